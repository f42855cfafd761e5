"""From a stored batch to the tensors of the window a learner uses: cropping, masks, discounts, sanitised padding.

Stored arrays are batch-major ``[B, S, ...]``; everything made here but the frames is ``[T, B, ...]``. Whatever invalid
rows hold (NaN, garbage actions) is replaced by selection on the way in, so that nothing after it needs to care.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from r2d2.networks import State, state_from_rows
from schemas.geometry import CONTINUES, LIFE_LOST, TERMINATED, SequenceGeometry
from schemas.records import SequenceBatch
from schemas.specs import CoreSpec


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """What targets and losses need; rows count from the first trained one.

    Attributes:
        action: int64 ``[T, B]``.
        reward: float32 ``[T+n, B]``.
        continues: float32 ``[T+n, B]``, 0 where the row's action ended what may be bootstrapped over.
        end: int64 ``[B]``, row of the final observation; past T+n where the episode goes on.
        mask: bool ``[T, B]``, the row is real and can be trained.
    """

    action: Tensor
    reward: Tensor
    continues: Tensor
    end: Tensor
    mask: Tensor

    def segment(self, first: int, stop: int, bootstrap: int) -> "Transitions":
        """Trained rows ``first .. stop-1`` alone, and the ``bootstrap`` rows behind them."""
        return Transitions(
            action=self.action[first:stop],
            reward=self.reward[first : stop + bootstrap],
            continues=self.continues[first : stop + bootstrap],
            end=self.end - first,
            mask=self.mask[first:stop],
        )

    def to(self, device: torch.device) -> "Transitions":
        return Transitions(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class WindowTensors:
    """A batch on the learner's device; S = L + T + n rows of the used window.

    Attributes:
        geometry: of the used window: L, T, n, K.
        frames: ``[B, K-1+S, *shape]`` in the stored dtype; see ``stack``.
        previous_action, previous_reward: int64 (-1 none), float32, ``[S, B]``.
        transitions: of the trained rows and those behind them.
        first_valid: int64 ``[B]``, 0 .. L.
        borders: the distinct values of ``first_valid`` above 0, ascending: where burn-in sets states.
        core: state before row ``first_valid``; meaningful where ``core_known``.
        core_known: bool ``[B]``: the state before the first used valid row is stored (always where an episode begins).
        begins: bool ``[B]``: that row begins an episode, so its state is zero whoever acted.
        unroll_core: state before the first trained row.
        probe_core: state before the last trained row, of the sequences ``probes`` (int64 indices) alone.
    """

    geometry: SequenceGeometry
    frames: Tensor
    previous_action: Tensor
    previous_reward: Tensor
    transitions: Transitions
    first_valid: Tensor
    borders: tuple[int, ...]
    core: State
    core_known: Tensor
    begins: Tensor
    unroll_core: State
    probe_core: State
    probes: Tensor

    def stack(self, first: int, stop: int) -> Tensor:
        """Stacked observations of rows ``first .. stop-1``: ``[B, rows, K, *shape]``, a view that copies nothing."""
        depth = self.geometry.frame_stack
        return self.frames[:, first : stop + depth - 1].unfold(1, depth, 1).movedim(-1, 2)

    def previous(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Previous actions and rewards ``[rows, B]`` that enter the core in rows ``first .. stop-1``."""
        return self.previous_action[first:stop], self.previous_reward[first:stop]


def transitions(
    batch: SequenceBatch, geometry: SequenceGeometry, stored: SequenceGeometry, life_loss: str
) -> Transitions:
    """The rows of ``geometry``'s unroll and bootstrap, out of a batch stored as ``stored``. On the CPU.

    ``continues`` is 0 in the step that terminated the episode or, where lives end episodes, lost one; with
    ``life_loss`` ``roll`` also in every flagged row. Truncated and cut episodes continue: they bootstrap from the
    final observation.
    """
    offset = stored.burn_in
    rows = slice(offset, offset + geometry.unroll + geometry.bootstrap)
    count = geometry.unroll + geometry.bootstrap
    row = torch.arange(count).unsqueeze(1)

    past_action = _long(batch.first_valid) + _long(batch.num_steps) - offset
    past_observation = _long(batch.first_valid) + _long(batch.num_observations) - offset
    ends = _long(batch.ends)
    beyond = stored.stored_steps + 1
    end = torch.where(ends == CONTINUES, beyond, past_action)
    is_zero = (ends == TERMINATED) | (ends == LIFE_LOST)

    real = row < past_action
    continues = torch.where(is_zero & (row == end - 1), 0.0, 1.0)
    if life_loss == "roll":
        lost = _time_major(batch.life_lost[:, rows]) != 0
        continues = torch.where(lost & real, 0.0, continues)
    # A row is trained when its target can be made: its bootstrap is either cut off or was observed.
    reached = torch.minimum(row + geometry.bootstrap, end)[: geometry.unroll]
    has_target = (reached < past_observation) | (is_zero & (reached == end))
    mask = real[: geometry.unroll] & has_target
    return Transitions(
        action=torch.where(mask, _time_major(batch.action[:, rows])[: geometry.unroll].long(), 0),
        reward=torch.where(real, _time_major(batch.reward[:, rows]), 0.0),
        continues=continues,
        end=end,
        mask=mask,
    )


