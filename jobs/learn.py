"""Train on a dataset while it grows, or on one that has long been complete.

python jobs/learn.py                              data/pong, as collect.py writes it
python jobs/learn.py --dataset data/breakout --updates 10000
python jobs/learn.py --resume                     the newest run in this folder, from its last checkpoint
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings, warn
from jobs.flags import DatasetFlags, TrackingFlags, default_threads, read_flags
from jobs.presets import NetworkOptions, Preset, laptop
from jobs.run_folder import RunFolder, find_run_to_resume, new_run_name
from jobs.stopping import StopRequest
from jobs.training import CheckpointConfig, Training
from pipeline.dataset import read_terms
from pipeline.limiter import LimiterConfig
from pipeline.params import ParamsPublisher, PublishConfig
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter
from pipeline.provenance import provenance
from pipeline.replay import Replay, ReplayConfig
from pipeline.retention import Retention, RetentionConfig
from pipeline.tracking import TrackingConfig, make_tracker
from r2d2.config import LearnerConfig
from r2d2.learner import Learner
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms

WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """For how long, where, and from what to train.

    Attributes:
        updates: stop when the learner has done this many updates in all.
        max_minutes: stop after this many minutes.
        seed: of the network's initialisation and the draws.
        device: of the learner; default: cuda where there is a GPU, else cpu.
        threads: torch and decoding threads; default: half the cores, the odd one included.
        offline: train on the dataset as it is: no ratio to keep, nothing is written into it.
        deterministic: no prefetch, every draw follows the last update: same data, same seed, same updates.
        run_dir: folder of checkpoints; default ``runs/<run name>`` in the current folder.
        resume: continue the run named by ``--run-name`` or ``--run-dir``, else the newest of this dataset.
        dry_run: print the resolved configuration and stop.
    """

    updates: int | None = None
    max_minutes: float | None = None
    seed: int = 0
    device: str | None = None
    threads: int = 1
    offline: bool = False
    deterministic: bool = False
    run_dir: Path | None = None
    resume: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("updates", "max_minutes", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; allowed: 0 or more")


@dataclass(frozen=True, kw_only=True)
class LearnFlags:
    """Flags of learn.py."""

    source: DatasetFlags = field(default_factory=DatasetFlags)
    train: TrainFlags = field(default_factory=TrainFlags)
    window: SequenceGeometry = field(default_factory=lambda: laptop().geometry)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    replay: ReplayConfig = field(default_factory=lambda: laptop().replay)
    limiter: LimiterConfig = field(default_factory=lambda: laptop().limiter)
    publish: PublishConfig = field(default_factory=PublishConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        self.limiter.refuse_capacity(self.replay.capacity)
        if self.train.offline and self.retention.deletes:
            raise ValueError("retain_gb, retain_sequences are set; allowed: neither with --offline")

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
        if terms is None:
            if not _wait_for_dataset(flags, stop, status):
                return 0
            flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
        if terms is None:
            refuse("dataset.json has gone again")
        _check_identity(flags, preset, terms)
        torch.set_num_threads(flags.train.threads)
        training = _build(flags, terms, status)
    problem, failed = None, True
    try:
        with StatusLine("learn") as status:
            training.run(stop, status, updates=flags.train.updates, max_minutes=flags.train.max_minutes)
        failed = False
    except (ValueError, OSError) as error:
        problem = error
    finally:
        written = training.close(failed=failed)
        print(f"learn: stopped ({stop.reason or 'failed'}): {training.summary()}", flush=True)
    if problem is not None:
        refuse(problem)
    return 0 if written else 1


def _build(flags: LearnFlags, terms: DatasetTerms, status: StatusLine) -> Training:
    train, store, offline = flags.train, flags.source.store(), flags.train.offline
    name = flags.tracking.run_name
    if train.resume:
        folder = find_run_to_resume(train.run_dir, name, store.root)
        name = folder.record["run"]
    else:
        name = name or new_run_name(store.root.name, train.seed)
        folder = RunFolder(train.run_dir or Path("runs") / name)
        folder.refuse_used()
    spec = flags.network.spec(terms.env, flags.window.frame_stack)
    device = train.device or ("cuda" if torch.cuda.is_available() else "cpu")
    learner = Learner(
        spec,
        flags.learner,
        geometry=flags.window,
        stored=terms.geometry,
        life_loss=terms.env.life_loss,
        device=device,
        seed=train.seed,
    )
    for notice in learner.notices:
        warn(notice)
    replay = Replay(
        store,
        terms,
        flags.replay,
        replace(flags.limiter, min_sequences=1, samples_per_insert=None) if offline else flags.limiter,
        generator=np.random.default_rng(train.seed),
        threads=train.threads,
    )
    tracker = make_tracker(
        TrackingConfig(
            uri=flags.tracking.tracking_uri,
            experiment=flags.tracking.experiment,
            run_name=name,
            tags={"role": "learn", "game": terms.env.env_id, "dataset": store.root.name, "run": name},
            run_id=folder.record.get("mlflow_run_id") if train.resume else None,
        )
    )
    training = Training(
        learner=learner,
        replay=replay,
        prefetcher=Prefetcher(replay, flags.limiter.batch_size, deterministic=train.deterministic),
        progress=None if offline else ProgressWriter(store, name, lambda: replay.progress(learner.updates)),
        publisher=None if offline else ParamsPublisher(store, name, flags.publish),
        retention=None if offline else Retention(store, flags.retention),
        folder=folder,
        tracker=tracker,
        config=flags.checkpoint,
    )
    if train.resume:
        for line in training.restore():
            status.say(f"learn: {line}")
    else:
        tracker.params({**asdict(flags), "terms": asdict(terms), "network": asdict(spec), "provenance": provenance()})
    folder.write({"run": name, "dataset": str(store.root)})
    parameters = sum(value.numel() for value in learner.network.parameters())
    status.say(f"learn: {terms.env.env_id} from {store.root} as run {name}, {parameters:,} parameters on {device}")
    return training


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
