"""Checkpoints: whole or not at all, the newest complete one wins, the previous one is always there."""

import subprocess
import sys
import time

import pytest

from pipeline.checkpoint import CheckpointError, CheckpointFolder, load_checkpoint

BLOBS = {"learner.safetensors": b"a" * 5000, "replay.safetensors": b"b" * 3000}


def test_what_was_saved_is_loaded_and_only_so_many_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for updates in (10, 20, 30):
        folder.save(updates, {**BLOBS, "n": str(updates).encode()})
    assert [path.name for path in folder.paths()] == ["000000020", "000000030"]
    newest, passed_over = folder.load_newest()
    assert newest is not None
    assert (newest.updates, newest.blobs, passed_over) == (30, {**BLOBS, "n": b"30"}, [])


def test_case_h_g1_a_halved_checkpoint_is_named_and_the_previous_one_used(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.save(1, BLOBS)
    newest = folder.save(2, BLOBS)
    blob = newest / "learner.safetensors"
    blob.write_bytes(blob.read_bytes()[:2500])
    found, passed_over = folder.load_newest()
    assert found is not None
    assert found.updates == 1
    assert len(passed_over) == 1
    assert str(newest) in passed_over[0]
    with pytest.raises(CheckpointError, match=str(newest)):
        load_checkpoint(newest)
    assert blob.stat().st_size == 2500


def cut_short(path):
    blob = path / "learner.safetensors"
    blob.write_bytes(blob.read_bytes()[:2500])


def names(folder):
    return [path.name for path in folder.paths()]


def test_damaged_checkpoints_never_crowd_out_good_ones_whatever_their_numbers(tmp_path):
    """All of the newest are damaged, so the run starts over and saves under smaller numbers."""
    folder = CheckpointFolder(tmp_path, keep=3)
    for updates in (4000, 5000, 6000):
        cut_short(folder.save(updates, BLOBS))
    for updates in (300, 600, 900, 1200):
        folder = CheckpointFolder(tmp_path, keep=3)
        folder.load_newest()
        assert folder.save(updates, BLOBS).exists()
        found, passed_over = CheckpointFolder(tmp_path, keep=3).load_newest()
        assert found is not None
        assert (found.updates, len(passed_over)) == (updates, 3)
    assert names(folder)[:3] == ["000000600", "000000900", "000001200"]


def test_two_good_checkpoints_are_left_beside_a_damaged_one(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.save(4000, BLOBS)
    cut_short(folder.save(5000, BLOBS))
    folder.load_newest()
    folder.save(4500, BLOBS)
    assert names(folder) == ["000004000", "000004500", "000005000"]
    folder.save(5500, BLOBS)
    folder.save(6000, BLOBS)
    assert names(folder) == ["000005500", "000006000"]


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_there_again(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, BLOBS)
    cut_short(folder.save(2, BLOBS))
    found, _ = folder.load_newest()
    assert found is not None
    assert found.updates == 1
    folder.save(2, BLOBS)
    found, passed_over = CheckpointFolder(tmp_path).load_newest()
    assert found is not None
    assert (found.updates, passed_over) == (2, [])


@pytest.mark.parametrize("damage", ["missing", "manifest", "flipped"])
def test_any_damage_is_seen(tmp_path, damage):
    path = CheckpointFolder(tmp_path).save(1, BLOBS)
    if damage == "missing":
        (path / "replay.safetensors").unlink()
    elif damage == "manifest":
        (path / "manifest.json").write_bytes(b"{")
    else:
        (path / "replay.safetensors").write_bytes(b"c" + b"b" * 2999)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


def test_keeping_fewer_than_two_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep is 1; allowed: 2 or more"):
        CheckpointFolder(tmp_path, keep=1)


KILLED = """
import sys
from pathlib import Path
from pipeline.checkpoint import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]), keep=2)
print("ready", flush=True)
for updates in range(1, 10_000):
    folder.save(updates, {"a": str(updates).encode() * 20_000, "b": b"x" * 50_000})
    print(updates, flush=True)
"""


def test_case_h_g1_a_kill_at_any_moment_leaves_the_newest_complete_one(tmp_path):
    for attempt in range(5):
        where = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(where)], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(0.013 * attempt)
        process.kill()
        said = [int(line) for line in process.stdout.read().split()]
        process.wait()
        folder = CheckpointFolder(where, keep=2)
        found, passed_over = folder.load_newest()
        assert found is not None
        assert found.updates >= max([2, *said])
        assert not passed_over
        assert found.blobs["a"] == str(found.updates).encode() * 20_000
        folder.save(found.updates + 1, {"a": b"1"})
        assert not list(where.glob("_*")), "temporary folders outlive the next save"
