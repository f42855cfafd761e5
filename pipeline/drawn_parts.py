"""A batch that several replays gave rows to: whose each row is, and how likely it was to come from there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from pipeline.decode import RowHolder
from pipeline.drawing import DrawnBatch

OfMember = TypeVar("OfMember", bound=DrawnBatch)


@dataclass(eq=False)
class DrawnParts(Generic[OfMember]):
    """What each member drew for one batch, in the order of its rows. An id tells its member: id % members.

    Attributes:
        parts: (member, what it drew).
        shares: of the batch, what each member was to give on average, float64 ``[members]``.
        ids, probabilities, replay_sequences: see ``ReplaySample``.
    """

    parts: list[tuple[int, OfMember]]
    shares: np.ndarray
    members: int
    replay_sequences: int
    ids: np.ndarray = field(init=False)
    probabilities: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._gather()

    @property
    def rows(self) -> list[tuple[RowHolder, int]]:
        return [row for _, drawn in self.parts for row in drawn.rows]

    def replace(self, ok: np.ndarray, replace_in: Callable[[int, OfMember, np.ndarray], OfMember | None]) -> int | None:
        """Other draws of the same member where ``ok`` (bool ``[B]``) is False, by ``replace_in(member, part, ok)``.

        Returns the member that had nothing left to draw, whose part is gone then, as it is when one raises; None when
        all were replaced.
        """
        ends = np.cumsum([len(drawn.ids) for _, drawn in self.parts])[:-1]
        for index, part_ok in enumerate(np.split(ok, ends)):
            member, drawn = self.parts[index]
            if part_ok.all():
                continue
            del self.parts[index]  # A member that has no other, or raises, has taken its part back.
            other = replace_in(member, drawn, part_ok)
            if other is None:
                return member
            self.parts.insert(index, (member, other))
        self._gather()
        return None

    def _gather(self) -> None:
        self.ids = np.concatenate([drawn.ids * self.members + member for member, drawn in self.parts])
        self.probabilities = np.concatenate([drawn.probabilities * self.shares[member] for member, drawn in self.parts])
