"""Each well-known way to get R2D2 silently wrong (algorithm.md 10), built in on purpose: the golden checks must fail.

pytest -k sabotage -v        prints the table
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.environments import EnvironmentConfig
from pipeline.sequences import SequenceBuilder
from r2d2 import priorities as priorities_module
from r2d2 import tensors as tensors_module
from r2d2.policy import RecurrentPolicy
from r2d2.priorities import initial_priorities
from r2d2.tensors import WindowTensors
from schemas.geometry import CUT, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import check_all, collect_golden

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)
LSTM = CoreSpec(kind="lstm", layers=1, width=16)


class StateOneStepLate(SequenceBuilder):
    """Stores the state after the observation was consumed instead of before."""

    def _write(self, step, rows, at):
        super()._write(step, rows, at)
        lanes, late = at
        for ring in self._states:
            ring[lanes, (late - 1) % self._ring] = ring[lanes, late]


class PreviousActionShifted(SequenceBuilder):
    """The previous action of a sequence's first row is the one before it."""

    def _cut_window(self, lane):
        sequence = super()._cut_window(lane)
        if sequence.first_valid or sequence.start == self._geometry.burn_in:
            return sequence
        before = (sequence.start - self._geometry.burn_in - 2) % self._ring
        return replace(sequence, previous_action=int(self._rows["action"][lane, before]))


class TailDropped(SequenceBuilder):
    """Only full windows are emitted."""

    def _finish(self, lane, observation, q_values):
        emitted = super()._finish(lane, observation, q_values)
        kept = [sequence for sequence in emitted if sequence.num_steps == self._geometry.stored_steps]
        self._sequences -= len(emitted) - len(kept)
        return kept


class TruncationAsTermination(SequenceBuilder):
    """One "done" for both."""

    def _cut_window(self, lane):
        sequence = super()._cut_window(lane)
        return replace(sequence, ends=TERMINATED) if sequence.ends == TRUNCATED else sequence


class StackKeptOverReset(SequenceBuilder):
    """The finished episode's last frames stand before the next episode's first."""

    def _begin(self, lane, history):
        super()._begin(lane, np.full_like(history, 200))


class CoreKeptOverReset(RecurrentPolicy):
    """The acting policy carries its state from one episode into the next."""

    def act(self, observation, previous_action, previous_reward, first):
        return super().act(observation, previous_action, previous_reward, np.zeros_like(first))


def padding_in_the_priority(batch, q_values, geometry, config, life_loss):
    """The mean runs over all T rows, padding included."""
    masked = priorities_module.sequence_priorities

    def padded(errors, mask, eta):
        return masked(errors, torch.ones_like(mask), eta)

    priorities_module.sequence_priorities = padded
    try:
        return initial_priorities(batch, q_values, geometry, config, life_loss)
    finally:
        priorities_module.sequence_priorities = masked


def constant_initial_priority(batch, q_values, geometry, config, life_loss):
    return np.ones(len(batch), np.float32)


def current_action_fed_in(monkeypatch):
    """The action taken on an observation enters together with it (claim C23)."""

    def previous(self, first, stop):
        shifted = torch.cat([self.previous_action[1:], self.previous_action[-1:]])
        return shifted[first:stop], self.previous_reward[first:stop]

    monkeypatch.setattr(WindowTensors, "previous", previous)


def terminal_step_dropped(monkeypatch):
    """The loss is masked by (1 - terminated) (claim C14)."""
    right = tensors_module.transitions

    def dropping(batch, geometry, stored, life_loss):
        rows = right(batch, geometry, stored, life_loss)
        return replace(rows, mask=rows.mask & (rows.continues[: rows.mask.shape[0]] > 0))

    monkeypatch.setattr(tensors_module, "transitions", dropping)


def padding_trained(monkeypatch):
    """Rows past the end count as real."""
    right = tensors_module.transitions

    def padded(batch, geometry, stored, life_loss):
        rows = right(batch, geometry, stored, life_loss)
        return replace(rows, mask=torch.ones_like(rows.mask))

    monkeypatch.setattr(tensors_module, "transitions", padded)


COMPONENTS = {
    "state stored one step late": {"builder_class": StateOneStepLate},
    "previous action shifted": {"builder_class": PreviousActionShifted},
    "tail dropped": {"builder_class": TailDropped},
    "truncation as termination": {"builder_class": TruncationAsTermination},
    "stack kept over a reset": {"builder_class": StackKeptOverReset},
    "core kept over a reset": {"policy_class": CoreKeptOverReset},
    "padding in the priority": {"priorities": padding_in_the_priority},
    "constant initial priority": {"priorities": constant_initial_priority},
}
PATCHES = {
    "current action fed in": current_action_fed_in,
    "mask drops the terminal step": terminal_step_dropped,
    "padding trained": padding_trained,
}


def run_golden(tmp_path, **sabotaged):
    """CartPole that terminates in some lanes, and truncates after 13 steps in the others."""
    golden = collect_golden(
        tmp_path,
        environment=EnvironmentConfig(env_id="CartPole-v1", arguments={"max_episode_steps": 13}),
        geometry=GEOMETRY,
        core=LSTM,
        lanes=4,
        calls=90,
        **sabotaged,
    )
    assert {TERMINATED, TRUNCATED, CUT} <= set(golden.acted.ends.values())
    check_all(golden)


def test_without_sabotage_the_golden_checks_pass(tmp_path):
    run_golden(tmp_path)


@pytest.mark.parametrize("sabotaged", COMPONENTS.values(), ids=COMPONENTS.keys())
def test_sabotage_of_the_actor_is_caught(tmp_path, sabotaged):
    with pytest.raises(AssertionError):
        run_golden(tmp_path, **sabotaged)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES.keys())
def test_sabotage_of_the_learner_is_caught(tmp_path, monkeypatch, patch):
    patch(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # Trained padding lies beyond what was ever acted.
        run_golden(tmp_path)
