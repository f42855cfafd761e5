"""Several datasets in one replay: each batch holds rows of all of them, in shares that are exact in the long run.

    --mix old=0.25                 a quarter of every batch from the dataset ``old``, the rest from the growing one
    --mix old=0.5:0.1@100000       its share falls from a half to a tenth over the first 100,000 batches

A row's probability is its dataset's share times its chance within that dataset, and N counts the sequences of all, so
that 1 / (N * P) weighs a row as if all sequences lay in one replay and were drawn uniformly.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.decode import BatchDecoder
from pipeline.drawing import DecodingReplay
from pipeline.drawn_parts import DrawnParts
from pipeline.outstanding import Drawn
from pipeline.priority_table import UpdateCounts
from pipeline.progress import Progress
from pipeline.replay import PollCounts, Replay
from schemas.terms import DatasetTerms

_SHARE = re.compile(r"(?P<first>[0-9.eE-]+)(:(?P<last>[0-9.eE-]+)@(?P<batches>[0-9]+))?")


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of each batch comes from one further dataset.

    Attributes:
        uri: of the dataset.
        first, last: its share at first and after ``batches`` batches, in a straight line between.
    """

    uri: str
    first: float
    last: float
    batches: int = 1

    def __post_init__(self) -> None:
        if not self.uri:
            raise ValueError(f"mix is ={self.first:g}; allowed: URI=SHARE or URI=FIRST:LAST@UPDATES")
        for share in (self.first, self.last):
            if not 0 <= share < 1:
                raise ValueError(f"mix is {self.uri}={share:g}; allowed: a share from 0 to less than 1")
        if self.batches < 1:
            raise ValueError(f"mix is {self.uri} over {self.batches} updates; allowed: 1 or more")

    @classmethod
    def parse(cls, text: str) -> "Share":
        """``URI=0.25`` or ``URI=0.5:0.1@100000``."""
        uri, _, share = text.rpartition("=")
        found = _SHARE.fullmatch(share)
        try:
            if found is None:
                raise ValueError
            first = float(found["first"])
            last = first if found["last"] is None else float(found["last"])
            batches = int(found["batches"] or 1)
        except ValueError:
            raise ValueError(f"mix is {text!r}; allowed: URI=SHARE or URI=FIRST:LAST@UPDATES") from None
        return cls(uri=uri, first=first, last=last, batches=batches)

    def at(self, batch: int) -> float:
        return self.first + (self.last - self.first) * min(1.0, batch / self.batches)


def refuse_shares(shares: list[Share]) -> None:
    """Raise ValueError when nothing would be left for the main dataset, or one is named twice."""
    for batch in (0, *(share.batches for share in shares)):  # Between these their sum is a straight line.
        total = sum(share.at(batch) for share in shares)
        if total >= 1:
            raise ValueError(f"mix is {total:g} in all; allowed: less than 1, the rest is the dataset's own")
    uris = [share.uri for share in shares]
    if len(set(uris)) < len(uris):
        raise ValueError(f"mix is given {max(uris, key=uris.count)} twice; allowed: once")


def refuse_other_terms(uri: str, terms: DatasetTerms | None, main: DatasetTerms) -> None:
    """Raise ValueError unless rows of the dataset ``uri`` fit into batches of the main one."""
    if terms is None:
        raise ValueError(f"mix is {uri}; allowed: a folder with a dataset, and there is none")
    differences = main.differences(terms)
    if differences:
        raise ValueError(f"mix is {uri}; allowed: a dataset of the same terms ({'; '.join(differences)})")


@dataclass(eq=False)
class MixedDraw(DrawnParts[Drawn]):
    """``before`` is the number of the batch and what was owed to each member before this draw."""

    before: tuple[int, np.ndarray]


