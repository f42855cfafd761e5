"""Several replay services that share a dataset, drawn from as if they were one replay.

A batch's rows are dealt out to the services by chance, in proportion to their total priorities (the sums of p^alpha),
so a row's probability is its service's share of the batch times its chance there: what one replay of all would give it.
N is the sequences of all services drawn from.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.decode import BatchDecoder
from pipeline.drawing import DecodingReplay
from pipeline.drawn_parts import DrawnParts
from pipeline.priority_table import UpdateCounts
from pipeline.replay_client import Received, RemoteReplay

PATIENCE_SECONDS = 2.0  # So long the others wait for one that has to wait for new sequences itself;
LATE_SECONDS = 10.0  # then they go on without it for so long.


SharedDraw = DrawnParts[Received]


class SeveralReplays(DecodingReplay[SharedDraw]):
    """``members`` as one; closing it closes them. An id tells its member: id % members.

    A service that is lost (its connection says so by name) gives no rows until it is found again: the others are drawn
    from meanwhile, with their N and their weights. So is one that has to wait for new sequences while the others could
    go on. Each service keeps its own ratio.

    Args:
        decoder: of batches; closed with this.
        generator: deals out the rows.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        members: Sequence[RemoteReplay],
        decoder: BatchDecoder,
        *,
        generator: np.random.Generator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._members, self._decoder, self._generator = list(members), decoder, generator
        self._lock, self._draw_lock = threading.RLock(), threading.Lock()
        self._outstanding: deque[SharedDraw] = deque()
        self._begun: tuple[np.ndarray, np.ndarray, dict[int, Received]] | None = None
        self._begun_at, self._late = 0.0, dict[int, float]()
        self._waits_for = ""

    @property
    def connections(self) -> list[Any]:
        return [member.connection for member in self._members]

    def close(self) -> None:
        self._decoder.close()
        for member in self._members:
            member.close()

    def poll(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Tell every service that we are alive; their totals come back."""
        for member in self._members:
            member.poll(should_stop)

    def draw(self, batch_size: int) -> SharedDraw | None:
        """The next batch; None when a service has to wait, or none is there. What has been drawn for it is kept."""
        with self._draw_lock:
            if self._begun is None:
                self._begin(batch_size)
            if self._begun is None:
                return None
            shares, counts, parts = self._begun
            for member in np.flatnonzero(counts).tolist():
                if member not in parts and (drawn := self._members[member].draw(int(counts[member]))) is not None:
                    parts[member] = drawn
            if missing := [member for member in np.flatnonzero(counts).tolist() if member not in parts]:
                return self._wait_or_deal_anew(missing, batch_size)
            sequences = sum(self._sequences(member, parts) for member in np.flatnonzero(shares).tolist())
            drawn = SharedDraw(sorted(parts.items()), shares, len(self._members), sequences)
            with self._lock:
                self._outstanding.append(drawn)
            self._begun, self._waits_for = None, ""
            return drawn

    def replace(self, drawn: SharedDraw, ok: np.ndarray) -> SharedDraw | None:
        """See ``RemoteReplay.replace``: what is corrupt is replaced from the service that it came from."""
        if drawn.replace(ok, lambda member, part, part_ok: self._members[member].replace(part, part_ok)) is None:
            return drawn
        with self._lock:
            self._outstanding.remove(drawn)
        self._give_back(drawn.parts)
        return None

    def consumed(self, drawn: SharedDraw | None = None) -> None:
        with self._lock:
            drawn = drawn or self._outstanding[0]
            self._outstanding.remove(drawn)
            for member, part in drawn.parts:
                self._members[member].consumed(part)

    def waits_for(self) -> str:
        return self._waits_for

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts:
        """See ``Replay.update_priorities``: each id finds its service. What a lost one cannot be told is stale."""
        ids, priorities = np.asarray(ids, np.int64), np.asarray(priorities, np.float64)
        own, members = ids // len(self._members), ids % len(self._members)
        counts = UpdateCounts(0, 0, 0)
        for index in np.unique(members).tolist():
            mine, member = members == index, self._members[index]
            if member.connection.is_lost:
                told = UpdateCounts(0, int(mine.sum()), 0)
            else:
                told = member.update_priorities(own[mine], priorities[mine])
            counts = UpdateCounts(*(a + b for a, b in zip(counts, told, strict=True)))
        return counts

    def metrics(self) -> dict[str, float]:
        """Sums over the services; ``samples_per_insert`` is theirs weighed by samples; services that are lost."""
        each = [member.metrics() for member in self._members]
        total = {name: float(sum(values.get(name, 0.0) for values in each)) for name in each[0]}
        inserted = sum(
            values["samples"] / values["samples_per_insert"] for values in each if values["samples_per_insert"]
        )
        total["samples_per_insert"] = total["samples"] / inserted if inserted else 0.0
        total["lost_services"] = float(sum(connection.is_lost for connection in self.connections))
        return total

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Nothing but where they are: the services keep their own."""
        return {}, {"services": [connection.address for connection in self.connections]}

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str:
        return f"priorities are kept by {len(self._members)} replay services"

    def _begin(self, batch_size: int) -> None:
        """Deal out the rows of the next batch over the services that are there."""
        now = self._clock()
        self._late = {member: until for member, until in self._late.items() if now < until}
        totals = np.array([member.total_priority for member in self._members])
        totals[[member.connection.is_lost or index in self._late for index, member in enumerate(self._members)]] = 0.0
        if not totals.any():
            self._late.clear()
            self._waits_for = "the replay services: none has sequences to draw yet"
            self.poll()
            return
        shares = totals / totals.sum()
        self._begun, self._begun_at = (shares, self._generator.multinomial(batch_size, shares), {}), now

    def _wait_or_deal_anew(self, missing: list[int], batch_size: int) -> None:
        """Rows of services that are lost, or have kept the others waiting for long, are dealt out anew."""
        assert self._begun is not None
        now, parts = self._clock(), self._begun[2]
        self._waits_for = self._members[missing[0]].waits_for()
        if any(self._members[member].connection.is_lost for member in missing):
            pass  # It gets no rows until it is found again.
        elif parts and now - self._begun_at >= PATIENCE_SECONDS:
            self._late |= dict.fromkeys(missing, now + LATE_SECONDS)
        else:
            return
        # What the others have given is handed back unseen: a batch must be dealt out as a whole.
        self._give_back(parts.items())
        self._begun = None
        self._begin(batch_size)

    def _give_back(self, parts: Iterable[tuple[int, Received]]) -> None:
        for member, drawn in parts:
            self._members[member].give_back(drawn)

    def _sequences(self, member: int, parts: dict[int, Received]) -> int:
        return parts[member].replay_sequences if member in parts else self._members[member].drawable
