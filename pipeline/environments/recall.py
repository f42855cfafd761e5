"""A small task that cannot be solved without memory: ``pipeline.environments.recall:Recall-v0``.

Each trial shows one of two cues for one step, then nothing for ``delay`` steps, then asks which cue it was. Neither
the question, nor its time, nor an earlier reward tells the cue.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

CUE_A, CUE_B, WAIT, ASK = range(4)


class Recall(gymnasium.Env):
    """``trials`` trials of ``delay + 2`` steps: cue, delay, question. Reward 1 for the right answer, otherwise 0.

    The observation is a one-hot float32 ``[4]`` of (cue A, cue B, wait, ask); the two actions are the two answers,
    and count only when asked.
    """

    def __init__(self, trials: int = 4, delay: int = 40) -> None:
        if trials < 1 or delay < 0:
            raise ValueError(f"trials, delay are {trials}, {delay}; allowed: 1 or more, 0 or more")
        self.observation_space = Box(0.0, 1.0, (4,), np.float32)
        self.action_space = Discrete(2)
        self._trials, self._delay = trials, delay
        self._step = 0
        self._cue = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: int):
        asked = self._phase() == self._delay + 1
        reward = float(asked and action == self._cue)
        self._step += 1
        terminated = self._step == self._trials * (self._delay + 2)
        return self._observe(), reward, terminated, False, {}

    def _phase(self) -> int:
        return self._step % (self._delay + 2)

    def _observe(self) -> np.ndarray:
        phase = self._phase()
        if phase == 0:
            self._cue = int(self.np_random.integers(2))
        shown = self._cue if phase == 0 else ASK if phase == self._delay + 1 else WAIT
        return np.eye(4, dtype=np.float32)[shown]


gymnasium.register(id="Recall-v0", entry_point="pipeline.environments.recall:Recall")
