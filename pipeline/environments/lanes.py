"""What the collector sees of any vectorised environment: N lanes that step together.

Gymnasium's NEXT_STEP autoreset is the one mode supported: the call after an episode's end ignores its action and
returns the reset observation with reward 0. That call is *not* a transition, and ``LaneStep.is_transition`` says so.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from schemas.specs import LIFE_LOSS_MODES, EnvSpec


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """How to make an environment.

    Attributes:
        env_id: a gymnasium id (``ALE/Pong-v5``, ``CartPole-v1``) or ``module:EnvId``.
        arguments: passed to the environment; for Atari also frame size, action set, no-op starts, frame cap.
        sticky: Atari only, probability of repeating the previous action (the paper: 0).
        life_loss: ``off``, ``roll`` (zero discount at a lost life) or ``reset`` (a boundary too).
        max_failures: steps in a row in which some environment raised before the job gives up.
    """

    env_id: str = "ALE/Pong-v5"
    arguments: dict[str, Any] = field(default_factory=dict)
    sticky: float = 0.0
    life_loss: str = "off"
    max_failures: int = 10

    def __post_init__(self) -> None:
        if not 0.0 <= self.sticky < 1.0:
            raise ValueError(f"sticky is {self.sticky}; allowed: 0 to below 1")
        if self.life_loss not in LIFE_LOSS_MODES:
            raise ValueError(f"life_loss is {self.life_loss!r}; allowed: {', '.join(LIFE_LOSS_MODES)}")
        if self.max_failures < 1:
            raise ValueError(f"max_failures is {self.max_failures}; allowed: 1 or more")


@dataclass(frozen=True)
class LaneStep:
    """What one call brought to each of N lanes.

    ``observation`` ``[N, *shape]`` is what is seen after the call (an episode's final observation where it ended);
    ``reward`` float32 ``[N]``; the flags are bool ``[N]``. Where ``is_transition`` is False the lane was only reset,
    because its episode had ended or because its environment raised and was made anew.
    """

    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    life_lost: np.ndarray
    is_transition: np.ndarray


class Lanes(Protocol):
    """N lanes of one environment. ``send`` then ``recv`` is one step; between them emulator threads may run.

    Attributes:
        restarts: how often an environment raised and was made anew.
        last_failure: what it said then.
    """

    spec: EnvSpec
    num_lanes: int
    restarts: int
    last_failure: str

    def reset(self, seed: int) -> np.ndarray:
        """Start every lane anew, lane i from ``seed + i``; returns the first observations ``[N, *shape]``."""
        ...

    def send(self, actions: np.ndarray) -> None:
        """Hand one action per lane to the environment. ValueError, and nothing sent, if any is out of range."""
        ...

    def recv(self) -> LaneStep:
        """Wait for the step that was sent. EnvironmentFailure when environments keep raising."""
        ...

    def close(self) -> None: ...


class EpisodeEnds:
    """Turns raw results of NEXT_STEP autoreset into LaneSteps: marks the reset calls and sees lives go.

    Args:
        num_lanes: N.
        num_actions: actions outside 0 .. num_actions-1 are refused here, because an emulator can hang on them for ever.
    """

    def __init__(self, num_lanes: int, num_actions: int) -> None:
        self._num_actions = num_actions
        self._needs_reset = np.zeros(num_lanes, bool)
        self._lives = np.zeros(num_lanes, np.int64)

    def start(self, lives: np.ndarray | None) -> None:
        """Forget everything: all lanes were reset and hold ``lives`` int ``[N]`` (None: the game has none)."""
        self._needs_reset[:] = False
        self._lives = np.zeros_like(self._lives) if lives is None else lives.astype(np.int64)

    def check(self, actions: np.ndarray) -> None:
        if actions.shape != self._needs_reset.shape or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(
                f"actions are {actions.dtype}{list(actions.shape)}; allowed: one integer for each of "
                f"{len(self._needs_reset)} lanes"
            )
        if actions.min() < 0 or actions.max() >= self._num_actions:
            raise ValueError(f"actions are {actions.tolist()}; allowed: 0 to {self._num_actions - 1}")

    def after(
        self,
        observation: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        lives: np.ndarray | None,
        failed: np.ndarray | None = None,
    ) -> LaneStep:
        is_transition = ~self._needs_reset
        if failed is not None:
            is_transition &= ~failed
        lives = self._lives if lives is None else lives.astype(np.int64)
        step = LaneStep(
            observation=observation,
            reward=np.where(is_transition, reward, 0).astype(np.float32),
            terminated=terminated & is_transition,
            truncated=truncated & is_transition,
            life_lost=(lives < self._lives) & is_transition,
            is_transition=is_transition,
        )
        self._lives = lives.copy()
        self._needs_reset = step.terminated | step.truncated
        return step
