"""How well a policy plays: whole episodes in vectorised lanes, counted so that short ones gain nothing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.rollout import Rollout, VectorStep


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One whole episode: ``episode_return`` is undiscounted and unclipped, ``steps`` are agent steps."""

    lane: int
    episode_return: float
    steps: int
    truncated: bool


def play_episodes(
    rollout: Rollout,
    episodes: int,
    *,
    watch: Callable[[VectorStep], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[PlayedEpisode]:
    """Exactly ``episodes`` episodes, in the order (round, lane): lane i plays the i-th, (i + N)-th, ... of them.

    Each lane's share is settled beforehand. Taking the first ``episodes`` that happen to *end* would favour short
    ones, which in most games are the bad ones. Lanes that have played their share go on unheard.

    ``watch`` is shown every step. Once ``stop`` holds, what has been played so far is returned.

    Raises:
        ValueError: no episode is asked for.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; allowed: 1 or more")
    lanes = rollout.num_lanes
    shares = np.full(lanes, episodes // lanes) + (np.arange(lanes) < episodes % lanes)
    returns, steps = np.zeros(lanes), np.zeros(lanes, np.int64)
    played: list[list[PlayedEpisode]] = [[] for _ in range(lanes)]
    while not stop() and any(len(own) < share for own, share in zip(played, shares, strict=True)):
        step = rollout.step()
        if watch is not None:
            watch(step)
        returns += step.reward
        steps += step.is_transition
        started_anew = ~step.is_transition  # The environment raised: what was played of this episode is no episode.
        returns[started_anew] = steps[started_anew] = 0
        for lane in np.flatnonzero(step.terminated | step.truncated):
            if len(played[lane]) < shares[lane]:
                episode = PlayedEpisode(
                    lane=int(lane),
                    episode_return=float(returns[lane]),
                    steps=int(steps[lane]),
                    truncated=bool(step.truncated[lane]),
                )
                played[lane].append(episode)
            returns[lane] = steps[lane] = 0
    return [own[turn] for turn in range(int(shares.max())) for own in played if turn < len(own)]
