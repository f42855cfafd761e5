"""Flags of learn.py, and what they must not say together."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from jobs.devices import refuse_device
from jobs.flags import DatasetFlags, TrackingFlags, default_threads
from jobs.presets import NetworkOptions, Preset, laptop
from jobs.replays import MixFlags, ServiceFlags
from jobs.training import CheckpointConfig
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.params import PublishConfig
from pipeline.retention import RetentionConfig
from r2d2.config import LearnerConfig
from r2d2.health import MemoryLimit
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms


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
        refuse_device(self.device)
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


def refuse_replay_settings(flags: LearnFlags, defaults: LearnFlags) -> None:
    """What decides the draws is the service's affair: a flag that would do nothing is refused."""
    for ours, default in ((flags.replay, defaults.replay), (flags.limiter, defaults.limiter)):
        for name, value in asdict(ours).items():
            if name != "batch_size" and value != getattr(default, name):
                raise ValueError(f"{name} is {value}; allowed: not with --replay, give it to serve_replay.py")


def check_identity(flags: LearnFlags, preset: Preset, terms: DatasetTerms) -> None:
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
