import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from pipeline.codec import compress, row_layout
from pipeline.collate import pack_probe, pack_row, stack_sequences
from pipeline.dataset import shards_after
from pipeline.decode import BatchDecoder
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import encode_shard
from schemas.geometry import SequenceGeometry
from schemas.specs import ArraySpec, CoreSpec
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()


def open_all(store):
    return [open_shard(store.map_path(name.path), name) for name in shards_after(store, "c0", -1)]


def assert_batches_equal(batch, expected, rows=slice(None)):
    for field in dataclasses.fields(batch):
        values, wanted = getattr(batch, field.name), getattr(expected, field.name)
        if not isinstance(values, tuple):
            values, wanted = (values,), (wanted,)
        assert len(values) == len(wanted)
        for value, want in zip(values, wanted, strict=True):
            assert value.dtype == want.dtype, field.name
            assert value.flags.c_contiguous
            assert value.flags.writeable
            if field.name not in ("probes", "probe_core"):
                np.testing.assert_array_equal(value[rows], want[rows], err_msg=field.name)
    np.testing.assert_equal(probes_of(batch, rows), probes_of(expected, rows))


def probes_of(batch, rows):
    probes = {row: [part[at] for part in batch.probe_core] for at, row in enumerate(batch.probes.tolist())}
    return {row: probes[row] for row in np.arange(len(batch))[rows].tolist() if row in probes}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("dataset"), TERMS, 70, per_shard=16)


@pytest.fixture
def shards(dataset):
    return open_all(dataset)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "terms",
    [
        TERMS,
        tiny_terms(core=CoreSpec(kind="gru", layers=2, width=5)),
        tiny_terms(core=CoreSpec(kind="none"), observation=ArraySpec(shape=(4,), dtype="float32")),
        tiny_terms(geometry=SequenceGeometry(burn_in=0, unroll=3, bootstrap=2, stride=3, frame_stack=4)),
    ],
    ids=["lstm", "gru", "no core, vectors", "no burn-in"],
)
def test_a_batch_of_any_rows_is_what_was_written(tmp_path, terms, threads):
    sequences = make_sequences(terms, 70, lanes=2)
    shards = open_all(make_dataset(tmp_path, terms, 70, per_shard=16, lanes=2))
    drawn = np.random.default_rng(0).permutation(70)
    with BatchDecoder(terms, threads) as decoder:
        batch, ok = decoder.decode([(shards[i // 16], i % 16) for i in drawn])
    assert ok.all()
    assert len(batch) == 70
    assert_batches_equal(batch, stack_sequences([sequences[i] for i in drawn]))


def test_pixels_go_straight_into_the_callers_buffer(shards):
    with BatchDecoder(TERMS, threads=2) as decoder:
        buffer = decoder.observation_buffer(5)
        buffer[:] = 7
        batch, _ = decoder.decode([(shards[0], row) for row in range(5)], buffer)
    assert batch.observation is buffer
    np.testing.assert_array_equal(buffer, stack_sequences(make_sequences(TERMS, 5)).observation)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((4, 8, 6, 5), np.uint8),
        np.zeros((5, 8, 6, 5), np.int8),
        np.zeros((5, 8, 5, 6), np.uint8).transpose(0, 1, 3, 2),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_a_buffer_of_another_form_is_refused(shards, buffer):
    with BatchDecoder(TERMS) as decoder, pytest.raises(ValueError, match="observation_out is"):
        decoder.decode([(shards[0], row) for row in range(5)], buffer)


def test_a_batch_owns_its_values(dataset):
    shards, before = open_all(dataset), pa.total_allocated_bytes()
    with BatchDecoder(TERMS) as decoder:
        first, _ = decoder.decode([(shards[0], row) for row in range(10)])
        decoder.decode([(shards[1], row) for row in range(10)])
    for shard in shards:
        shard.close()
    assert_batches_equal(first, stack_sequences(make_sequences(TERMS, 10)))
    assert pa.total_allocated_bytes() == before


def test_rows_that_came_as_bytes_decode_like_rows_of_a_shard(shards):
    rows = [shards[1].row(row) for row in range(8)]
    sent = [type(row)(*(bytes(part) for part in row)) for row in rows]
    with BatchDecoder(TERMS) as decoder:
        batch, ok = decoder.decode_rows(sent)
        assert ok.all()
        assert_batches_equal(batch, decoder.decode([(shards[1], row) for row in range(8)])[0])


def first_byte(column, row):
    """Where the row's value begins in the last buffer of an Arrow column."""
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_primitive(column.type):
        return row * (column.buffers()[-1].size // len(column))
    if pa.types.is_fixed_size_binary(column.type):
        return row * column.type.byte_width
    items = sum(len(value.as_py()) for value in column[:row])
    return items * 4 if pa.types.is_list(column.type) else items


def test_a_flipped_bit_in_any_column_costs_exactly_its_row(tmp_path, dataset):
    data = dataset.get(shards_after(dataset, "c0", -1)[0].path)
    whole, expected = pa.py_buffer(data), stack_sequences(make_sequences(TERMS, 16))
    batch = pa.ipc.open_file(whole).get_batch(0)
    assert batch.num_columns == 31
    with BatchDecoder(TERMS) as decoder:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            row = 0 if field.name == "probe_core" else 5  # One row in 64 has a probe.
            damaged = bytearray(data)
            damaged[column.buffers()[-1].address - whole.address + first_byte(column, row)] ^= 1
            (tmp_path / "shard.arrow").write_bytes(damaged)
            shard = open_shard(tmp_path / "shard.arrow")
            decoded, ok = decoder.decode([(shard, row) for row in range(16)])
            assert np.flatnonzero(~ok).tolist() == [row], field.name
            assert_batches_equal(decoded, expected, ok)


def test_a_bad_zstd_frame_under_a_right_checksum_is_a_bad_row_and_no_exception(tmp_path):
    sequences, layout = make_sequences(TERMS, 4), row_layout(TERMS)
    frames = [compress(sequence.observation, 3) for sequence in sequences]
    frames[1], frames[2] = frames[1][:-3], compress(sequences[2].observation[1:], 3)
    records = np.concatenate([pack_row(sequence, layout) for sequence in sequences])
    data = encode_shard(TERMS, "c0", records, frames, [pack_probe(sequence) for sequence in sequences])
    (tmp_path / "shard.arrow").write_bytes(data)
    shard = open_shard(tmp_path / "shard.arrow")
    assert shard.checksums_ok(range(4)).all()
    with BatchDecoder(TERMS, threads=2) as decoder:
        batch, ok = decoder.decode([(shard, row) for row in range(4)])
    np.testing.assert_array_equal(ok, [True, False, False, True])
    assert_batches_equal(batch, stack_sequences(sequences), ok)


def test_rows_of_other_terms_are_refused(shards):
    with (
        BatchDecoder(tiny_terms(core=CoreSpec(kind="gru", width=3))) as decoder,
        pytest.raises(ValueError, match="row"),
    ):
        decoder.decode([(shards[0], 0)])


def test_an_impossible_number_of_threads_is_refused():
    with pytest.raises(ValueError, match="threads is 0; allowed: 1 or more"):
        BatchDecoder(TERMS, 0)
