"""Whole configurations by name: ``laptop`` (the default), ``paper``, ``article``.

Each value not given by its source is ours and says so here or beside its field.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.environments import EnvironmentConfig
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from r2d2.config import NATURE, SMALL, TINY, LearnerConfig, NetworkSpec, is_image
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec, EnvSpec

IMAGE_ENCODERS = {"nature": NATURE, "small": SMALL, "tiny": TINY}


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """The recurrent core: part of a dataset's terms.

    Attributes:
        core: ``lstm`` (paper, article), ``gru``, or ``none`` for a feed-forward network.
        core_layers: stacked recurrent layers (paper, article: 1).
        core_width: H, units per layer (paper, article: 512).
    """

    core: str = "lstm"
    core_layers: int = 1
    core_width: int = 512

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> CoreSpec:
        return CoreSpec(kind=self.core, layers=self.core_layers, width=self.core_width)

    @classmethod
    def of(cls, spec: CoreSpec) -> "CoreOptions":
        return cls(core=spec.kind, core_layers=spec.layers, core_width=spec.width)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """A network but for what the environment decides.

    Attributes:
        image_encoder: convolutions for images, ``nature``, ``small`` or ``tiny``; vectors enter the dense layers.
        dense: widths of the encoder's dense layers; without any, convolutions enter the core directly (article 3.2).
        dueling_width: hidden units of the value head and of the advantage head.
        use_previous_action: the one-hot previous action enters the core.
        use_previous_reward: the previous reward enters the core.
    """

    image_encoder: str = "nature"
    dense: tuple[int, ...] = (512,)
    core: CoreOptions = CoreOptions()
    dueling_width: int = 512
    use_previous_action: bool = True
    use_previous_reward: bool = True

    def __post_init__(self) -> None:
        if self.image_encoder not in IMAGE_ENCODERS:
            raise ValueError(f"image_encoder is {self.image_encoder!r}; allowed: {', '.join(IMAGE_ENCODERS)}")

    def with_core(self, core: CoreSpec) -> "NetworkOptions":
        return replace(self, core=CoreOptions.of(core))

    def spec(self, env: EnvSpec, frame_stack: int) -> NetworkSpec:
        return NetworkSpec(
            observation=env.observation,
            num_actions=env.num_actions,
            frame_stack=frame_stack,
            convolutions=IMAGE_ENCODERS[self.image_encoder] if is_image(env.observation) else (),
            dense=self.dense,
            core=self.core.spec(),
            use_previous_action=self.use_previous_action,
            use_previous_reward=self.use_previous_reward,
            dueling_width=self.dueling_width,
        )


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that the two jobs need, with nothing left open but the dataset.

    ``refresh_env_steps``: steps per lane between two looks for newer parameters (paper: 400).
    """

    environment: EnvironmentConfig
    geometry: SequenceGeometry
    network: NetworkOptions
    learner: LearnerConfig
    replay: ReplayConfig
    limiter: LimiterConfig
    envs: int
    refresh_env_steps: int = 400


def paper() -> Preset:
    """Kapturowski et al. 2019, table of hyperparameters; clip, beta and samples per insert are ours."""
    return Preset(
        environment=EnvironmentConfig(arguments={"full_action_space": True}),
        geometry=SequenceGeometry(burn_in=40, unroll=80, bootstrap=5, stride=40, frame_stack=4),
        network=NetworkOptions(),
        learner=LearnerConfig(),
        replay=ReplayConfig(capacity=100_000, alpha=0.9),
        limiter=LimiterConfig(samples_per_insert=0.8, min_sequences=5_000, batch_size=64),
        envs=32,
    )


def article() -> Preset:
    """The article's settings; what it leaves open (frame stack, capacity, lanes) is the paper's or ours."""
    return Preset(
        environment=EnvironmentConfig(),
        geometry=SequenceGeometry(burn_in=0, unroll=80, bootstrap=3, stride=80, frame_stack=4),
        network=NetworkOptions(dense=(), use_previous_reward=False),
        learner=LearnerConfig(learning_rate=6.25e-5, eta=1.0, target_copy_updates=1000, tbptt=20),
        replay=ReplayConfig(capacity=100_000, alpha=0.5),
        limiter=LimiterConfig(samples_per_insert=0.8, min_sequences=1_000, batch_size=32),
        envs=16,
        refresh_env_steps=80,  # "Every submission": a lane submits a sequence every 80 steps.
    )


def laptop() -> Preset:
    """Ours, for two CPU cores (``make learn-pong``): many small updates on small frames, 0.45 M parameters."""
    return Preset(
        environment=EnvironmentConfig(arguments={"img_height": 42, "img_width": 42}),
        geometry=SequenceGeometry(burn_in=4, unroll=16, bootstrap=5, stride=16, frame_stack=2),
        network=NetworkOptions(image_encoder="tiny", dense=(256,), core=CoreOptions(core_width=128), dueling_width=128),
        learner=LearnerConfig(gamma=0.99, learning_rate=5e-4, adam_epsilon=1e-6, beta=0.4, target_copy_updates=400),
        replay=ReplayConfig(capacity=50_000, alpha=0.6),
        limiter=LimiterConfig(samples_per_insert=8.0, min_sequences=500, batch_size=16),
        envs=16,
        refresh_env_steps=50,
    )


PRESETS: dict[str, Callable[[], Preset]] = {"laptop": laptop, "paper": paper, "article": article}
DEFAULT_PRESET = "laptop"


def preset_named(name: str) -> Preset:
    """Raises ValueError naming the presets there are."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]()
