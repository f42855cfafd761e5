"""An environment that raises costs its open episode, not the job."""

from collections.abc import Callable
from typing import Any

import gymnasium


class EnvironmentFailure(RuntimeError):
    """Environments have raised too often in a row; the message names the last error."""


class RestartingEnv(gymnasium.Wrapper):
    """Makes its environment anew when it raises in ``step`` or ``reset``, and remembers that it did.

    The failed step is no transition: what is returned is the first observation of a new episode.

    Attributes:
        failure: what was raised since ``failure`` was last cleared, else empty.
    """

    def __init__(self, make: Callable[[], gymnasium.Env]) -> None:
        super().__init__(make())
        self._make = make
        self.failure = ""

    def step(self, action: Any):
        try:
            return self.env.step(action)
        except Exception as error:
            observation, info = self._start_over(error)
            return observation, 0.0, False, False, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            return self._start_over(error)

    def _start_over(self, error: Exception):
        self.failure = " ".join(f"{type(error).__name__}: {error}".split())
        try:
            self.env.close()
        except Exception:  # It is broken: whatever closing it raises says nothing new.
            self.failure += " (and could not be closed)"
        try:
            self.env = self._make()
            return self.env.reset()
        except Exception as again:
            raise EnvironmentFailure(
                f"the environment raised, and so did a new one: {self.failure}; {again}"
            ) from again
