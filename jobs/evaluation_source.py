"""Which network is meant: a checkpoint, a run of MLflow, or a model; what it was made for, and whose run it is."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.command_line import peek
from jobs.models import environment_of
from jobs.parameters import read_parameters
from jobs.run_folder import RunFolder
from pipeline.mlflow_client import Run, find_run
from pipeline.mlflow_models import download_model
from pipeline.tracking import NONE
from r2d2.serialize import Parameters
from schemas.specs import EnvSpec

LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Source:
    """``env`` is None where the parameters do not say; ``run_id`` is the MLflow run they come from, if one is known."""

    parameters: Parameters
    env: EnvSpec | None
    run_id: str | None


def find_source(checkpoint: Path | None, run_id: str | None, model: str | None, tracking_uri: str) -> Source:
    """Exactly one of the three is given.

    Raises:
        ValueError: it names nothing that can be used.
    """
    if checkpoint is not None:
        parameters = read_parameters(checkpoint, "checkpoint")
        return Source(
            parameters=parameters, env=environment_of(checkpoint), run_id=_run_of_folder(checkpoint, tracking_uri)
        )
    if tracking_uri == NONE:
        raise ValueError(f"tracking_uri is {NONE!r}; allowed: where the run is, with --run-id and --model")
    if model is not None:
        return _from_model(model, tracking_uri)
    assert run_id is not None
    run = find_run(tracking_uri, run_id)
    if run is None:
        raise ValueError(f"run_id is {run_id!r}; allowed: a run that {tracking_uri} has")
    try:
        return _from_model(f"runs:/{run_id}/{LAST}", tracking_uri)
    except ValueError:  # It is still training, or was killed.
        return _from_disk(run)


def dataset_of(argv: Sequence[str]) -> list[str]:
    """``--dataset`` as the run's own record has it, for a run's folder and nothing said about the environment."""
    given = peek(argv, "checkpoint", "dataset", "env")
    if given["checkpoint"] is None or given["dataset"] or given["env"]:
        return []
    for folder in (path := Path(given["checkpoint"])), *path.parents:
        if (dataset := RunFolder(folder).record.get("dataset")) is not None:
            return ["--dataset", dataset]
        if (folder / "dataset.json").is_file():
            return ["--dataset", str(folder)]
    return []


def _from_model(uri: str, tracking_uri: str) -> Source:
    with tempfile.TemporaryDirectory() as folder:
        path, run_id = download_model(tracking_uri, uri, Path(folder))
        return Source(parameters=read_parameters(path, "model"), env=environment_of(path), run_id=run_id)


def _from_disk(run: Run) -> Source:
    """What the run has published or saved on this machine."""
    published = Path(run.tags.get("dataset_uri", "")) / "runs" / run.tags.get("run", "")
    for path in (published, Path(run.tags.get("run_folder", ""))):
        if path.is_absolute() and path.is_dir():
            return Source(parameters=read_parameters(path, "run_id"), env=_env_below(path), run_id=run.run_id)
    raise ValueError(
        f"run_id is {run.run_id!r}; allowed: a run with a model {LAST!r}, or whose dataset or folder is on this machine"
    )


def _env_below(path: Path) -> EnvSpec | None:
    from pipeline.dataset import read_terms
    from pipeline.store import open_store

    terms = read_terms(open_store(RunFolder(path).record.get("dataset") or str(path.parent.parent)))
    return terms.env if terms else None


def _run_of_folder(path: Path, tracking_uri: str) -> str | None:
    """The MLflow run that the record of a run's folder names, if it is to be found there."""
    if tracking_uri == NONE:
        return None
    for folder in (path, *path.parents):
        if run_id := RunFolder(folder).record.get("mlflow_run_id"):
            try:
                return run_id if find_run(tracking_uri, run_id) else None
            except ValueError:
                return None
    return None
