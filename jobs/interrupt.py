"""Ctrl-C never shows a traceback. Every job imports this first, for the rest takes seconds to import.

Jobs that write something then answer it with a ``StopRequest``.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

INTERRUPTED_STATUS = 130


def _on_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if hasattr(sys.modules["__main__"], "main"):  # All is imported: what the job has opened is closed on the way out.
        raise KeyboardInterrupt
    sys.stderr.write("stopped\n")
    os._exit(INTERRUPTED_STATUS)  # An exception would be caught, or shown, by whatever is being imported.


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped\n")
    else:
        sys.__excepthook__(kind, error, trace)


# Only in a program of ours: whoever imports a job (a test, a worker) has an answer of its own.
if Path(getattr(sys.modules["__main__"], "__file__", None) or "").parent.name == "jobs":
    signal.signal(signal.SIGINT, _on_interrupt)
    sys.excepthook = _on_uncaught
