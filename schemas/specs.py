"""What an environment shows and takes, and what a recurrent core carries: plain values with a JSON form."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

LIFE_LOSS_MODES = ("off", "roll", "reset")
CORE_KINDS = ("lstm", "gru", "none")


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape and dtype of one array, without time and batch axes. ``dtype`` is a numpy name such as ``uint8``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Everything that makes two datasets of one game comparable or not.

    Attributes:
        env_id: registered id, such as ``ALE/Pong-v5`` or ``module:EnvId``.
        arguments: every argument that the environment was made with, defaults resolved.
        action_set: the names of the actions in order; its length is the number of actions, never guessed from data.
        observation: one single frame (or vector), before stacking.
        frame_skip: emulator frames per agent step (1 where that has no meaning).
        sticky: probability that the emulator repeats the previous action.
        life_loss: ``off``; ``roll`` zeroes the discount at a lost life; ``reset`` also ends the episode there.
    """

    env_id: str
    observation: ArraySpec
    action_set: tuple[str, ...]
    frame_skip: int = 1
    sticky: float = 0.0
    life_loss: str = "off"
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.life_loss not in LIFE_LOSS_MODES:
            raise ValueError(f"life_loss is {self.life_loss!r}; allowed: {', '.join(LIFE_LOSS_MODES)}")
        if not self.action_set:
            raise ValueError("action_set is empty; allowed: at least one action")

    @property
    def num_actions(self) -> int:
        return len(self.action_set)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "EnvSpec":
        observation = ArraySpec(shape=tuple(value["observation"]["shape"]), dtype=value["observation"]["dtype"])
        return cls(**{**value, "observation": observation, "action_set": tuple(value["action_set"])})


@dataclass(frozen=True, kw_only=True)
class CoreSpec:
    """The recurrent core's state: ``parts`` arrays of ``size`` float32 values, layer-major."""

    kind: str
    layers: int = 1
    width: int = 512

    def __post_init__(self) -> None:
        if self.kind not in CORE_KINDS:
            raise ValueError(f"core kind is {self.kind!r}; allowed: {', '.join(CORE_KINDS)}")
        if self.kind == "none":  # One form only, so that two specs of no core always compare equal.
            object.__setattr__(self, "layers", 0)
            object.__setattr__(self, "width", 0)
        elif self.layers < 1 or self.width < 1:
            raise ValueError(f"core layers and width are {self.layers} and {self.width}; allowed: 1 or more")

    @property
    def parts(self) -> tuple[str, ...]:
        return {"lstm": ("h", "c"), "gru": ("h",), "none": ()}[self.kind]

    @property
    def size(self) -> int:
        """Values per part: layers * width."""
        return self.layers * self.width

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
