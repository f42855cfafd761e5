"""One collector of ``make bench-actors``: a process of its own that acts for a while and prints what that took.

    python -m tests.benchmarks.actor --policy table --dataset FOLDER --seconds 20 ...

It says ``ready`` when it is warm, and begins when a line comes on its standard input, so that several begin together.
"""

import argparse
import json
import resource
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from jobs.presets import Preset, preset_named
from jobs.stateless import StatelessActing
from pipeline.action_table import TablePoller
from pipeline.collector import Collector, RefreshConfig
from pipeline.dataset import agree_on_terms, new_collector_id
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.frame_buffers import FrameBuffers
from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import LocalStore
from schemas.specs import CoreSpec
from schemas.terms import DatasetTerms

WARM_CALLS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    flags = parser.parse_args()
    collector, lanes, policy = make_actor(flags)
    for _ in range(WARM_CALLS):
        collector.turn()
    collector.counts.blocked.take()
    print("ready", flush=True)
    sys.stdin.readline()
    wall, cpu, steps = time.perf_counter(), time.process_time(), collector.counts.env_steps
    while time.perf_counter() - wall < flags.seconds:
        collector.turn()
    seconds = time.perf_counter() - wall
    found = {
        "steps": collector.counts.env_steps - steps,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "blocked_seconds": collector.counts.blocked.seconds,
        **{name.removeprefix("collect/"): value for name, value in policy.metrics().items()},
    }
    print(json.dumps(found), flush=True)
    lanes.close()
    return 0


def make_actor(flags: argparse.Namespace):
    """A whole collector: with a network as published in the dataset, by its table, or at random."""
    preset: Preset = preset_named(flags.preset)
    lanes = make_lanes(EnvironmentConfig(env_id=flags.env), flags.envs, 1)
    has_network = flags.policy == "recurrent"
    core = preset.network.core.spec() if has_network else CoreSpec(kind="none")
    terms = DatasetTerms(env=lanes.spec, geometry=preset.geometry, core=core)
    store = LocalStore(Path(flags.dataset))
    agree_on_terms(store, terms)
    generator, name = np.random.default_rng(flags.seed), new_collector_id()
    if has_network:
        import torch

        from jobs.acting import ActingPolicy

        torch.set_num_threads(1)
        policy = ActingPolicy(terms, preset.learner, [flags.envs], None, generator, "cpu")
        use, poller = policy.use_published, ParamsPoller
    else:
        policy = StatelessActing(terms, [flags.envs], None, generator, uses_table=flags.policy == "table")
        use = policy.use_table if flags.policy == "table" else None
        poller = partial(TablePoller, env=terms.env)
    buffers = FrameBuffers(terms, flags.envs)
    writer = ShardWriter(store, terms, name, WriterConfig(), initial_priorities=policy.initial_priorities)
    collector = Collector(
        store=store,
        collector=name,
        rollouts=[Rollout(lanes, policy.policies[0], terms.geometry.frame_stack, flags.seed)],
        builder=SequenceBuilder(terms, name, flags.envs, buffers),
        spool=Spool(writer, SpoolConfig(), buffers),
        follower=RunFollower(store, "bench"),
        use_published=use,
        poller=poller,
        refresh=RefreshConfig(),
    )
    return collector, lanes, policy


if __name__ == "__main__":
    sys.exit(main())
