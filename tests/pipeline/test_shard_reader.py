import os

import numpy as np
import pyarrow as pa
import pytest

from pipeline.collate import stack_sequences
from pipeline.dataset import ShardName, shards_after
from pipeline.decode import BatchDecoder
from pipeline.shard_reader import ShardError, open_shard
from schemas.shard import VERSION_KEY, shard_schema
from schemas.specs import CoreSpec
from tests.pipeline.sequence_factory import damage, make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("dataset"), TERMS, 200, per_shard=10)


@pytest.fixture(scope="module")
def names(dataset):
    return shards_after(dataset, "c0", -1)


@pytest.fixture(scope="module")
def good(dataset, names):
    return dataset.get(names[0].path)


def read_batch(data):
    return pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)


def as_file(*batches, schema=None, **options):
    sink = pa.BufferOutputStream()
    schema = schema or batches[0].schema
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def as_stream(batch):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_version(batch, version):
    return as_file(batch.replace_schema_metadata({**batch.schema.metadata, VERSION_KEY: version}))


def with_null(batch):
    # Arrow lets a field that says it has no nulls be written with a bitmap all the same.
    rewards = pa.array([None, *batch.column("previous_reward").to_pylist()[1:]], pa.float32())
    columns = [rewards if field.name == "previous_reward" else batch.column(field.name) for field in batch.schema]
    return as_file(pa.RecordBatch.from_arrays(columns, schema=batch.schema))


def test_columns_are_what_was_written(dataset, names):
    expected = stack_sequences(make_sequences(TERMS, 10))
    shard = open_shard(dataset.map_path(names[0].path), names[0])
    assert (shard.terms, shard.collector, shard.num_rows) == (TERMS, "c0", 10)
    columns = shard.columns
    per_row = set(columns) - {"episode", "start", "lane", "initial_priority", "episode_return", "env_steps", "checksum"}
    parts = {f"{kind}_{part}": (kind, i) for kind in ("core", "unroll_core") for i, part in enumerate("hc")}
    for name in per_row:
        value = getattr(expected, parts[name][0])[parts[name][1]] if name in parts else getattr(expected, name)
        np.testing.assert_array_equal(columns[name], value, err_msg=name)
    assert columns["lineage"].shape == (10, 16)
    np.testing.assert_array_equal(shard.probe(0), np.concatenate([part[0] for part in expected.probe_core]))
    assert shard.probe(1).size == 0
    assert shard.checksums_ok(range(10)).all()


def test_views_are_read_only_and_outlive_the_shard(dataset, names):
    shard = open_shard(dataset.map_path(names[0].path))
    reward, frame = shard.columns["reward"], shard.frame(3)
    copies = reward.copy(), bytes(frame)
    shard.close()
    np.testing.assert_array_equal(reward, copies[0])
    assert frame == copies[1]
    assert frame.readonly
    with pytest.raises(ValueError, match="read-only"):
        reward[0, 0] = 1.0


def test_h_d2_fixed_columns_of_2000_random_sequences_allocate_nothing_in_arrow(dataset, names):
    before = pa.total_allocated_bytes()
    shards = [open_shard(dataset.map_path(name.path), name) for name in names]
    assert len(shards) == 20
    columns, rng = [shard.columns for shard in shards], np.random.default_rng(0)
    total = 0
    for _ in range(2000):
        shard, row = rng.integers(20), rng.integers(10)
        total += sum(np.count_nonzero(column[row]) for column in columns[shard].values())
    assert total > 0
    assert pa.total_allocated_bytes() == before


def test_h_d3_an_open_shard_holds_no_descriptor(dataset, names):
    before = len(os.listdir("/dev/fd"))
    shards = [open_shard(dataset.map_path(name.path), name) for name in names for _ in range(10)]
    assert len(shards) == 200
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda data: b"", "empty file", id="empty"),
        pytest.param(lambda data: b"\0" * len(data), "Not an Arrow file", id="zeros"),
        pytest.param(lambda data: b"PAR1 some other file of somebody else's PAR1", "Not an Arrow file", id="foreign"),
        pytest.param(lambda data: data[:-1], "Not an Arrow file", id="one byte short"),
        pytest.param(lambda data: data[: len(data) // 2] + data[-100:], "torn or foreign", id="torn in the middle"),
        pytest.param(lambda data: bytes(b ^ 1 for b in data[:16]) + data[16:], "does not begin as", id="beginning"),
        pytest.param(lambda data: as_stream(read_batch(data)), "Not an Arrow file", id="stream format"),
        pytest.param(lambda data: as_file(pa.record_batch({"x": [1]})), "names no schema version", id="other schema"),
        pytest.param(lambda data: with_version(read_batch(data), b"2"), "version is 2; allowed: at most 1", id="later"),
        pytest.param(lambda data: with_version(read_batch(data), b"x"), "version is x; allowed", id="no version"),
        pytest.param(lambda data: as_file(read_batch(data), compression="zstd"), "buffer compression", id="zstd"),
        pytest.param(lambda data: as_file(read_batch(data), compression="lz4"), "buffer compression", id="lz4"),
        pytest.param(lambda data: as_file(*[read_batch(data)] * 2), "2 record batches; allowed: 1", id="two batches"),
        pytest.param(lambda data: as_file(schema=read_batch(data).schema), "0 record batches", id="no batch"),
        pytest.param(lambda data: as_file(read_batch(data).slice(0, 0)), "no rows", id="no rows"),
        pytest.param(lambda data: with_null(read_batch(data)), "previous_reward has nulls", id="null"),
        pytest.param(
            lambda data: as_file(read_batch(data).drop_columns(["lane"])), "columns are not those", id="column missing"
        ),
    ],
)
def test_what_is_no_shard_is_refused_with_one_line(tmp_path, good, damage, reason):
    path = tmp_path / "shard.arrow"
    path.write_bytes(damage(good))
    with pytest.raises(ShardError, match=reason) as caught:
        open_shard(path)
    assert "\n" not in str(caught.value)
    assert path.exists()


