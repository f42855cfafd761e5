"""Ray Data goes through far more than it was given memory for: blocks come and go, nothing piles up anywhere."""

import contextlib
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipeline.dataset import ShardName, write_provenance
from pipeline.ray_source import PIXEL_BLOCK_BYTES, read_sequences
from pipeline.scan import list_shards
from schemas.geometry import SequenceGeometry
from schemas.specs import ArraySpec
from tests.pipeline.sequence_factory import make_dataset, tiny_terms
from tests.ray_session import ray_session

__all__ = ["ray_session"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TIMES = 10
PER_SHARD = 64
MOST_BYTES = 20 * PIXEL_BLOCK_BYTES  # Of its own, in any process, beyond what it had before.


class MemoryWatch:
    """The most memory of its own (not the object store's, which is shared) that each process of this Ray had.

    ``spilled_bytes``: the most that the object store, too small for what it was to hold, had put into files.
    """

    def __init__(self) -> None:
        from ray._private.worker import _global_node

        assert _global_node is not None
        self._session = Path(_global_node.get_session_dir_path())
        self.peak: dict[int, int] = {}
        self.spilled_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._look()
        self.before = dict(self.peak)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def grown(self) -> int:
        """Bytes of the process that grew most; one that is new counts from what an idle worker has."""
        usual = max(self.before.values())
        return max(most - self.before.get(pid, min(usual, most)) for pid, most in self.peak.items())

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # Gone since it was listed.
            files = self._session.glob("ray_spilled_objects*/*")
            self.spilled_bytes = max(self.spilled_bytes, sum(file.stat().st_size for file in files))
        me = psutil.Process(os.getpid())
        for process in [me, *me.children(recursive=True)]:
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            self.peak[process.pid] = max(self.peak.get(process.pid, 0), memory.rss - memory.shared)


@pytest.fixture
def large(tmp_path, ray_session):
    """One shard under many names: ten times the object store when decoded."""
    terms = tiny_terms(
        observation=ArraySpec(shape=(84, 84), dtype="uint8"),
        geometry=SequenceGeometry(burn_in=20, unroll=40, bootstrap=5, stride=20, frame_stack=4),
    )
    store = make_dataset(tmp_path / "large", terms, PER_SHARD, per_shard=PER_SHARD)
    write_provenance(store, "c0", {})
    (shard,) = list_shards(store)
    decoded = PER_SHARD * terms.geometry.stored_frames * 84 * 84
    given = int(ray_session.cluster_resources()["object_store_memory"])
    count = -(-TIMES * given // decoded)
    for number in range(1, count):
        path = store.map_path(ShardName("c0", number, shard.sequences, shard.env_steps).path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(store.map_path(shard.path), path)
    return store, count * PER_SHARD, given


def rows_of(batch):
    return {"rows": [len(batch["observation"])]}


@pytest.mark.parametrize("consumer", ["here, slower than the tasks", "in tasks of their own"])
def test_ten_times_the_memory_given_goes_through(large, ray_session, consumer):
    store, sequences, given = large
    dataset = read_sequences(str(store.root), ["sequence", "observation"])
    assert dataset.size_bytes() > TIMES * given
    with MemoryWatch() as memory:
        if consumer == "in tasks of their own":
            # Another need of cores than the read tasks': not fused with them, so blocks cross the object store.
            counts = dataset.map_batches(rows_of, batch_size=None, num_cpus=0.5)
            seen = sum(row["rows"] for row in counts.take_all())
        else:
            seen = 0
            for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
                seen += len(batch["observation"])
                time.sleep(0.005)
    assert seen == sequences
    assert memory.grown() < MOST_BYTES, f"a process grew by {memory.grown() / 1e6:.0f} MB"
    assert memory.spilled_bytes < given
