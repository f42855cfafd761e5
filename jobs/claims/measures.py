"""Claims that are figures of a machine, a formula or real frames: measured here, a repetition for each seed.

Ratios within one repetition, in processor seconds where time is meant: other work on the machine disturbs both sides.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from jobs.alternating import Alternation, Schedule
from jobs.claims.peak import SavedBytes
from jobs.claims.tasks import masked_cartpole
from jobs.presets import CoreOptions, NetworkOptions, article
from pipeline.dataset import agree_on_terms
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import LocalStore
from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.learner import Learner
from r2d2.networks import build_network, zero_state
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import network_of, params_from_bytes
from schemas.geometry import SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch
from schemas.specs import ArraySpec, CoreSpec, EnvSpec
from schemas.terms import DatasetTerms

Measure = Callable[[int, bool], dict[str, float]]
GAMES = ("Pong", "Breakout", "MsPacman", "Seaquest", "SpaceInvaders")
LINEAGE = bytes(range(16))
SMALL = NetworkOptions(image_encoder="small", dense=(256,), core=CoreOptions(core_width=128), dueling_width=128)
IMAGE = ArraySpec(shape=(84, 84), dtype="uint8")


def discount(seed: int, quick: bool) -> dict[str, float]:
    return {"0.997^1000": 0.997**1000}


def acting(seed: int, quick: bool) -> dict[str, float]:
    """Processor time of a lane-step on Pong: the article's network, or no network at all."""
    lanes = make_lanes(EnvironmentConfig(), 8)
    geometry, network = article().geometry, article().network
    terms = DatasetTerms(env=lanes.spec, geometry=geometry, core=network.core.spec())
    seconds = {}
    for name in ("recurrent", "stateless"):
        policy = RecurrentPolicy(terms.core, terms.env.num_actions, np.full(8, 0.1), np.random.default_rng(seed))
        if name == "recurrent":
            spec = network.spec(terms.env, geometry.frame_stack)
            policy.set_network(build_network(spec, torch.Generator().manual_seed(seed)), 0, LINEAGE)
        rollout = Rollout(lanes, policy, geometry.frame_stack, seed)
        for _ in range(5):
            rollout.step()
        started, steps = time.process_time(), 10 if quick else 500
        for _ in range(steps):
            rollout.step()
        seconds[name] = (time.process_time() - started) / steps / 8
    lanes.close()
    return {
        "microseconds of a step, recurrent": 1e6 * seconds["recurrent"],
        "microseconds of a step, without a network": 1e6 * seconds["stateless"],
        "share of processor time saved": 1 - seconds["stateless"] / seconds["recurrent"],
    }


def initializer_share(seed: int, quick: bool) -> dict[str, float]:
    """Of the parameters of the article's network on Pong's six actions."""
    found = {}
    for kind in ("mlp", "linear"):
        config = replace(article().learner, initial_state="initializer", initializer=kind)
        spec = replace(_spec(), dense=(), use_previous_reward=False)
        learner = Learner(spec, config, geometry=article().geometry, stored=article().geometry, seed=seed)
        found[f"percent of parameters, {kind}"] = 100 * learner.initializer_share
    return found


def hashing(seed: int, quick: bool) -> dict[str, float]:
    """Of the frames of five games under random play that differ: those whose first 100 bytes another one shares."""
    distinct = collided = 0
    for game in GAMES[: 1 if quick else None]:
        lanes = make_lanes(EnvironmentConfig(env_id=f"ALE/{game}-v5"), 8)
        random = np.random.default_rng(seed)
        frames = lanes.reset(seed)
        whole: dict[int, int] = {}
        for _ in range(20 if quick else 1000):
            for frame in frames:
                data = frame.tobytes()
                whole[xxhash.xxh3_64_intdigest(data)] = xxhash.xxh3_64_intdigest(data[:100])
            lanes.send(random.integers(0, lanes.spec.num_actions, 8))
            frames = lanes.recv().observation
        lanes.close()
        _, counts = np.unique(list(whole.values()), return_counts=True)
        distinct, collided = distinct + len(whole), collided + int(counts[counts > 1].sum())
    return {"percent of distinct frames that collide": 100 * collided / distinct, "distinct frames": distinct}


