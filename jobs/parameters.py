"""Trained parameters wherever they rest: published, in a checkpoint, or as the newest of a run."""

from pathlib import Path

from jobs.run_folder import RECORD, RunFolder
from pipeline.checkpoint import MANIFEST, load_checkpoint
from r2d2.config import NetworkSpec
from r2d2.serialize import Parameters, params_from_bytes
from schemas.specs import EnvSpec

LEARNER_BLOB = "learner.safetensors"
PUBLISHED = "params.safetensors"
KINDS = "a params.safetensors, a checkpoint folder, or the folder of a run"


def read_parameters(path: Path, flag: str) -> Parameters:
    """Parameters of a network from a file (published, or a learner's saved state), a checkpoint or a run's folder.

    A run's folder stands for its newest complete checkpoint; a run below a dataset, for what it published last.

    Raises:
        ValueError: naming ``flag``, the path and what is wrong with it.
    """
    try:
        return params_from_bytes(_bytes_of(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} is {str(path)!r}; allowed: {KINDS} ({error})") from error


def refuse_misfit(spec: NetworkSpec, env: EnvSpec) -> None:
    """Raise ValueError, with both values and the game's name, unless the network was made for this environment."""
    for name, theirs, ours in (
        ("actions", spec.num_actions, env.num_actions),
        ("observation", spec.observation, env.observation),
    ):
        if theirs != ours:
            raise ValueError(f"{name} of the network is {theirs}; allowed: {ours}, as {env.env_id} has here")


def _bytes_of(path: Path) -> bytes:
    if path.is_file():
        return path.read_bytes()
    if (path / MANIFEST).is_file():
        return load_checkpoint(path).blobs[LEARNER_BLOB]
    if (path / PUBLISHED).is_file():
        return (path / PUBLISHED).read_bytes()
    if (path / RECORD).is_file():
        checkpoint, passed_over = RunFolder(path).checkpoints(keep=2).load_newest()
        if checkpoint is None:
            raise ValueError(passed_over[0] if passed_over else "the run has no checkpoint yet")
        return checkpoint.blobs[LEARNER_BLOB]
    raise ValueError("neither is there" if path.exists() else "there is nothing")
