"""Which episodes a job takes: conditions such as ``return>=10`` on what is known of each."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline.episodes import EpisodeFacts
from schemas.geometry import ENDS_NAMES

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_PATTERN = re.compile(r"([a-z_]+)(>=|<=|!=|=|>|<)(.+)")


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _ends(text: str) -> str:
    if text not in ENDS_NAMES[1:]:
        raise ValueError(text)
    return text


# Name -> how its value is read, and what it is of an episode whose collector started at a time (Unix seconds).
_FIELDS: dict[str, tuple[Callable[[str], Any], Callable[[EpisodeFacts, float], Any]]] = {
    "return": (float, lambda facts, started: facts.episode_return),
    "steps": (int, lambda facts, started: facts.steps),
    "version": (int, lambda facts, started: facts.version_last),
    "lane": (int, lambda facts, started: facts.lane),
    "collector": (str, lambda facts, started: facts.collector),
    "ends": (_ends, lambda facts, started: ENDS_NAMES[facts.ends]),
    "env_steps": (int, lambda facts, started: facts.env_steps),
    "started": (_seconds, lambda facts, started: started),
}


@dataclass(frozen=True)
class Condition:
    """``name`` compared with ``value``. An unknown value (the return of a cut episode) meets no condition but ``!=``.

    ``version`` is the newest that acted in the episode; ``env_steps`` and ``started`` (ISO date, UTC unless it says
    otherwise) are times: the collector's own steps by then, and when its process began.
    """

    name: str
    comparison: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Raises ValueError naming ``where``, the text and what is allowed."""
        match = _PATTERN.fullmatch(text.replace(" ", ""))
        allowed = f"{', '.join(_FIELDS)} with =, !=, <, <=, >, >= and a value"
        if match is None or match[1] not in _FIELDS:
            raise ValueError(f"where is {text!r}; allowed: {allowed}")
        try:
            return cls(match[1], match[2], _FIELDS[match[1]][0](match[3]))
        except ValueError as error:
            raise ValueError(f"where is {text!r}; allowed: a value that fits {match[1]} ({error})") from error

    def holds(self, facts: EpisodeFacts, started_unix_seconds: float) -> bool:
        return _OPERATORS[self.comparison](_FIELDS[self.name][1](facts, started_unix_seconds), self.value)
