"""The way of a step to the learner, timed without comparing clocks."""

import numpy as np

from pipeline.latency import SampleableLatency
from pipeline.shard_writer import waited_seconds
from pipeline.store import LocalStore
from tests.pipeline.sequence_factory import make_sequences, make_writer, tiny_terms


def test_a_sequence_is_sampleable_when_the_replay_has_seen_it():
    now = [100.0]
    latency = SampleableLatency(lambda: now[0])
    latency.labelled("a", 3, np.array([1.0, 2.0, 3.0, 4.0]))
    latency.labelled("b", 0, np.array([10.0]))
    now[0] = 102.0
    latency.seen({"a": 3})  # Its last sequence, number 3, is not among the first three.
    assert latency.take() == {}
    latency.seen({"a": 4})
    found = latency.take()
    assert (found["latency_seconds_median"], found["latency_seconds_max"]) == (4.5, 6.0)
    now[0] = 105.0
    latency.seen({"a": 9, "b": 1})
    assert latency.take()["latency_seconds_median"] == 15.0
    assert latency.take() == {}


def test_a_shard_says_how_long_its_sequences_waited_if_it_was_asked_to(tmp_path):
    terms, now = tiny_terms(), [0.0]
    for notes in (True, False):
        store = LocalStore(tmp_path)
        writer = make_writer(store, terms, f"c{int(notes)}", clock=lambda: now[0])
        writer._notes_waits = notes
        for sequence in make_sequences(terms, 3, collector=f"c{int(notes)}"):
            writer.add(sequence)
            now[0] += 1
        writer.flush()
        (path,) = (tmp_path / "shards" / f"c{int(notes)}").rglob("*.arrow")
        waited = waited_seconds(path)
        assert waited is None if not notes else waited.tolist() == [3, 2, 1]
