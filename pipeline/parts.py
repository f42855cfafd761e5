"""How several replay services share a dataset: part I of N owns the collectors whose id modulo N is I."""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part ``index`` of ``total``; the whole by default."""

    index: int = 0
    total: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.total:
            raise ValueError(f"part is {self.index}/{self.total}; allowed: I/N with I from 0 to N - 1")

    @classmethod
    def parse(cls, text: str) -> "Part":
        """``I/N``."""
        index, slash, total = text.partition("/")
        if not slash or not index.isdigit() or not total.isdigit():
            raise ValueError(f"part is {text!r}; allowed: I/N with I from 0 to N - 1")
        return cls(index=int(index), total=int(total))

    def __str__(self) -> str:
        return f"{self.index}/{self.total}"

    def owns(self, collector: str) -> bool:
        return number_of(collector) % self.total == self.index


WHOLE = Part()


def number_of(collector: str) -> int:
    """A collector's id as a number; of a name that is none, a hash of it."""
    try:
        return int(collector, 16)
    except ValueError:
        return zlib.crc32(collector.encode())
