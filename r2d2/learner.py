"""The learner: updates of the online network from replayed batches (Kapturowski et al. 2019, sections 2.3 and 3)."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r2d2.adam import moments, restore_moments
from r2d2.burn_in import choose
from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.data_parallel import Replicas
from r2d2.diagnostics import strategy_discrepancies, window_discrepancies
from r2d2.initializer import StateInitializer
from r2d2.losses import row_weights
from r2d2.metrics import crop_metrics, discrepancy_metrics, origin_metrics, own_lineage, value_metrics
from r2d2.networks import State, build_network, empty_network, zero_state
from r2d2.priorities import importance_weights, sequence_priorities
from r2d2.serialize import (
    Parameters,
    load_tensors,
    params_to_bytes,
    tensors_from_bytes,
    tensors_to_bytes,
    tensors_under,
)
from r2d2.tensors import WindowTensors, core_fits, window_tensors
from r2d2.training_pass import autocast, training_pass
from schemas.geometry import SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch
from schemas.shard import LINEAGE_BYTES
from schemas.specs import LIFE_LOSS_MODES

MUST_BE_FINITE = ("loss", "gradient_norm", "initializer_loss", "initializer_gradient_norm")
ADDED_UP = ("loss", "initializer_loss", "trained_steps")  # Over all replicas.


@dataclass(frozen=True, kw_only=True)
class LearnerOutput:
    """What one step gives back.

    Attributes:
        priorities: float64 ``[B]`` of the sample's sequences, before alpha, by the weights before the update; not
            finite where the errors were not.
        metrics: plain numbers by name; one that has no value in this batch is left out.
        updated: False when the loss or the gradient was not finite: then no parameter was touched.
    """

    priorities: np.ndarray
    metrics: dict[str, float]
    updated: bool


class Learner:
    """Online network, target network and optimiser; what ``step`` does follows from its state and the sample alone.

    Attributes:
        network: the online network; publish it with ``version`` and ``lineage``.
        updates: updates done, those before a resume included; a skipped one does not count.
        lineage: 16 bytes born with the random initialisation; core states of another lineage mean nothing here.
        initializer: the State Initializer, or None.
        notices: one line each on what this window or these options leave out.

    Args:
        geometry: the window to use; its stride is not looked at.
        stored: the window that the dataset stores.
        life_loss: ``off``, ``roll`` or ``reset``.
        seed: of the random initialisation, the only randomness here.
        lineage: None draws a new one.
        replicas: the processes that share every update, this one among them; None: it is alone.

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
        replicas: Replicas | None = None,
    ) -> None:
        if life_loss not in LIFE_LOSS_MODES:
            raise ValueError(f"life_loss is {life_loss!r}; allowed: {', '.join(LIFE_LOSS_MODES)}")
        geometry.refuse_larger(stored)
        config.refuse_impossible(spec, geometry)
        self.spec, self.config, self.geometry, self.stored = spec, config, geometry, stored
        self.life_loss, self.device = life_loss, torch.device(device)
        self.lineage = secrets.token_bytes(LINEAGE_BYTES) if lineage is None else lineage
        self.updates = 0
        self._first_version = 0
        self._replicas = replicas or Replicas()
        generator = torch.Generator().manual_seed(seed)
        self.network = build_network(spec, generator).to(self.device)
        self.target = empty_network(spec).to(self.device).requires_grad_(False)
        self.initializer = None
        if config.initial_state == "initializer":
            initializer = StateInitializer(spec, config.initializer, config.initializer_width, generator)
            self.initializer = initializer.to(self.device)
        self._copy_target()
        if config.channels_last:
            for network in (self.network, self.target):
                network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if config.compile:
            for network in (self.network, self.target):
                network.encode = torch.compile(network.encode)
        self._trained = {f"network.{name}": value for name, value in self.network.named_parameters()}
        if self.initializer is not None:
            self._trained |= {f"initializer.{name}": value for name, value in self.initializer.named_parameters()}
        self._optimizer = torch.optim.Adam(
            self._trained.values(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        self.notices = tuple(self._notices())

    def step(self, sample: ReplaySample) -> LearnerOutput:
        """One update, by all replicas together. Metrics but for the loss, gradients and steps are of the own part.

        Raises:
            ValueError: the batch holds actions that the network does not have, or too few sequences for the replicas.
        """
        part = self._replicas.share_out(sample)
        output = self.update(self.load(part.batch), part)
        return replace(output, priorities=self._replicas.gather(output.priorities))

    def follow(self) -> None:
        """Do every update of the learner of rank 0 along with it, from its state on, until it closes its replicas."""
        self.share_state()
        while (part := self._replicas.receive()) is not None:
            self._replicas.gather(self.update(self.load(part.batch), part).priorities)

    def share_state(self) -> None:
        """Give all replicas the state of rank 0, once before the first ``step``; the others call ``follow``."""
        if self._replicas.size == 1:
            return
        leads = self._replicas.rank == 0
        data = self._replicas.share_bytes(tensors_to_bytes(*self.state()) if leads else None)
        if not leads:
            self.restore(*tensors_from_bytes(data))

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
        """``step`` on what ``load`` has made of the sample's batch: where there are replicas, of a part of it."""
        usable = self.usable_states(sample.batch)
        usable_here = torch.from_numpy(usable).to(self.device)
        mask = window.transitions.mask
        # Every row's share of the batch loss is known beforehand, so that segments can go backward one by one.
        shares = row_weights(mask, self.config.time_weighting) * self._sequence_weights(sample)

        self._optimizer.zero_grad()
        measured = self._train_initializer(window, usable_here, self._replicas.total(float(usable.sum())))
        start = self.start_state(window, usable_here)
        trained = training_pass(self.network, self.target, window, start=start, shares=shares, config=self.config)
        measured |= value_metrics(trained, mask)
        measured = {name: value.float() for name, value in measured.items()}
        gradients = [value.grad for value in self._trained.values() if value.grad is not None]
        self._replicas.add_up([*gradients, *(measured[name] for name in ADDED_UP if name in measured)])
        measured |= self._clip_gradients()
        priorities = sequence_priorities(trained.errors, mask, self.config.eta)
        with autocast(self.config, self.device):
            dq = window_discrepancies(self.network, window, trained.q, trained.first_features, trained.last_features)

        # One transfer, which is also where the host waits for the device.
        scalars = torch.stack(list(measured.values()))
        on_host = torch.cat([scalars, priorities, *dq]).double().cpu().numpy()
        scalars, priorities, dq_first, dq_last = np.split(on_host, np.cumsum([len(scalars), len(usable), len(usable)]))
        metrics = dict(zip(measured, scalars.tolist(), strict=True))
        metrics |= origin_metrics(sample.batch, self.lineage, self.version)
        metrics |= discrepancy_metrics(dq_first[usable], dq_last[usable[window.probes.cpu()]])
        metrics |= crop_metrics(sample.batch, self.geometry, self.stored)
        updated = all(np.isfinite(value) for name, value in metrics.items() if name in MUST_BE_FINITE)
        if updated:
            self._optimizer.step()
            self.updates += 1
            if self.updates % self.config.target_copy_updates == 0:
                self._copy_target()
        return LearnerOutput(priorities=priorities, metrics=metrics, updated=updated)

    def usable_states(self, batch: SequenceBatch) -> np.ndarray:
        """Whose stored states mean something to this network, or are to be trusted regardless: bool ``[B]``."""
        if not core_fits(batch, self.spec.core):
            return np.zeros(len(batch), np.bool_)
        return own_lineage(batch, self.lineage) | self.config.trust_stored_state

    def start_state(self, window: WindowTensors, usable: Tensor) -> State:
        """The state before each sequence's first valid row, as ``config.initial_state`` wants it.

        Zeros where an episode begins and wherever nothing better is to be had: the stored state is not known in a
        cropped burn-in, and not ``usable`` (bool ``[B]``) from another lineage.
        """
        state = zero_state(self.spec.core, len(usable), self.device)
        if self.initializer is not None:
            with torch.no_grad():
                guess = self.initializer(self.network, window.stack(0, 1)[:, 0])
            return choose(window.begins, state, guess)
        if self.config.initial_state == "stored":
            return choose(window.core_known & usable & ~window.begins, window.core, state)
        return state

    def discrepancies(self, sample: ReplaySample) -> dict[str, float]:
        """Mean dQ of each start strategy over the sequences with usable states, as ``dq_first/zero`` and so on.

        Changes nothing. A mean over no sequence is left out.
        """
        window, usable = self.load(sample.batch), self.usable_states(sample.batch)
        found = {}
        for strategy, (first, last) in strategy_discrepancies(self.network, window).items():
            for name, values, chosen in (("first", first, usable), ("last", last, usable[window.probes.cpu()])):
                if chosen.any():
                    found[f"dq_{name}/{strategy}"] = float(values.cpu().numpy()[chosen].mean())
        return found

    def start_from(self, parameters: Parameters) -> None:
        """Take over a trained network, its lineage and its version; the rest stays as it is.

        Raises:
            ValueError: a network of another description; nothing is changed.
        """
        if parameters.spec != self.spec:
            raise ValueError(f"the network differs: {parameters.spec.differences(self.spec)}; allowed: the same one")
        load_tensors(self.network, parameters.tensors, "parameters")
        self._copy_target()
        self.lineage = parameters.lineage
        self._first_version = parameters.version - self.updates

    def published(self) -> bytes:
        """What actors need: ``params_from_bytes`` reads it."""
        return params_to_bytes(self.network, self.version, self.lineage, self.config.acting_values())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a resume needs, as named tensors (views, not copies) and JSON values.

        Settings are not part of it: they come from the configuration at every start.
        """
        tensors = {name: value.detach() for name, value in self._trained.items()}
        tensors |= {f"target.{name}": value for name, value in self.target.state_dict().items()}
        tensors |= {f"adam.{name}": value for name, value in moments(self._optimizer, self._trained).items()}
        values = {"spec": self.spec.to_json(), "lineage": self.lineage.hex(), "acting": self.config.acting_values()}
        return tensors, {**values, "updates": self.updates, "version": self.version}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ValueError: naming what is missing or does not fit; the learner must then not be used.
        """
        missing = {"spec", "lineage", "updates", "version"} - values.keys()
        if missing:
            raise ValueError(f"the saved state of a learner has no {', '.join(sorted(missing))}")
        spec = NetworkSpec.from_json(values["spec"])
        if spec != self.spec:
            raise ValueError(f"the network differs: {self.spec.differences(spec)}; allowed: that of the saved state")
        for part, module in (("network", self.network), ("target", self.target), ("initializer", self.initializer)):
            if module is not None:
                load_tensors(module, tensors_under(part, tensors), part)
        restore_moments(self._optimizer, self._trained, tensors_under("adam", tensors))
        self.lineage = bytes.fromhex(values["lineage"])
        self.updates = values["updates"]
        self._first_version = values["version"] - self.updates

    @property
    def version(self) -> int:
        """Of the online network within its lineage: ``updates``, counted on from the parameters it started from."""
        return self._first_version + self.updates

    @property
    def initializer_share(self) -> float:
        """The State Initializer's part of all trained parameters (article: 0.003)."""
        sizes = {name: value.numel() for name, value in self._trained.items()}
        return sum(size for name, size in sizes.items() if name.startswith("initializer.")) / sum(sizes.values())

    def _sequence_weights(self, sample: ReplaySample) -> Tensor:
        """Each sequence's weight in the loss of the whole batch, float32 ``[B]``."""
        weights = np.ones(len(sample.ids))
        if self.config.importance_weights:
            least = self._replicas.least(sample.probabilities.min())
            weights = importance_weights(sample.probabilities, sample.replay_sequences, self.config.beta, least)
        return torch.from_numpy(weights / self._replicas.total(len(weights))).float().to(self.device)

    def _train_initializer(self, window: WindowTensors, usable: Tensor, count: float) -> dict[str, Tensor]:
        """Gradient of the initializer's own loss, at the first trained row: the one whose state is always stored."""
        if self.initializer is None:
            return {}
        row = self.geometry.burn_in
        guess = self.initializer(self.network, window.stack(row, row + 1)[:, 0])
        loss = self.initializer.loss(guess, window.unroll_core, usable, count)
        loss.backward()
        return {"initializer_loss": loss.detach()}

    def _clip_gradients(self) -> dict[str, Tensor]:
        """Each module by itself, so that the initializer's error cannot shorten the network's step."""
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        if self.initializer is None:
            return {"gradient_norm": norm}
        own_norm = torch.nn.utils.clip_grad_norm_(self.initializer.parameters(), self.config.clip_norm)
        return {"gradient_norm": norm, "initializer_gradient_norm": own_norm}

    def _copy_target(self) -> None:
        self.target.load_state_dict(self.network.state_dict())

    def _notices(self) -> Iterator[str]:
        used, stored = self.geometry, self.stored
        if 0 < used.burn_in < stored.burn_in and self.config.initial_state == "stored":
            yield (
                f"burn_in {used.burn_in} of the stored {stored.burn_in}: no state is stored at its first row, so "
                "sequences start from zeros there unless their episode begins within it"
            )
        if used.unroll < stored.unroll:
            yield f"unroll {used.unroll} of the stored {stored.unroll}: the steps behind it go untrained"
