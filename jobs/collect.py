"""Run environments and write their experience as sequence shards, until stopped.

python jobs/collect.py                                   ALE/Pong-v5 into data/pong
python jobs/collect.py --env ALE/Breakout-v5 --envs 32   another game
"""

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from jobs.acting import ActingPolicy
from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.flags import DatasetFlags, TrackingFlags, default_threads, read_flags
from jobs.presets import CoreOptions, Preset, laptop
from jobs.stopping import StopRequest
from pipeline.collector import Collector, RefreshConfig
from pipeline.dataset import agree_on_terms, new_collector_id, write_provenance
from pipeline.environments import make_lane_groups
from pipeline.progress import RunFollower
from pipeline.provenance import provenance
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from pipeline.tracking import TrackingConfig, make_tracker
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms

METRICS_SECONDS = 10.0
MAX_SEED = 2**30  # Lane i takes seed + i, and the emulator takes 31 bits.


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
        device: of the acting network.
        dry_run: print the resolved configuration and stop.
    """

    envs: int = 16
    threads: int = 1
    seed: int | None = None
    env_steps: int | None = None
    max_minutes: float | None = None
    params: Path | None = None
    ladder: str | None = None
    device: str = "cpu"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("envs", "threads", "env_steps", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
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
    with refusing(OSError):
        flags, preset, stored_terms = read_flags(CollectFlags, argv, "collect.py")
        act, store = flags.act, flags.source.store()
        environment = flags.source.environment(preset, stored_terms)
        groups = make_lane_groups(environment, act.envs, act.threads)
        terms = DatasetTerms(env=groups[0].spec, geometry=flags.window, core=flags.core.spec())
        seed = act.seed if act.seed is not None else secrets.randbelow(MAX_SEED)
        collector_id = new_collector_id()
        resolved = {**asdict(flags), "dataset": str(store.root), "terms": asdict(terms), "seed": seed}
        if act.dry_run:
            dry_run(resolved)
        torch.set_num_threads(act.threads)
        generator = np.random.default_rng(seed)
        sizes = [lanes.num_lanes for lanes in groups]
        policy = ActingPolicy(terms, preset.learner, sizes, act.ladder, generator, act.device)
        if act.params is not None:
            policy.use_file(act.params)
        follower = RunFollower(store, flags.follow.follow, when_silent=flags.follow.when_silent)
        rollouts = [
            Rollout(lanes, own_policy, terms.geometry.frame_stack, seed + first_lane)
            for lanes, own_policy, first_lane in zip(groups, policy.policies, (0, sizes[0]), strict=False)
        ]
        _open_dataset(store, terms, collector_id, provenance(role="collector", seed=seed, envs=act.envs))

    stop = StopRequest().listen()
    writer = ShardWriter(store, terms, collector_id, flags.writer, initial_priorities=policy.initial_priorities)
    collector = Collector(
        store=store,
        collector=collector_id,
        rollouts=rollouts,
        builder=SequenceBuilder(terms, collector_id, act.envs),
        writer=writer,
        follower=follower,
        use_params=None if act.params else policy.use_published,
        refresh=flags.refresh,
    )
    name = flags.tracking.run_name or f"collect-{store.root.name}-{collector_id[:6]}"
    tags = {"role": "collect", "game": terms.env.env_id, "dataset": store.root.name, "collector": collector_id}
    tracker = make_tracker(
        TrackingConfig(uri=flags.tracking.tracking_uri, experiment=flags.tracking.experiment, run_name=name, tags=tags)
    )
    tracker.params({**resolved, "provenance": provenance()})
    failed = True
    with StatusLine("collect") as status:
        status.say(f"collect: {terms.env.env_id} into {store.root}, collector {collector_id}, seed {seed}")
        try:
            _run(collector, writer, policy, tracker, status, stop, act)
            failed = False
        except (ValueError, OSError) as error:
            refuse(error)
        finally:
            if failed:
                writer.flush()
            else:
                collector.finish()
            for lanes in groups:
                lanes.close()
            counts = collector.counts
            tracker.metrics(_metrics(counts, writer, policy, 0.0), counts.env_steps)
            tracker.close(failed=failed)
        status.say(
            f"collect: stopped ({stop.reason}): {counts.env_steps} env steps, {counts.episodes} episodes, "
            f"{writer.sequences} sequences in {writer.shards} shards, {writer.bytes_published / 1e6:.1f} MB; "
            f"{len(counts.versions_used - {-1})} parameter versions; MLflow run {tracker.run_id()}"
        )
    return 0


def _open_dataset(store: LocalStore, terms: DatasetTerms, collector_id: str, origin: dict) -> None:
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        agree_on_terms(store, terms)
        write_provenance(store, collector_id, origin)
    except OSError as error:
        refuse(f"dataset is {str(store.root)!r}; allowed: a folder that can be written ({error})")


def _run(collector, writer, policy, tracker, status: StatusLine, stop: StopRequest, act: ActFlags) -> None:
    counts = collector.counts
    started = reported = time.monotonic()
    reported_steps = 0
    recent: list[float] = []
    while not stop:
        collector.turn()
        for lane, episode_return, length in counts.take_finished():
            recent = [*recent[-99:], episode_return]
            values = {f"collect/episode_return/lane_{lane:02d}": episode_return, "collect/episode_steps": length}
            tracker.metrics({**values, "collect/episode_return": episode_return}, counts.env_steps)
        now = time.monotonic()
        rate = (counts.env_steps - reported_steps) / max(now - reported, 1e-9)
        if status.is_due:
            waits = collector.waits_for or ("" if policy.has_network else policy.waits_for)
            status.show(
                waits,
                env_steps=counts.env_steps,
                steps_per_second=rate,
                episodes=counts.episodes,
                mean_return=float(np.mean(recent)) if recent else None,
                version=policy.version,
                sequences=writer.sequences,
            )
        if now - reported >= METRICS_SECONDS:
            tracker.metrics(_metrics(counts, writer, policy, rate), counts.env_steps)
            reported, reported_steps = now, counts.env_steps
        if act.env_steps is not None and counts.env_steps >= act.env_steps:
            stop.ask(f"{act.env_steps} env steps")
        if act.max_minutes is not None and now - started >= 60 * act.max_minutes:
            stop.ask(f"{act.max_minutes} minutes")


def _metrics(counts, writer, policy, rate: float) -> dict[str, float]:
    return {
        "collect/env_steps": counts.env_steps,
        "collect/frames": counts.env_steps * policy.terms.env.frame_skip,
        "collect/env_steps_per_second": rate,
        "collect/episodes": counts.episodes,
        "collect/sequences": writer.sequences,
        "collect/published_bytes": writer.bytes_published,
        "collect/waiting_seconds": counts.waiting_seconds,
        "collect/parameter_version": policy.version,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
