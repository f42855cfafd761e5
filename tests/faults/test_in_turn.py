"""One running pair goes through every kind of fault in turn, with real processes; then every shard is read.

``make test-faults`` holds the full counts.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.dataset import ShardName
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.processes import COLLECT, LEARN, all_shards, progress_of, until, updates_of

SMALL_DISK_BYTES = 24_000_000


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that is soon full. Needs root, as a container's only user is."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with open(path, "wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(100_000))


def goes_on(store, learner, updates=5):
    """Learning continues from wherever it is now."""
    before = updates_of(store)
    until(lambda: updates_of(store) >= before + updates, what=f"updates beyond {before}; it said {learner.said[-500:]}")


def test_every_fault_in_turn_and_nothing_is_lost(tmp_path, small_disk, start):
    root = small_disk / "pong"
    store = LocalStore(root)
    common = ["--dataset", str(root)]
    collect = ["collect.py", *COLLECT, *common, "--when-silent", "wait"]
    learn = ["learn.py", *LEARN, *common, "--run-name", "r", "--run-dir", str(small_disk / "run"),
             "--checkpoint-seconds", "1"]  # fmt: skip
    collector, learner = start(*collect), start(*learn)
    until(lambda: updates_of(store) >= 10, what="updates")

    # The folder is moved away and back: nothing grows in the old place, and both go on.
    root.rename(small_disk / "elsewhere")
    time.sleep(4)
    assert not root.exists()
    (small_disk / "elsewhere").rename(root)
    goes_on(store, learner)

    # The disk fills up, while shards, parameters and checkpoints are due.
    filler = small_disk / "filler"
    fill(filler)
    until(lambda: "could not be written" in learner.said, 30, "the learner to say that the disk is full")
    filler.unlink()
    goes_on(store, learner, 10)

    # Both are killed at once, and start again.
    acknowledged = all_shards(store)
    for job in (collector, learner):
        job.process.kill()
        job.wait()

    # Damage under final names, while nobody looks: a flipped bit, a torn shard, junk.
    first, second, third = sorted(acknowledged, key=lambda name: name.number)[1:4]
    flipped = bytearray(store.get(first.path))
    flipped[len(flipped) // 2] ^= 1
    store.put(first.path, flipped)
    store.put(second.path, store.get(second.path)[:2000])
    store.put(third.path, b"junk")
    collector, learner = start(*collect), start(*learn, "--resume")
    until(lambda: "resumed run r at update" in learner.said, what="the resume")
    goes_on(store, learner, 10)
    for damaged in (second, third):
        assert f"{damaged.path} is skipped" in learner.said, "a bad shard is named"

    # A second learner comes up: a collector that was told nothing refuses to choose.
    other = start("learn.py", *LEARN, *common, "--run-name", "other", "--run-dir", str(small_disk / "run2"))
    until(lambda: updates_of(store, "other") >= 1, what="the second learner")
    confused = start(*collect)
    assert confused.wait() == 2
    assert re.search(r"error: follow is not set; allowed: one of the live runs, (r, other|other, r)", confused.said)
    assert "Traceback" not in confused.said
    assert other.stop() == 0

    for job in (collector, learner):
        assert job.stop() == 0, job.said
        assert "Traceback" not in job.said
    assert progress_of(store, "r")["closed"] is True
    assert acknowledged <= all_shards(store)
    check_only_damage_is_missing(store, first, {second, third})
    temporary = re.compile(r"\.writing|_(?!_)")  # A model's own code is no leftover: ``__init__.py``.
    assert [path.name for path in small_disk.rglob("*") if temporary.match(path.name)] == []


def check_only_damage_is_missing(store: LocalStore, flipped: ShardName, destroyed: set[ShardName]) -> None:
    report = verify_dataset(store)
    assert {path for path, _ in report.bad_files} == {name.path for name in destroyed}
    assert report.corrupt_rows <= 1
    assert (report.duplicates, report.missing_sequences) == (0, 0)
    unexpected = [fault for fault in report.faults if not any(name.path in fault for name in {flipped, *destroyed})]
    assert unexpected == []


JUMPING = """
import runpy, sys, time
real, began = time.time, time.monotonic()
time.time = lambda: real() + (-86_400.0 if int(time.monotonic() - began) % 2 else 86_400.0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_clock_that_jumps_a_day_back_and_forth_every_second_changes_nothing(tmp_path, start):
    store = LocalStore(tmp_path / "data" / "pong")
    script = tmp_path / "jumping.py"
    script.write_text(JUMPING)
    jobs = Path(__file__).parent.parent.parent / "jobs"

    def start_jumping(name, *arguments):
        command = [sys.executable, "-u", str(script), str(jobs / name), *arguments]
        with open(tmp_path / f"{name}.log", "w") as log:
            return subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)

    processes = [start_jumping("collect.py", *COLLECT), start_jumping("learn.py", *LEARN, "--run-name", "r")]
    try:
        until(lambda: updates_of(store) >= 40, what="updates")
        for process in processes:
            process.terminate()
        assert [process.wait(15) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert verify_dataset(store).faults == []
    record = progress_of(store)
    assert record["samples"] <= 2 * (record["sequences_seen"] - 24) + 2 * 8 + 16
