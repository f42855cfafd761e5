"""The recall score tells a system that learns from one that is wrong: short runs, a shorter delay.

Shuffled rewards and a dropped terminal step leave every test of shapes and states green; only the score shows them.
"""

from dataclasses import replace

import numpy as np
import torch

from pipeline.environments import EnvironmentConfig
from pipeline.sequences import SequenceBuilder
from r2d2 import tensors as tensors_module
from schemas.geometry import SequenceGeometry
from tests.learning.alternate import Alternation, Schedule
from tests.learning.recall import ENV_ID, recall

PASSES = 0.95
SEEDS = (0, 1, 2)


def short():
    """One trial an episode, with a delay of 4 instead of 40.

    n = 1: with more, the last reward would also enter the targets of steps before it, whose actions resemble the last.
    """
    preset = recall()
    return replace(
        preset,
        environment=EnvironmentConfig(env_id=ENV_ID, arguments={"trials": 1, "delay": 4}),
        geometry=SequenceGeometry(burn_in=2, unroll=8, bootstrap=1, stride=4),
        network=replace(
            preset.network, dense=(32,), dueling_width=32, core=replace(preset.network.core, core_width=32)
        ),
        learner=replace(preset.learner, learning_rate=2e-3, target_copy_updates=50),
        limiter=replace(preset.limiter, min_sequences=64, batch_size=16),
        envs=16,
    )


def scores(folder, **sabotage) -> list[float]:
    """Share of right answers after 80 updates, per seed. One alone could be right by chance: there are two answers."""
    schedule = Schedule(
        max_updates=80, evaluate_updates=1000, good_enough=None, validation_episodes=1, test_episodes=100
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [Alternation(short(), seed, folder / str(seed), **sabotage).learn(schedule) for seed in SEEDS]
        return [run.mean_return for run in runs]
    finally:
        torch.set_num_threads(threads)


class ShuffledRewards(SequenceBuilder):
    """Each step's rewards go to lanes at random. (All lanes are asked at the same steps, but for other cues.)"""

    def record(self, step, first_lane=0):
        order = np.random.default_rng(int(self._steps[0]) + self._sequences).permutation(len(step.reward))
        return super().record(replace(step, reward=step.reward[order]), first_lane)


def drop_terminal_steps(monkeypatch):
    """The loss is masked by (1 - terminated) (claim C14)."""
    right = tensors_module.transitions

    def dropping(batch, geometry, stored, life_loss):
        rows = right(batch, geometry, stored, life_loss)
        return replace(rows, mask=rows.mask & (rows.continues[: len(rows.mask)] > 0))

    monkeypatch.setattr(tensors_module, "transitions", dropping)


def test_without_sabotage_the_task_is_learnt(tmp_path):
    assert min(scores(tmp_path)) >= PASSES


def test_sabotage_of_rewards_fails_the_score(tmp_path):
    assert min(scores(tmp_path, builder_class=ShuffledRewards)) < PASSES


def test_sabotage_of_terminal_steps_fails_the_score(tmp_path, monkeypatch):
    """The only reward of an episode is at its last step."""
    drop_terminal_steps(monkeypatch)
    assert min(scores(tmp_path)) < PASSES
