"""Run environments and write their experience as sequence shards, until stopped.

python jobs/collect.py                                   ALE/Pong-v5 into data/pong
python jobs/collect.py --env ALE/Breakout-v5 --envs 32   another game
python jobs/collect.py --policy table                    without a network; see label.py
"""

import jobs.interrupt  # noqa: F401

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from jobs.acting import ActingPolicy
from jobs.collecting import CollectRun
from jobs.command_line import dry_run, peek, refuse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.devices import refuse_device
from jobs.flags import DatasetFlags, TrackingFlags, default_threads, read_flags
from jobs.offline import dataset_tags
from jobs.presets import CoreOptions, Preset, laptop
from jobs.ray_collectors import Collectors, actor_argv, drawn_seed
from jobs.run_tags import describe, run_tags
from jobs.stateless import StatelessActing
from jobs.stopping import StopRequest
from pipeline.action_table import TablePoller
from pipeline.collector import Collector, RefreshConfig
from pipeline.dataset import agree_on_terms, link_run, new_collector_id, write_provenance
from pipeline.environments import EnvironmentConfig, EnvironmentFailure, make_lane_groups, make_lanes
from pipeline.frame_buffers import FrameBuffers
from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.provenance import provenance
from pipeline.ray_start import start_ray
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.spool import Spool, SpoolConfig
from pipeline.store import Store
from pipeline.tracking import Tracker, TrackingConfig, ending_run, make_tracker
from r2d2.health import MemoryLimit, SpeedLimit
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec
from schemas.terms import DatasetTerms

EVALUATION_SEED = 2**29
POLICIES = ("recurrent", "table", "random")
MAX_SEED = 2**29  # Lane i takes seed + i, and the emulator takes 31 bits.


