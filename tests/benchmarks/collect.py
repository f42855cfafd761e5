"""``make bench-collect``: where a collector's time goes on Pong with the paper's network, against its bare parts.

Emulator and policy are measured alone, then the whole collector, in turn, several rounds; medians. Exit 1 when
assembly, compression and publishing take more than 10 % or the collector is slower than 0.9 of 1 / (emulator + policy).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from jobs.presets import preset_named
from pipeline.collector import Collector, RefreshConfig
from pipeline.dataset import agree_on_terms
from pipeline.environments import make_lane_groups, make_lanes
from pipeline.frame_buffers import FrameBuffers
from pipeline.progress import RunFollower
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import LocalStore
from r2d2.exploration import epsilon_ladder
from r2d2.networks import build_network
from r2d2.policy import RecurrentPolicy
from r2d2.priorities import initial_priorities
from schemas.terms import DatasetTerms

MOST_OVERHEAD, LEAST_RATIO = 0.10, 0.9


class Stopwatch:
    """Seconds per part; ``timed`` wraps a function."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable) -> Callable:
        def wrapped(*arguments, **named):
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] += time.perf_counter() - started

        return wrapped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=150, help="vector steps per round and part")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    preset = preset_named(flags.preset)
    one_group = [make_lanes(preset.environment, flags.envs, flags.threads)]
    two_groups = make_lane_groups(preset.environment, flags.envs, flags.threads)
    lanes = one_group[0]
    terms = DatasetTerms(env=lanes.spec, geometry=preset.geometry, core=preset.network.core.spec())
    network = build_network(
        preset.network.spec(terms.env, terms.geometry.frame_stack), torch.Generator().manual_seed(0)
    )
    random = np.random.default_rng(0)

    def make_policy(num_lanes: int) -> RecurrentPolicy:
        policy = RecurrentPolicy(terms.core, terms.env.num_actions, epsilon_ladder(num_lanes), random)
        policy.set_network(network, 0, bytes(range(16)))
        return policy

    watch = Stopwatch()
    steps = flags.calls * flags.envs
    rounds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        agree_on_terms(store, terms)
        overlapping = make_collector("two", two_groups, make_policy, terms, store, preset, watch)
        in_turn = make_collector("one", one_group, make_policy, terms, store, preset, Stopwatch())
        for _ in range(40):  # Warm up, past the first full windows.
            overlapping.turn()
            in_turn.turn()
        policy = make_policy(flags.envs)
        for _ in range(flags.rounds):
            rounds["policy alone"].append(policy_alone(policy, terms, flags.envs, random, flags.calls) / steps)
            rounds["collector, emulator and policy in turn"].append(run(in_turn, flags.calls) / steps)
            watch.seconds.clear()
            rounds["collector"].append(run(overlapping, flags.calls * len(two_groups)) / steps)
            for part, seconds in watch.seconds.items():
                rounds[f"  of it {part}"].append(seconds / steps)
            alone = make_lanes(preset.environment, flags.envs, flags.threads)
            alone.reset(1)
            rounds["emulator alone"].append(emulator_alone(alone, random, flags.calls) / steps)
            alone.close()
        shard_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.arrow"))
    median = {part: statistics.median(values) for part, values in rounds.items()}
    whole = median["collector"]
    print(
        f"{flags.preset} network, Pong, {flags.envs} lanes, {flags.threads} thread(s); medians of {flags.rounds} rounds"
    )
    for part, seconds in median.items():
        print(f"  {part:38s} {1e6 * seconds:8.1f} us a step  {seconds / whole:6.1%}")
    overhead = sum(median[f"  of it {part}"] for part in ("assembly", "compression", "publishing")) / whole
    bare = median["emulator alone"] + median["policy alone"]
    print(f"  assembly + compression + publishing    {overhead:.1%} (at most {MOST_OVERHEAD:.0%})")
    print(f"  collector                              {1 / whole:,.0f} steps/s")
    print(f"  against 1 / (emulator + policy)        {bare / whole:.3f} (at least {LEAST_RATIO})")
    print(f"  the same without overlapping them      {bare / median['collector, emulator and policy in turn']:.3f}")
    print(f"  published                              {shard_bytes / 1e6:.1f} MB")
    return 0 if overhead <= MOST_OVERHEAD and bare / whole >= LEAST_RATIO else 1


def make_collector(name, groups, make_policy, terms, store, preset, watch: Stopwatch) -> Collector:
    """A real collector without a learner, its parts timed by ``watch``."""

    def priorities(batch, q_values):
        return initial_priorities(batch, q_values, terms.geometry, preset.learner, terms.env.life_loss)

    rollouts = []
    for lanes in groups:
        policy = make_policy(lanes.num_lanes)
        lanes.send = watch.timed("sending actions", lanes.send)
        lanes.recv = watch.timed("waiting for the emulator", lanes.recv)
        policy.act = watch.timed("policy", policy.act)
        rollouts.append(Rollout(lanes, policy, terms.geometry.frame_stack, 0))
    num_lanes = sum(lanes.num_lanes for lanes in groups)
    buffers = FrameBuffers(terms, num_lanes)
    builder = SequenceBuilder(terms, name, num_lanes, buffers)
    writer = ShardWriter(store, terms, name, WriterConfig(), initial_priorities=priorities)
    spool = Spool(writer, SpoolConfig(), buffers)
    builder.record = watch.timed("assembly", builder.record)
    writer.add, writer.maybe_flush = (
        watch.timed("compression", writer.add),
        watch.timed("publishing", writer.maybe_flush),
    )
    return Collector(
        store=store,
        collector=name,
        rollouts=rollouts,
        builder=builder,
        spool=spool,
        follower=RunFollower(store),
        use_published=None,
        refresh=RefreshConfig(),
    )


def run(collector: Collector, turns: int) -> float:
    started = time.perf_counter()
    for _ in range(turns):
        collector.turn()
    return time.perf_counter() - started


def emulator_alone(lanes, random: np.random.Generator, calls: int) -> float:
    actions = random.integers(0, lanes.spec.num_actions, (calls, lanes.num_lanes))
    started = time.perf_counter()
    for action in actions:
        lanes.send(action)
        lanes.recv()
    return time.perf_counter() - started


def policy_alone(policy, terms, envs: int, random: np.random.Generator, calls: int) -> float:
    shape = (envs, terms.geometry.frame_stack, *terms.env.observation.shape)
    stack = random.integers(0, 255, shape).astype(np.uint8)
    action, reward, first = np.zeros(envs, np.int64), np.zeros(envs, np.float32), np.zeros(envs, bool)
    started = time.perf_counter()
    for _ in range(calls):
        policy.act(stack, action, reward, first)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
