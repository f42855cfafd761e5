"""A replay that lives in a service elsewhere, with the interface of one in process. It decodes and verifies here.

Batches travel as they rest in shards.
"""

import json
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.decode import BatchDecoder, RowHolder
from pipeline.drawing import DecodingReplay
from pipeline.flight import ServiceConnection, ServiceLost
from pipeline.priority_table import UpdateCounts
from pipeline.replay_messages import (
    Description,
    DrawRequest,
    FromClient,
    UpdateRequest,
    WireBatch,
    unpack_batch,
)

Answer = TypeVar("Answer")
IDS_OF_A_START = 1 << 40  # Ids begin anew when the service starts anew; here those of each start stand apart.


@dataclass(eq=False)
class Received:
    """A batch as it came, not decoded. ``number`` names it between us and the service."""

    ids: np.ndarray
    probabilities: np.ndarray
    replay_sequences: int
    rows: list[tuple[RowHolder, int]]
    number: int


def describe(connection: ServiceConnection) -> Description | None:
    """What the service says of itself; None when it is not there. Raises ValueError when it is none of ours."""
    try:
        return Description.from_bytes(connection.act("describe", b""))
    except ServiceLost:
        return None


class RemoteReplay(DecodingReplay[Received]):
    """Draws from the service behind ``connection``. Any number of threads may use it.

    A service that goes away is waited for and taken up again. Its ids have begun anew then: priorities of batches from
    before are dropped and counted as stale.

    Args:
        description: what the service said of itself; it must stay true.
        threads: how many decode a batch.

    Attributes:
        total_priority, drawable: the service's, as of its last answer.
    """

    def __init__(self, connection: ServiceConnection, description: Description, *, threads: int = 1) -> None:
        self._connection, self._description = connection, description
        self.total_priority, self.drawable = 0.0, 0
        self._decoder = BatchDecoder(description.terms, threads)
        self._client = secrets.token_hex(8)
        self._incarnations = [description.incarnation]
        self._number, self._consumed = 0, -1
        self._given_back: set[int] = set()  # Batches that the service has not heard about yet.
        self._outstanding: deque[Received] = deque()
        self._lock, self._draw_lock = threading.RLock(), threading.Lock()
        self._waits_for = ""
        self._metrics: dict[str, float] = {}
        self._dropped = 0
        self._is_closed = False

    @property
    def connection(self) -> ServiceConnection:
        return self._connection

    def close(self) -> None:
        """End the threads and tell the service, if it is there. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._decoder.close()
        if not self._connection.is_lost:
            self._ask("leave", FromClient, {})
        self._connection.close()

    def poll(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """The service follows the dataset itself; this tells it that we are alive, and fetches its counters."""
        if self._is_closed:
            return
        answer = self._ask("heartbeat", FromClient, {})
        if answer is not None:
            self._metrics = json.loads(answer)["metrics"]
            self.total_priority = float(self._metrics["total_priority"])
            self.drawable = int(self._metrics["drawable"])

    def draw(self, batch_size: int) -> Received | None:
        """The next batch as it came; None also while the service is away.

        Raises:
            ValueError: the service refuses, or is another one than it was.
        """
        with self._draw_lock:
            try:
                wire = self._fetch(self._number, batch_size)
            except ServiceLost:
                self._waits_for = f"the replay service at {self._connection.address}, which does not answer"
                return None
            if "waits_for" in wire.header:
                self._waits_for = wire.header["waits_for"]
                return None
            received = self._received(wire, self._number)
            with self._lock:
                self._outstanding.append(received)
                self._number += 1
            self._waits_for = ""
            return received

    def replace(self, drawn: Received, ok: np.ndarray) -> Received | None:
        """Report the rows that are not ``ok``: the service gives others for them, and names and counts them."""
        corrupt = tuple(self._local(drawn.ids[~ok]))
        try:
            wire = self._fetch(drawn.number, len(ok), corrupt, self._incarnations[int(drawn.ids[0]) // IDS_OF_A_START])
        except ServiceLost:
            wire = None
        if wire is None or "waits_for" in wire.header:
            self.give_back(drawn)
            return None
        other = self._received(wire, drawn.number)
        with self._lock:
            self._outstanding[self._outstanding.index(drawn)] = other
        return other

    def consumed(self, drawn: Received | None = None) -> None:
        """``drawn``, or else the oldest batch, has reached the learner. The service hears of it with the next call."""
        with self._lock:
            drawn = drawn or self._outstanding[0]
            self._outstanding.remove(drawn)
            self._consumed = max(self._consumed, drawn.number)

    def give_back(self, drawn: Received) -> None:
        """No learner will ever see ``drawn``: it counts for nothing. The service hears of it with the next call."""
        with self._lock:
            self._outstanding.remove(drawn)
            self._given_back.add(drawn.number)

    def waits_for(self) -> str:
        """What the last draw, if it was refused, waits for; else empty."""
        return self._waits_for

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts:
        """See ``Replay.update_priorities``. What cannot be delivered is dropped and counted as stale."""
        ids, priorities = np.asarray(ids, np.int64), np.asarray(priorities, np.float64)
        current = ids // IDS_OF_A_START == len(self._incarnations) - 1
        update = {
            "incarnation": self._incarnations[-1],
            "ids": self._local(ids[current]),
            "priorities": priorities[current].tolist(),
        }
        answer = self._ask("update", UpdateRequest, update) if current.any() else None
        delivered = UpdateCounts(*json.loads(answer)) if answer is not None else UpdateCounts(0, 0, 0)
        dropped = len(ids) - sum(delivered)
        self._dropped += dropped
        return delivered._replace(stale=delivered.stale + dropped)

    def metrics(self) -> dict[str, float]:
        """The service's counters, the last that came, and our own: updates dropped, losses of the service."""
        self.poll()
        return {
            **dict.fromkeys(("size", "inserted", "samples", "samples_per_insert", "corrupt_rows", "bad_shards"), 0.0),
            **self._metrics,
            "dropped_priorities": self._dropped,
            "service_losses": self._connection.losses,
        }

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Nothing but where it is: the service keeps its own."""
        return {}, {"service": self._connection.address}

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str:
        return f"priorities are kept by the replay service at {self._connection.address}"

    def _fetch(self, number: int, batch_size: int, corrupt: tuple[int, ...] = (), incarnation: str = "") -> WireBatch:
        wanted = {"number": number, "batch_size": batch_size, "corrupt": corrupt, "incarnation": incarnation}
        wire = unpack_batch(self._send(DrawRequest, wanted, self._connection.get))
        self._meet(wire.header["incarnation"])
        self.total_priority, self.drawable = float(wire.header["total_priority"]), int(wire.header["drawable"])
        return wire

    def _received(self, wire: WireBatch, number: int) -> Received:
        start = self._incarnations.index(wire.header["incarnation"])
        rows: list[tuple[RowHolder, int]] = [(wire, row) for row in range(len(wire.ids))]
        return Received(
            wire.ids + start * IDS_OF_A_START, wire.probabilities.copy(), wire.header["replay_sequences"], rows, number
        )

    def _local(self, ids: np.ndarray) -> list[int]:
        """Ids as the service knows them."""
        return (ids % IDS_OF_A_START).tolist()

    def _ask(self, kind: str, request: type[FromClient], values: dict[str, Any]) -> bytes | None:
        try:
            return self._send(request, values, lambda data: self._connection.act(kind, data))
        except ServiceLost:
            return None

    def _send(self, request: type[FromClient], values: dict[str, Any], send: Callable[[bytes], Answer]) -> Answer:
        """Every request also says what has become of our batches."""
        with self._lock:
            consumed, given_back = self._consumed, tuple(self._given_back)
        data = request(client=self._client, consumed=consumed, given_back=given_back, **values).to_bytes()
        answer = send(data)
        with self._lock:
            self._given_back.difference_update(given_back)
        return answer

    def _meet(self, incarnation: str) -> None:
        """The service that answered may have been started anew since: then it must be the same but for its ids."""
        with self._lock:
            if incarnation in self._incarnations:
                return
            description = describe(self._connection)
            if description is None or description.incarnation != incarnation:
                raise ServiceLost(self._connection.address)
            for field in ("run", "dataset", "part"):
                ours, theirs = getattr(self._description, field), getattr(description, field)
                if ours != theirs:
                    raise ValueError(f"{field} of the replay service is {theirs}; allowed: {ours}, as it was before")
            differences = self._description.terms.differences(description.terms)
            if differences:
                raise ValueError(f"terms of the replay service have changed: {'; '.join(differences)}")
            self._incarnations.append(incarnation)
