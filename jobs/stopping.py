"""Ctrl-C and SIGTERM ask a job to finish; a second one ends it at once."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

FORCED_STATUS = 130
GONE_SECONDS = 8.0  # Of the ten that a stopped job may take.
ONE_SIGNAL_SECONDS = 0.5  # A terminal, ``timeout`` and a parent may all pass on one and the same wish.


class StopRequest:
    """Becomes set on the first SIGINT or SIGTERM, or when the job itself has done what it was asked to do.

    Attributes:
        reason: why, in a word or two.
        by_signal: somebody wants the job gone, also if it was about to end by itself.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.by_signal = False
        self._gone_by = math.inf
        self._signalled_at = -math.inf

    def listen(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        return self

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def gone_by(self) -> float:
        """The monotonic time by which the last record should have left; infinite until a signal came."""
        return self._gone_by

    def wait(self, seconds: float) -> bool:
        """Sleep at most ``seconds``; True as soon as a stop was asked for."""
        return self._event.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.by_signal:
            self.by_signal, self._signalled_at, self._gone_by = True, now, now + GONE_SECONDS
            self.ask(signal.Signals(number).name)
        elif now - self._signalled_at >= ONE_SIGNAL_SECONDS:
            sys.stderr.write("stopping at once\n")
            os._exit(FORCED_STATUS)


class Interruption(StopRequest):
    """For work that may end anywhere: the first signal, SIGTERM too, raises KeyboardInterrupt in the main thread."""

    def ask(self, reason: str) -> None:
        super().ask(reason)
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible(job: str, left: Callable[[], str]) -> Iterator[Interruption]:
    """SIGINT and SIGTERM end the block, and the job with one line: what is ``left``, and how to go on."""
    stop = Interruption().listen()
    try:
        yield stop
    except KeyboardInterrupt:
        print(f"{job}: stopped ({stop.reason}), {left()}", flush=True)
        sys.exit(FORCED_STATUS)
    finally:
        StopRequest().listen()  # Little is left to do, and nothing that could be interrupted.
