import dataclasses
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

from pipeline.collate import stack_sequences
from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from schemas.shard import shard_schema
from schemas.specs import ArraySpec, CoreSpec
from tests.pipeline.sequence_factory import make_sequences, make_writer, q_spread, tiny_terms, write_shards

TERMS = tiny_terms()


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def read_with_pyarrow_alone(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).get_batch(0)


def names_and_stats(store):
    return [(name.number, name.sequences, name.env_steps) for name in shards_after(store, "c0", -1)]


# --- what a shard holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "terms",
    [
        TERMS,
        tiny_terms(core=CoreSpec(kind="gru", layers=2, width=4)),
        tiny_terms(core=CoreSpec(kind="none"), observation=ArraySpec(shape=(3,), dtype="float32")),
    ],
    ids=["lstm", "gru", "no core, vectors"],
)
def test_every_column_holds_what_was_added_read_by_pyarrow_alone(store, terms):
    sequences = make_sequences(terms, 70, lanes=2)
    (name,) = write_shards(store, terms, sequences, per_shard=70)
    batch = read_with_pyarrow_alone(store.map_path(name.path))
    assert batch.schema.equals(shard_schema(terms), check_metadata=True)
    expected_priority = q_spread(stack_sequences(sequences), np.stack([each.q_values for each in sequences]))
    for row, (stored, sequence) in enumerate(zip(batch.to_pylist(), sequences, strict=True)):
        pixels = zstandard.decompress(stored.pop("observation"))
        assert pixels == sequence.observation.tobytes()
        assert stored.pop("initial_priority") == expected_priority[row]
        assert stored.pop("lineage") == sequence.lineage
        assert stored.pop("probe_core") == [value for part in sequence.probe_core for value in part.tolist()]
        assert (len(sequence.probe_core) > 0) == (row in (0, 64)) or not terms.core.parts
        for position, part in enumerate(terms.core.parts):
            assert stored.pop(f"core_{part}") == sequence.core[position].tolist()
            assert stored.pop(f"unroll_core_{part}") == sequence.unroll_core[position].tolist()
        del stored["checksum"]
        for column, value in stored.items():
            given = getattr(sequence, column)
            given = given.tolist() if isinstance(given, np.ndarray) else given
            assert value == (pytest.approx(given) if isinstance(given, float) else given), column


def test_the_checksum_is_xxh3_of_all_other_columns_in_schema_order(store):
    (name,) = write_shards(store, TERMS, make_sequences(TERMS, 3), per_shard=3)
    batch = read_with_pyarrow_alone(store.map_path(name.path))
    codes = {pa.int64(): "q", pa.int32(): "i", pa.int8(): "b", pa.uint8(): "B", pa.float32(): "f"}
    for row in batch.to_pylist():
        digest = xxhash.xxh3_64()
        for field in batch.schema:
            value = row[field.name]
            if field.name == "checksum":
                continue
            if isinstance(value, str | bytes):
                digest.update(value.encode() if isinstance(value, str) else value)
            elif isinstance(value, list):
                digest.update(struct.pack(f"<{len(value)}{codes[field.type.value_type]}", *value))
            else:
                digest.update(struct.pack(f"<{codes[field.type]}", value))
        assert row["checksum"] == digest.intdigest()


def test_pyarrow_alone_reads_fixed_columns_without_allocating(store):
    (name,) = write_shards(store, TERMS, make_sequences(TERMS, 20), per_shard=20)
    before = pa.total_allocated_bytes()
    batch = read_with_pyarrow_alone(store.map_path(name.path))
    columns = [
        batch.column(column).flatten().to_numpy(zero_copy_only=True) for column in ("action", "reward", "core_h")
    ]
    assert all(np.isfinite(column).all() for column in columns)
    assert pa.total_allocated_bytes() == before


def test_the_name_and_the_counters_count_owned_steps(store):
    sequences = make_sequences(TERMS, 40, lanes=3)
    writer = make_writer(store, TERMS, flush_sequences=15)
    for sequence in sequences:
        writer.add(sequence)
    assert (writer.pending_sequences, writer.sequences) == (40, 0)
    assert writer.pending_bytes > 0
    assert writer.flush() == 3
    # The factory counts steps while it cuts: env_steps at a shard's last row minus that at the shard before.
    counts = [0, sequences[14].env_steps, sequences[29].env_steps, sequences[39].env_steps]
    assert names_and_stats(store) == [
        (0, 15, counts[1]),
        (1, 15, counts[2] - counts[1]),
        (2, 10, counts[3] - counts[2]),
    ]
    files = [store.map_path(name.path) for name in shards_after(store, "c0", -1)]
    published = sum(file.stat().st_size for file in files)
    assert (writer.shards, writer.sequences, writer.env_steps, writer.bytes_published) == (3, 40, counts[3], published)
    assert writer.pending_sequences == writer.pending_bytes == 0


