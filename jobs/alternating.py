"""Collector and learner in one process, taking turns through a real dataset on disk.

The parts are those of the two jobs: lanes, rollout, sequence builder, shard writer, dataset, replay, learner, published
parameters, acting policy. Only the processes are missing, so that one seed gives one result however loaded the machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from schemas.records import ReplaySample
from schemas.terms import DatasetTerms

NEVER = 1e9
FIRST_UPDATES = 50
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
        flush_sequences: sequences of a shard.
        max_env_steps: stop here too, for what never gets anything to learn from.
    """

    max_updates: int
    evaluate_updates: int
    good_enough: float | None
    validation_episodes: int
    test_episodes: int
    publish_updates: int = 10
    flush_sequences: int = 32
    max_env_steps: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an experiment puts in place of our own parts, to see what becomes of learning.

    Attributes:
        builder: cuts sequences.
        rollout: steps the lanes.
        on_sample: what the learner gets for a drawn sample.
        on_learner: is shown the learner before its first update.
    """

    builder: type[SequenceBuilder] = SequenceBuilder
    rollout: type[Rollout] = Rollout
    on_sample: Callable[[ReplaySample], ReplaySample] = lambda sample: sample
    on_learner: Callable[[Learner], None] = lambda learner: None


@dataclass(frozen=True, kw_only=True)
class Look:
    """Greedy validation episodes after so many updates and env steps."""

    updates: int
    env_steps: int
    mean_return: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Mean return of the test episodes, and what it took: wall-clock and processor seconds, evaluation included.

    ``looks`` is the learning curve; ``first_gradient_norms`` are those of the first updates; ``discrepancies`` are dQ
    of the four start strategies over the last batch.
    """

    mean_return: float
    seconds: float
    cpu_seconds: float
    env_steps: int
    updates: int
    sequences: int
    samples_per_insert: float
    looks: list[Look] = field(default_factory=list)
    first_gradient_norms: list[float] = field(default_factory=list)
    discrepancies: dict[str, float] = field(default_factory=dict)


class Alternation:
    """One learner and one collector over the dataset in ``folder``."""

    def __init__(self, preset: Preset, seed: int, folder: Path, parts: Parts | None = None) -> None:
        self.preset, self._seed, self._parts = preset, seed, parts or Parts()
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
        self._parts.on_learner(self.learner)
        random = np.random.default_rng(seed + 1)
        self._policy = ActingPolicy(terms, preset.learner, [preset.envs], None, random, "cpu")
        self._rollout = self._parts.rollout(self._lanes, self._policy.policies[0], geometry.frame_stack, seed)
        self._builder = self._parts.builder(terms, COLLECTOR, preset.envs)
        self._store, self._terms = store, terms
        self._replay = Replay(
            store,
            terms,
            preset.replay,
            preset.limiter,
            generator=np.random.default_rng(seed + 2),
            threads=1,
            clock=time.process_time,  # A run that is suspended for a while must not take its collector for gone.
        )
        self.env_steps = 0
        self.looks: list[Look] = []
        self._gradient_norms: list[float] = []
        self._last_sample: ReplaySample | None = None

    def learn(self, schedule: Schedule, say: Callable[[str], None] = lambda line: None) -> Outcome:
        """Take turns until the validation episodes are good enough or the updates are used up; then the test."""
        started, cpu_started = time.perf_counter(), time.process_time()
        self._writer = ShardWriter(
            self._store,
            self._terms,
            COLLECTOR,
            WriterConfig(flush_sequences=schedule.flush_sequences, first_flush_seconds=NEVER, flush_seconds=NEVER),
            initial_priorities=self._policy.initial_priorities,
        )
        self._publish()
        looked_at, best_score, best = 0, -np.inf, None
        while self.learner.updates < schedule.max_updates and self.env_steps < schedule.max_env_steps:
            self._collect()
            self._update(schedule)
            if self.learner.updates - looked_at >= schedule.evaluate_updates:
                looked_at = self.learner.updates
                parameters = self.learner.published()
                score = self.greedy_return(parameters, schedule.validation_episodes, VALIDATION_SEED + self._seed)
                self.looks.append(Look(updates=looked_at, env_steps=self.env_steps, mean_return=score))
                said = time.perf_counter() - started
                say(f"{said:5.0f} s  {self.env_steps:,} env steps  {looked_at:,} updates  greedy return {score:.2f}")
                if schedule.good_enough is not None and score > best_score:
                    best_score, best = score, parameters
                    if score >= schedule.good_enough:
                        break
        score = self.greedy_return(best or self.learner.published(), schedule.test_episodes, TEST_SEED + self._seed)
        if not self.looks:
            self.looks.append(Look(updates=self.learner.updates, env_steps=self.env_steps, mean_return=score))
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
            looks=self.looks,
            first_gradient_norms=self._gradient_norms,
            discrepancies=self.learner.discrepancies(self._last_sample) if self._last_sample else {},
        )

    def greedy_return(self, parameters: bytes, episodes: int, seed: int) -> float:
        """Mean return of greedy episodes, one per lane."""
        lanes = make_lanes(self.preset.environment, episodes)
        spec = self.learner.spec
        policy = RecurrentPolicy(spec.core, spec.num_actions, np.zeros(episodes), np.random.default_rng(seed))
        policy.set_network(network_of(params_from_bytes(parameters)), 0, self.learner.lineage)
        played = play_episodes(self._parts.rollout(lanes, policy, spec.frame_stack, seed), episodes)
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
            self._last_sample = sample = self._parts.on_sample(sample)
            output = self.learner.step(sample)
            if len(self._gradient_norms) < FIRST_UPDATES:
                self._gradient_norms.append(output.metrics["gradient_norm"])
            self._replay.update_priorities(sample.ids, output.priorities)
            if self.learner.updates % schedule.publish_updates == 0:
                self._publish()

    def _publish(self) -> None:
        self._policy.use_published(self.learner.published())


def one_thread() -> None:
    """These networks are too small to share among threads, and results then do not depend on their number."""
    torch.set_num_threads(1)
