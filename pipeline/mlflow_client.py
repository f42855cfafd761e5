"""MLflow's own client, opened so that processes do not race, quietly, and the few calls that take more than one line.

Imports mlflow inside its functions only.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.charts import Histories, History

KIND = {"mlflow.experimentKind": "custom_model_development"}  # Else the UI opens its pages for language models.


def connect(uri: str, experiment: str) -> tuple[Any, str]:
    """An ``MlflowClient`` and the id of ``experiment``, which is made when it is missing."""
    quiet_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    with _only_one_process(uri):
        client = MlflowClient(tracking_uri=uri)  # Makes the tables of an empty database.
        found = client.get_experiment_by_name(experiment)
        if found is not None:
            return client, found.experiment_id
        try:
            return client, client.create_experiment(experiment, tags=KIND)
        except MlflowException:  # Another host was faster.
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
            return client, found.experiment_id


@dataclass(frozen=True, kw_only=True)
class Run:
    """What MLflow knows of one run."""

    run_id: str
    name: str
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    start_seconds: float
    end_seconds: float | None


def find_run(uri: str, run_id: str) -> Run | None:
    """None where there is no such run.

    Raises:
        ValueError: ``uri`` cannot be read at all.
    """
    from mlflow.exceptions import MlflowException

    with _readable(uri) as client:
        try:
            return _run_of(client.get_run(run_id))
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise


def search_runs(uri: str, experiment: str, tags: Mapping[str, str], most: int = 1000) -> list[Run]:
    """Runs of an experiment that have all these tags, the newest first.

    Raises:
        ValueError: ``uri`` cannot be read, or has no such experiment.
    """
    with _readable(uri) as client:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            raise ValueError(f"experiment is {experiment!r}; allowed: one that {uri} has")
        condition = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = client.search_runs([found.experiment_id], condition, max_results=most)
        return [_run_of(run) for run in runs]


def list_artifacts(uri: str, run_id: str) -> set[str]:
    """Paths of a run's files, without those of its models. Raises ValueError when ``uri`` cannot be read."""
    with _readable(uri) as client:
        found, todo = set(), [""]
        while todo:
            for artifact in client.list_artifacts(run_id, todo.pop() or None):
                (todo.append if artifact.is_dir else found.add)(artifact.path)
        return found


def histories_of(uri: str, run_id: str, names: Iterable[str]) -> Histories:
    """Raises ValueError when ``uri`` cannot be read."""
    with _readable(uri) as client:
        return metric_histories(client, run_id, names)


def metric_histories(client: Any, run_id: str, names: Iterable[str]) -> Histories:
    """What a run has logged under each of ``names``, in the order of time; without those never logged."""
    known = client.get_run(run_id).data.metrics.keys()
    histories = {}
    for name in names:
        if name in known:
            logged = sorted(client.get_metric_history(run_id, name), key=lambda metric: (metric.timestamp, metric.step))
            histories[name] = History(
                np.array([metric.step for metric in logged], np.int64),
                np.array([metric.timestamp / 1000 for metric in logged]),
                np.array([metric.value for metric in logged]),
            )
    return histories


def system_monitors() -> list[Any]:
    """MLflow's own monitors of the machine, as many as work here."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(ImportError, RuntimeError):  # No GPU.
        monitors.append(GPUMonitor())
    return monitors


@contextlib.contextmanager
def _readable(uri: str) -> Iterator[Any]:
    """A client to read with; MLflow's errors become one ValueError."""
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ValueError(f"tracking_uri is {uri!r}; allowed: a database that is there")  # MLflow would make one.
    quiet_mlflow()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        with _only_one_process(uri):
            client = MlflowClient(tracking_uri=uri)
        yield client
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"tracking_uri is {uri!r}; allowed: where runs can be read ({reason})") from error


def _run_of(run: Any) -> Run:
    return Run(
        run_id=run.info.run_id,
        name=run.info.run_name,
        tags=run.data.tags,
        metrics=run.data.metrics,
        start_seconds=run.info.start_time / 1000,
        end_seconds=None if run.info.end_time is None else run.info.end_time / 1000,
    )


def quiet_mlflow() -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def tracking_to(uri: str) -> Iterator[None]:
    """Some of MLflow's functions know one tracking URI for the whole process only."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


@contextlib.contextmanager
def _only_one_process(uri: str) -> Iterator[None]:
    """Serialises the first open of an sqlite database, which races between processes (tables and experiment)."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{database}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
