"""States and Q-values of whole recorded episodes under one network (article section 3.1: the learner side infers them).

The network runs over each episode from its first step, as an acting policy would have: every state is exact, none is
approximated by a burn-in.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from r2d2.networks import R2D2Network, state_from_rows, state_to_rows
from r2d2.training_pass import IMAGES_AT_ONCE
from schemas.shard import NO_ACTION


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """What was seen and done in E consecutive steps of an episode, by default from its first on.

    Attributes:
        frames: ``[K-1+E+1, *shape]`` with history and final observation, K at least the network's.
        action: int ``[E]``.
        reward: float32 ``[E]``.
        states_at: ascending steps whose states are wanted; None: all. The core runs over what lies between them in one
            call, which is several times as fast as step by step.
        core: one float32 ``[D]`` per part, the state before the first of these steps; None: zero, an episode's start.
        previous_action, previous_reward: what came before the first of these steps, by default nothing.
    """

    frames: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    states_at: np.ndarray | None = None
    core: tuple[np.ndarray, ...] | None = None
    previous_action: int = NO_ACTION
    previous_reward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Labels:
    """``q_values`` float32 ``[E+1, A]``; ``core``: one float32 ``[E+1, D]`` per part, the state *before* each step.

    Where no state was wanted it is NaN.
    """

    q_values: np.ndarray
    core: tuple[np.ndarray, ...]


class Labeller:
    """Runs ``network`` over episodes, several side by side; it moves to the device and must not be changed by others.

    Which episodes go together decides the last bits of the results, nothing more.
    """

    def __init__(self, network: R2D2Network, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._network = network.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def label(self, episodes: Many[RecordedSteps]) -> list[Labels]:
        """Labels of each episode. Memory: features and states of all their steps.

        Raises:
            ValueError: an action that the network does not have.
        """
        if not episodes:
            return []
        num_actions = self._network.spec.num_actions
        for episode in episodes:
            if len(episode.action) and not 0 <= episode.action.min() <= episode.action.max() < num_actions:
                raise ValueError(f"an action is outside 0 to {num_actions - 1}, which the network has")
        # Longest first, so that those still running are always the first lanes.
        order = sorted(range(len(episodes)), key=lambda index: -len(episodes[index].action))
        features = [self._features(episodes[index].frames, len(episodes[index].action) + 1) for index in order]
        previous = [self._previous(episodes[index]) for index in order]
        start = self._start([episodes[index].core for index in order])
        hidden, states = self._recur(features, previous, start, _borders(episodes))
        labels: list[Labels | None] = [None] * len(episodes)
        for lane, index in enumerate(order):
            steps = len(features[lane])
            q_values = self._network.heads(hidden[:steps, lane]).float().cpu().numpy()
            labels[index] = Labels(q_values=q_values, core=self._states_of(lane, steps, states))
        return [label for label in labels if label is not None]

    def _states_of(self, lane: int, steps: int, states: dict[int, tuple[Tensor, ...]]) -> tuple[np.ndarray, ...]:
        core = self._network.spec.core
        out = tuple(np.full((steps, core.size), np.nan, np.float32) for _ in core.parts)
        for step, state in states.items():
            if step < steps:
                for rows, part in zip(out, state, strict=True):
                    rows[step] = part[lane].cpu().numpy()
        return out

    def _features(self, frames: np.ndarray, count: int) -> Tensor:
        """``[count, F]``: of every step's stack, a bounded number of images at a time."""
        depth, at_once = self._network.spec.frame_stack, IMAGES_AT_ONCE.get(self._device.type, 8192)
        first = len(frames) - count - (depth - 1)
        pieces = []
        for begin in range(0, count, at_once):
            stop = min(begin + at_once, count)
            some = torch.from_numpy(frames[first + begin : first + stop + depth - 1]).to(self._device)
            pieces.append(self._network.encode(some.unfold(0, depth, 1).movedim(-1, 1)))
        return torch.cat(pieces)

    def _previous(self, episode: RecordedSteps) -> tuple[Tensor, Tensor]:
        """Previous actions and rewards ``[E+1]`` that enter the core at each step."""
        action = np.concatenate([[episode.previous_action], episode.action])
        reward = np.concatenate([[episode.previous_reward], episode.reward])
        return (
            torch.from_numpy(action.astype(np.int64)).to(self._device),
            torch.from_numpy(reward.astype(np.float32)).to(self._device),
        )

    def _start(self, cores: Many[tuple[np.ndarray, ...] | None]) -> tuple[Tensor, ...]:
        """The lanes' states before their first steps."""
        core = self._network.spec.core
        zero = tuple(np.zeros(core.size, np.float32) for _ in core.parts)
        rows = (np.stack(part) for part in zip(*(own or zero for own in cores), strict=True))
        return state_from_rows(tuple(torch.from_numpy(part).to(self._device) for part in rows), core)

    def _recur(
        self,
        features: list[Tensor],
        previous: list[tuple[Tensor, Tensor]],
        state: tuple[Tensor, ...],
        borders: list[int],
    ) -> tuple[Tensor, dict[int, tuple[Tensor, ...]]]:
        """The core's output ``[steps, lanes, hidden]``, and the state rows ``[lanes, D]`` before each border."""
        lengths = [len(values) for values in features]
        padded = torch.nn.utils.rnn.pad_sequence(features)
        action, reward = (torch.nn.utils.rnn.pad_sequence([pair[which] for pair in previous]) for which in range(2))
        hidden = padded.new_zeros(lengths[0], len(lengths), self._network.spec.hidden_size)
        states = {}
        for step, following in pairwise([*borders, lengths[0]]):
            lanes = sum(length > step for length in lengths)
            state = tuple(part[:, :lanes].contiguous() for part in state)
            states[step] = state_to_rows(state)
            # A lane that ends in here runs on over padding: nothing of that is kept.
            rows = slice(step, following)
            hidden[rows, :lanes], state = self._network.recur(
                padded[rows, :lanes], action[rows, :lanes], reward[rows, :lanes], state
            )
        return hidden, states


def _borders(episodes: Many[RecordedSteps]) -> list[int]:
    """Steps before which some episode's state is wanted; the first always."""
    longest = max(len(episode.action) for episode in episodes)
    wanted = {0}
    for episode in episodes:
        steps = range(len(episode.action) + 1) if episode.states_at is None else episode.states_at.tolist()
        wanted.update(step for step in steps if step <= longest)
    return sorted(wanted)