def test_a_shard_that_is_not_what_its_name_says_is_refused(dataset, names):
    path = dataset.map_path(names[0].path)
    with pytest.raises(ShardError, match="holds 10 sequences of c0, its name says 11 of c0"):
        open_shard(path, ShardName("c0", 0, 11, 1))
    with pytest.raises(ShardError, match="its name says 10 of somebody"):
        open_shard(path, ShardName("somebody", 0, 10, 1))


def test_a_file_that_is_not_there_is_an_os_error_and_no_bad_shard(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_shard(tmp_path / "missing.arrow")


def test_a_shard_cut_at_every_64th_byte_is_refused(tmp_path, good):
    path = tmp_path / "shard.arrow"
    for length in range(0, len(good), 64):
        path.write_bytes(good[:length])
        with pytest.raises(ShardError):
            open_shard(path)


def test_damage_anywhere_is_a_shard_error_or_some_bad_rows_and_never_a_crash(tmp_path, good):
    """Hostile bytes in metadata, offsets and contents: whatever still passes is bit for bit what was written."""
    path, rng = tmp_path / "shard.arrow", np.random.default_rng(0)
    expected = stack_sequences(make_sequences(TERMS, 10))
    reasons, outcomes = [], {"other terms": 0, "all rows": 0, "some rows": 0}
    with BatchDecoder(TERMS) as decoder:
        for _ in range(800):
            damaged = bytearray(good)
            for _ in range(rng.integers(1, 4)):
                damaged[rng.integers(len(good))] = rng.integers(256)
            path.write_bytes(damaged)
            try:
                shard = open_shard(path, ShardName("c0", 0, 10, 1))
            except ShardError as error:
                reasons.append(str(error))
                continue
            if shard.terms != TERMS:
                outcomes["other terms"] += 1
                continue
            batch, ok = decoder.decode([(shard, row) for row in range(10)])
            outcomes["all rows" if ok.all() else "some rows"] += 1
            for field in ("sequence", "observation", "reward", "lineage"):
                np.testing.assert_array_equal(getattr(batch, field)[ok], getattr(expected, field)[ok])
    assert min(len(reasons), outcomes["all rows"], outcomes["some rows"]) > 50
    assert not any("\n" in reason for reason in reasons)


def test_a_flipped_bit_in_a_collectors_name_costs_that_row_only(tmp_path, good):
    names = read_batch(good).column("collector").buffers()[2]
    at = good.index(names.to_pybytes())
    damaged = bytearray(good)
    damaged[at] ^= 4  # The first letter of row 0's name.
    (tmp_path / "shard.arrow").write_bytes(damaged)
    shard = open_shard(tmp_path / "shard.arrow", ShardName("c0", 0, 10, 1))
    assert shard.collector == "c0"
    np.testing.assert_array_equal(shard.checksums_ok(range(10)), [False] + [True] * 9)


def test_the_first_sequence_is_that_of_row_0_whichever_rows_are_intact(tmp_path):
    store = make_dataset(tmp_path, TERMS, 10, per_shard=5)
    name = shards_after(store, "c0", -1)[1]
    for row in range(5):
        assert open_shard(store.map_path(name.path), name).first_sequence() == 5
        damage(store, name, "sequence", row, bit=2)
    assert open_shard(store.map_path(name.path), name).first_sequence() is None


def test_a_core_without_state_has_no_state_columns(tmp_path):
    terms = tiny_terms(core=CoreSpec(kind="none"))
    store = make_dataset(tmp_path, terms, 3)
    shard = open_shard(store.map_path(shards_after(store, "c0", -1)[0].path))
    assert [name for name in shard.columns if "core" in name] == []
    assert "core_h" in shard_schema(TERMS).names
