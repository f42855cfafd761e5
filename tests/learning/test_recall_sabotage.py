"""The recall score tells a system that learns from one that is wrong: short runs, a shorter delay.

Shuffled rewards and a dropped terminal step leave every test of shapes and states green; only the score shows them.
"""

from dataclasses import replace

import numpy as np
import torch

from jobs.alternating import Alternation, Parts, Schedule
from jobs.claims.tasks import short_recall
from jobs.claims.wrong import terminal_step_dropped
from pipeline.sequences import SequenceBuilder

PASSES = 0.95
SEEDS = (0, 1, 2)


def scores(folder, parts=None) -> list[float]:
    """Share of right answers after 80 updates, per seed. One alone could be right by chance: there are two answers."""
    schedule = Schedule(
        max_updates=80, evaluate_updates=1000, good_enough=None, validation_episodes=1, test_episodes=100
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [Alternation(short_recall(), seed, folder / str(seed), parts).learn(schedule) for seed in SEEDS]
        return [run.mean_return for run in runs]
    finally:
        torch.set_num_threads(threads)


class ShuffledRewards(SequenceBuilder):
    """Each step's rewards go to lanes at random. (All lanes are asked at the same steps, but for other cues.)"""

    def record(self, step, first_lane=0):
        order = np.random.default_rng(int(self._steps[0]) + self._sequences).permutation(len(step.reward))
        return super().record(replace(step, reward=step.reward[order]), first_lane)


def test_without_sabotage_the_task_is_learnt(tmp_path):
    assert min(scores(tmp_path)) >= PASSES


def test_sabotage_of_rewards_fails_the_score(tmp_path):
    assert min(scores(tmp_path, Parts(builder=ShuffledRewards))) < PASSES


def test_sabotage_of_terminal_steps_fails_the_score(tmp_path):
    """The loss is masked by (1 - terminated) (claim C14); the only reward of an episode is at its last step."""
    with terminal_step_dropped():
        assert min(scores(tmp_path)) < PASSES
