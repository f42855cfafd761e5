"""Jobs as real processes, small enough for tests: how to start them, wait for them, and see what they did."""

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.store import LocalStore

ROOT = Path(__file__).parent.parent
# Small frames and windows: the whole path, in seconds. Terms are the collector's; the learner takes them over.
COLLECT = [
    "--env-arg", "img_height=42", "--env-arg", "img_width=42", "--envs", "4", "--burn-in", "4", "--unroll", "8",
    "--bootstrap", "3", "--stride", "8", "--core-width", "16", "--flush-sequences", "16", "--refresh-env-steps", "20",
    "--tracking-uri", "none",
]  # fmt: skip
LEARN = [
    "--dense", "32", "--dueling-width", "16", "--batch-size", "8", "--min-sequences", "24", "--samples-per-insert", "2",
    "--publish-updates", "5", "--publish-seconds", "0.2", "--tracking-uri", "none",
]  # fmt: skip


class Job:
    """A job in a folder of its own; what it said is kept."""

    def __init__(self, folder: Path, script: str, *arguments: str) -> None:
        self.log = folder / f"{script}-{time.monotonic_ns()}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "jobs" / script), *arguments],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs in ``tmp_path``; those still alive at the end are killed."""
    jobs = []

    def start_job(script: str, *arguments: str) -> Job:
        jobs.append(Job(tmp_path, script, *arguments))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


def until(condition: Callable[[], object], seconds: float = 60, what: str = "") -> None:
    """Wait for something to become true; fail saying ``what`` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.1)


def progress_of(store: LocalStore, run: str | None = None) -> dict:
    """The record of ``run``, or of the only one; empty while there is none."""
    for name in store.folders("runs") if run is None else [run]:
        try:
            return json.loads(store.get(f"runs/{name}/progress.json"))
        except FileNotFoundError:
            continue
    return {}


def updates_of(store: LocalStore, run: str | None = None) -> int:
    return progress_of(store, run).get("updates", 0)


def all_shards(store: LocalStore) -> set[ShardName]:
    """Everything acknowledged so far."""
    return {name for collector in list_collectors(store) for name in shards_after(store, collector, -1)}


def tracked_runs(database: Path) -> int:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.OperationalError:  # Not made yet, or busy.
        return 0
