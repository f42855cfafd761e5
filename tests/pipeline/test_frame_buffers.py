"""Sequences in memory that is used again: the same bytes reach the shards, and nobody waits for a buffer."""

from dataclasses import replace

import numpy as np

from pipeline.blocked_times import BlockedTimes
from pipeline.frame_buffers import FrameBuffers
from pipeline.sequences import SequenceBuilder
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import LocalStore
from tests.golden_replay import collect_golden
from tests.jobs.test_relabel import CARTPOLE, GEOMETRY, LSTM, bytes_of
from tests.pipeline.sequence_factory import make_sequences, make_writer, tiny_terms
from tests.pipeline.test_spool import prepared

TERMS = tiny_terms()


def test_what_a_buffer_held_before_never_shows(tmp_path):
    def dirty(terms, name, lanes):
        buffers = FrameBuffers(terms, 500)
        for frames in buffers._free:
            frames[:] = 255
        return SequenceBuilder(terms, name, lanes, buffers)

    options = {"environment": CARTPOLE, "geometry": GEOMETRY, "core": LSTM, "lanes": 3, "calls": 70}
    clean = collect_golden(tmp_path / "clean", **options)
    reused = collect_golden(tmp_path / "reused", **options, builder_class=dirty)
    assert bytes_of(clean.store) == bytes_of(reused.store)


def test_shards_are_the_same_whether_memory_is_used_again_or_not(tmp_path):
    stores = [LocalStore(tmp_path / name) for name in ("fresh", "reused")]
    for store in stores:
        store.root.mkdir()
        prepared(store)
        buffers = FrameBuffers(TERMS, 2)
        spool = Spool(make_writer(store, TERMS, flush_sequences=4, first_flush_seconds=9), SpoolConfig(), buffers)
        for sequence in make_sequences(TERMS, 60):
            if store is stores[1]:
                frames = buffers.take()
                frames[:] = sequence.observation
                sequence = replace(sequence, observation=frames)
            spool.put(sequence)
        assert spool.close(10) == 0
    assert bytes_of(stores[0]) == bytes_of(stores[1])


def test_with_the_writer_behind_there_is_memory_all_the_same_and_none_is_shared():
    buffers = FrameBuffers(TERMS, 3)
    taken = [buffers.take() for _ in range(40)]
    assert buffers.overflows == 34
    assert len({frames.ctypes.data for frames in taken}) == 40
    for frames in taken:
        buffers.give_back(frames)
    again = [buffers.take() for _ in range(7)]
    assert buffers.overflows == 35, "only what was preallocated came back"
    assert len({frames.ctypes.data for frames in again}) == 7


def test_blocked_times_are_those_since_the_last_report():
    times = BlockedTimes()
    assert times.take() == {}
    times.add(100e-6, 2)
    times.add(300e-6, 1)
    np.testing.assert_allclose(times.take()["blocked_seconds_median"], 50e-6)
    times.add(300e-6, 1)
    assert times.take() == {
        "blocked_seconds_median": 300e-6, "blocked_seconds_p99": 300e-6, "blocked_seconds_max": 300e-6,
        "blocked_within_120_us": 0.0,
    }  # fmt: skip
