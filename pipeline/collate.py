"""Sequences to packed rows and back to batches: the only place that knows which field stands in which column."""

from collections.abc import Sequence as Many

import numpy as np

from pipeline.codec import RowLayout
from schemas.records import Sequence, SequenceBatch

_SCALARS = (
    "sequence",
    "first_valid",
    "num_steps",
    "num_observations",
    "ends",
    "previous_action",
    "previous_reward",
    "version_first",
    "version_last",
    "epsilon",
)
_PER_STEP = ("action", "reward", "terminated", "truncated", "life_lost", "greedy")


def pack_row(sequence: Sequence, layout: RowLayout) -> np.ndarray:
    """The fixed columns of one sequence as a record ``[1]``; ``initial_priority`` is NaN and ``checksum`` 0.

    Raises:
        ValueError: naming the field whose shape or kind is not the schema's.
    """
    values = {
        **{f"core_{part}": value for part, value in zip(layout.core_parts, sequence.core, strict=True)},
        **{f"unroll_core_{part}": value for part, value in zip(layout.core_parts, sequence.unroll_core, strict=True)},
        "lineage": np.frombuffer(sequence.lineage, np.uint8),
        "initial_priority": np.nan,
        "checksum": np.uint64(0),
    }
    record = np.zeros(1, layout.dtype)
    for column in layout.dtype.names or ():
        value = np.asarray(values[column] if column in values else getattr(sequence, column))
        target = record[column]
        if value.shape != target.shape[1:] or not np.can_cast(value.dtype, target.dtype, "same_kind"):
            allowed = f"{target.dtype} {list(target.shape[1:])}"
            raise ValueError(f"{column} is {value.dtype} {list(value.shape)}; allowed: {allowed}")
        target[0] = value
    return record


def pack_probe(sequence: Sequence) -> bytes:
    """The probe's parts one after the other, empty when the sequence has none."""
    return b"".join(np.ascontiguousarray(part, "<f4").tobytes() for part in sequence.probe_core)


def unpack_rows(
    records: np.ndarray,
    collectors: Many[bytes],
    probes: Many[memoryview | bytes],
    observation: np.ndarray,
    layout: RowLayout,
) -> SequenceBatch:
    """B packed rows and their decoded pixels as a batch of contiguous, writable arrays; ``observation`` is kept."""
    parts = layout.core_parts
    probed, probe_core = _unpack_probes(probes, records, layout)
    return SequenceBatch(
        observation=observation,
        collector=np.array(collectors),
        lineage=records["lineage"].copy(),
        core=tuple(records[f"core_{part}"].copy() for part in parts),
        unroll_core=tuple(records[f"unroll_core_{part}"].copy() for part in parts),
        probes=probed,
        probe_core=probe_core,
        **{column: records[column].copy() for column in _SCALARS + _PER_STEP},
    )


def _unpack_probes(
    probes: Many[memoryview | bytes], records: np.ndarray, layout: RowLayout
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    widths = [records.dtype[f"core_{part}"].shape[0] for part in layout.core_parts]
    probe_bytes = 4 * sum(widths)
    # One of another size comes of a damaged row, which its checksum refuses.
    probed = [row for row, probe in enumerate(probes) if probe_bytes and len(probe) == probe_bytes]
    values = np.frombuffer(b"".join([probes[row] for row in probed]), "<f4").reshape(len(probed), sum(widths))
    parts = np.split(values, np.cumsum(widths)[:-1], axis=1) if widths else ()
    return np.array(probed, np.int64), tuple(part.astype(np.float32) for part in parts)


def stack_sequences(sequences: Many[Sequence]) -> SequenceBatch:
    """Raw sequences as the batch that a decoder gives once they have been written and read.

    Raises:
        ValueError: there are none, or their shapes differ.
    """
    if not sequences:
        raise ValueError("sequences is empty; allowed: one or more")
    parts = range(len(sequences[0].core))

    def stack(field: str, dtype: type) -> np.ndarray:
        return np.stack([np.asarray(getattr(sequence, field), dtype) for sequence in sequences])

    def stack_parts(field: str) -> tuple[np.ndarray, ...]:
        held = [arrays for sequence in sequences if (arrays := getattr(sequence, field))]
        shapes = [np.shape(part) for part in sequences[0].core]
        return tuple(
            np.array([arrays[part] for arrays in held], np.float32).reshape(len(held), *shapes[part]) for part in parts
        )

    return SequenceBatch(
        sequence=stack("sequence", np.int64),
        first_valid=stack("first_valid", np.int32),
        num_steps=stack("num_steps", np.int32),
        num_observations=stack("num_observations", np.int32),
        ends=stack("ends", np.int8),
        observation=np.stack([sequence.observation for sequence in sequences]),
        action=stack("action", np.int32),
        reward=stack("reward", np.float32),
        terminated=stack("terminated", np.uint8),
        truncated=stack("truncated", np.uint8),
        life_lost=stack("life_lost", np.uint8),
        greedy=stack("greedy", np.uint8),
        previous_action=stack("previous_action", np.int32),
        previous_reward=stack("previous_reward", np.float32),
        core=stack_parts("core"),
        unroll_core=stack_parts("unroll_core"),
        probes=np.flatnonzero([bool(sequence.probe_core) for sequence in sequences]),
        probe_core=stack_parts("probe_core"),
        version_first=stack("version_first", np.int64),
        version_last=stack("version_last", np.int64),
        lineage=np.stack([np.frombuffer(sequence.lineage, np.uint8) for sequence in sequences]),
        epsilon=stack("epsilon", np.float32),
        collector=np.array([sequence.collector.encode() for sequence in sequences]),
    )