def window_tensors(
    batch: SequenceBatch,
    geometry: SequenceGeometry,
    stored: SequenceGeometry,
    *,
    core: CoreSpec,
    num_actions: int,
    life_loss: str,
    device: torch.device,
) -> WindowTensors:
    """Everything an update needs, on ``device``; pixels travel as stored.

    Raises:
        ValueError: a real row holds an action the network does not have.
    """
    skipped = stored.burn_in - geometry.burn_in
    steps = geometry.stored_steps
    row = torch.arange(steps).unsqueeze(1) + skipped

    begins_at, past_action = _long(batch.first_valid), _long(batch.first_valid) + _long(batch.num_steps)
    first_valid = (begins_at - skipped).clamp(min=0)
    action, reward = _time_major(batch.action).long(), _time_major(batch.reward)
    stored_row = torch.arange(stored.stored_steps).unsqueeze(1)
    has_action = (stored_row >= begins_at) & (stored_row < past_action)
    foreign = action[has_action & ((action < 0) | (action >= num_actions))]
    if len(foreign):
        raise ValueError(f"action is {foreign[0]} in the data; allowed: 0 to {num_actions - 1}, as the network has")

    starts = row == begins_at
    follows = (row > begins_at) & (row <= past_action)
    before = (row - 1).clamp(min=0).squeeze(1)
    previous_action = torch.where(follows, action[before], -1)
    previous_action = torch.where(starts, _long(batch.previous_action), previous_action)
    previous_reward = torch.where(follows, reward[before], 0.0)
    previous_reward = torch.where(starts, torch.from_numpy(batch.previous_reward), previous_reward)

    # The state at the first used row is stored where nothing was cropped before it; a start of an episode is known.
    begins = (begins_at >= skipped) & (_long(batch.previous_action) == -1)
    uses_unroll_core = geometry.burn_in == 0
    known = begins | (begins_at >= skipped) | uses_unroll_core
    first_core = batch.unroll_core if uses_unroll_core else batch.core

    same_last_row = geometry.unroll == stored.unroll
    probes = batch.probes if same_last_row else batch.probes[:0]
    return WindowTensors(
        geometry=geometry,
        frames=_frames(batch, geometry, stored, device),
        previous_action=previous_action.to(device),
        previous_reward=previous_reward.to(device),
        transitions=transitions(batch, geometry, stored, life_loss).to(device),
        first_valid=first_valid.to(device),
        borders=tuple(int(border) for border in first_valid.unique() if border > 0),
        core=_state(first_core, core, len(batch), device),
        core_known=known.to(device),
        begins=begins.to(device),
        unroll_core=_state(batch.unroll_core, core, len(batch), device),
        probe_core=_state(tuple(part[: len(probes)] for part in batch.probe_core), core, len(probes), device),
        probes=torch.from_numpy(probes).to(device),
    )


def transfer_buffer(array: np.ndarray, device: torch.device) -> np.ndarray:
    """``array``, or for a GPU one like it in page-locked memory, which is copied while the host goes on."""
    return torch.from_numpy(array).pin_memory().numpy() if device.type == "cuda" else array


def core_fits(batch: SequenceBatch, core: CoreSpec) -> bool:
    """The stored states have the shape of this core; offline, a dataset may come from another one."""
    return len(batch.core) == len(core.parts) and all(part.shape[1] == core.size for part in batch.core)


def _state(rows: tuple[np.ndarray, ...], core: CoreSpec, lanes: int, device: torch.device) -> State:
    if len(rows) != len(core.parts) or any(part.shape[1] != core.size for part in rows):
        rows = tuple(np.zeros((lanes, core.size), np.float32) for _ in core.parts)
    return state_from_rows(tuple(torch.from_numpy(part).to(device) for part in rows), core)


def _frames(batch: SequenceBatch, geometry: SequenceGeometry, stored: SequenceGeometry, device: torch.device) -> Tensor:
    """Frames ``[B, K-1+S, *shape]`` of the used window. Integers cannot hold a NaN and travel untouched."""
    first = stored.burn_in - geometry.burn_in + stored.frame_stack - geometry.frame_stack
    positions = slice(first, first + geometry.stored_frames)
    frames = torch.from_numpy(batch.observation)[:, positions].to(device, non_blocking=True)
    if not frames.is_floating_point():
        return frames
    position = torch.arange(stored.stored_frames)
    # Position p is row p-(K-1): real rows and the K-1 frames before the first of them.
    begins_at, observations = _long(batch.first_valid)[:, None], _long(batch.num_observations)[:, None]
    real = (position >= begins_at) & (position < begins_at + observations + stored.frame_stack - 1)
    real = real[:, positions].to(device)
    return torch.where(real.reshape(*real.shape, *[1] * (frames.ndim - 2)), frames, 0.0)


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).long()


def _time_major(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).transpose(0, 1)
