"""A learner's own folder: which run it is, and its checkpoints. ``runs/<run name>`` unless told otherwise."""

import fcntl
import json
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jobs.console import warn
from pipeline.checkpoint import CheckpointFolder
from pipeline.store import LocalStore

RECORD, LOCK = "run.json", ".lock"
RUNS = Path("runs")


def new_run_name(dataset: str, seed: int) -> str:
    return f"learn-{dataset}-s{seed}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class RunFolder:
    """``record`` holds the run's name, dataset and MLflow run id.

    Raises:
        ValueError: the record cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: dict[str, Any] = {}
        self._lock: Any = None
        if (path / RECORD).exists():
            try:
                self.record = dict(json.loads((path / RECORD).read_bytes()))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path / RECORD} is damaged ({error}); allowed: a JSON object") from error

    def refuse_used(self) -> None:
        """Raise ValueError when another run has been here: a new one must not mix with its checkpoints."""
        if self.record:
            raise ValueError(f"run_dir is {self.path}; allowed: a new folder, or --resume to continue the run in it")

    def claim(self) -> "RunFolder":
        """Make the folder this process's alone, until it ends in whatever way. Returns the folder.

        Raises:
            ValueError: another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115  The lock lasts as long as the open file.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run_dir is {self.path}; allowed: one that no other process works in") from None
        return self

    def release(self) -> None:
        """Let others have it. Doing so twice is fine."""
        if self._lock is not None:
            self._lock.close()

    def write(self, values: dict[str, Any]) -> None:
        """Durable when the call returns."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.record.update(values)
        LocalStore(self.path).put(RECORD, json.dumps(self.record, indent=1).encode() + b"\n")

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """``record`` as the file ``name`` in this folder. Durable when the call returns."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        LocalStore(path.parent).put(path.name, json.dumps(record).encode())

    def checkpoints(self, keep: int) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints", keep)


def find_run_to_resume(run_dir: Path | None, run_name: str | None, dataset: str, job: str = "learn") -> RunFolder:
    """The folder that ``--resume`` means: the one named, else the newest that ``job`` made for this dataset.

    Raises:
        ValueError: there is none, or it is another dataset's.
    """
    if run_dir is not None or run_name is not None:
        folder = RunFolder(run_dir or RUNS / str(run_name))
        if not folder.record:
            raise ValueError(f"resume is True; allowed: with a run in {folder.path}, which holds none")
        if folder.record["dataset"] != dataset:
            theirs, record = folder.record["dataset"], folder.path / RECORD
            moved = f"if the dataset has been moved, say so in {record}"
            raise ValueError(f"dataset is {dataset}; allowed: {theirs}, which this run is of ({moved})")
        return folder
    found = _readable(RUNS.glob(f"*/{RECORD}"))
    records = [(folder, folder.record) for folder in found if folder.record.get("job", "learn") == job]
    ours = [folder for folder, record in records if record.get("dataset") == dataset]
    if not ours:
        raise ValueError(
            f"resume is True; allowed: with a run of {dataset} below {RUNS.absolute()}, where {job} has none"
        )
    return max(ours, key=lambda folder: folder.path.joinpath(RECORD).stat().st_mtime_ns)


def _readable(records: Iterable[Path]) -> list[RunFolder]:
    folders = []
    for path in records:
        try:
            folders.append(RunFolder(path.parent))
        except ValueError as error:
            warn(f"passed over: {error}")
    return folders