def submission(seed: int, quick: bool) -> dict[str, float]:
    """How long handing a Pong sequence over blocks the environment loop, while the writer's thread works."""
    preset = article()
    lanes = make_lanes(preset.environment, 8)
    terms = DatasetTerms(env=lanes.spec, geometry=preset.geometry, core=preset.network.core.spec())
    policy = RecurrentPolicy(terms.core, terms.env.num_actions, np.ones(8), np.random.default_rng(seed))
    rollout, builder = Rollout(lanes, policy, terms.geometry.frame_stack, seed), SequenceBuilder(terms, "c", 8)
    blocked = []
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        agree_on_terms(store, terms)
        ones = lambda batch, _: np.ones(len(batch), np.float32)  # noqa: E731
        spool = Spool(ShardWriter(store, terms, "c", WriterConfig(), initial_priorities=ones), SpoolConfig())
        for _ in range(150 if quick else 3000):
            for sequence in builder.record(rollout.step()):
                started = time.perf_counter()
                spool.put(sequence)
                blocked.append(1e6 * (time.perf_counter() - started))
        spool.close(30.0)
    lanes.close()
    return {
        "microseconds blocked, median": float(np.median(blocked)),
        "microseconds blocked, 99th percentile": float(np.quantile(blocked, 0.99)),
    }


