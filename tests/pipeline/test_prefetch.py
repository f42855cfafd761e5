import json
import threading
import time

import numpy as np
import pytest

from pipeline.prefetch import Prefetcher
from tests.pipeline.replay_factory import empty_dataset, make_quarry, make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()
PATIENCE_SECONDS = 20.0


@pytest.fixture
def store(tmp_path):
    (tmp_path / "data").mkdir()
    with unsynced():
        return make_dataset(tmp_path / "data", TERMS, 40)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ids_of(batches, number):
    """Copies: the arrays of a batch are reused, and ids with them in a later version perhaps."""
    return [batches.next(PATIENCE_SECONDS).ids.copy() for _ in range(number)]


def drawing_threads():
    return [thread for thread in threading.enumerate() if thread.name in ("draw", "decode", "poll")]


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_drawn_ahead_are_those_drawn_on_demand(store, depth):
    with Prefetcher(make_replay(store), 8, deterministic=True) as batches:
        expected = ids_of(batches, 12)
    with Prefetcher(make_replay(store), 8, depth=depth) as batches:
        np.testing.assert_array_equal(ids_of(batches, 12), expected)


def test_a_batch_is_whole_until_the_next_is_asked_for_and_buffers_go_round(store):
    expected = {each.sequence: each.observation for each in make_sequences(TERMS, 40)}
    buffers = []

    def make_buffer():
        buffers.append(replay.observation_buffer(8))
        return buffers[-1]

    replay = make_replay(store)
    with Prefetcher(replay, 8, depth=2, make_buffer=make_buffer) as batches:
        for _ in range(20):
            batch = batches.next(PATIENCE_SECONDS).batch
            time.sleep(0.001)  # Time for the thread to overwrite it, if it would.
            np.testing.assert_array_equal(batch.observation, [expected[i] for i in batch.sequence.tolist()])
            assert any(batch.observation is buffer for buffer in buffers)
    assert len(buffers) == 3


def test_no_more_than_depth_batches_are_drawn_ahead(store):
    replay = make_replay(store)
    with Prefetcher(replay, 8, depth=2) as batches:
        batches.next(PATIENCE_SECONDS)
        wait_until(lambda: replay.metrics()["samples"] == 24)
        time.sleep(0.05)
        assert replay.metrics()["samples"] == 24


def test_the_state_is_that_of_the_last_batch_handed_out(store):
    replay, twin = make_replay(store), make_replay(store, seed=1)
    with Prefetcher(replay, 8, depth=2) as batches:
        ids_of(batches, 3)
        wait_until(lambda: replay.metrics()["samples"] == 40)
        arrays, values = replay.state()
    assert json.loads(json.dumps(replay.state()[1])) == values | {
        "waiting_seconds": replay.state()[1]["waiting_seconds"]
    }
    twin.restore(arrays, values)
    assert values["limiter"]["samples"] == 24
    with Prefetcher(make_replay(store), 8, deterministic=True) as batches:
        ids_of(batches, 3)
        expected = ids_of(batches, 4)
    with Prefetcher(twin, 8, depth=1) as batches:
        np.testing.assert_array_equal(ids_of(batches, 4), expected)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_batch_that_does_not_come_in_time_is_none_with_the_reason(store, deterministic):
    replay = make_replay(store, min_sequences=50)
    with Prefetcher(replay, 8, deterministic=deterministic) as batches:
        started = time.monotonic()
        assert batches.next(0.3) is None
        assert 0.3 <= time.monotonic() - started < 5
        assert batches.waits_for() == "sequences to start with: 40 of 50 are there"
        assert batches.waiting_seconds >= 0.3


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_starved_learner_does_not_sit_out_the_time_between_polls(tmp_path, deterministic):
    quarry = make_quarry(tmp_path / "quarry", {"a": [20]})
    store = empty_dataset(tmp_path / "data")
    with Prefetcher(make_replay(store), 8, poll_seconds=60, deterministic=deterministic) as batches:
        assert batches.next(0.2) is None
        quarry.publish(quarry.shards["a"][0], store)
        started = time.monotonic()
        assert batches.next(PATIENCE_SECONDS) is not None
        assert time.monotonic() - started < 5  # On an idle machine 0.15 s.


def test_new_shards_are_found_while_batches_flow(tmp_path):
    quarry = make_quarry(tmp_path / "quarry", {"a": [20, 20]})
    store = empty_dataset(tmp_path / "data")
    quarry.publish(quarry.shards["a"][0], store)
    replay = make_replay(store)
    with Prefetcher(replay, 8, poll_seconds=0.02) as batches:
        batches.next(PATIENCE_SECONDS)
        quarry.publish(quarry.shards["a"][1], store)
        wait_until(lambda: batches.next(PATIENCE_SECONDS) and replay.metrics()["size"] == 40)


@pytest.mark.parametrize("method", ["stage", "finish", "poll"])
def test_what_stops_a_thread_is_raised_to_the_learner(store, method, monkeypatch):
    replay = make_replay(store)

    def fail(*_, **__):
        raise OSError(f"no {method} today")

    with Prefetcher(replay, 8, poll_seconds=0.01) as batches:
        batches.next(PATIENCE_SECONDS)
        monkeypatch.setattr(replay, method, fail)
        with pytest.raises(OSError, match=f"no {method} today"):
            wait_until(lambda: batches.next(PATIENCE_SECONDS) is None)
        with pytest.raises(OSError, match=f"no {method} today"):
            batches.next(PATIENCE_SECONDS)


def test_what_stops_a_thread_wakes_a_waiting_learner(store, monkeypatch):
    replay = make_replay(store, min_sequences=50)

    def fail(*_, **__):
        raise OSError("no poll today")

    with Prefetcher(replay, 8, poll_seconds=0.01) as batches:
        assert batches.next(0.05) is None
        later = threading.Timer(0.2, monkeypatch.setattr, (replay, "poll", fail))
        later.start()
        started = time.monotonic()
        with pytest.raises(OSError, match="no poll today"):
            batches.next(PATIENCE_SECONDS)
        assert time.monotonic() - started < PATIENCE_SECONDS / 2
        later.join()


def test_closing_ends_the_threads_at_once_even_while_they_wait(store):
    hungry = Prefetcher(make_replay(store, min_sequences=50), 8, poll_seconds=60).start()
    full = Prefetcher(make_replay(store), 8, poll_seconds=60).start()
    assert hungry.next(0.05) is None
    assert full.next(PATIENCE_SECONDS) is not None
    started = time.monotonic()
    for prefetcher in (hungry, full, full):
        prefetcher.close()
    assert time.monotonic() - started < 5
    assert not drawing_threads()


def test_closing_interrupts_a_long_indexing(store, monkeypatch):
    replay = make_replay(store)
    read, reading = replay._held.read, threading.Event()

    def slow_read(name):
        reading.set()
        time.sleep(0.05)
        return read(name)

    monkeypatch.setattr(replay._held, "read", slow_read)
    prefetcher = Prefetcher(replay, 8).start()
    assert reading.wait(PATIENCE_SECONDS)
    prefetcher.close()
    assert 0 < replay.metrics()["size"] < 40


@pytest.mark.parametrize(
    ("settings", "message"), [({"depth": 0}, "depth is 0"), ({"poll_seconds": 0}, "poll_seconds is 0")]
)
def test_a_wrong_setting_is_refused_by_name(store, settings, message):
    with pytest.raises(ValueError, match=message):
        Prefetcher(make_replay(store), 8, **settings)
