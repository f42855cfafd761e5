"""What the article or others do that our own parts refuse to: built here on purpose, for the experiments alone."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from r2d2 import learner as learner_module
from r2d2 import priorities as priorities_module
from r2d2 import tensors as tensors_module
from r2d2.learner import Learner
from r2d2.tensors import WindowTensors
from schemas.records import ReplaySample


def quantised_states(sample: ReplaySample) -> ReplaySample:
    """Stored states as int8 with one scale for each state (article 5.3): 255 values between its extremes."""

    def quantise(part: np.ndarray) -> np.ndarray:
        scale = np.maximum(np.abs(part).max(axis=1, keepdims=True), 1e-12) / 127
        return (np.round(part / scale).astype(np.int8) * scale).astype(np.float32)

    batch = sample.batch
    return replace(
        sample,
        batch=replace(
            batch,
            core=tuple(quantise(part) for part in batch.core),
            unroll_core=tuple(quantise(part) for part in batch.unroll_core),
        ),
    )


def no_forget_bias(learner: Learner) -> None:
    """The forget gate starts at bias 0, not 1 (article 5.1)."""
    width = learner.spec.core.width
    with torch.no_grad():
        for network in (learner.network, learner.target):
            network.core.bias_ih_l0[width : 2 * width] = 0.0


class ShortDropped(SequenceBuilder):
    """Sequences that an episode's end cuts short of the unroll are thrown away."""

    def _finish(self, lane: int, *rest: Any) -> list:
        emitted = super()._finish(lane, *rest)
        length, unroll = self._geometry.burn_in, self._geometry.unroll
        kept = [each for each in emitted if each.num_steps - (length - each.first_valid) >= unroll]
        self._sequences -= len(emitted) - len(kept)
        return [replace(each, sequence=emitted[0].sequence + i) for i, each in enumerate(kept)]


class FinishedFrameKept(Rollout):
    """After an episode's end its last observation stays the current one (article 5.2's own listing)."""

    def observe(self):
        step = super().observe()
        began = ~step.is_transition
        self._stack[began, -1] = step.stack[began, -1]
        return step


@contextlib.contextmanager
def terminal_step_dropped() -> Iterator[None]:
    """The loss is masked by (1 - done_t)."""
    right = tensors_module.transitions

    def dropping(batch, geometry, stored, life_loss):
        rows = right(batch, geometry, stored, life_loss)
        return replace(rows, mask=rows.mask & (rows.continues[: len(rows.mask)] > 0))

    with patch.object(tensors_module, "transitions", dropping):
        yield


@contextlib.contextmanager
def current_action_fed_in() -> Iterator[None]:
    """The action taken on an observation enters the core together with it (article's listing 4.3)."""

    def previous(self: WindowTensors, first: int, stop: int) -> tuple[Tensor, Tensor]:
        shifted = torch.cat([self.previous_action[1:], self.previous_action[-1:]])
        return shifted[first:stop], self.previous_reward[first:stop]

    with patch.object(WindowTensors, "previous", previous):
        yield


@contextlib.contextmanager
def first_step_priorities() -> Iterator[None]:
    """A sequence's priority is the error of its first trained step."""

    def first(errors: Tensor, mask: Tensor, eta: float) -> Tensor:
        return torch.where(mask, errors.abs(), 0.0)[0]

    with (
        patch.object(priorities_module, "sequence_priorities", first),
        patch.object(learner_module, "sequence_priorities", first),
    ):
        yield
