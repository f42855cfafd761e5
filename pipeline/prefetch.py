"""The next batches, made while the learner works on the last one.

    "draw"     draw, gather ─▶ staged
    "decode"                   verify, decode ─▶ ready ─▶ next()
    "poll"     follow the dataset

Drawing and gathering hold the interpreter's lock, decoding does not: so one batch is drawn while another is decoded,
when ``depth`` leaves room for two.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from schemas.records import ReplaySample

STARVED_POLL_SECONDS = 0.1  # With narrow bands learner and collectors wait for each other in turn: be quick then.
RETRY_SECONDS = 0.05


class BatchSource(Protocol):
    """A replay, here or elsewhere."""

    def poll(self, should_stop: Callable[[], bool]) -> Any: ...

    def sample(self, batch_size: int, observation_out: np.ndarray | None = None) -> ReplaySample | None: ...

    def stage(self, batch_size: int) -> Any: ...

    def finish(self, staged: Any, observation_out: np.ndarray | None = None) -> ReplaySample | None: ...

    def consumed(self) -> None: ...

    def waits_for(self) -> str: ...

    def observation_buffer(self, batch_size: int) -> np.ndarray: ...


class Prefetcher:
    """Hands out batches, in the order in which they were drawn. Threads work from ``start`` (or ``with``) to ``close``.

    Args:
        depth: batches ready or in the making beyond the one that is in use.
        deterministic: no threads and nothing ahead: everything happens inside ``next``, and on a fixed dataset the
            batches depend on the generator and the priorities alone.
        poll_seconds: how often to look for new shards; a learner without a batch looks every 0.1 s.
        make_buffer: gives an array for a batch's ``observation`` (pinned memory, say); called ``depth + 1`` times.

    Attributes:
        waiting_seconds: time that ``next`` has spent without a batch.
    """

    def __init__(
        self,
        replay: BatchSource,
        batch_size: int,
        *,
        depth: int = 1,
        deterministic: bool = False,
        poll_seconds: float = 1.0,
        make_buffer: Callable[[], np.ndarray] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; allowed: 1 batch or more")
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds is {poll_seconds}; allowed: above 0")
        self._replay, self._batch_size, self._poll_seconds = replay, batch_size, poll_seconds
        make_buffer = make_buffer or (lambda: replay.observation_buffer(batch_size))
        # Large arrays go round in a ring: new memory of this size costs more than what is decoded into it.
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(1 if deterministic else 1 + depth):
            self._free.put(make_buffer())
        self._room = threading.Semaphore(depth)
        self._staged: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[ReplaySample, np.ndarray] | None] = queue.SimpleQueue()
        self._in_use: np.ndarray | None = None
        self._polled_at = -float("inf")
        self._stop, self._starved = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.waiting_seconds = 0.0
        loops = {"draw": self._draw_ahead, "decode": self._decode_ahead, "poll": self._follow}
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for name, loop in loops.items()
            if not deterministic
        ]

    def __enter__(self) -> "Prefetcher":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> "Prefetcher":
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """End the threads; batches that were drawn ahead stay unconsumed. Closing twice is fine."""
        self._stop.set()
        self._starved.set()
        self._room.release()
        for waited_for in (self._staged, self._free):
            waited_for.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def next(self, timeout_seconds: float) -> ReplaySample | None:
        """The next batch, or None when there is none in time: ``waits_for`` says why.

        The arrays of the batch before it are overwritten from now on.

        Raises:
            Exception: whatever stopped one of the threads.
        """
        started = time.monotonic()
        if self._in_use is not None:
            self._free.put(self._in_use)
            self._in_use = None
        try:
            return self._take(timeout_seconds) if self._threads else self._sample_now(started + timeout_seconds)
        finally:
            self.waiting_seconds += time.monotonic() - started

    def waits_for(self) -> str:
        """What the next batch waits for, in words."""
        return self._replay.waits_for() or "a batch to be decoded"

    def _take(self, timeout_seconds: float) -> ReplaySample | None:
        if self._error is None:
            try:
                item = self._ready.get(timeout=timeout_seconds)
            except queue.Empty:
                return None
            if item is not None:
                sample, self._in_use = item
                self._replay.consumed()
                self._room.release()
                return sample
        assert self._error is not None
        raise self._error

    def _sample_now(self, deadline: float) -> ReplaySample | None:
        buffer = self._free.get()
        self._in_use = buffer
        while True:
            if time.monotonic() - self._polled_at >= self._poll_seconds:
                self._poll()
            sample = self._replay.sample(self._batch_size, buffer)
            if sample is not None:
                return sample
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, STARVED_POLL_SECONDS))
            self._poll()

    def _poll(self) -> None:
        self._replay.poll(self._stop.is_set)
        self._polled_at = time.monotonic()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # Shown to whoever waits for a batch, instead of dying unseen in a thread.
            self._error = error
            self._ready.put(None)

    def _draw_ahead(self) -> None:
        while self._room.acquire() and not self._stop.is_set():
            while (staged := self._replay.stage(self._batch_size)) is None:
                self._starved.set()
                if self._stop.wait(RETRY_SECONDS):
                    return
            self._starved.clear()
            self._staged.put(staged)

    def _decode_ahead(self) -> None:
        while (staged := self._staged.get()) is not None and (buffer := self._free.get()) is not None:
            sample = self._replay.finish(staged, buffer)
            if sample is not None:
                self._ready.put((sample, buffer))
            else:
                self._free.put(buffer)
                self._room.release()

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._poll()
            if self._starved.wait(self._poll_seconds):
                self._stop.wait(STARVED_POLL_SECONDS)