def update_speed(seed: int, quick: bool) -> dict[str, float]:
    """Trained steps per processor second, as many of them in each window; a network of 0.4 M parameters."""
    windows = {
        "L 0": (0, 80),
        "L 40": (40, 80),
        "L 80": (80, 80),
        "L 160": (160, 80),
        "T 40": (40, 40),
        "T 160": (40, 160),
    }
    learners = {}
    for name, (burn_in, unroll) in windows.items():
        geometry = SequenceGeometry(burn_in=burn_in, unroll=unroll, bootstrap=5, stride=unroll // 2, frame_stack=2)
        sequences = 1 if quick else 320 // unroll
        learners[name] = _learner(SMALL.spec, geometry), _sample(geometry, sequences)
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(1 if quick else 4):
        for name, (learner, sample) in learners.items():
            started = time.process_time()
            learner.step(sample)
            seconds[name].append(time.process_time() - started)
    rate = {
        name: len(learners[name][1].ids) * windows[name][1] / float(np.median(own[0 if quick else 1 :]))
        for name, own in seconds.items()
    }
    found = {f"trained steps/s, {name}": value for name, value in rate.items()}
    found["throughput of L 80 over that of L 160"] = rate["L 80"] / rate["L 160"]
    found["percent of throughput lost from T 80 to T 160"] = 100 * (1 - rate["T 160"] / rate["L 40"])
    return found


def segment_memory(seed: int, quick: bool) -> dict[str, float]:
    """Bytes kept for the backward pass over 1000 steps: as a whole, and in segments of 20."""
    steps = 100 if quick else 1000
    geometry = SequenceGeometry(burn_in=0, unroll=steps, bootstrap=3, stride=steps, frame_stack=2)
    sample, kept = _sample(geometry, 1), {}
    for tbptt in (0, 20):
        learner = _learner(SMALL.spec, geometry, LearnerConfig(tbptt=tbptt))
        with SavedBytes() as saved:
            learner.step(sample)
        kept[tbptt] = saved.most
    return {
        "MB for the whole unroll": kept[0] / 1e6,
        "MB for segments of 20": kept[20] / 1e6,
        "memory of 1000 steps over that of 20-step segments": kept[0] / kept[20],
    }


def batch_costs(seed: int, quick: bool) -> dict[str, float]:
    """What a further sequence costs the article's network (80 steps at once, no burn-in), and what it brings."""
    geometry = article().geometry if not quick else replace(article().geometry, unroll=8, stride=8)
    learner = _learner(article().network.spec, geometry, replace(article().learner, tbptt=0))
    kept, rate = {}, {}
    for sequences in (2, 4):
        sample = _sample(geometry, sequences)
        with SavedBytes() as saved:
            learner.step(sample)
        kept[sequences] = saved.most
        seconds = []
        for _ in range(1 if quick else 3):
            started = time.process_time()
            learner.step(sample)
            seconds.append(time.process_time() - started)
        rate[sequences] = sequences / float(np.median(seconds))
    return {
        "MB for each further sequence": (kept[4] - kept[2]) / 2 / 1e6,
        "percent of throughput for each further sequence": 100 * (rate[4] / rate[2] - 1) / 2,
    }


def state_norms(seed: int, quick: bool) -> dict[str, float]:
    """Norms of the core states that earlier and later versions of one training run make of the same observations."""
    schedule = Schedule(
        max_updates=4 if quick else 800,
        evaluate_updates=2 if quick else 100,
        good_enough=None,
        validation_episodes=2,
        test_episodes=1,
    )
    versions: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Alternation(masked_cartpole(), seed, Path(folder))
        versions.append(run.learner.published())
        looked = run.greedy_return

        def keeping(parameters: bytes, episodes: int, at: int) -> float:
            versions.append(parameters)
            return looked(parameters, episodes, at)

        run.greedy_return = keeping  # pyright: ignore[reportAttributeAccessIssue]
        run.learn(schedule)
    random = np.random.default_rng(seed)
    observations = torch.from_numpy(random.normal(0, 0.1, (64, 32, 1, 2)).astype(np.float32))
    norms = [_state_norm(parameters, observations) for parameters in versions]
    return {"largest ratio of state norms between versions": max(norms) / min(norms), "versions": len(norms)}


def _state_norm(parameters: bytes, observations: torch.Tensor) -> float:
    network = network_of(params_from_bytes(parameters))
    lanes = observations.shape[0]
    with torch.no_grad():
        features = network.encode(observations).transpose(0, 1)
        none = torch.full(features.shape[:2], -1), torch.zeros(features.shape[:2])
        _, state = network.recur(features, *none, zero_state(network.spec.core, lanes))
    return float(torch.cat(state, -1).norm(dim=-1).mean())


def _spec() -> NetworkSpec:
    return NetworkSpec(observation=IMAGE, num_actions=6, frame_stack=4)


def _learner(spec: Callable, geometry: SequenceGeometry, config: LearnerConfig | None = None) -> Learner:
    terms = _terms(geometry)
    return Learner(
        spec(terms.env, geometry.frame_stack),
        config or LearnerConfig(),
        geometry=geometry,
        stored=geometry,
        lineage=LINEAGE,
    )


def _terms(geometry: SequenceGeometry) -> DatasetTerms:
    env = EnvSpec(env_id="ALE/Pong-v5", observation=IMAGE, action_set=tuple("abcdef"))
    return DatasetTerms(env=env, geometry=geometry, core=CoreSpec(kind="lstm", layers=1, width=128))


def _sample(geometry: SequenceGeometry, sequences: int) -> ReplaySample:
    """Full sequences from the middle of episodes with random pixels, foreign states."""
    random, steps = np.random.default_rng(0), geometry.stored_steps
    zeros = np.zeros((sequences, 1), np.float32)
    per_step = {
        name: np.zeros((sequences, steps), np.uint8) for name in ("terminated", "truncated", "life_lost", "greedy")
    }
    count = np.full(sequences, steps, np.int32)
    batch = SequenceBatch(
        sequence=np.arange(sequences),
        first_valid=np.zeros(sequences, np.int32),
        num_steps=count,
        num_observations=count,
        ends=np.zeros(sequences, np.int8),
        observation=random.integers(0, 256, (sequences, geometry.stored_frames, 84, 84)).astype(np.uint8),
        action=random.integers(0, 6, (sequences, steps)).astype(np.int32),
        reward=random.normal(size=(sequences, steps)).astype(np.float32),
        previous_action=np.zeros(sequences, np.int32),
        previous_reward=np.zeros(sequences, np.float32),
        core=(zeros, zeros),
        unroll_core=(zeros, zeros),
        probes=np.zeros(0, np.int64),
        probe_core=(zeros[:0],) * 2,
        version_first=np.zeros(sequences, np.int64),
        version_last=np.zeros(sequences, np.int64),
        lineage=np.zeros((sequences, 16), np.uint8),
        epsilon=np.zeros(sequences, np.float32),
        collector=np.array([b"c"] * sequences),
        **per_step,
    )
    return ReplaySample(
        ids=np.arange(sequences),
        probabilities=np.full(sequences, 1 / sequences),
        replay_sequences=sequences,
        batch=batch,
    )


MEASURES: dict[str, Measure] = {
    "discount": discount,
    "acting": acting,
    "initializer share": initializer_share,
    "hashing": hashing,
    "submission": submission,
    "update speed": update_speed,
    "segment memory": segment_memory,
    "batch costs": batch_costs,
    "state norms": state_norms,
}
