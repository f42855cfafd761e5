"""The arithmetic of windows; nothing else in the project computes where a sequence starts or ends.

    episode steps     0 ....................................................... E-1 | E (final observation)
    sequence k        [ burn-in L ][ unroll T ][ bootstrap n ]
                      unroll covers steps k*stride .. k*stride+T-1

A sequence stores S = L + T + n rows. Row t of sequence k is episode step k*stride - L + t. Row t holds the
observation, the action taken on it, and what that action brought.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# What ended an episode, seen from the rows a sequence stores (column ``ends``).
CONTINUES, TERMINATED, TRUNCATED, CUT, LIFE_LOST = range(5)
ENDS_NAMES = ("continues", "terminated", "truncated", "cut", "life_lost")


@dataclass(frozen=True)
class Window:
    """Which rows of one sequence are real.

    ``start`` is the episode step of the first unroll row. Rows ``first_valid .. first_valid+num_steps-1`` hold an
    action; ``num_observations`` is one more when the final observation lies inside the window. ``holds_end`` says
    that the step which ended the episode is one of the stored rows.
    """

    start: int
    first_valid: int
    num_steps: int
    num_observations: int
    holds_end: bool


@dataclass(frozen=True, kw_only=True)
class SequenceGeometry:
    """Lengths of a stored window, in agent steps.

    Attributes:
        burn_in: L, steps before the trained ones that only bring up the core state (paper: 40, article: 0).
        unroll: T, trained steps (paper, article: 80).
        bootstrap: n, horizon of the n-step targets and steps stored behind the trained ones (paper: 5, article: 3).
        stride: steps between the starts of neighbouring sequences, a divisor of unroll (paper: 40, article: 80).
        frame_stack: K, single frames per network input (paper: 4).

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    burn_in: int
    unroll: int
    bootstrap: int
    stride: int
    frame_stack: int = 1

    def __post_init__(self) -> None:
        for field, least in (("burn_in", 0), ("unroll", 1), ("bootstrap", 1), ("stride", 1), ("frame_stack", 1)):
            value = getattr(self, field)
            if value < least:
                raise ValueError(f"{field} is {value}; allowed: {least} or more")
        if self.unroll % self.stride:
            divisors = [d for d in range(1, self.unroll + 1) if self.unroll % d == 0]
            raise ValueError(f"stride is {self.stride}; allowed: a divisor of unroll {self.unroll}, one of {divisors}")

    @property
    def stored_steps(self) -> int:
        """S, the rows of a sequence."""
        return self.burn_in + self.unroll + self.bootstrap

    @property
    def stored_frames(self) -> int:
        """K - 1 + S: every row's frame and the history that the first row's stack needs."""
        return self.frame_stack - 1 + self.stored_steps

    def last_sequence(self, episode_steps: int) -> int:
        """The smallest k whose unroll reaches the end of an episode of ``episode_steps`` (at least 1) steps."""
        return max(0, -(-(episode_steps - self.unroll) // self.stride))

    def is_complete(self, sequence: int, steps: int) -> bool:
        """All S rows of ``sequence`` exist once ``steps`` steps of the episode have been taken."""
        return steps >= sequence * self.stride + self.unroll + self.bootstrap

    def window(self, sequence: int, steps: int, *, ended: bool) -> Window:
        """The real rows of ``sequence`` after ``steps`` steps; ``ended`` when the episode has no more than those."""
        start = sequence * self.stride
        past_last_row = start + self.unroll + self.bootstrap
        first_step = max(0, start - self.burn_in)
        num_steps = min(steps, past_last_row) - first_step
        return Window(
            start=start,
            first_valid=first_step - (start - self.burn_in),
            num_steps=num_steps,
            num_observations=num_steps + int(ended and steps < past_last_row),
            holds_end=ended and steps <= past_last_row,
        )

    def owned_steps(self, first_valid: np.ndarray, num_steps: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Steps that each stored sequence owns, from its own columns: ``stride``, or all the rest for the last one.

        Owned steps tile an episode, so sums over them never count an overlap twice. ``[B]`` in, int64 ``[B]`` out.
        """
        steps_from_start = first_valid.astype(np.int64) + num_steps - self.burn_in
        is_last = (ends != CONTINUES) & (steps_from_start <= self.unroll)
        return np.where(is_last, steps_from_start, self.stride)

    def times_trained(self, step: int, episode_steps: int) -> int:
        """How many sequences of an episode of ``episode_steps`` steps have ``step`` in their unroll."""
        quotient = step // self.stride
        first = max(0, quotient - self.unroll // self.stride + 1)
        return min(quotient, self.last_sequence(episode_steps)) - first + 1

    def refuse_larger(self, stored: "SequenceGeometry") -> None:
        """Raise ValueError unless this window can be cropped out of ``stored``.

        A larger one needs the dataset to be cut anew.
        """
        for field in ("burn_in", "unroll", "bootstrap", "frame_stack"):
            wanted, limit = getattr(self, field), getattr(stored, field)
            if wanted > limit:
                raise ValueError(f"{field} is {wanted}; allowed: at most {limit}, which is what the dataset stores")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
