"""What a benchmark found: printed, held against its bounds, and kept in docs/performance.md between markers."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "performance.md"


class Report:
    """Tables and bounds in the order in which they are added; each is printed at once.

    Args:
        section: name of the part of docs/performance.md.
        command: what a reader types to see the same.

    Attributes:
        missed: bounds that do not hold.
    """

    def __init__(self, section: str, command: str) -> None:
        self._section, self._command = section, command
        self._load_before = os.getloadavg()[0]
        self._blocks: list[str] = []
        self._bounds: list[str] = []
        self.missed: list[str] = []

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        lines = [f"**{title}**", "", _row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
        self._add("\n".join(lines))

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self._bound(what, value, f"at least {bound:g}{unit}", value >= bound, unit)

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self._bound(what, value, f"at most {bound:g}{unit}", value <= bound, unit)

    def write(self) -> None:
        """Put all of it into the document, in place of what this benchmark left there before."""
        header = ["what", "bound", "measured", "holds"]
        lines = [_row(header), _row(["---"] * len(header)), *self._bounds]
        text = "\n\n".join([self._where(), "\n".join(lines), *self._blocks])
        begin, end = f"<!-- {self._section}: begin -->", f"<!-- {self._section}: end -->"
        document = DOCUMENT.read_text() if DOCUMENT.exists() else "# Performance\n"
        part = f"{begin}\n\n{text}\n\n{end}"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if pattern.search(document):
            document = pattern.sub(lambda _: part, document)
        else:
            document = f"{document.rstrip()}\n\n## {self._section}\n\n{part}\n"
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document)
        for line in self.missed:
            print(f"missed: {line}")
        print(f"written to {DOCUMENT}")

    def _bound(self, what: str, value: float, bound: str, holds: bool, unit: str) -> None:
        if not holds:
            self.missed.append(f"{what} is {value:.4g}{unit}; {bound}")
        self._bounds.append(_row([what, bound, f"{value:.3g}{unit}", "yes" if holds else "**no**"]))
        print(f"{'' if holds else 'MISSED  '}{what}: {value:.4g}{unit} ({bound})", flush=True)

    def _add(self, block: str) -> None:
        self._blocks.append(block)
        print(f"\n{block}\n", flush=True)

    def _where(self) -> str:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        load = f"load {self._load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        return (
            f"`{self._command}`, {time.strftime('%Y-%m-%d %H:%M')}, on top of commit {git.stdout.strip() or '?'}; "
            f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; {load}."
        )


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
