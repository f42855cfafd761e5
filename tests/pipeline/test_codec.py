import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.codec import compress, decode_into, row_layout
from schemas.shard import shard_schema
from schemas.specs import CoreSpec
from tests.pipeline.sequence_factory import tiny_terms

FRAMES = np.arange(4 * 30, dtype=np.uint8).reshape(4, 6, 5).repeat(5, axis=0)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "<f4", "<i2", "<f8"]),
    level=st.sampled_from([1, 3, 9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_array_comes_back_bit_for_bit(shape, dtype, level, seed):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    out = np.zeros(shape, dtype)
    decode_into(compress(array, level), out)
    assert out.tobytes() == array.tobytes()


def test_a_view_with_strides_is_compressed_by_value():
    out = np.zeros((20, 5, 6), np.uint8)
    decode_into(compress(FRAMES.transpose(0, 2, 1), 3), out)
    np.testing.assert_array_equal(out, FRAMES.transpose(0, 2, 1))


def test_a_frame_cut_short_anywhere_is_an_error():
    frame, out = compress(FRAMES, 3), np.zeros_like(FRAMES)
    for length in range(len(frame)):
        with pytest.raises(ValueError, match="zstd frame"):
            decode_into(frame[:length], out)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(compress(FRAMES, 3) + b"more", id="followed by junk"),
        pytest.param(compress(FRAMES, 3) * 2, id="followed by another frame"),
        pytest.param(compress(FRAMES[:-1], 3), id="too short"),
        pytest.param(compress(FRAMES[:1].repeat(30, axis=0), 3), id="too long"),
        pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(FRAMES.tobytes()), id="size unknown"),
        pytest.param(b"no zstd at all, only text", id="junk"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_frame_that_does_not_fill_its_target_exactly_is_an_error(frame):
    with pytest.raises(ValueError, match="zstd frame"):
        decode_into(frame, np.zeros_like(FRAMES))


def test_a_flipped_bit_never_writes_past_the_target():
    frame, around = compress(FRAMES, 3), np.zeros((FRAMES.size + 64,), np.uint8)
    target = around[32:-32].reshape(FRAMES.shape)
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 1 << position % 8
        try:
            decode_into(bytes(damaged), target)
        except ValueError as error:
            assert "zstd frame" in str(error)  # noqa: PT017 either outcome is right, zstd has no checksum here
        assert not around[:32].any()
        assert not around[-32:].any()


def test_threads_do_not_share_a_decompressor():
    arrays = [np.random.default_rng(seed).integers(0, 9, 100_000, np.uint8) for seed in range(4)]
    frames = [compress(array, 3) for array in arrays]
    wrong = []

    def decode(number):
        out = np.empty_like(arrays[number])
        for _ in range(40):
            out[:] = 0
            decode_into(frames[number], out)
            if not np.array_equal(out, arrays[number]):
                wrong.append(number)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["lstm", "gru", "none"])
def test_a_packed_row_holds_every_column_of_constant_size_side_by_side(kind):
    terms = tiny_terms(core=CoreSpec(kind=kind, layers=2, width=3))
    layout = row_layout(terms)
    varying = {"collector", "observation", "probe_core"}
    assert layout.dtype.names == tuple(name for name in shard_schema(terms).names if name not in varying)
    assert layout.dtype.itemsize == sum(layout.widths)
    assert all(layout.dtype[name].base.byteorder in "<|=" for name in layout.dtype.names)


def test_equal_terms_have_one_layout():
    assert row_layout(tiny_terms()) is row_layout(tiny_terms())
    assert row_layout(tiny_terms()) is not row_layout(tiny_terms(core=CoreSpec(kind="gru", width=3)))
