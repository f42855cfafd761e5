"""Samples per inserted sequence, kept between a learner and a collector that know each other by files alone."""

import contextlib
import threading
import time
from unittest.mock import patch

import numpy as np
import pytest

from pipeline import progress as progress_module
from pipeline.flight import ServiceConnection, serve
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter, RunFollower
from pipeline.replay_client import RemoteReplay, describe
from pipeline.replay_service import ReplayService
from pipeline.shard_writer import ShardWriter, WriterConfig
from tests.pipeline.replay_factory import TERMS, empty_dataset, make_replay, unsynced
from tests.pipeline.sequence_factory import make_sequences

BATCH, RATIO, MINIMUM = 16, 2.0, 40
PATIENCE_SECONDS = 60.0


class CollectorThread(threading.Thread):
    """Publishes shards of 4 sequences as long as the followed run allows; ``pause_seconds`` before each."""

    def __init__(self, store, most_sequences, pause_seconds):
        super().__init__(daemon=True)
        self._follower = RunFollower(store, "run")
        self._pause_seconds = pause_seconds
        self.ended = threading.Event()
        self.waits = 0
        self._sequences = make_sequences(TERMS, most_sequences, collector="c", seed=0)
        self._writer = ShardWriter(
            store, TERMS, "c", WriterConfig(), initial_priorities=lambda batch, _: np.ones(len(batch), np.float32)
        )

    def run(self):
        published = 0
        while not self.ended.wait(self._pause_seconds):
            self._follower.poll()
            if not self._follower.may_collect(published, "c").allowed:
                self.waits += 1
                time.sleep(0.001)
                continue
            for _ in range(4):
                self._writer.add(self._sequences[published])
                published += 1
            self._writer.flush()


@contextlib.contextmanager
def learner_side(replay, how):
    """The replay as a learner sees it: the object itself, or what its service shows over Arrow Flight."""
    if how == "in process":
        yield replay
        return
    service = ReplayService(replay, TERMS, run="run", dataset="data", largest_batch=BATCH)
    server = serve(service, "127.0.0.1", 0)
    connection = ServiceConnection(f"grpc://127.0.0.1:{server.port}")
    remote = RemoteReplay(connection, describe(connection))
    polling, ended = threading.Thread(target=lambda: follow(replay, ended), daemon=True), threading.Event()
    polling.start()
    try:
        yield remote
    finally:
        ended.set()
        polling.join()
        remote.close()
        server.shutdown()


def follow(replay, ended):
    while not ended.wait(0.002):
        replay.poll()


def draw_batches(store, how, number, *, learner_seconds, collector_seconds):
    """What the limiter counted in the end, and both sides' waits."""
    replay = make_replay(
        store, batch_size=BATCH, min_sequences=MINIMUM, samples_per_insert=RATIO, capacity=500, band=2.0 * BATCH
    )
    collector = CollectorThread(store, MINIMUM + number * BATCH, collector_seconds)
    writer = ProgressWriter(store, "run", lambda: replay.progress(0)).start()
    collector.start()
    with learner_side(replay, how) as seen, Prefetcher(seen, BATCH, poll_seconds=0.002) as batches:
        for _ in range(number):
            sample = batches.next(PATIENCE_SECONDS)
            assert sample is not None, batches.waits_for()
            seen.update_priorities(sample.ids, np.ones(BATCH))
            time.sleep(learner_seconds)
    collector.ended.set()
    collector.join()
    writer.close()
    counts = replay.metrics()
    replay.close()
    return counts, collector.waits, batches.waiting_seconds


@pytest.fixture
def quick(monkeypatch):
    """Records, looks and retries in milliseconds: the band, not the cadence, is what is tested."""
    monkeypatch.setattr(progress_module, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(progress_module, "CHANGE_SECONDS", 0.002)
    with (
        unsynced(),
        patch("pipeline.prefetch.STARVED_POLL_SECONDS", 0.002),
        patch("pipeline.prefetch.RETRY_SECONDS", 0.002),
    ):
        yield


SPEEDS = [
    pytest.param(0.0, 0.004, id="fast learner"),
    pytest.param(0.01, 0.0, id="slowed learner"),
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["in process", "through the service"])
@pytest.mark.parametrize(("learner_seconds", "collector_seconds"), SPEEDS)
def test_samples_per_inserted_sequence_stay_within_the_band(how, learner_seconds, collector_seconds, tmp_path):
    check_ratio(tmp_path, how, 60, learner_seconds, collector_seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["in process", "through the service"])
@pytest.mark.parametrize(("learner_seconds", "collector_seconds"), SPEEDS)
def test_samples_per_inserted_sequence_are_within_2_percent_after_1000_batches(
    how, learner_seconds, collector_seconds, tmp_path
):
    measured = check_ratio(tmp_path, how, 1050, learner_seconds, collector_seconds)
    assert measured == pytest.approx(RATIO, rel=0.02)


def check_ratio(tmp_path, how, number, learner_seconds, collector_seconds):
    store = empty_dataset(tmp_path / "data")
    counts, collector_waits, learner_waited_seconds = draw_batches(
        store, how, number, learner_seconds=learner_seconds, collector_seconds=collector_seconds
    )
    measured = counts["samples_per_insert"]
    print(
        f"{how}, {number} batches: {measured:.4f} samples per insert (setting {RATIO:g}); the collector waited "
        f"{collector_waits} times, the learner {learner_waited_seconds:.1f} s"
    )
    earning = counts["samples"] / measured
    assert abs(counts["samples"] - RATIO * earning) <= 2 * BATCH + RATIO * 4 + BATCH
    if learner_seconds:
        assert collector_waits > 0, "the slowed learner held nobody up"
    return measured
