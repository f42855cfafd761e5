"""Draw, decode, draw again what was corrupt: the same for a replay in process, a mixed one and one elsewhere."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pipeline.decode import BatchDecoder, RowHolder
from pipeline.priority_table import UpdateCounts
from pipeline.progress import Progress
from schemas.records import ReplaySample


class DrawnBatch(Protocol):
    """A batch before it is decoded: ``rows`` says where each of ``ids`` lies; the rest is that of ``ReplaySample``."""

    ids: np.ndarray
    probabilities: np.ndarray
    replay_sequences: int

    @property
    def rows(self) -> list[tuple[RowHolder, int]]: ...


class DrawSource(Protocol):
    """Gives batches as drawn and takes them back."""

    def draw(self, batch_size: int) -> Any: ...

    def replace(self, drawn: Any, ok: np.ndarray) -> Any: ...

    def consumed(self, drawn: Any = None) -> None: ...


class ServedReplay(DrawSource, Protocol):
    """What a replay service needs of the replay that it serves."""

    def poll(self, should_stop: Callable[[], bool] = ...) -> Any: ...

    def give_back(self, drawn: Any) -> None: ...

    def waits_for(self) -> str: ...

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts: ...

    def progress(self, updates: int) -> Progress: ...

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]: ...

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def draw_decoded(
    source: DrawSource, decoder: BatchDecoder, batch_size: int, observation_out: np.ndarray | None, *, ahead: bool
) -> ReplaySample | None:
    """A whole batch, or None when ``source`` has none now. Corrupt rows are reported to it and replaced."""
    drawn: DrawnBatch | None = source.draw(batch_size)
    while drawn is not None:
        batch, ok = decoder.decode(drawn.rows, observation_out)
        if ok.all():
            if not ahead:
                source.consumed(drawn)
            return ReplaySample(
                ids=drawn.ids,
                probabilities=drawn.probabilities,
                replay_sequences=drawn.replay_sequences,
                batch=batch,
            )
        drawn = source.replace(drawn, ok)
    return None