# --- initial priorities ---------------------------------------------------------------------------------------------


def test_initial_priorities_get_the_batch_without_pixels_and_nan_means_none(store):
    sequences, given = make_sequences(TERMS, 5), []

    def priorities(batch, q_values):
        given.append((batch, q_values))
        return np.array([1, np.nan, 0, 2.5, np.nan])

    writer = ShardWriter(store, TERMS, "c0", WriterConfig(), initial_priorities=priorities)
    for sequence in sequences:
        writer.add(sequence)
    writer.flush()
    (batch, q_values), expected = given[0], stack_sequences(sequences)
    np.testing.assert_array_equal(q_values, np.stack([sequence.q_values for sequence in sequences]))
    assert batch.observation.shape == expected.observation.shape
    assert batch.observation.dtype == expected.observation.dtype
    assert not batch.observation.any()
    for field in set(batch.__dict__) - {"observation"}:
        np.testing.assert_array_equal(getattr(batch, field), getattr(expected, field), err_msg=field)
    shard = open_shard(store.map_path(shards_after(store, "c0", -1)[0].path))
    np.testing.assert_array_equal(shard.columns["initial_priority"], np.float32([1, np.nan, 0, 2.5, np.nan]))


def test_initial_priorities_of_another_shape_are_refused_and_nothing_is_published(store):
    writer = ShardWriter(store, TERMS, "c0", WriterConfig(), initial_priorities=lambda batch, q_values: np.ones((1, 1)))
    writer.add(make_sequences(TERMS, 1)[0])
    with pytest.raises(ValueError, match=r"priorities have shape \[1, 1\]; allowed: \[1\]"):
        writer.flush()
    assert list_collectors(store) == []


# --- what may be added ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collector": "c1"}, "collector is 'c1'; allowed: 'c0'"),
        ({"sequence": 1}, "sequence is 1; allowed: the next one, 0"),
        (
            {"observation": np.zeros((8, 6, 4), np.uint8)},
            r"observation is uint8 \[8, 6, 4\]; allowed: uint8 \[8, 6, 5\]",
        ),
        ({"observation": np.zeros((8, 6, 5), np.float32)}, "observation is float32"),
        ({"action": np.zeros(1, np.int32)}, r"action is int32 \[1\]; allowed: int32 \[7\]"),
        ({"action": np.zeros(7, np.float32)}, "action is float32"),
        ({"core": (np.zeros(3, np.float32), np.zeros(1, np.float32))}, r"core_c is float32 \[1\]"),
        ({"previous_reward": np.zeros(2)}, r"previous_reward is float64 \[2\]"),
    ],
)
def test_a_sequence_of_another_form_is_refused_by_field(store, changes, message):
    writer = make_writer(store, TERMS)
    with pytest.raises(ValueError, match=message):
        writer.add(dataclasses.replace(make_sequences(TERMS, 1)[0], **changes))
    assert writer.pending_sequences == 0


def test_arrays_may_be_reused_once_a_sequence_is_added(store):
    sequences = make_sequences(TERMS, 4)
    expected = stack_sequences(sequences).action
    writer, action = make_writer(store, TERMS), np.zeros(7, np.int32)
    for sequence in sequences:
        action[:] = sequence.action
        writer.add(dataclasses.replace(sequence, action=action))
    writer.flush()
    shard = open_shard(store.map_path(shards_after(store, "c0", -1)[0].path))
    np.testing.assert_array_equal(shard.columns["action"], expected)


# --- when a shard is published --------------------------------------------------------------------------------------


def test_the_first_shard_is_due_after_2_s_later_ones_at_64_sequences_or_15_s(store):
    clock, sequences = Clock(), iter(make_sequences(TERMS, 200))
    writer = make_writer(store, TERMS, clock=clock)

    def at(seconds, *, add):
        clock.seconds = seconds
        for _ in range(add):
            writer.add(next(sequences))
        writer.maybe_flush()
        return [sequences for _, sequences, _ in names_and_stats(store)]

    assert at(0.0, add=3) == []
    assert at(1.9, add=2) == []
    assert at(2.0, add=1) == [6]
    assert at(3.0, add=1) == [6]
    assert at(17.9, add=1) == [6]
    assert at(18.0, add=0) == [6, 2]
    assert at(19.0, add=63) == [6, 2]
    assert at(19.1, add=1) == [6, 2, 64]
    assert at(60.0, add=0) == [6, 2, 64]
    assert at(60.0, add=63) == [6, 2, 64]
    writer.flush()
    assert [sequences for _, sequences, _ in names_and_stats(store)] == [6, 2, 64, 63]
    assert writer.flush() == writer.maybe_flush() == 0


