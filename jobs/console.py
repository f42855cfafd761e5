"""What a job shows while it works: one live line on a terminal, a plain line every ten seconds elsewhere."""

import logging
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5
WIDE = 1000  # Characters.
WARNING = "warning: "


class StatusLine:
    """``show`` may be called as often as one likes; it prints when it is time to. Use as a context manager."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(stderr=False, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._shown_at = time.monotonic() - PLAIN_SECONDS + 2.0  # The first plain line soon, but not an empty one.

    def __enter__(self) -> "StatusLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._shown_at >= (LIVE_SECONDS if self._live else PLAIN_SECONDS)

    def show(self, waits_for: str = "", **values: object) -> None:
        """``name value`` pairs, and what is being waited for."""
        if not self.is_due:
            return
        self._shown_at = time.monotonic()
        parts = [f"{name.replace('_', ' ')} {_short(value)}" for name, value in values.items() if value is not None]
        line = f"{self._title}: " + "  ".join(parts) + (f"  [waits for {waits_for}]" if waits_for else "")
        if self._live:
            self._live.update(Text(line))
        else:
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._live:
            self._live.console.print(Text(line))
        else:
            print(line, flush=True)


def table_console() -> Console:
    """For tables: as wide as they come where no terminal has an edge to cut them at."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def warn(line: str) -> None:
    print(f"{WARNING}{line}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Let what the libraries below warn of (a bad shard, say) appear as this job's own lines."""
    logging.basicConfig(level=logging.WARNING, format=f"{WARNING}%(message)s", stream=sys.stderr, force=True)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
