"""From a draw to a batch: the same for a replay in process, a mixed one and one elsewhere.

draw ─▶ gather rows ─▶ verify and decode          a batch that is staged is all in memory, but not unpacked
     ◀──── replace what is corrupt ────┘
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pipeline.codec import EncodedRow
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


Drawn = TypeVar("Drawn", bound=DrawnBatch)


@dataclass(eq=False)
class Staged(Generic[Drawn]):
    """A drawn batch and its rows; their pixels are still compressed where they rest."""

    drawn: Drawn
    rows: list[EncodedRow]


class DecodingReplay(ABC, Generic[Drawn]):
    """Batches out of draws. Any number of threads may stage and finish.

    Rows that turn out to be corrupt are replaced by other draws.
    """

    _decoder: BatchDecoder

    @abstractmethod
    def draw(self, batch_size: int) -> Drawn | None:
        """A batch as drawn, outstanding until ``consumed``; None when it has to wait. Never waits itself."""

    @abstractmethod
    def replace(self, drawn: Drawn, ok: np.ndarray) -> Drawn | None:
        """``drawn`` with other draws where ``ok`` (bool ``[B]``) is False; None when nothing is left to draw.

        Then, and when it raises OSError, the batch has been taken back.
        """

    @abstractmethod
    def consumed(self, drawn: Drawn | None = None) -> None:
        """``drawn``, or else the oldest outstanding batch, has reached its learner."""

    def observation_buffer(self, batch_size: int) -> np.ndarray:
        """A new array of the kind that ``sample`` and ``finish`` fill."""
        return self._decoder.observation_buffer(batch_size)

    def sample(
        self, batch_size: int, observation_out: np.ndarray | None = None, *, ahead: bool = False
    ) -> ReplaySample | None:
        """Draw and decode a batch; None when it has to wait (``waits_for`` says for what). Never waits itself.

        Args:
            observation_out: becomes the batch's ``observation``; see ``BatchDecoder.decode_rows``.
            ahead: the batch is not consumed yet: ``state`` leaves it out until ``consumed`` is called.

        Raises:
            ValueError: ``batch_size`` is larger than the limiter was told.
            OSError: shards cannot be opened for want of maps or descriptors.
        """
        staged = self.stage(batch_size)
        sample = None if staged is None else self.finish(staged, observation_out)
        if staged is not None and sample is not None and not ahead:
            self.consumed(staged.drawn)
        return sample

    def stage(self, batch_size: int) -> Staged[Drawn] | None:
        """Draw a batch and gather its rows; outstanding until it is consumed. None and raises like ``sample``."""
        drawn = self.draw(batch_size)
        return None if drawn is None else Staged(drawn, self._decoder.gather(drawn.rows))

    def finish(self, staged: Staged[Drawn], observation_out: np.ndarray | None = None) -> ReplaySample | None:
        """Verify and decode. None when replacing corrupt rows leaves nothing to draw: the batch is given up."""
        while True:
            batch, ok = self._decoder.decode_rows(staged.rows, observation_out)
            drawn = staged.drawn
            if ok.all():
                return ReplaySample(
                    ids=drawn.ids,
                    probabilities=drawn.probabilities,
                    replay_sequences=drawn.replay_sequences,
                    batch=batch,
                )
            other = self.replace(drawn, ok)
            if other is None:
                return None
            staged.drawn, staged.rows = other, self._decoder.gather(other.rows)


class ServedReplay(Protocol):
    """What a replay service needs of the replay that it serves."""

    @property
    def total_priority(self) -> float: ...

    @property
    def drawable(self) -> int: ...

    def draw(self, batch_size: int) -> Any: ...

    def replace(self, drawn: Any, ok: np.ndarray) -> Any: ...

    def consumed(self, drawn: Any = None) -> None: ...

    def poll(self, should_stop: Callable[[], bool] = ...) -> Any: ...

    def give_back(self, drawn: Any) -> None: ...

    def waits_for(self) -> str: ...

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts: ...

    def progress(self, updates: int) -> Progress: ...

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]: ...

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...
