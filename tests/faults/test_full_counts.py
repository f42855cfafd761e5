"""``make test-faults``: kills and starts in the numbers that rare races need to show themselves."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.processes import COLLECT, LEARN, all_shards, tracked_runs, until, updates_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def check_nothing_lost(store, acknowledged):
    report = verify_dataset(store)
    assert report.faults == []
    assert acknowledged <= all_shards(store)


def test_50_collector_kills_while_writing(tmp_path, start):
    store = LocalStore(tmp_path / "data" / "pong")
    moments = random.Random(1)
    # Small shards at once, so that a kill often meets a write; nobody learns, so nothing makes the collector wait.
    writing = [*COLLECT, "--flush-sequences", "2", "--first-flush-seconds", "0"]
    acknowledged = set()
    for kill in range(50):
        collector = start("collect.py", *writing)
        before = len(acknowledged)
        until(lambda before=before: len(all_shards(store)) > before, what=f"a shard before kill {kill}")
        time.sleep(moments.uniform(0, 0.3))
        collector.process.kill()
        collector.wait()
        acknowledged |= all_shards(store)
    last = start("collect.py", *writing, "--env-steps", "200")
    assert last.wait() == 0, last.said
    check_nothing_lost(store, acknowledged)
    assert not [path for path in tmp_path.rglob(".writing*") if time.time() - path.stat().st_mtime > 60]


def test_20_learner_kills_and_resumes(tmp_path, start):
    store = LocalStore(tmp_path / "data" / "pong")
    moments = random.Random(2)
    collector = start("collect.py", *COLLECT)
    learner = start("learn.py", *LEARN, "--run-name", "r", "--checkpoint-seconds", "0.2")
    until(lambda: updates_of(store) >= 5, what="updates")
    newest = 0
    for _ in range(20):
        time.sleep(moments.uniform(0, 1))
        checkpoints = [int(path.name) for path in (tmp_path / "runs/r/checkpoints").glob("0*")]
        learner.process.kill()
        learner.wait()
        learner = start("learn.py", *LEARN, "--resume", "--checkpoint-seconds", "0.2")
        until(lambda learner=learner: "resumed run r at update" in learner.said, what="a resume")
        at = int(re.findall(r"at update (\d+)", learner.said)[0])
        assert at >= max([newest, *checkpoints]), "a complete checkpoint was passed over"
        newest = at
        until(lambda at=at: updates_of(store) > at, what="an update after the resume")
    assert (learner.stop(), collector.stop()) == (0, 0)
    check_nothing_lost(store, set())
    ratio = float(re.findall(r"\(([0-9.e+-]+) samples per insert\)", learner.said)[-1])
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_20_double_starts_on_an_empty_folder(tmp_path, start):
    for attempt in range(20):
        folder = tmp_path / f"try{attempt}"
        folder.mkdir()
        tracking = ["--tracking-uri", f"sqlite:///{folder}/mlflow.db", "--dataset", str(folder / "data")]
        jobs = [
            start("collect.py", *COLLECT[:-2], *tracking, "--env-steps", "400"),
            start("collect.py", *COLLECT[:-2], *tracking, "--env-steps", "400"),
            start("learn.py", *LEARN[:-2], *tracking, "--updates", "2", "--run-dir", str(folder / "run")),
        ]
        assert [job.wait() for job in jobs] == [0, 0, 0], [job.said for job in jobs]
        assert verify_dataset(LocalStore(folder / "data")).collectors == 2
        check_nothing_lost(LocalStore(folder / "data"), set())
        assert tracked_runs(folder / "mlflow.db") <= 3
        assert not [job.said for job in jobs if "Traceback" in job.said]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mlflow_server(folder: Path, port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/server.db",
               "--artifacts-destination", str(folder / "art")]  # fmt: skip
    with open(folder / "server.log", "a") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def end(server: subprocess.Popen) -> None:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def test_an_mlflow_server_that_is_down_at_start_in_the_middle_and_at_the_end(tmp_path, start):
    port = free_port()
    store = LocalStore(tmp_path / "data" / "pong")
    tracking = ["--tracking-uri", f"http://127.0.0.1:{port}"]
    collector = start("collect.py", *COLLECT)
    learner = start("learn.py", *LEARN[:-2], *tracking, "--run-name", "r")
    until(lambda: updates_of(store) >= 30, what="updates without a server")
    server = mlflow_server(tmp_path, port)
    try:
        until(lambda: tracked_runs(tmp_path / "server.db") == 1, 120, "the run to appear once the server is up")
        end(server)
        at = updates_of(store)
        until(lambda: updates_of(store) >= at + 30, what="updates while the server is down")
        server = mlflow_server(tmp_path, port)
        time.sleep(25)
        end(server)
        assert (learner.stop(), collector.stop()) == (0, 0)
    finally:
        if server.poll() is None:
            end(server)
    assert "Traceback" not in learner.said
    lost = int(re.findall(r"tracking: (\d+) metrics and \d+ other records could not be delivered", learner.said)[-1])
    assert lost > 0, "what the dead server could not take at the end is counted"
    check_nothing_lost(store, set())
