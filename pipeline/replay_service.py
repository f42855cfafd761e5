"""A replay for learners in other processes. Knows sessions and turns, no sockets: ``flight`` carries the messages.

A learner that dies leaves nothing behind: after ``LEASE_SECONDS`` of silence the batches that it drew and never
consumed are taken back, as if they had not been drawn. What it consumed stays counted.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.drawing import DrawnBatch, ServedReplay
from pipeline.parts import WHOLE, Part
from pipeline.priority_table import UpdateCounts
from pipeline.progress import Progress
from pipeline.replay_messages import Description, DrawRequest, FromClient, UpdateRequest, pack_batch
from schemas.terms import DatasetTerms

LEASE_SECONDS = 30.0
MOST_OUTSTANDING = 64  # Batches that one client may hold: far more than any prefetching needs.
TURN_SECONDS = 0.5  # A learner that waits keeps its turn as long as it asks at least this often.


class ReplayService:
    """Serves ``replay``; safe to call from any number of threads.

    Args:
        clock: seconds, monotonic.

    Attributes:
        replay: the one served.
        updates: batches whose priorities came back, over all clients; goes on over restarts with ``restore``.
        sent_bytes: of batches, compressed as they travel.
        starved: set while a learner waits, so that new shards are looked for sooner.
    """

    def __init__(
        self,
        replay: ServedReplay,
        terms: DatasetTerms,
        *,
        run: str,
        dataset: str,
        largest_batch: int,
        part: Part = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replay, self._clock = replay, clock
        self.description = Description(
            incarnation=secrets.token_hex(8),
            run=run,
            dataset=dataset,
            largest_batch=largest_batch,
            terms=terms,
            part=str(part),
        )
        self._sessions: dict[str, _Session] = {}
        self._lock, self._draw_lock = threading.Lock(), threading.Lock()
        self._turns = _Turns(clock)
        self.updates = self.sent_bytes = 0
        self.starved = threading.Event()

    @property
    def clients(self) -> int:
        return len(self._sessions)

    def draw(self, request: DrawRequest) -> pa.RecordBatch:
        """The batch, or none with ``waits_for`` in the header.

        Raises:
            ValueError: the batch is too large, or the client holds too many.
        """
        while True:
            session = self._session(request)
            with session.lock:
                if not session.has_ended:  # Else it was silent for so long that it ended just now: begin another.
                    drawn = self._drawn(session, request)
                    return self._packed(drawn)

    def _drawn(self, session: "_Session", request: DrawRequest) -> DrawnBatch | None:
        drawn = session.outstanding.pop(request.number, None)
        if drawn is not None and len(drawn.ids) != request.batch_size:
            self.replay.give_back(drawn)
            drawn = None
        if drawn is None:
            if len(session.outstanding) >= MOST_OUTSTANDING:
                raise ValueError(f"outstanding batches are {len(session.outstanding)}; allowed: consume some first")
            drawn = self._draw_in_turn(request)
        if drawn is not None and request.incarnation == self.description.incarnation:
            ok = ~np.isin(drawn.ids, np.array(request.corrupt, np.int64))
            drawn = drawn if ok.all() else self.replay.replace(drawn, ok)
        if drawn is not None:
            session.outstanding[request.number] = drawn
        return drawn

    def _draw_in_turn(self, request: DrawRequest) -> DrawnBatch | None:
        with self._draw_lock:
            if not self._turns.may_draw(request.client):
                return None
            drawn = self.replay.draw(request.batch_size)
            if drawn is None:
                self._turns.wait(request.client)
                self.starved.set()
            else:
                self._turns.served(request.client)
                self.starved.clear()
            return drawn

    def _packed(self, drawn: DrawnBatch | None) -> pa.RecordBatch:
        header: dict[str, Any] = {
            "incarnation": self.description.incarnation,
            "total_priority": self.replay.total_priority,
            "drawable": self.replay.drawable,
        }
        if drawn is None:
            header["waits_for"] = self.replay.waits_for() or "its turn: other learners have waited longer"
        else:
            header["replay_sequences"] = drawn.replay_sequences
        batch = pack_batch(header, drawn)
        with self._lock:
            self.sent_bytes += batch.nbytes
        return batch

    def update(self, request: UpdateRequest) -> UpdateCounts:
        """Priorities by id; all stale when they are for ids of an earlier start of this service."""
        self._session(request)
        if request.incarnation != self.description.incarnation:
            return UpdateCounts(0, len(request.ids), 0)
        ids, priorities = np.array(request.ids, np.int64), np.array(request.priorities, np.float64)
        counts = self.replay.update_priorities(ids, priorities)
        with self._lock:
            self.updates += 1
        return counts

    def heartbeat(self, request: FromClient) -> bytes:
        """Counters of the replay as a JSON object."""
        self._session(request)
        return json.dumps({"metrics": self.replay.metrics()}).encode()

    def leave(self, request: FromClient) -> None:
        """The client goes; what it has not consumed is taken back."""
        self._session(request)
        with self._lock:
            session = self._sessions.pop(request.client, None)
        if session is not None:
            self._end(request.client, session)

    def end_silent_sessions(self) -> int:
        """Take back what silent clients hold. Returns how many there were."""
        now = self._clock()
        with self._lock:
            silent = [name for name, each in self._sessions.items() if now - each.heard_at > LEASE_SECONDS]
            sessions = {name: self._sessions.pop(name) for name in silent}
        for name, session in sessions.items():
            self._end(name, session)
        return len(sessions)

    def progress(self) -> Progress:
        return self.replay.progress(self.updates)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See ``Replay.state``; batches that clients hold and have not consumed are left out."""
        arrays, values = self.replay.state()
        return arrays, {**values, "updates": self.updates}

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str:
        self.updates = values["updates"]
        return self.replay.restore(arrays, values)

    def _session(self, request: FromClient) -> "_Session":
        with self._lock:
            session = self._sessions.setdefault(request.client, _Session())
            session.heard_at = self._clock()
        with session.lock:
            for number in session.outstanding.keys() & set(request.given_back):
                self.replay.give_back(session.outstanding.pop(number))
            for number in [n for n in session.outstanding if n <= request.consumed]:
                self.replay.consumed(session.outstanding.pop(number))
        return session

    def _end(self, client: str, session: "_Session") -> None:
        with self._draw_lock:
            self._turns.forget(client)
        with session.lock:
            session.has_ended = True
            for drawn in session.outstanding.values():
                self.replay.give_back(drawn)
            session.outstanding.clear()


class _Session:
    """One client: the batches that it drew and has not consumed, by number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outstanding: dict[int, DrawnBatch] = {}
        self.heard_at = 0.0
        self.has_ended = False


class _Turns:
    """While there is not enough for all: of those who wait, who was served longest ago draws. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_at: dict[str, float] = {}  # When those who wait asked last.
        self._served: dict[str, int] = {}  # In the order of their last batches.
        self._batches = 0

    def may_draw(self, client: str) -> bool:
        now = self._clock()
        self._asked_at = {name: at for name, at in self._asked_at.items() if now - at <= TURN_SECONDS}
        own = self._served.get(client, -1)
        if any(self._served.get(name, -1) < own for name in self._asked_at if name != client):
            self.wait(client)
            return False
        return True

    def wait(self, client: str) -> None:
        self._asked_at[client] = self._clock()

    def served(self, client: str) -> None:
        self._asked_at.pop(client, None)
        self._served[client], self._batches = self._batches, self._batches + 1

    def forget(self, client: str) -> None:
        self._asked_at.pop(client, None)
        self._served.pop(client, None)
