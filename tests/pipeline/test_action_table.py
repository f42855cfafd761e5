"""The action table: looks up whole frames, is bounded by recency, and is seen whole or not at all."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.action_table import MISS, RecentActions, TablePoller, encode_table, frame_hashes, open_table, table_name
from pipeline.store import LocalStore
from schemas.specs import ArraySpec, EnvSpec

ROOT = Path(__file__).parent.parent.parent
ENV = EnvSpec(env_id="Tiny-v0", observation=ArraySpec(shape=(6, 5), dtype="uint8"), action_set=("a", "b", "c"))
LINEAGE = bytes(range(16))


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (count, 6, 5)).astype(np.uint8)


def table_of(some, actions, version=1, capacity=1000):
    recent = RecentActions(capacity)
    recent.see(frame_hashes(some), np.asarray(actions))
    return recent.encode(ENV, version, LINEAGE)


def test_known_frames_give_their_newest_action_and_others_a_miss(tmp_path):
    store, seen = LocalStore(tmp_path), frames(50)
    recent = RecentActions(100)
    recent.see(frame_hashes(seen), np.zeros(50, int))
    recent.see(frame_hashes(seen[10:20]), np.full(10, 2))
    store.put(table_name("r"), recent.encode(ENV, 7, LINEAGE))
    table = TablePoller(store, "r", ENV).poll()
    assert (table.version, table.lineage, len(table)) == (7, LINEAGE, 50)
    expected = np.zeros(50, int)
    expected[10:20] = 2
    assert table.look_up(seen).tolist() == expected.tolist()
    assert (table.look_up(frames(20, seed=1)) == MISS).all()


def test_one_changed_pixel_anywhere_is_another_frame(tmp_path):
    store, seen = LocalStore(tmp_path), frames(1)
    store.put(table_name("r"), table_of(seen, [1]))
    table = open_table(store, table_name("r"), ENV)
    for pixel in np.ndindex(6, 5):
        other = seen.copy()
        other[(0, *pixel)] ^= 1
        assert table.look_up(other)[0] == MISS


def test_the_frames_seen_longest_ago_make_room(tmp_path):
    store, seen = LocalStore(tmp_path), frames(30)
    recent = RecentActions(10)
    recent.see(frame_hashes(seen[:10]), np.zeros(10, int))
    recent.see(frame_hashes(seen[:2]), np.ones(2, int))  # Seen again: not the oldest any more.
    recent.see(frame_hashes(seen[10:18]), np.zeros(8, int))
    store.put(table_name("r"), recent.encode(ENV, 1, LINEAGE))
    known = open_table(store, table_name("r"), ENV).look_up(seen) != MISS
    assert np.flatnonzero(known).tolist() == [0, 1, *range(10, 18)]


def test_an_empty_table_knows_nothing(tmp_path):
    store = LocalStore(tmp_path)
    store.put(table_name("r"), RecentActions(5).encode(ENV, 0, LINEAGE))
    assert (open_table(store, table_name("r"), ENV).look_up(frames(3)) == MISS).all()


def damaged():
    good = table_of(frames(50), np.zeros(50, int)).to_pybytes()
    other_env = EnvSpec(env_id="Other", observation=ENV.observation, action_set=("a", "b"))
    hashes = np.sort(frame_hashes(frames(4)))
    flipped = bytearray(good)
    flipped[good.index(np.sort(frame_hashes(frames(50))).tobytes()) + 200] ^= 1
    return {
        "empty": (b"", "no action table"),
        "torn": (good[: len(good) // 2], "no action table"),
        "foreign": (b"what is this" * 100, "no action table"),
        "flipped": (bytes(flipped), "checksum|ascending"),
        "of another game": (
            encode_table(hashes, np.zeros(4, np.int32), other_env, 1, LINEAGE).to_pybytes(), "num_actions is 2",
        ),
        "not sorted": (encode_table(hashes[::-1], np.zeros(4, np.int32), ENV, 1, LINEAGE).to_pybytes(), "ascending"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", damaged())
def test_a_bad_table_is_named_once_and_the_old_one_stays(tmp_path, caplog, fault):
    data, reason = damaged()[fault]
    store, seen = LocalStore(tmp_path), frames(5)
    store.put(table_name("r"), table_of(seen, [1] * 5))
    poller = TablePoller(store, "r", ENV)
    old = poller.poll()
    store.put(table_name("r"), data)
    assert poller.poll() is None
    assert poller.poll() is None
    (record,) = caplog.records
    assert "runs/r/actions.arrow is not used" in record.message
    assert re.search(reason, record.message)
    assert (old.look_up(seen) == 1).all()
    store.put(table_name("r"), table_of(seen, [2] * 5))
    assert (poller.poll().look_up(seen) == 2).all()


WRITER = """
import sys, time
from pipeline.store import LocalStore
from tests.pipeline.test_action_table import frames, table_name, table_of
store, version, until = LocalStore(sys.argv[1]), 1, time.monotonic() + float(sys.argv[2])
tables = [table_of(frames(400, seed=s % 2), [s % 3] * 400, version=s) for s in range(6)]
while time.monotonic() < until:
    store.replace(table_name("r"), tables[version % 6])
    version += 1
print(version)
"""


def test_a_table_replaced_under_readers_is_an_old_or_a_new_one_never_a_mix(tmp_path):
    store = LocalStore(tmp_path)
    store.put(table_name("r"), table_of(frames(400), [0] * 400, version=0))
    command = [sys.executable, "-c", WRITER, str(tmp_path), "1.0"]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    both = [frames(400, seed=0), frames(400, seed=1)]
    pollers, held, taken_up = [TablePoller(store, "r", ENV) for _ in range(3)], {}, set()
    while writer.poll() is None:
        for reader, poller in enumerate(pollers):
            held[reader] = poller.poll() or held[reader]
            version = held[reader].version
            found = [held[reader].look_up(some) for some in both]
            assert (found[version % 2] == version % 3).all()
            assert (found[1 - version % 2] == MISS).all()
            taken_up.add(version)
    assert int(writer.communicate()[0]) > 20
    assert len(taken_up) > 3
