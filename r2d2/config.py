"""What a network is made of, and what a learner does with it. Every default names its source.

"paper" is Kapturowski et al. 2019, "article" the write-up that this project implements, "ours" a value neither gives.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from schemas.geometry import SequenceGeometry
from schemas.specs import ArraySpec, CoreSpec

# (channels, kernel, stride) per convolution.
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015, kept by the paper
SMALL = ((16, 8, 4), (32, 4, 2), (32, 3, 2))  # ours, for the laptop preset: 16 features where Nature has 49 a channel
TINY = ((16, 6, 3), (32, 4, 2))  # ours, for 42x42 frames: half the time of SMALL on 84x84 for an update
ENCODERS = {"nature": NATURE, "small": SMALL, "tiny": TINY, "mlp": ()}

INITIAL_STATES = ("stored", "zero", "initializer")
INITIALIZERS = ("mlp", "linear")
PAPER_CORE = CoreSpec(kind="lstm", layers=1, width=512)
TIME_WEIGHTINGS = ("uniform", "recent")
PRECISIONS = ("float32", "bfloat16")
ACTING_FIELDS = ("gamma", "eta", "rescaling", "rescaling_epsilon")
MOST_IMAGE_CHANNELS = 4


def is_image(observation: ArraySpec) -> bool:
    """Shape ``(H, W)``, or ``(H, W, C)`` with at most four channels; channels first is not guessed at."""
    shape = observation.shape
    return len(shape) == 2 or (len(shape) == 3 and shape[-1] <= MOST_IMAGE_CHANNELS)


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Encoder, recurrent core and dueling heads; the defaults are the paper's network.

    Attributes:
        observation: one frame or vector, as stored.
        num_actions: A, from the environment's action set, never from data.
        frame_stack: K single frames per input.
        convolutions: (channels, kernel, stride) per layer, see ``ENCODERS``; empty for an MLP on the flattened input.
        dense: widths of the layers after them; empty sends the convolutions straight into the core (article 3.2).
        core: recurrent core; its layers and width.
        use_previous_action: the one-hot previous action enters the core (paper, article).
        use_previous_reward: so does the previous reward (paper; the article leaves it out).
        dueling_width: hidden units of the value head and of the advantage head.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    observation: ArraySpec
    num_actions: int
    frame_stack: int = 4
    convolutions: tuple[tuple[int, int, int], ...] = NATURE
    dense: tuple[int, ...] = (512,)
    core: CoreSpec = PAPER_CORE
    use_previous_action: bool = True
    use_previous_reward: bool = True
    dueling_width: int = 512

    def differences(self, other: "NetworkSpec") -> str:
        """Each field that differs, as ``core.width is 77, not 128``."""
        ours, theirs = _flat(asdict(self)), _flat(asdict(other))
        return "; ".join(f"{name} is {ours[name]}, not {theirs[name]}" for name in ours if ours[name] != theirs[name])

    def __post_init__(self) -> None:
        for field in ("num_actions", "frame_stack", "dueling_width"):
            _require(field, getattr(self, field), getattr(self, field) >= 1, "1 or more")
        _require("dense", self.dense, all(width >= 1 for width in self.dense), "widths of 1 or more")
        layers_fit = all(len(layer) == 3 and min(layer) >= 1 for layer in self.convolutions)
        _require("convolutions", self.convolutions, layers_fit, "(channels, kernel, stride), each 1 or more")
        if self.convolutions:
            shape, fits = self.observation.shape, is_image(self.observation)
            _require("observation shape", shape, fits, "(H, W) or (H, W, C <= 4) for convolutions")
            _require("observation shape", shape, min(self.map_shape[1:]) >= 1, "larger images for these convolutions")

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) that the convolutions put out."""
        height, width = self.observation.shape[:2]
        for _, kernel, stride in self.convolutions:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        return self.convolutions[-1][0], height, width

    @property
    def input_channels(self) -> int:
        """Channels of the stacked image: K times the image's own."""
        return self.frame_stack * (self.observation.shape[2] if len(self.observation.shape) == 3 else 1)

    @property
    def flat_size(self) -> int:
        """Values that enter the dense layers."""
        if not self.convolutions:
            return self.frame_stack * self.observation.size
        channels, height, width = self.map_shape
        return channels * height * width

    @property
    def feature_size(self) -> int:
        """F, the encoder's output."""
        return self.dense[-1] if self.dense else self.flat_size

    @property
    def core_input_size(self) -> int:
        return self.feature_size + self.num_actions * self.use_previous_action + int(self.use_previous_reward)

    @property
    def hidden_size(self) -> int:
        """What the heads read: the core's width, or its input where there is no recurrence."""
        return self.core.width or self.core_input_size

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "NetworkSpec":
        """Raises ValueError when ``value`` is not what ``to_json`` gave."""
        try:
            shape, dtype = value["observation"]["shape"], value["observation"]["dtype"]
            rebuilt = {
                "observation": ArraySpec(shape=tuple(shape), dtype=dtype),
                "convolutions": tuple(tuple(layer) for layer in value["convolutions"]),
                "dense": tuple(value["dense"]),
                "core": CoreSpec(**value["core"]),
            }
            return cls(**{**value, **rebuilt})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the description of a network: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Everything an update depends on, besides the network and the window. The defaults are the paper's.

    Attributes:
        gamma: discount per agent step (paper, article: 0.997).
        rescaling: train in h-space (paper section 2.3); off leaves returns as they are.
        rescaling_epsilon: the linear part of h (paper: 1e-3).
        learning_rate: of Adam (paper: 1e-4; article: 6.25e-5).
        adam_epsilon: of Adam, added to its denominator (paper: 1e-3).
        clip_norm: largest norm of the whole gradient (ours: 40).
        eta: priority is eta * max + (1 - eta) * mean of |delta| (paper: 0.9; article 5.4: 1).
        beta: exponent of the importance weights (ours: 0.6).
        importance_weights: off weighs every sequence alike.
        target_copy_updates: updates between copies into the target network (paper: 2500; article: 1000).
        initial_state: what a window starts from: the stored state, zeros, or the State Initializer (article 3.2).
        initializer: two-layer ``mlp`` on the encoding, or one ``linear`` layer on pooled maps (article 3.2).
        initializer_width: hidden units of the ``mlp`` (ours: 64).
        trust_stored_state: use stored states whatever network made them, to measure the harm.
        tbptt: steps per segment of truncated backpropagation, 0 for the whole unroll (article 2.3: 20).
        tbptt_carry: the state crosses segment borders; off restarts each segment from zeros (ablation).
        cql_alpha: weight of the conservative term, for fixed data (Kumar et al. 2020); 0: none.
        time_weighting: ``recent`` weighs later steps of a sequence up (article 3.3; formula ours).
        precision: ``bfloat16`` runs the networks under autocast; targets and losses stay float32.
        compile: compile the encoders with torch.compile (the first updates are slow).
        channels_last: keep convolutions in channels-last memory order (1.3 times as fast an update on a CPU).

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    gamma: float = 0.997
    rescaling: bool = True
    rescaling_epsilon: float = 1e-3
    learning_rate: float = 1e-4
    adam_epsilon: float = 1e-3
    clip_norm: float = 40.0
    eta: float = 0.9
    beta: float = 0.6
    importance_weights: bool = True
    target_copy_updates: int = 2500
    initial_state: str = "stored"
    initializer: str = "mlp"
    initializer_width: int = 64
    trust_stored_state: bool = False
    tbptt: int = 0
    tbptt_carry: bool = True
    cql_alpha: float = 0.0
    time_weighting: str = "uniform"
    precision: str = "float32"
    compile: bool = False
    channels_last: bool = True

    def __post_init__(self) -> None:
        for field in ("gamma", "eta", "beta"):
            _require(field, getattr(self, field), 0 <= getattr(self, field) <= 1, "0 to 1")
        for field in ("learning_rate", "adam_epsilon", "clip_norm"):
            _require(field, getattr(self, field), getattr(self, field) > 0, "above 0")
        for field, choices in (
            ("initial_state", INITIAL_STATES),
            ("initializer", INITIALIZERS),
            ("time_weighting", TIME_WEIGHTINGS),
            ("precision", PRECISIONS),
        ):
            _require(field, repr(getattr(self, field)), getattr(self, field) in choices, ", ".join(choices))
        _require("rescaling_epsilon", self.rescaling_epsilon, self.rescaling_epsilon >= 0, "0 or more")
        _require("cql_alpha", self.cql_alpha, self.cql_alpha >= 0, "0 or more")
        _require("target_copy_updates", self.target_copy_updates, self.target_copy_updates >= 1, "1 or more")
        _require("initializer_width", self.initializer_width, self.initializer_width >= 1, "1 or more")
        _require("tbptt", self.tbptt, self.tbptt >= 0, "0 (whole unroll) or more")
        _require("tbptt_carry", self.tbptt_carry, self.tbptt_carry or self.tbptt > 0, "True unless tbptt is set")
        trusts_nothing = self.trust_stored_state and self.initial_state == "zero"
        _require("trust_stored_state", self.trust_stored_state, not trusts_nothing, "False when initial_state is zero")

    @property
    def epsilon(self) -> float | None:
        """Of the rescaling in force; None where there is none."""
        return self.rescaling_epsilon if self.rescaling else None

    def acting_values(self) -> dict[str, Any]:
        """What an actor must know to price a new sequence as this learner would; travels with the parameters."""
        return {name: getattr(self, name) for name in ACTING_FIELDS}

    def with_acting_values(self, values: dict[str, Any]) -> "LearnerConfig":
        """This configuration, pricing sequences as the one whose ``acting_values`` these are.

        Raises:
            ValueError: a value is missing, unknown or not allowed.
        """
        if values.keys() != set(ACTING_FIELDS):
            raise ValueError(f"acting values are {sorted(values)}; allowed: {', '.join(ACTING_FIELDS)}")
        return replace(self, **values)

    def refuse_impossible(self, spec: NetworkSpec, geometry: SequenceGeometry) -> None:
        """Raise ValueError when these options make no sense for this network and window."""
        stacks = spec.frame_stack == geometry.frame_stack
        _require("frame_stack of the network", spec.frame_stack, stacks, f"{geometry.frame_stack}, the window's")
        _require("tbptt", self.tbptt, self.tbptt <= geometry.unroll, f"at most unroll {geometry.unroll}")
        if spec.core.kind == "none":
            starts = self.initial_state != "initializer"
            _require("initial_state", self.initial_state, starts, "stored or zero, for a network without recurrence")
            _require("tbptt", self.tbptt, not self.tbptt, "0, for a network without recurrence")


def _require(field: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{field} is {value}; allowed: {allowed}")


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found
