"""The learner's arithmetic the slow way: one sequence, one row at a time, padding never touched.

Reads the stored columns by itself; shares nothing with the code under test but the network's ``step`` and the settings.
"""

import math

import numpy as np
import torch

from r2d2.config import LearnerConfig
from r2d2.networks import R2D2Network, zero_state
from schemas.geometry import CONTINUES, LIFE_LOST, TERMINATED, SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch


class SlowSequence:
    """Sequence ``b`` of a batch stored as ``stored``, seen through the window ``used``."""

    def __init__(self, batch: SequenceBatch, b: int, used: SequenceGeometry, stored: SequenceGeometry) -> None:
        self.batch, self.b, self.used, self.stored = batch, b, used, stored
        self.first_valid, self.unroll_start = int(batch.first_valid[b]), stored.burn_in
        self.first = max(self.first_valid, stored.burn_in - used.burn_in)
        self.past_action = self.first_valid + int(batch.num_steps[b])
        self.past_observation = self.first_valid + int(batch.num_observations[b])
        self.ends = int(batch.ends[b])

    def step(self, network: R2D2Network, row: int, state):
        newest = row + self.stored.frame_stack
        stack = self.batch.observation[self.b, newest - self.used.frame_stack : newest]
        if row == self.first_valid:
            action, reward = self.batch.previous_action[self.b], self.batch.previous_reward[self.b]
        else:
            action, reward = self.batch.action[self.b, row - 1], self.batch.reward[self.b, row - 1]
        return network.step(
            torch.from_numpy(stack.copy())[None],
            torch.tensor([int(action)]),
            torch.tensor([float(reward)]),
            state,
            torch.tensor([False]),
        )

    def start(self, config: LearnerConfig, core, usable: bool):
        """Stored state where it is known and wanted, else zeros."""
        cropped = 0 < self.used.burn_in < self.stored.burn_in and self.first_valid < self.first
        if config.initial_state == "zero" or not usable or cropped:
            return zero_state(core, 1)
        rows = self.batch.unroll_core if self.used.burn_in == 0 else self.batch.core
        return tuple(torch.from_numpy(part[self.b].copy()).reshape(core.layers, 1, core.width) for part in rows)

    def errors(self, online: R2D2Network, target: R2D2Network, config: LearnerConfig, life_loss: str, state):
        """TD errors of the valid trained rows, in order, with gradient."""
        states = {online: state, target: state}
        with torch.no_grad():
            for row in range(self.first, self.unroll_start):
                for network, before in states.items():
                    _, states[network] = self.step(network, row, before)
        errors = []
        length = config.tbptt or self.used.unroll
        for first in range(0, self.used.unroll, length):
            stop = min(first + length, self.used.unroll)
            if first and not config.tbptt_carry:
                states = {network: zero_state(network.spec.core, 1) for network in states}
            rows = range(self.unroll_start + first, self.unroll_start + stop + self.used.bootstrap)
            q = {network: {} for network in states}
            after = {}
            for network, before in states.items():
                state = tuple(part.detach() for part in before)
                for row in rows:
                    if row < self.past_observation:
                        q[network][row], state = self.step(network, row, state)
                    if row == self.unroll_start + stop - 1:
                        after[network] = state
            states = after
            for row in range(self.unroll_start + first, min(self.unroll_start + stop, self.past_action)):
                chosen = q[online][row][0, int(self.batch.action[self.b, row])]
                errors.append(chosen - self.target(row, q[online], q[target], config, life_loss))
        return errors

    def target(self, row: int, online_q: dict, target_q: dict, config: LearnerConfig, life_loss: str) -> float:
        total, discount, at = 0.0, 1.0, row
        while at < row + self.used.bootstrap and (at < self.past_action or self.ends == CONTINUES):
            total += discount * float(self.batch.reward[self.b, at])
            discount *= config.gamma
            is_last = self.ends != CONTINUES and at == self.past_action - 1
            if is_last and self.ends in (TERMINATED, LIFE_LOST):
                discount = 0.0
            if life_loss == "roll" and self.batch.life_lost[self.b, at]:
                discount = 0.0
            at += 1
        if discount:
            value = float(target_q[at][0, int(online_q[at][0].argmax())])
            total += discount * (_unscale(value, config.rescaling_epsilon) if config.rescaling else value)
        return _scale(total, config.rescaling_epsilon) if config.rescaling else total


def slow_update(
    online: R2D2Network,
    target: R2D2Network,
    sample: ReplaySample,
    *,
    used: SequenceGeometry,
    stored: SequenceGeometry,
    config: LearnerConfig,
    life_loss: str,
    usable: np.ndarray,
) -> tuple[np.ndarray, float, dict[str, torch.Tensor]]:
    """Priorities ``[B]``, batch loss, and the gradient by parameter name."""
    batch, priorities, losses = sample.batch, [], []
    for b in range(len(batch)):
        sequence = SlowSequence(batch, b, used, stored)
        state = sequence.start(config, online.spec.core, bool(usable[b]))
        errors = torch.stack(sequence.errors(online, target, config, life_loss, state))
        sizes = errors.detach().abs()
        priorities.append(config.eta * float(sizes.max()) + (1 - config.eta) * float(sizes.mean()))
        weights = torch.ones(len(errors))
        if config.time_weighting == "recent":
            weights = 0.5 + 0.5 * torch.arange(len(errors)) / (used.unroll - 1)
        losses.append((weights / weights.mean() * 0.5 * errors**2).mean())
    importance = np.ones(len(batch))
    if config.importance_weights:
        importance = (1 / (sample.replay_sequences * sample.probabilities)) ** config.beta
        importance /= importance.max()
    loss = (torch.stack(losses) * torch.from_numpy(importance).float()).mean()
    names, parameters = zip(*online.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return np.array(priorities), float(loss.detach()), dict(zip(names, gradients, strict=True))


def _scale(x: float, epsilon: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + epsilon * x


def _unscale(y: float, epsilon: float) -> float:
    root = (math.sqrt(1 + 4 * epsilon * (abs(y) + 1 + epsilon)) - 1) / (2 * epsilon)
    return math.copysign(root**2 - 1, y)
