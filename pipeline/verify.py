"""Reads a whole dataset and says what is wrong with it: files, checksums, pixels, windows, coverage, identities."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.dataset import ShardName, list_collectors, read_provenance, read_terms, shards_after, unknown_files
from pipeline.decode import BatchDecoder
from pipeline.row_faults import ROW_COLUMNS, STEP_COLUMNS, episode_steps, owned_steps, row_fault
from pipeline.shard_reader import Shard, ShardError, open_shard
from pipeline.store import Store
from schemas.geometry import CONTINUES, ENDS_NAMES
from schemas.terms import DatasetTerms

_DECODED_AT_ONCE = 16


@dataclass(kw_only=True)
class DatasetReport:
    """What a dataset holds, and ``faults``: one line each, none when all is well.

    Attributes:
        bytes: of shards.
        env_steps: owned steps, so overlap counts once.
        episodes: how many ended in each way; those that a killed collector left open are in none.
        corrupt_rows: checksum or pixels wrong: each costs one sequence.
        bad_files: path and reason of what is no shard of this dataset.
        duplicates, missing_sequences: of the contiguous numbers inside a collector.
        versions, lineages: of the parameters that acted (-1 and no lineage: the random policy).
        network_sequences: acted by one network throughout.
        distinct_priorities: how many different initial priorities those have.
    """

    collectors: int = 0
    shards: int = 0
    sequences: int = 0
    env_steps: int = 0
    bytes: int = 0
    episodes: Counter[str] = field(default_factory=Counter)
    corrupt_rows: int = 0
    bad_files: list[tuple[str, str]] = field(default_factory=list)
    duplicates: int = 0
    missing_sequences: int = 0
    versions: set[int] = field(default_factory=set)
    lineages: set[str] = field(default_factory=set)
    network_sequences: int = 0
    distinct_priorities: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def distinct_priority_share(self) -> float:
        """Of the sequences that a network acted; NaN when there are none."""
        return self.distinct_priorities / self.network_sequences if self.network_sequences else float("nan")


def verify_dataset(store: Store, threads: int = 1) -> DatasetReport:
    """Read every shard once, in order; memory is that of a few sequences plus 4 bytes for each.

    The end of a collector's story may be missing (it runs, or was killed): that is no fault. Nor are older shards that
    were deleted whole; a number missing between two present ones is.

    Raises:
        ValueError: there is no dataset, or its terms cannot be read.
    """
    terms = read_terms(store)
    if terms is None:
        raise ValueError(f"{store!r} holds no dataset: dataset.json is missing")
    report = DatasetReport()
    for path in unknown_files(store):
        report.bad_files.append((path, "not the name of a shard"))
    priorities: list[np.ndarray] = []
    with BatchDecoder(terms, threads) as decoder:
        for collector in list_collectors(store):
            names = shards_after(store, collector, -1)
            report.collectors += bool(names)
            if names:
                priorities += _CollectorCheck(store, terms, report, decoder).run(collector, names)
    report.distinct_priorities = len(np.unique(np.concatenate(priorities))) if priorities else 0
    report.faults += [f"{path}: {reason}" for path, reason in report.bad_files]
    return report


@dataclass
class _Lane:
    """How far a lane's current episode has been read. ``end`` is (ends, its steps) once a sequence has shown it."""

    episode: int
    next_start: int
    is_over: bool
    end: tuple[int, int] | None


