"""Priorities under lasting identities, as they are saved and found again after a restart."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

Run = tuple[str, int, int]  # Collector, first sequence number, how many.
_ENTRY = "values"


def pack_priorities(runs: list[Run], priorities: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Plain arrays, and the names that ``run_collector`` points into.

    ``priority`` float64 ``[N]`` goes through the runs one after the other; ``run_*`` int64 ``[runs]``.
    """
    collectors = sorted({collector for collector, _, _ in runs})
    position = {collector: index for index, collector in enumerate(collectors)}
    table = np.array([(position[name], first, count) for name, first, count in runs], np.int64).reshape(-1, 3)
    columns = {f"run_{name}": table[:, i].copy() for i, name in enumerate(("collector", "first", "count"))}
    return {**columns, "priority": priorities}, collectors


class SavedPriorities:
    """What ``pack_priorities`` saved, to be taken sequence by sequence; NaN is "not saved" or "taken"."""

    def __init__(self, arrays: dict[str, np.ndarray], collectors: list[str]) -> None:
        self._first: dict[str, int] = {}
        self._priority: dict[str, np.ndarray] = {}
        self._first_taken: dict[str, int] = {}
        starts = np.cumsum(arrays["run_count"]) - arrays["run_count"]
        table = np.stack([arrays["run_first"], arrays["run_count"], starts], axis=1)
        for index, collector in enumerate(collectors):
            chosen = arrays["run_collector"] == index
            runs = list(zip(*table[chosen].T.tolist(), strict=True))
            first = min(run_first for run_first, _, _ in runs)
            priority = np.full(max(run_first + count for run_first, count, _ in runs) - first, np.nan)
            for run_first, count, start in runs:
                priority[run_first - first :][:count] = arrays["priority"][start : start + count]
            self._first[collector], self._priority[collector] = first, priority

    def take(self, collector: str, first: int, count: int) -> np.ndarray:
        """Saved priorities of ``count`` sequences from number ``first`` on, float64 ``[count]``, NaN where none is."""
        self._first_taken[collector] = min(first, self._first_taken.get(collector, first))
        taken = np.full(count, np.nan)
        if collector in self._first:
            saved, offset = self._priority[collector], first - self._first[collector]
            start, stop = np.clip([offset, offset + count], 0, len(saved))
            taken[start - offset : stop - offset] = saved[start:stop]
            saved[start:stop] = np.nan
        return taken

    def left(self, skips_older: Callable[[str], bool]) -> dict[str, np.ndarray]:
        """Sequence numbers that nobody took, by collector: they have gone from the dataset.

        Where a collector's older shards were skipped for want of room (``skips_older``), what lies before its first
        taken sequence has been evicted, not lost, and is left out.
        """
        found = {}
        for collector, saved in self._priority.items():
            numbers = np.flatnonzero(~np.isnan(saved)) + self._first[collector]
            if skips_older(collector):
                numbers = numbers[numbers >= self._first_taken.get(collector, np.inf)]
            if len(numbers):
                found[collector] = numbers
        return found


def snapshot_to_bytes(arrays: dict[str, np.ndarray], values: dict[str, Any]) -> bytes:
    """A replay's ``state`` as one safetensors object, for an owner that has no learner's checkpoint to put it in."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, metadata={_ENTRY: json.dumps(values)})


def snapshot_from_bytes(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse. Raises ValueError naming what is wrong with ``data``."""
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return arrays, json.loads(header["__metadata__"][_ENTRY])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{len(data)} bytes are no snapshot of a replay: {error}") from error