def test_no_shard_holds_more_than_it_may_even_after_a_pause(store):
    writer = make_writer(store, TERMS, flush_sequences=10)
    for sequence in make_sequences(TERMS, 25):
        writer.add(sequence)
    assert writer.maybe_flush() == 2
    assert [sequences for _, sequences, _ in names_and_stats(store)] == [10, 10]


@pytest.mark.parametrize(
    ("field", "value"),
    [("first_flush_seconds", -1), ("flush_seconds", float("nan")), ("flush_sequences", 0), ("zstd_level", 23)],
)
def test_an_impossible_setting_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}; allowed"):
        WriterConfig(**{field: value})


# --- faults ---------------------------------------------------------------------------------------------------------


class FailingStore(LocalStore):
    """Fails ``failures`` times, before or after the object is there."""

    def __init__(self, root, *, failures, after):
        super().__init__(root)
        self.failures, self.after = failures, after

    def put(self, name, data):
        if self.failures and not self.after:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().put(name, data)
        if self.failures:
            self.failures -= 1
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("after", [False, True], ids=["nothing written", "only the last sync failed"])
def test_a_store_that_fails_loses_nothing_and_doubles_nothing(tmp_path, after):
    store = FailingStore(tmp_path, failures=3, after=after)
    writer = make_writer(store, TERMS, flush_sequences=8)
    sequences = make_sequences(TERMS, 20)
    for sequence in sequences:
        writer.add(sequence)
        if sequence.sequence % 5 == 4:
            try:
                writer.flush()
            except OSError:
                assert writer.pending_sequences > 0
    writer.flush()
    shards = [open_shard(store.map_path(name.path), name) for name in shards_after(store, "c0", -1)]
    numbers = np.concatenate([shard.columns["sequence"] for shard in shards])
    np.testing.assert_array_equal(numbers, np.arange(20))
    assert writer.sequences == 20
    assert writer.env_steps == sequences[-1].env_steps


def test_h_d1_an_exception_in_the_middle_leaves_no_shard(store, monkeypatch):
    writer = make_writer(store, TERMS)
    for sequence in make_sequences(TERMS, 4):
        writer.add(sequence)
    make_file = pa.ipc.new_file

    class FailsBeforeItsFooter:
        def __init__(self, sink, *args, **kwargs):
            self.inner = make_file(sink, *args, **kwargs)

        def __enter__(self):
            return self.inner.__enter__()

        def __exit__(self, *error):
            self.inner.__exit__(*error)
            raise RuntimeError("in the middle")

    with monkeypatch.context() as patched:
        patched.setattr(pa.ipc, "new_file", FailsBeforeItsFooter)
        with pytest.raises(RuntimeError):
            writer.flush()
    assert list_collectors(store) == []
    writer.flush()
    assert [sequences for _, sequences, _ in names_and_stats(store)] == [4]


_WRITE_UNTIL_KILLED = """
import os, sys, time
from pipeline.store import LocalStore
from tests.pipeline.sequence_factory import make_writer, sequences_of, tiny_terms

class SlowFile:
    # Passes half of what it is given, says so, and takes its time with the other half.
    def __init__(self, file):
        self.file = file
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()
    def write(self, data):
        half = len(memoryview(data)) // 2
        self.file.write(memoryview(data)[:half])
        self.file.flush()
        print("half written", flush=True)
        time.sleep(60)

import pipeline.store
shards_whole = int(sys.argv[2])
store, terms = LocalStore(sys.argv[1]), tiny_terms()
writer = make_writer(store, terms, flush_sequences=4)
for sequence in sequences_of(terms):
    writer.add(sequence)
    if writer.shards == shards_whole:
        pipeline.store.open = lambda *args: SlowFile(open(*args))
    writer.maybe_flush()
"""


@pytest.mark.parametrize("shards_whole", [0, 3])
def test_h_d1_a_writer_killed_in_the_middle_leaves_whole_shards_only(store, shards_whole):
    command = [sys.executable, "-c", _WRITE_UNTIL_KILLED, str(store.root), str(shards_whole)]
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    seen: set[ShardName] = set()
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half written\n"
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:  # A reader that polls every 10 ms, before and after the kill.
            for name in shards_after(store, "c0", -1):
                open_shard(store.map_path(name.path), name)
                seen.add(name)
            if time.monotonic() > deadline - 0.07 and writer.poll() is None:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.wait()
    assert sorted(name.number for name in seen) == list(range(shards_whole))
    assert store.clean_leftovers(older_than_seconds=0) == 1
    assert names_and_stats(store) == [(name.number, name.sequences, name.env_steps) for name in sorted(seen)]
