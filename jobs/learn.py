"""Train on a dataset while it grows, or on one that has long been complete.

python jobs/learn.py                              data/pong, as collect.py writes it
python jobs/learn.py --dataset data/breakout --updates 10000
python jobs/learn.py --resume                     the newest run in this folder, from its last checkpoint
torchrun --nproc-per-node 2 jobs/learn.py         two processes that share every update
python jobs/learn.py --replay grpc://127.0.0.1:7878     from the replay that a serve_replay.py keeps
python jobs/learn.py --mix data/old=0.25          a quarter of every batch from another dataset
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings, warn
from jobs.flags import DatasetFlags, TrackingFlags, default_threads, read_flags
from jobs.held_out import HeldOutCheck
from jobs.offline import dataset_tags, updates_of_epochs
from jobs.parameters import read_parameters
from jobs.presets import NetworkOptions, Preset, laptop
from jobs.replays import FoundService, MixFlags, ServiceFlags, find_service, make_replay
from jobs.replicas import follow, join
from jobs.run_folder import RunFolder, find_run_to_resume, new_run_name
from jobs.stopping import StopRequest
from jobs.training import CheckpointConfig, Training
from pipeline.dataset import read_terms
from pipeline.limiter import LimiterConfig
from pipeline.params import ParamsPublisher, PublishConfig
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter
from pipeline.provenance import provenance
from pipeline.replay import ReplayConfig
from pipeline.replay_client import RemoteReplay
from pipeline.retention import Retention, RetentionConfig
from pipeline.tracking import TrackingConfig, make_tracker
from r2d2.config import LearnerConfig
from r2d2.data_parallel import Replicas
from r2d2.health import MemoryLimit
from r2d2.learner import Learner
from r2d2.tensors import transfer_buffer
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms

WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """For how long, where, and from what to train.

    Attributes:
        updates: stop when the learner has done this many updates in all.
        epochs: with ``--offline``: stop when as many sequences have been drawn, in all, as this many times the dataset.
        max_minutes: stop after this many minutes.
        seed: of the network's initialisation and the draws.
        device: of the learner; default: cuda where there is a GPU, else cpu.
        threads: torch and decoding threads; default: half the cores, the odd one included.
        init_from: go on from the network, lineage and version in this file, checkpoint or run folder.
        dq_every: updates between two measurements of dQ under all four start strategies; 0: none (paper, section 3).
        offline: train on the dataset as it is: no ratio to keep, nothing is written into it.
        held_out_every: with ``--held-out``: updates between two measurements on the episodes kept apart.
        deterministic: no prefetch, every draw follows the last update: same data, same seed, same updates.
        run_dir: folder of checkpoints; default ``runs/<run name>`` in the current folder.
        resume: continue the run named by ``--run-name`` or ``--run-dir``, else the newest of this dataset.
        dry_run: print the resolved configuration and stop.
    """

    updates: int | None = None
    epochs: float | None = None
    max_minutes: float | None = None
    seed: int = 0
    device: str | None = None
    threads: int = 1
    init_from: Path | None = None
    dq_every: int = 0
    offline: bool = False
    held_out_every: int = 500
    deterministic: bool = False
    run_dir: Path | None = None
    resume: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("updates", "epochs", "max_minutes", "threads", "held_out_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
        for name in ("seed", "dq_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more")
        if self.epochs is not None and (not self.offline or self.updates is not None):
            raise ValueError(f"epochs is {self.epochs}; allowed: with --offline and without --updates")
        if self.init_from is not None and self.resume:
            raise ValueError(f"init_from is {str(self.init_from)!r}; allowed: without --resume, which has a network")


@dataclass(frozen=True, kw_only=True)
class LearnFlags:
    """Flags of learn.py."""

    source: DatasetFlags = field(default_factory=DatasetFlags)
    train: TrainFlags = field(default_factory=TrainFlags)
    window: SequenceGeometry = field(default_factory=lambda: laptop().geometry)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    service: ServiceFlags = field(default_factory=ServiceFlags)
    mixing: MixFlags = field(default_factory=MixFlags)
    replay: ReplayConfig = field(default_factory=lambda: laptop().replay)
    limiter: LimiterConfig = field(default_factory=lambda: laptop().limiter)
    publish: PublishConfig = field(default_factory=PublishConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        self.limiter.refuse_capacity(self.replay.capacity)
        if self.train.offline and self.retention.deletes:
            raise ValueError("retain_gb, retain_sequences are set; allowed: neither with --offline")
        if self.replay.held_out and not self.train.offline:
            raise ValueError(f"held_out is {self.replay.held_out}; allowed: with --offline, on a fixed dataset")
        if self.service.replay and self.mixing.mix:
            raise ValueError("mix is set; allowed: without --replay, whose serve_replay.py takes --mix itself")

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> "LearnFlags":
        network = preset.network.with_core(terms.core) if terms else preset.network
        return cls(
            train=TrainFlags(threads=default_threads(for_learner=True)),
            window=terms.geometry if terms else preset.geometry,
            network=network,
            learner=preset.learner,
            replay=preset.replay,
            limiter=preset.limiter,
        )


def main(argv: Sequence[str]) -> int:
    show_warnings()
    stop = StopRequest().listen()
    with refusing(OSError), StatusLine("learn") as status:
        flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
        if flags.train.dry_run:
            dry_run({**asdict(flags), "dataset": str(flags.source.store().root)})
        service = None
        if flags.service.replay:
            service = find_service(flags.service.replay, stop, status, flags.train.max_minutes)
            if service is None:
                return 0
            if flags.source.dataset is None:
                argv = [*argv, "--dataset", service.description.dataset]
                flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
            service.refuse_other_dataset(terms, str(flags.source.store().root))
            _refuse_replay_settings(flags, LearnFlags.defaults(preset, terms))
        if terms is None:
            if not _wait_for_dataset(flags, stop, status):
                return 0
            flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
        if terms is None:
            refuse("dataset.json has gone again")
        _check_identity(flags, preset, terms)
        torch.set_num_threads(flags.train.threads)
        replicas, device = join(flags.train.device, flags.limiter.batch_size)
        learner = _make_learner(flags, terms, device, replicas)
        if replicas.rank:
            return follow(learner, replicas)
        updates = flags.train.updates
        if flags.train.epochs is not None:
            store = flags.source.open_store()
            updates = updates_of_epochs(flags.train.epochs, store, terms, flags.replay, flags.limiter)
            status.say(f"learn: {flags.train.epochs:g} epochs are {updates:,} updates")
        training = _build(flags, terms, service, learner, status)
        learner.share_state()
    problem, failed = None, True
    try:
        with StatusLine("learn") as status:
            training.run(stop, status, updates=updates, max_minutes=flags.train.max_minutes)
        failed = False
    except (ValueError, OSError) as error:
        problem = error
    finally:
        written = training.close(failed=failed)
        replicas.close(failed=failed)
        print(f"learn: stopped ({stop.reason or 'failed'}): {training.summary()}", flush=True)
    if problem is not None:
        refuse(problem)
    return 0 if written else 1


def _make_learner(flags: LearnFlags, terms: DatasetTerms, device: str, replicas: Replicas) -> Learner:
    return Learner(
        flags.network.spec(terms.env, flags.window.frame_stack),
        flags.learner,
        geometry=flags.window,
        stored=terms.geometry,
        life_loss=terms.env.life_loss,
        device=device,
        seed=flags.train.seed,
        replicas=replicas,
    )


def _build(
    flags: LearnFlags, terms: DatasetTerms, service: FoundService | None, learner: Learner, status: StatusLine
) -> Training:
    train, store, offline = flags.train, flags.source.open_store(), flags.train.offline
    name = flags.tracking.run_name
    if train.resume:
        folder = find_run_to_resume(train.run_dir, name, store.root)
        name = folder.record["run"]
    else:
        name = name or new_run_name(store.root.name, train.seed)
        folder = RunFolder(train.run_dir or Path("runs") / name)
        folder.refuse_used()
    for notice in learner.notices:
        warn(notice)
    if train.init_from is not None:
        learner.start_from(read_parameters(train.init_from, "init_from"))
        status.say(f"learn: goes on from version {learner.version} in {train.init_from}")
    if learner.initializer is not None:
        status.say(f"learn: {learner.initializer_share:.2%} of the trained parameters are the State Initializer's")
    publishes_as = service.description.run if service else name
    if service:
        replay = service.replay(batch_size=flags.limiter.batch_size, threads=train.threads)
    else:
        replay = make_replay(
            store,
            terms,
            flags.replay,
            replace(flags.limiter, min_sequences=1, samples_per_insert=None) if offline else flags.limiter,
            shares=flags.mixing.shares(),
            seed=train.seed,
            threads=train.threads,
        )
    tracker = make_tracker(
        TrackingConfig(
            uri=flags.tracking.tracking_uri,
            experiment=flags.tracking.experiment,
            run_name=name,
            tags={
                "role": "learn",
                "game": terms.env.env_id,
                "dataset": store.root.name,
                "run": publishes_as,
                **dataset_tags(store, "start"),
            },
            run_id=folder.record.get("mlflow_run_id") if train.resume else None,
        )
    )
    progress = None
    if not offline and not isinstance(replay, RemoteReplay):  # A replay elsewhere publishes its own progress.
        progress = ProgressWriter(store, name, lambda: replay.progress(learner.updates))
    training = Training(
        learner=learner,
        replay=replay,
        prefetcher=Prefetcher(
            replay,
            flags.limiter.batch_size,
            deterministic=train.deterministic,
            make_buffer=lambda: transfer_buffer(replay.observation_buffer(flags.limiter.batch_size), learner.device),
        ),
        progress=progress,
        publisher=None if offline else ParamsPublisher(store, publishes_as, flags.publish),
        retention=None if offline else Retention(store, flags.retention),
        folder=folder,
        tracker=tracker,
        config=flags.checkpoint,
        memory=flags.memory,
        dq_every=train.dq_every,
        held_out=HeldOutCheck(
            store, terms, share=flags.replay.held_out, gamma=flags.learner.gamma, every=train.held_out_every
        )
        if flags.replay.held_out
        else None,
        closing_tags=lambda: dataset_tags(store, "close"),
    )
    if train.resume:
        for line in training.restore():
            status.say(f"learn: {line}")
    else:
        tracker.params(
            {**asdict(flags), "terms": asdict(terms), "network": asdict(learner.spec), "provenance": provenance()}
        )
    folder.write({"run": name, "dataset": str(store.root)})
    parameters = sum(value.numel() for value in learner.network.parameters())
    status.say(
        f"learn: {terms.env.env_id} from {store.root} as run {name}, {parameters:,} parameters on {learner.device}"
    )
    if service:
        status.say(f"learn: draws from {service.connection.address}, publishes parameters as run {publishes_as}")
    return training


def _refuse_replay_settings(flags: LearnFlags, defaults: LearnFlags) -> None:
    """What decides the draws is the service's affair: a flag that would do nothing is refused."""
    for ours, default in ((flags.replay, defaults.replay), (flags.limiter, defaults.limiter)):
        for name, value in asdict(ours).items():
            if name != "batch_size" and value != getattr(default, name):
                raise ValueError(f"{name} is {value}; allowed: not with --replay, give it to serve_replay.py")


def _wait_for_dataset(flags: LearnFlags, stop: StopRequest, status: StatusLine) -> bool:
    """True when there is one."""
    store = flags.source.store()
    started = time.monotonic()
    limit = None if flags.train.max_minutes is None else 60 * flags.train.max_minutes
    while read_terms(store) is None:
        status.show(waits_for=f"a dataset in {store.root}; start one with python jobs/collect.py")
        if stop.wait(WAIT_SECONDS) or (limit is not None and time.monotonic() - started > limit):
            return False
    return True


def _check_identity(flags: LearnFlags, preset: Preset, terms: DatasetTerms) -> None:
    """Flags that speak of the environment must agree with the dataset; the others never need to be given."""
    if not flags.source.names_identity():
        return
    wanted = flags.source.environment(preset, terms)
    for name, ours, theirs in (
        ("env", wanted.env_id, terms.env.env_id),
        ("sticky", wanted.sticky, terms.env.sticky),
        ("life_loss", wanted.life_loss, terms.env.life_loss),
        ("env_arg", wanted.arguments, dict(terms.env.arguments)),
    ):
        if ours != theirs:
            raise ValueError(f"{name} is {ours}; allowed: {theirs}, which the dataset has")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
