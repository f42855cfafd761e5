"""The spool: never blocks, never drops, says what it waits for."""

import threading
import time

import pytest

from pipeline.dataset import write_provenance
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.pipeline.sequence_factory import make_sequences, make_writer, tiny_terms, write_shards

TERMS = tiny_terms()


class GatedStore(LocalStore):
    """A real store that waits at a gate before each shard."""

    def __init__(self, root):
        super().__init__(root)
        self.gate = threading.Event()

    def put(self, name, data):
        if name.endswith(".arrow"):
            self.gate.wait()
        super().put(name, data)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def prepared(store):
    """Terms and provenance of collector c0, no shards."""
    write_shards(store, TERMS, make_sequences(TERMS, 1, collector="other"))
    write_provenance(store, "c0", {})
    return store


def test_a_slow_store_fills_the_spool_and_nothing_is_lost(tmp_path):
    store = GatedStore(tmp_path)
    store.gate.set()
    prepared(store)
    store.gate.clear()
    spool = Spool(make_writer(store, TERMS, flush_sequences=4), SpoolConfig(spool_mb=0.005))
    sequences = make_sequences(TERMS, 60)
    started = time.monotonic()
    for sequence in sequences:
        spool.put(sequence)
    assert time.monotonic() - started < 1, "put must not wait for the store"
    until(lambda: spool.waits_for)
    assert "MB are spooled (it is slow)" in spool.waits_for
    store.gate.set()
    assert spool.close(10) == 0
    assert spool.waits_for == ""
    assert spool.bytes == 0
    report = verify_dataset(store)
    assert (report.faults, report.sequences) == ([], 61)


def test_a_store_that_was_away_gets_everything_once_it_is_back(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    store = prepared(LocalStore(root))
    spool = Spool(make_writer(store, TERMS, flush_sequences=4), SpoolConfig())
    sequences = make_sequences(TERMS, 40)
    for sequence in sequences[:20]:
        spool.put(sequence)
    spool.flush()
    until(lambda: spool.writer.sequences == 20)
    root.rename(tmp_path / "elsewhere")
    for sequence in sequences[20:]:
        spool.put(sequence)
    until(lambda: spool.store_error)
    assert not root.exists(), "a dataset that was moved away must not grow a second half in its old place"
    (tmp_path / "elsewhere").rename(root)
    assert spool.close(10) == 0
    assert spool.store_error == ""
    report = verify_dataset(store)
    assert (report.faults, report.sequences) == ([], 41)


def test_what_cannot_be_published_in_time_is_counted(tmp_path):
    spool = Spool(make_writer(LocalStore(tmp_path / "nowhere"), TERMS), SpoolConfig())
    for sequence in make_sequences(TERMS, 7):
        spool.put(sequence)
    assert spool.close(0.5) == 7


def test_a_fault_of_the_writer_is_raised_to_the_collector(tmp_path):
    spool = Spool(make_writer(LocalStore(tmp_path), TERMS), SpoolConfig())
    spool.put(make_sequences(TERMS, 1, collector="another")[0])
    until(lambda: spool._bug)
    with pytest.raises(ValueError, match="collector is 'another'"):
        spool.put(make_sequences(TERMS, 1)[0])