class _CollectorCheck:
    """Walks one collector's shards in the order of their numbers.

    What a missing shard or a corrupt row held is unknown, so after one the story is picked up again wherever it stands:
    one fault is reported once.
    """

    def __init__(self, store: Store, terms: DatasetTerms, report: DatasetReport, decoder: BatchDecoder) -> None:
        self._store, self._terms, self._report, self._decoder = store, terms, report, decoder
        self._next_number = 0
        self._next_sequence: int | None = 0  # None: the first that is left can be any.
        self._sequence_is_known = True
        self._env_steps: int | None = 0
        self._lanes: dict[int, _Lane] = {}
        self._lanes_are_known = True

    def run(self, collector: str, names: list[ShardName]) -> list[np.ndarray]:
        """Check every shard; returns the initial priorities of the sequences that a network acted."""
        try:
            read_provenance(self._store, collector)
        except (OSError, ValueError):
            self._report.faults.append(f"collectors/{collector}.json: missing or unreadable")
        if names[0].number > 0:  # Older shards were deleted whole.
            self._next_number, self._next_sequence = names[0].number, None
            self._lose_the_thread()
        return [priorities for name in names if (priorities := self._check_shard(name)) is not None]

    def _pass_over(self, sequences: int) -> None:
        if self._next_sequence is not None:
            self._next_sequence += sequences
        self._lose_the_thread()

    def _lose_the_thread(self) -> None:
        self._env_steps, self._lanes, self._lanes_are_known = None, {}, False

    def _check_shard(self, name: ShardName) -> np.ndarray | None:
        report, path = self._report, name.path
        if name.number < self._next_number:
            report.duplicates += name.sequences
            report.faults.append(f"{path}: shard {name.number} occurs twice")
            return None
        if name.number > self._next_number:
            report.faults.append(f"{path}: gap, shards {self._next_number} to {name.number - 1} are missing")
            self._sequence_is_known = False
            self._lose_the_thread()
        self._next_number = name.number + 1
        try:
            shard = open_shard(self._store.map_path(path), name)
            if differences := self._terms.differences(shard.terms):
                raise ShardError(f"other terms than the dataset's: {'; '.join(differences)}")
        except (ShardError, OSError) as error:
            report.bad_files.append((path, str(error)))
            self._pass_over(name.sequences)
            return None
        report.shards += 1
        report.sequences += shard.num_rows
        report.env_steps += name.env_steps
        report.bytes += self._store.size_bytes(path)
        intact = self._check_rows(shard, path)
        if intact.all() and (owned := int(owned_steps(self._terms, shard.columns).sum())) != name.env_steps:
            report.faults.append(f"{path}: owns {owned} env steps, its name says {name.env_steps}")
        return self._note_parameters(shard, path, intact)

    def _check_rows(self, shard: Shard, path: str) -> np.ndarray:
        columns, intact = shard.columns, np.zeros(shard.num_rows, bool)
        for begin in range(0, shard.num_rows, _DECODED_AT_ONCE):
            rows = range(begin, min(begin + _DECODED_AT_ONCE, shard.num_rows))
            batch, intact[begin : rows.stop] = self._decoder.decode([(shard, row) for row in rows])
            for row in rows:
                if intact[row]:
                    values = {column: columns[column][row].item() for column in ROW_COLUMNS}
                    steps = {column: columns[column][row] for column in STEP_COLUMNS}
                    fault = self._check_row(values, steps, batch.observation[row - begin])
                else:
                    fault = "checksum or pixels wrong"
                    self._report.corrupt_rows += 1
                    self._pass_over(1)
                if fault:
                    self._report.faults.append(f"{path} row {row}: {fault}")
        return intact

    def _check_row(self, row: dict[str, Any], steps: dict[str, np.ndarray], frames: np.ndarray) -> str | None:
        """The row's first fault. A row that is wrong by itself tells nothing about its episode."""
        repeated_or_gap = self._check_sequence(row["sequence"])
        if fault := row_fault(self._terms, row, steps, frames):
            self._lose_the_thread()
            return fault
        faults = repeated_or_gap, self._check_coverage(row), self._check_env_steps(row)
        return next(filter(None, faults), None)

    def _check_sequence(self, number: int) -> str | None:
        expected, was_known = self._next_sequence, self._sequence_is_known
        self._next_sequence, self._sequence_is_known = max(expected or 0, number + 1), True
        if expected is None:
            return None
        if number < expected:
            self._report.duplicates += 1
            return f"sequence {number} occurs twice"
        if number > expected:
            self._report.missing_sequences += number - expected
        if number > expected and was_known:
            return f"gap, sequences {expected} to {number - 1} are missing"
        return None

    def _check_env_steps(self, row: dict[str, Any]) -> str | None:
        before = self._env_steps
        self._env_steps = row["env_steps"]
        allowed = None if before is None else before + int(owned_steps(self._terms, row))
        return None if allowed in (None, row["env_steps"]) else f"env_steps is {row['env_steps']}; allowed: {allowed}"

    def _check_coverage(self, row: dict[str, Any]) -> str | None:
        """Starts of an episode's sequences are 0, stride, 2 * stride, ... up to the one that reaches its end."""
        geometry, episode, start = self._terms.geometry, row["episode"], row["start"]
        end = None if row["ends"] == CONTINUES else (row["ends"], episode_steps(self._terms, row))
        is_last = end is not None and start == geometry.last_sequence(end[1]) * geometry.stride
        lane = self._lanes.get(row["lane"])
        self._lanes[row["lane"]] = _Lane(episode, start + geometry.stride, is_last, end)
        if is_last:
            self._report.episodes[ENDS_NAMES[row["ends"]]] += 1
        begins = None if start == 0 else f"episode {episode} begins at step {start}"
        if lane is None:
            return begins if self._lanes_are_known else None
        if episode < lane.episode:
            return f"episode {episode} comes after episode {lane.episode} in lane {row['lane']}"
        if episode > lane.episode:
            left = f"episode {lane.episode} is left without an end, sequence at step {lane.next_start} is missing"
            return begins if lane.is_over else left
        if lane.is_over:
            return f"episode {episode} goes on after its end"
        if start != lane.next_start:
            return f"episode {episode} goes on at step {start}; allowed: {lane.next_start}"
        if lane.end not in (None, end):
            return f"episode {episode} has two ends, {lane.end} and {end}"
        return None

    def _note_parameters(self, shard: Shard, path: str, intact: np.ndarray) -> np.ndarray:
        columns = {name: column[intact] for name, column in shard.columns.items()}
        first, last, priority = columns["version_first"], columns["version_last"], columns["initial_priority"]
        by_network = (columns["lineage"] != 0).any(axis=1)
        self._report.versions.update(first.tolist(), last.tolist())
        self._report.lineages.update(lineage.tobytes().hex() for lineage in np.unique(columns["lineage"], axis=0))
        self._report.network_sequences += int(by_network.sum())
        if (first > last).any() or (by_network & (first < 0)).any():
            self._report.faults.append(f"{path}: parameter versions do not fit each other or the lineage")
        if (priority < 0).any() or np.isinf(priority).any():
            self._report.faults.append(f"{path}: a negative or infinite initial priority")
        return priority[by_network & ~np.isnan(priority)]
