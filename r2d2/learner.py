"""The learner: one update of the online network from one replayed batch (Kapturowski et al. 2019, section 2.3)."""

import secrets
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r2d2.burn_in import burn_in, choose
from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.diagnostics import STRATEGIES, strategy_discrepancies, window_discrepancies
from r2d2.initializer import StateInitializer
from r2d2.losses import row_weights, sequence_losses, td_errors
from r2d2.networks import R2D2Network, State, build_network, empty_network, zero_state
from r2d2.priorities import importance_weights, sequence_priorities
from r2d2.serialize import Parameters, load_tensors
from r2d2.targets import double_q_targets
from r2d2.tensors import WindowTensors, core_fits, window_tensors
from schemas.geometry import SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch

LINEAGE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class LearnerOutput:
    """What one step gives back.

    Attributes:
        priorities: float64 ``[B]``, of the sample's sequences, before alpha; not finite where the errors were not.
        metrics: plain numbers under fixed names; one that has no value in this batch is left out.
        updated: False when loss or gradient was not finite, and no parameter was touched.
    """

    priorities: np.ndarray
    metrics: dict[str, float]
    updated: bool


class Learner:
    """Online network, target network and optimiser; ``step`` is deterministic given state and sample.

    Attributes:
        network: the online network; hand it to ``params_to_bytes`` with ``updates`` as its version.
        updates: updates done; it is what the target copy counts.
        lineage: 16 bytes born with the random initialisation; states of another lineage mean nothing here.
        notices: one line each on what this combination of window and options cannot do.

    Args:
        geometry: the window to use; its stride is not looked at.
        stored: the window the dataset stores.
        life_loss: ``off``, ``roll`` or ``reset``.
        device: of all tensors.
        seed: of the random initialisation, the only randomness here.
        lineage: None draws a new one.

    Raises:
        ValueError: options that make no sense together, or a window larger than the stored one.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        config: LearnerConfig,
        *,
        geometry: SequenceGeometry,
        stored: SequenceGeometry,
        life_loss: str = "off",
        device: torch.device | str = "cpu",
        seed: int = 0,
        lineage: bytes | None = None,
    ) -> None:
        geometry.refuse_larger(stored)
        config.refuse_impossible(spec, geometry)
        self.spec, self.config, self.geometry, self.stored = spec, config, geometry, stored
        self.life_loss, self.device = life_loss, torch.device(device)
        self.lineage = secrets.token_bytes(LINEAGE_BYTES) if lineage is None else lineage
        self.updates = 0

        generator = torch.Generator().manual_seed(seed)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.network = build_network(spec, generator).to(self.device, memory_format=layout)
        self.target = empty_network(spec).to(self.device, memory_format=layout).requires_grad_(False)
        self._copy_target()
        self.initializer = None
        if config.initial_state == "initializer":
            self.initializer = StateInitializer(spec, config.initializer, config.initializer_width, generator)
            self.initializer.to(self.device)
        self._parameters = [*self.network.parameters(), *(self.initializer.parameters() if self.initializer else ())]
        self._optimizer = torch.optim.Adam(
            self._parameters, lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        self._encoders = {
            network: torch.compile(network.encode) if config.compile else network.encode
            for network in (self.network, self.target)
        }
        self.notices = tuple(self._notices())

    def step(self, sample: ReplaySample) -> LearnerOutput:
        """One update. Priorities belong to the weights before it.

        Raises:
            ValueError: the batch holds actions this network does not have.
        """
        return self.update(self.load(sample.batch), sample)

    def load(self, batch: SequenceBatch) -> WindowTensors:
        """The batch on the device, cropped to the window in use; may run ahead of ``update``."""
        return window_tensors(
            batch,
            self.geometry,
            self.stored,
            core=self.spec.core,
            num_actions=self.spec.num_actions,
            life_loss=self.life_loss,
            device=self.device,
        )

    def update(self, window: WindowTensors, sample: ReplaySample) -> LearnerOutput:
        """``step`` on a batch that ``load`` has made of ``sample``."""
        config, rows = self.config, window.transitions
        own = self._own(sample.batch)
        own_on_device = torch.from_numpy(own).to(self.device)
        weights = np.ones(len(own))
        if config.importance_weights:
            weights = importance_weights(sample.probabilities, sample.replay_sequences, config.beta)
        # Every row's share of the batch loss is known beforehand, so segments can go backward one by one.
        shares = row_weights(rows.mask, config.time_weighting)
        shares = shares * (torch.from_numpy(weights).float().to(self.device) / len(own))

        self._optimizer.zero_grad()
        guess_loss = self._train_initializer(window, own_on_device)
        errors, q, loss = [], [], torch.zeros((), device=self.device)
        for segment_errors, segment_q, segment_loss in self._segments(window, own_on_device, shares):
            errors.append(segment_errors)
            q.append(segment_q)
            loss += segment_loss
        errors, q = torch.cat(errors), torch.cat(q)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, config.clip_norm)
        ...
