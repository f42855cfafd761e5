"""Collector and learner in one process, taking turns through a real dataset on disk.

The parts are those of the two jobs: lanes, rollout, sequence builder, shard writer, dataset, replay, learner, published
parameters, acting policy. Only the processes are missing, so that one seed gives one result however loaded the machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jobs.acting import ActingPolicy
from jobs.presets import Preset
from pipeline.dataset import agree_on_terms
from pipeline.environments import make_lanes
from pipeline.evaluation import play_episodes
from pipeline.replay import Replay
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from r2d2.learner import Learner
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import network_of, params_from_bytes
from schemas.terms import DatasetTerms

NEVER = 1e9
COLLECTOR = "alternating"
VALIDATION_SEED, TEST_SEED = 1_000_000, 2_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to learn, and how to score it.

    Attributes:
        max_updates: stop here at the latest.
        evaluate_updates: updates between two looks at validation episodes.
        good_enough: stop at this mean return of the validation episodes, and test the parameters that did best in them.
            None: look without acting on it; do all updates, test the last parameters.
        validation_episodes, test_episodes: greedy episodes per look, and of the final score; from different seeds.
        publish_updates: updates between two publications of parameters.
    """

    max_updates: int
    evaluate_updates: int
    good_enough: float | None
    validation_episodes: int
    test_episodes: int
    publish_updates: int = 10


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Mean return of the test episodes, and what it took: wall-clock and processor seconds, evaluation included."""

    mean_return: float
    seconds: float
    cpu_seconds: float
    env_steps: int
    updates: int
    sequences: int
    samples_per_insert: float


class Alternation:
    """One learner and one collector over the dataset in ``folder``."""

    def __init__(self, preset: Preset, seed: int, folder: Path, *, builder_class=SequenceBuilder) -> None:
        self.preset, self._seed = preset, seed
        self._lanes = make_lanes(preset.environment, preset.envs)
        folder.mkdir(exist_ok=True)
        store, geometry = LocalStore(folder), preset.geometry
        terms = DatasetTerms(env=self._lanes.spec, geometry=geometry, core=preset.network.core.spec())
        agree_on_terms(store, terms)
        self.learner = Learner(
            preset.network.spec(terms.env, geometry.frame_stack),
            preset.learner,
            geometry=geometry,
            stored=geometry,
            seed=seed,
            lineage=np.random.default_rng(seed).bytes(16),
        )
        random = np.random.default_rng(seed + 1)
        self._policy = ActingPolicy(terms, preset.learner, [preset.envs], None, random, "cpu")
        self._rollout = Rollout(self._lanes, self._policy.policies[0], geometry.frame_stack, seed)
        self._builder = builder_class(terms, COLLECTOR, preset.envs)
        self._writer = ShardWriter(
            store,
            terms,
            COLLECTOR,
            WriterConfig(flush_sequences=32, first_flush_seconds=NEVER, flush_seconds=NEVER),
            initial_priorities=self._policy.initial_priorities,
        )
        self._replay = Replay(
            store, terms, preset.replay, preset.limiter, generator=np.random.default_rng(seed + 2), threads=1
        )
        self.env_steps = 0

    def learn(self, schedule: Schedule, say: Callable[[str], None] = lambda line: None) -> Outcome:
        """Take turns until the validation episodes are good enough or the updates are used up; then the test."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self._publish()
        looked_at, best_score, best = 0, -np.inf, None
        while self.learner.updates < schedule.max_updates:
            self._collect()
            self._update(schedule)
            if self.learner.updates - looked_at >= schedule.evaluate_updates:
                looked_at = self.learner.updates
                parameters = self.learner.published()
                score = self.greedy_return(parameters, schedule.validation_episodes, VALIDATION_SEED + self._seed)
                said = time.perf_counter() - started
                say(f"{said:5.0f} s  {self.env_steps:,} env steps  {looked_at:,} updates  greedy return {score:.2f}")
                if schedule.good_enough is not None and score > best_score:
                    best_score, best = score, parameters
                    if score >= schedule.good_enough:
                        break
        score = self.greedy_return(best or self.learner.published(), schedule.test_episodes, TEST_SEED + self._seed)
        self._lanes.close()
        self._replay.close()
        return Outcome(
            mean_return=score,
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu_started,
            env_steps=self.env_steps,
            updates=self.learner.updates,
            sequences=self._writer.sequences,
            samples_per_insert=self._replay.metrics()["samples_per_insert"],
        )

    def greedy_return(self, parameters: bytes, episodes: int, seed: int) -> float:
        """Mean return of greedy episodes, one per lane."""
        lanes = make_lanes(self.preset.environment, episodes)
        spec = self.learner.spec
        policy = RecurrentPolicy(spec.core, spec.num_actions, np.zeros(episodes), np.random.default_rng(seed))
        policy.set_network(network_of(params_from_bytes(parameters)), 0, self.learner.lineage)
        played = play_episodes(Rollout(lanes, policy, spec.frame_stack, seed), episodes)
        lanes.close()
        return float(np.mean([episode.episode_return for episode in played]))

    def _collect(self) -> None:
        step = self._rollout.step()
        self.env_steps += int(step.is_transition.sum())
        for sequence in self._builder.record(step):
            self._writer.add(sequence)
        if self._writer.maybe_flush():
            self._replay.poll()

    def _update(self, schedule: Schedule) -> None:
        """As many updates as the ratio allows by now."""
        while (sample := self._replay.sample(self.preset.limiter.batch_size)) is not None:
            output = self.learner.step(sample)
            self._replay.update_priorities(sample.ids, output.priorities)
            if self.learner.updates % schedule.publish_updates == 0:
                self._publish()

    def _publish(self) -> None:
        self._policy.use_published(self.learner.published())


def one_thread() -> None:
    """These networks are too small to share among threads, and results then do not depend on their number."""
    torch.set_num_threads(1)
