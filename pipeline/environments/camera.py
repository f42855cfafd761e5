"""A game in colour and at its own size, for people: the same game as an Atari lane's, played a second time."""

from dataclasses import replace

import numpy as np

from pipeline.environments.atari import AtariLanes, is_atari
from pipeline.environments.lanes import EnvironmentConfig

SCREEN = {"img_height": 210, "img_width": 160, "grayscale": False}


class Camera:
    """The emulator is deterministic: one with the same seed that is given the same actions shows the same game.

    Args:
        seed: of the lane to be filmed (lane i of ``reset(seed)`` has ``seed + i``).
    """

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        self._lanes = AtariLanes(replace(config, arguments={**config.arguments, **SCREEN}), 1, 1)
        self.picture: np.ndarray = self._lanes.reset(seed)[0]

    def follow(self, action: int) -> float:
        """Play ``action``; ``picture``, uint8 ``[210, 160, 3]``, is what is seen after it. Returns its reward."""
        self._lanes.send(np.array([action]))
        step = self._lanes.recv()
        self.picture = step.observation[0]
        return float(step.reward[0])

    def close(self) -> None:
        self._lanes.close()


def can_film(config: EnvironmentConfig) -> bool:
    return is_atari(config.env_id)
