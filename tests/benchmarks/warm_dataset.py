"""How long a learner waits for its batches when the dataset lies in the page cache."""

import time
from pathlib import Path

import numpy as np

from jobs.presets import paper
from pipeline.dataset import agree_on_terms
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.prefetch import Prefetcher
from pipeline.replay import Replay
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from r2d2.exploration import epsilon_ladder
from r2d2.learner import Learner
from r2d2.policy import RecurrentPolicy
from schemas.terms import DatasetTerms

LANES = 8
COLLECTOR = "random"


def collect(folder: Path, calls: int) -> DatasetTerms:
    """Ms. Pacman, whose frames compress least of the usual games, acted at random, in the paper's windows."""
    preset = paper()
    lanes = make_lanes(EnvironmentConfig(env_id="ALE/MsPacman-v5", arguments={"full_action_space": True}), LANES)
    terms = DatasetTerms(env=lanes.spec, geometry=preset.geometry, core=preset.network.core.spec())
    store = LocalStore(folder)
    agree_on_terms(store, terms)
    policy = RecurrentPolicy(terms.core, terms.env.num_actions, epsilon_ladder(LANES), np.random.default_rng(0))
    rollout = Rollout(lanes, policy, terms.geometry.frame_stack, seed=0)
    builder = SequenceBuilder(terms, COLLECTOR, LANES)

    def no_priorities(batch, q_values) -> np.ndarray:
        return np.full(len(batch), np.nan, np.float32)

    writer = ShardWriter(store, terms, COLLECTOR, WriterConfig(), initial_priorities=no_priorities)
    for _ in range(calls):
        for sequence in builder.record(rollout.step()):
            writer.add(sequence)
    writer.flush()
    lanes.close()
    return terms


def waiting_share(
    folder: Path, *, batch_size: int, threads: int, device: str, updates: int = 6, calls: int = 500
) -> float:
    """Share of the learner's time spent waiting for a batch, over ``updates`` updates after two to warm up."""
    terms, preset = collect(folder, calls), paper()
    spec = preset.network.spec(terms.env, terms.geometry.frame_stack)
    learner = Learner(spec, preset.learner, geometry=terms.geometry, stored=terms.geometry, device=device)
    limiter = LimiterConfig(batch_size=batch_size, min_sequences=1, samples_per_insert=None)
    replay = Replay(
        LocalStore(folder), terms, ReplayConfig(), limiter, generator=np.random.default_rng(0), threads=threads
    )
    with Prefetcher(replay, batch_size) as prefetcher:
        waited = started = 0.0
        for update in range(2 + updates):
            if update == 2:
                started, waited = time.perf_counter(), prefetcher.waiting_seconds
            sample = prefetcher.next(60.0)
            assert sample is not None, prefetcher.waits_for()
            output = learner.step(sample)
            replay.update_priorities(sample.ids, output.priorities)
        share = (prefetcher.waiting_seconds - waited) / (time.perf_counter() - started)
    replay.close()
    return share
