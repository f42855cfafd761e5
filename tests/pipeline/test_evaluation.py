"""Evaluation counts whole episodes, each lane a share settled beforehand, so that no length of episode is favoured."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.evaluation import play_episodes
from pipeline.rollout import Rollout
from tests.pipeline.scripted import Episode, ScriptedPolicy, scripted_lanes


def play(scripts, episodes):
    lanes, envs = scripted_lanes(scripts)
    played = play_episodes(Rollout(lanes, ScriptedPolicy(len(scripts)), 1, seed=0), episodes)
    return played, envs


def test_returns_lengths_and_ends_are_those_of_the_environments_own_log():
    played, envs = play([[Episode(3), Episode(7, truncates=True)], [Episode(5, lost=frozenset({2}))]], 5)
    assert [(episode.lane, episode.steps, episode.truncated) for episode in played] == [
        (0, 3, False), (1, 5, False), (0, 7, True), (1, 5, False), (0, 3, False),
    ]  # fmt: skip
    for lane in (0, 1):
        returns = [episode.episode_return for episode in played if episode.lane == lane]
        assert returns == [sum(log.rewards) for log in envs[lane].logs[: len(returns)]]


def test_lanes_of_short_episodes_do_not_crowd_out_the_long_ones():
    """Lane 0 could finish all ten before lane 1 has finished one."""
    played, _ = play([[Episode(2)], [Episode(60)]], 10)
    assert sorted(episode.steps for episode in played) == [2] * 5 + [60] * 5


def test_fewer_episodes_than_lanes_leave_the_others_unheard():
    played, _ = play([[Episode(9)], [Episode(2)], [Episode(1)]], 2)
    assert [(episode.lane, episode.steps) for episode in played] == [(0, 9), (1, 2)]
    with pytest.raises(ValueError, match="episodes is 0"):
        play([[Episode(1)]], 0)


class Replayed:
    """A rollout of one lane whose steps are given: (is it a transition, does it end the game), reward 1 each."""

    num_lanes = 1

    def __init__(self, steps):
        self._steps = iter(steps)

    def step(self):
        is_transition, ends = (np.array([flag]) for flag in next(self._steps))
        return SimpleNamespace(
            reward=is_transition.astype(np.float32),
            is_transition=is_transition,
            terminated=ends,
            truncated=np.zeros(1, bool),
        )


def test_an_episode_that_broke_off_because_the_environment_raised_counts_for_nothing():
    step, end, raised = (True, False), (True, True), (False, False)
    played = play_episodes(Replayed([step, step, raised, step, end, raised, step, step, end]), 2)
    assert [(episode.episode_return, episode.steps) for episode in played] == [(2.0, 2), (3.0, 3)]