class MixedReplay(DecodingReplay[MixedDraw]):
    """``main``, whose rows come first in a batch, and further replays as one. Closing it closes them all.

    Ratio control is the main one's: only its rows count as samples, only its sequences as insertions. An id tells its
    member: id % members.

    Args:
        main: of the growing dataset.
        others: replays without ratio, each with its share; their terms are those of ``main``.
        threads: how many decode a batch.
    """

    def __init__(self, main: Replay, others: Mapping[Share, Replay], terms: DatasetTerms, *, threads: int = 1) -> None:
        refuse_shares(list(others))
        self._shares, self._members = list(others), [main, *others.values()]
        self._decoder = BatchDecoder(terms, threads)
        self._lock = threading.RLock()
        self._batches, self._owed = 0, np.zeros(len(self._members))
        self._outstanding: deque[MixedDraw] = deque()
        self._waits_for = ""
        self._rows = np.zeros(len(self._members), np.int64)

    def close(self) -> None:
        self._decoder.close()
        for member in self._members:
            member.close()

    def poll(self, should_stop: Callable[[], bool] = lambda: False) -> PollCounts:
        return PollCounts(*np.sum([member.poll(should_stop) for member in self._members], axis=0).tolist())

    def draw(self, batch_size: int) -> MixedDraw | None:
        """See ``Replay.draw``. When one member has to wait nothing is drawn from the others either."""
        with self._lock:
            shares = self._shares_at(self._batches)
            owed = self._owed + shares * batch_size
            counts = _whole_parts(owed, batch_size)
            wanted = [(member, count) for member, count in enumerate(counts.tolist()) if count]
            # Asked before anything is drawn: a draw that is given back has moved its generator. The main one may wait
            # at any time and draws first, which is enough.
            for member, count in wanted:
                if member and (waits_for := self._members[member].would_wait_for(count)):
                    return self._refused(member, waits_for)
            parts: list[tuple[int, Drawn]] = []
            for member, count in wanted:
                drawn = self._members[member].draw(count)
                if drawn is None:
                    self._give_back(parts)
                    return self._refused(member, self._members[member].waits_for())
                parts.append((member, drawn))
            mixed = MixedDraw(parts, shares, len(self._members), self._sequences(parts), (self._batches, self._owed))
            self._batches, self._owed, self._waits_for = self._batches + 1, owed - counts, ""
            self._rows += counts
            self._outstanding.append(mixed)
            return mixed

    def replace(self, drawn: MixedDraw, ok: np.ndarray) -> MixedDraw | None:
        """See ``Replay.replace``: what is corrupt is replaced from the dataset that it came from."""
        with self._lock:
            try:
                empty = drawn.replace(ok, lambda member, part, part_ok: self._members[member].replace(part, part_ok))
            except OSError:
                self.give_back(drawn)
                raise
            if empty is None:
                return drawn
            self.give_back(drawn)
            return self._refused(empty, self._members[empty].waits_for())

    def consumed(self, drawn: MixedDraw | None = None) -> None:
        with self._lock:
            drawn = drawn or self._outstanding[0]
            self._outstanding.remove(drawn)
            for member, part in drawn.parts:
                self._members[member].consumed(part)

    def give_back(self, drawn: MixedDraw) -> None:
        with self._lock:
            self._outstanding.remove(drawn)
            self._give_back(drawn.parts)

    def waits_for(self) -> str:
        return self._waits_for

    @property
    def total_priority(self) -> float:
        """The main replay's."""
        return self._members[0].total_priority

    @property
    def drawable(self) -> int:
        return sum(member.drawable for member in self._members)

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts:
        """See ``Replay.update_priorities``: each id finds its member."""
        ids, priorities = np.asarray(ids, np.int64), np.asarray(priorities, np.float64)
        own, members = ids // len(self._members), ids % len(self._members)
        counts = [
            member.update_priorities(own[members == index], priorities[members == index])
            for index, member in enumerate(self._members)
        ]
        return UpdateCounts(*np.sum(counts, axis=0).tolist())

    def progress(self, updates: int) -> Progress:
        """The main dataset's: its collectors follow it."""
        return self._members[0].progress(updates)

    def metrics(self) -> dict[str, float]:
        """The main replay's, the further ones' as ``mix<i>_<name>``, and the share of each in all rows drawn so far."""
        values = dict(self._members[0].metrics())
        for index, member in enumerate(self._members[1:], start=1):
            values |= {f"mix{index}_{name}": value for name, value in member.metrics().items()}
            values[f"mix{index}_share"] = float(self._rows[index] / max(1, self._rows.sum()))
        return values

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The main replay's state, the others' beside it by dataset: with or without mixing it can be gone on from."""
        with self._lock:
            arrays, values = self._members[0].state()
            batches, owed = self._outstanding[0].before if self._outstanding else (self._batches, self._owed)
            mixed = {"batches": batches, "owed": owed.tolist(), "datasets": {}}
            arrays = dict(arrays)
            for index, (share, member) in enumerate(zip(self._shares, self._members[1:], strict=True)):
                its_arrays, its_values = member.state()
                arrays |= {f"mix{index}/{name}": array for name, array in its_arrays.items()}
                mixed["datasets"][share.uri] = [index, its_values]
            return arrays, {**values, "mixed": mixed}

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str:
        """Datasets that the state does not know begin with their own priorities."""
        lines = [self._members[0].restore(arrays, values)]
        mixed = values.get("mixed", {"batches": 0, "owed": [], "datasets": {}})
        self._batches = mixed["batches"]
        for position, (share, member) in enumerate(zip(self._shares, self._members[1:], strict=True), start=1):
            if share.uri not in mixed["datasets"]:
                lines.append(f"{share.uri} is new to this run")
                continue
            index, its_values = mixed["datasets"][share.uri]
            prefix = f"mix{index}/"
            its_arrays = {name[len(prefix) :]: each for name, each in arrays.items() if name.startswith(prefix)}
            lines.append(f"{share.uri}: {member.restore(its_arrays, its_values)}")
            self._owed[position] = mixed["owed"][index + 1]
        self._owed[0] = -self._owed[1:].sum()  # What all are owed adds up to nothing.
        return "; ".join(lines)

    def _shares_at(self, batch: int) -> np.ndarray:
        further = [share.at(batch) for share in self._shares]
        return np.array([1 - sum(further), *further])

    def _sequences(self, parts: list[tuple[int, Drawn]]) -> int:
        """N: what could have been drawn; members that gave no row to this batch count as they are now."""
        drawable = {member: drawn.replay_sequences for member, drawn in parts}
        return sum(drawable.get(index, member.drawable) for index, member in enumerate(self._members))

    def _give_back(self, parts: list[tuple[int, Drawn]]) -> None:
        for member, drawn in parts:
            self._members[member].give_back(drawn)

    def _refused(self, member: int, waits_for: str) -> None:
        self._waits_for = f"{waits_for} (of {self._shares[member - 1].uri})" if member else waits_for


def _whole_parts(owed: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers, 0 or more, that add up to ``total``, as near to ``owed`` as can be: the remainders come later."""
    counts = np.zeros(len(owed), np.int64)
    for _ in range(total):
        counts[np.argmax(owed - counts)] += 1
    return counts
