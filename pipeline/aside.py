"""Calls that may take long, made beside the caller's work."""

import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """One call at a time. Its result, or what it raised, is given out once, by the first ``take`` after it.

    Args:
        in_thread: call in a thread; else at once, which is simpler where calls are known to be short.
    """

    def __init__(self, *, in_thread: bool) -> None:
        self._in_thread = in_thread
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, call: Callable[[], Any]) -> None:
        """Call it; does nothing while an earlier call is not over."""
        if self._thread is not None:
            return
        if not self._in_thread:
            self._result = call()
            return
        self._thread = threading.Thread(target=self._guarded, args=(call,), name="aside", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """The result, None while there is none. Raises what the call raised."""
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Exception as error:
            self._error = error
