"""The tasks on which effects can show on two cores: seconds to a minute for each seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jobs.alternating import Schedule
from jobs.presets import CoreOptions, NetworkOptions, Preset
from pipeline.environments import EnvironmentConfig
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from r2d2.config import LearnerConfig
from schemas.geometry import SequenceGeometry

RECALL = "pipeline.environments.recall:Recall-v0"
MASKED_CARTPOLE = "pipeline.environments.masked_cartpole:MaskedCartPole-v1"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to learn, with the settings that are known to learn it.

    Attributes:
        preset: makes the settings anew.
        schedule: how long, and when to look.
        scale: turns a mean return into a score of at most 1.
    """

    preset: Callable[[], Preset]
    schedule: Schedule
    scale: float


def recall() -> Preset:
    """Four trials an episode: a cue for one step, 40 steps of nothing, the question. Settings of algorithm.md 5a.

    The network is not given its previous action: one without memory could act out the cue and copy its own last action
    from step to step, which is memory through the back door.
    """
    return Preset(
        environment=EnvironmentConfig(env_id=RECALL, arguments={"trials": 4, "delay": 40}),
        geometry=SequenceGeometry(burn_in=16, unroll=64, bootstrap=5, stride=16),
        network=NetworkOptions(
            dense=(64,), core=CoreOptions(core_width=64), dueling_width=64, use_previous_action=False
        ),
        learner=LearnerConfig(
            gamma=0.99, rescaling=False, learning_rate=1e-3, adam_epsilon=1e-8, target_copy_updates=200
        ),
        replay=ReplayConfig(capacity=100_000, alpha=0.9),
        limiter=LimiterConfig(samples_per_insert=2.0, min_sequences=400, batch_size=32),
        envs=32,
    )


def short_recall() -> Preset:
    """One trial an episode with a delay of 4: the only reward is at the terminal step.

    n = 1: with more, the last reward would also enter the targets of steps before it, whose actions resemble the last.
    """
    preset = recall()
    return replace(
        preset,
        environment=EnvironmentConfig(env_id=RECALL, arguments={"trials": 1, "delay": 4}),
        geometry=SequenceGeometry(burn_in=2, unroll=8, bootstrap=1, stride=4),
        network=replace(preset.network, dense=(32,), dueling_width=32, core=CoreOptions(core_width=32)),
        learner=replace(preset.learner, learning_rate=2e-3, target_copy_updates=50),
        limiter=replace(preset.limiter, min_sequences=64, batch_size=16),
        envs=16,
    )


def masked_cartpole() -> Preset:
    """CartPole-v1 without velocities: those of algorithm.md 5a, calmed (n = 5, alpha 0.9 and 5e-4 swing)."""
    return Preset(
        environment=EnvironmentConfig(env_id=MASKED_CARTPOLE),
        geometry=SequenceGeometry(burn_in=8, unroll=32, bootstrap=3, stride=16),
        network=NetworkOptions(dense=(64,), core=CoreOptions(core_width=64), dueling_width=64),
        learner=LearnerConfig(gamma=0.99, learning_rate=2e-4, adam_epsilon=1e-8, target_copy_updates=500),
        replay=ReplayConfig(capacity=100_000, alpha=0.5),
        limiter=LimiterConfig(samples_per_insert=4.0, min_sequences=200, batch_size=32),
        envs=16,
    )


def plain_cartpole() -> Preset:
    """CartPole-v1 as it is, the article's own task for sequence lengths."""
    return replace(masked_cartpole(), environment=EnvironmentConfig(env_id="CartPole-v1"))


def _schedule(max_updates: int, evaluate_updates: int, episodes: int) -> Schedule:
    return Schedule(
        max_updates=max_updates,
        evaluate_updates=evaluate_updates,
        good_enough=None,
        validation_episodes=episodes,
        test_episodes=2 * episodes,
        max_env_steps=500_000,
    )


TASKS = {
    "recall": Task(preset=recall, schedule=_schedule(400, 50, 50), scale=1 / 4),
    "short-recall": Task(preset=short_recall, schedule=_schedule(80, 20, 100), scale=1.0),
    "masked-cartpole": Task(preset=masked_cartpole, schedule=_schedule(1200, 100, 10), scale=1 / 500),
    "cartpole": Task(preset=plain_cartpole, schedule=_schedule(1200, 100, 10), scale=1 / 500),
}
QUICK = Schedule(
    max_updates=2,
    evaluate_updates=1,
    good_enough=None,
    validation_episodes=2,
    test_episodes=2,
    flush_sequences=2,
    max_env_steps=3_000,
)