@dataclass(frozen=True, kw_only=True)
class ActFlags:
    """How to act, and for how long.

    Attributes:
        envs: lanes, each with its own rung of the exploration ladder.
        threads: emulator and torch threads; default: half the cores.
        seed: of environments and exploration; drawn when not given, recorded either way.
        env_steps: stop after this many agent steps over all lanes.
        max_minutes: stop after this many minutes.
        params: act with the fixed parameters in this file instead of following a learner.
        ladder: ``OFFSET:TOTAL``, where this process's lanes stand on a ladder shared by several.
        eval_lanes: further lanes that act at epsilon 0.001, are logged, and write no sequences.
        policy: ``recurrent`` acts with a network (paper); ``table`` by the table of greedy actions that label.py
            publishes, at random where it has none (article 3.4); ``random``. The last two run no network: their
            sequences hold no states, and no core unless the dataset has one or ``--core`` names one.
        device: of the acting network.
        collectors: run so many collectors on Ray, ``--envs`` lanes and ``--threads`` threads each, on one ladder.
        ray_address: with ``--collectors``: the cluster, ``auto`` or ``host:port``; default: a Ray started here.
        dry_run: print the resolved configuration and stop.
    """

    envs: int = 16
    collectors: int = 1
    ray_address: str | None = None
    threads: int = 1
    seed: int | None = None
    env_steps: int | None = None
    max_minutes: float | None = None
    params: Path | None = None
    ladder: str | None = None
    eval_lanes: int = 0
    policy: str = "recurrent"
    device: str = "cpu"
    dry_run: bool = False

    def __post_init__(self) -> None:
        refuse_device(self.device)
        for name in ("envs", "collectors", "threads", "env_steps", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
        if self.collectors > 1 and self.ladder is not None:
            raise ValueError(f"ladder is {self.ladder!r}; allowed: without --collectors, which makes one")
        if self.eval_lanes < 0:
            raise ValueError(f"eval_lanes is {self.eval_lanes}; allowed: 0 or more")
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; allowed: {', '.join(POLICIES)}")
        if self.policy != "recurrent":
            for name, nothing in (("params", None), ("eval_lanes", 0)):
                if getattr(self, name) != nothing:
                    raise ValueError(f"{name} is {getattr(self, name)}; allowed: with --policy recurrent")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to {MAX_SEED - 1}")


@dataclass(frozen=True, kw_only=True)
class FollowFlags:
    """Whose parameters to act with, and whose ratio to keep.

    Attributes:
        follow: name of a run of this dataset; default: the only live one.
        when_silent: what to do when that run has been silent for 30 s without having closed: ``wait`` at its last
            allowance, or ``collect`` on.
    """

    follow: str | None = None
    when_silent: str = "wait"


@dataclass(frozen=True, kw_only=True)
class CollectFlags:
    """Flags of collect.py."""

    source: DatasetFlags = field(default_factory=DatasetFlags)
    window: SequenceGeometry = field(default_factory=lambda: laptop().geometry)
    core: CoreOptions = field(default_factory=CoreOptions)
    act: ActFlags = field(default_factory=ActFlags)
    follow: FollowFlags = field(default_factory=FollowFlags)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    writer: WriterConfig = field(default_factory=WriterConfig)
    spool: SpoolConfig = field(default_factory=SpoolConfig)
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    speed: SpeedLimit = field(default_factory=SpeedLimit)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> "CollectFlags":
        return cls(
            window=terms.geometry if terms else preset.geometry,
            core=CoreOptions.of(terms.core) if terms else preset.network.core,
            act=ActFlags(envs=preset.envs, threads=default_threads(for_learner=False)),
            refresh=RefreshConfig(refresh_env_steps=preset.refresh_env_steps),
        )


def main(argv: Sequence[str]) -> int:
    show_warnings()
    stop = StopRequest().listen()
    with StatusLine("collect") as status:
        given = peek(argv, "collectors", "ray_address")
        if given["collectors"] in (None, "1") and given["ray_address"] is None:
            return collect(argv, stop, status)
        return collect_on_ray(argv, stop, status)


def collect_on_ray(argv: Sequence[str], stop: StopRequest, status: StatusLine) -> int:
    """Several collectors as Ray actors; see ``jobs.ray_collectors``."""
    with refusing(OSError):
        flags, preset, terms = read_flags(CollectFlags, argv, "collect.py")
        act, store, environment = flags.act, flags.source.open_store(), flags.source.environment(preset, terms)
        threads = act.threads if peek(argv, "threads")["threads"] else 1
        seed = act.seed if act.seed is not None else drawn_seed(MAX_SEED)
        argv = [*argv, "--dataset", store.uri, "--threads", str(threads)]
        if act.params is not None:
            argv += ["--params", str(act.params.absolute())]
        if act.dry_run:
            dry_run({**asdict(flags), "dataset": store.uri, "seed": seed})
        tracker = make_tracker(
            TrackingConfig(
                uri=flags.tracking.tracking_uri,
                experiment=flags.tracking.experiment,
                run_name=flags.tracking.run_name or f"collect-{store.name}-{act.collectors}-collectors",
                tags={"role": "collect", "game": environment.env_id, "dataset": store.name, "dataset_uri": store.uri},
                parent_run_id=flags.tracking.parent_run_id,
            )
        )
        with ending_run(tracker, stop.gone_by):
            start_ray(act.ray_address, cpus=max(os.cpu_count() or 1, act.collectors * threads))

            def arguments(place: int, incarnation: int) -> tuple:
                own = actor_argv(argv, place, incarnation, envs=act.envs, collectors=act.collectors, seed=seed)
                return collect, own

            collectors = Collectors(act.collectors, arguments, threads=threads, tracker=tracker, status=status)
            status.say(f"collect: {act.collectors} collectors of {act.envs} lanes into {store.uri}, seed {seed}")
            failed = True
            try:
                code = collectors.run(stop, env_steps=act.env_steps, max_minutes=act.max_minutes)
                failed = False
            finally:
                tracker.close(failed=failed, gone_by=stop.gone_by)
                run = f"MLflow run {tracker.run_id()}"
                status.say(f"collect: stopped ({stop.reason or 'failed'}): {collectors.summary()}; {run}")
            return code


def collect(argv: Sequence[str], stop: StopRequest, status: StatusLine, tracker: Tracker | None = None) -> int:
    """One collector in this process; the exit status. ``tracker`` instead of the one that the flags name."""
    with refusing(OSError):
        flags, preset, stored_terms = read_flags(CollectFlags, argv, "collect.py")
        act, store = flags.act, flags.source.open_store()
        environment = flags.source.environment(preset, stored_terms)
        groups = make_lane_groups(environment, act.envs, act.threads)
        core = flags.core.spec()
        if act.policy != "recurrent" and peek(argv, "core")["core"] is None:
            core = stored_terms.core if stored_terms else CoreSpec(kind="none")
        terms = DatasetTerms(env=groups[0].spec, geometry=flags.window, core=core)
        seed = act.seed if act.seed is not None else secrets.randbelow(MAX_SEED)
        collector_id = new_collector_id()
        resolved = {**asdict(flags), "dataset": store.uri, "terms": asdict(terms), "seed": seed}
        if act.dry_run:
            dry_run(resolved)
        torch.set_num_threads(act.threads)
        generator = np.random.default_rng(seed)
        sizes = [lanes.num_lanes for lanes in groups]
        evaluation = None
        if act.policy == "recurrent":
            policy = ActingPolicy(
                terms, preset.learner, sizes, act.ladder, generator, act.device, evaluation_lanes=act.eval_lanes
            )
            if act.params is not None:
                policy.use_file(act.params)
            if act.eval_lanes:
                evaluation = _evaluation(policy, environment, act.eval_lanes, seed)
            use_published, poller = None if act.params else policy.use_published, ParamsPoller
        else:
            policy = StatelessActing(terms, sizes, act.ladder, generator, uses_table=act.policy == "table")
            use_published = policy.use_table if act.policy == "table" else None
            poller = partial(TablePoller, env=terms.env)
        follower = RunFollower(store, flags.follow.follow, collector=collector_id, when_silent=flags.follow.when_silent)
        rollouts = [
            Rollout(lanes, own_policy, terms.geometry.frame_stack, seed + first_lane)
            for lanes, own_policy, first_lane in zip(groups, policy.policies, (0, sizes[0]), strict=False)
        ]
        _open_dataset(store, terms, collector_id, provenance(role="collector", seed=seed, envs=act.envs))

    writer = ShardWriter(
        store, terms, collector_id, flags.writer, initial_priorities=policy.initial_priorities, notes_waits=True
    )
    buffers = FrameBuffers(terms, act.envs)
    spool = Spool(writer, flags.spool, buffers)
    collector = Collector(
        store=store,
        collector=collector_id,
        rollouts=rollouts,
        builder=SequenceBuilder(terms, collector_id, act.envs, buffers),
        spool=spool,
        follower=follower,
        use_published=use_published,
        poller=poller,
        refresh=flags.refresh,
        evaluation=evaluation,
    )
    tracker = tracker or make_tracker(
        TrackingConfig(
            uri=flags.tracking.tracking_uri,
            experiment=flags.tracking.experiment,
            run_name=flags.tracking.run_name or f"collect-{store.name}-{collector_id[:6]}",
            tags=run_tags(
                "collect",
                terms.env,
                store=store,
                preset=flags.source.preset,
                seed=seed,
                flags=asdict(flags),
                collector=collector_id,
                **dataset_tags(store, "start"),
            ),
            description=describe("Plays", terms.env, store, preset=flags.source.preset, seed=seed),
            parent_run_id=flags.tracking.parent_run_id,
            system_metrics=True,
        )
    )
    with ending_run(tracker, stop.gone_by):
        tracker.params({**resolved, "provenance": provenance()})
        run = CollectRun(
            collector=collector,
            spool=spool,
            policy=policy,
            groups=groups,
            tracker=tracker,
            memory=flags.memory,
            speed=flags.speed,
            link=lambda run_id: link_run(store, collector_id, run_id),
            closing_tags=lambda: dataset_tags(store, "close"),
        )
        problem, failed, lost = None, True, 0
        status.say(f"collect: {terms.env.env_id} into {store.uri}, collector {collector_id}, seed {seed}")
        try:
            run.run(stop, status, env_steps=act.env_steps, max_minutes=act.max_minutes)
            failed = False
        except (ValueError, EnvironmentFailure) as error:
            problem = error
        finally:
            lost = run.close(stop, failed=failed)
        run.show(status)
        status.say(f"collect: stopped ({stop.reason or 'failed'}): {run.summary()}")
    if problem is not None:
        refuse(problem)
    return 1 if lost else 0


def _evaluation(policy: ActingPolicy, environment: EnvironmentConfig, lanes: int, seed: int) -> Rollout:
    frame_stack = policy.terms.geometry.frame_stack
    return Rollout(make_lanes(environment, lanes, 1), policy.evaluation_policy, frame_stack, seed + EVALUATION_SEED)


def _open_dataset(store: Store, terms: DatasetTerms, collector_id: str, origin: dict) -> None:
    try:
        store.prepare()
        store.clean_leftovers()
        agree_on_terms(store, terms)
        write_provenance(store, collector_id, origin)
    except OSError as error:
        refuse(f"dataset is {store.uri!r}; allowed: a folder that can be written ({error})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
