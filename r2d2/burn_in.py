"""The state a window is trained from: where it starts, and the steps that bring it up to the first trained row."""

import torch
from torch import Tensor

from r2d2.networks import R2D2Network, State
from r2d2.tensors import WindowTensors


def burn_in(network: R2D2Network, features: Tensor, window: WindowTensors, start: State) -> State:
    """The state before the first trained row, without gradient.

    ``features`` ``[L, B, F]`` are those of the burn-in rows and ``start`` the state before each sequence's first valid
    row. Sequences near their episode's beginning have fewer burn-in rows than L: the core runs over the whole batch
    up to each border, and there takes the start state of those that begin at it. Rows before a border thus leave no
    trace, and a few fused calls do the work of a masked loop.

    Source: Kapturowski et al. 2019, section 3.
    """
    with torch.no_grad():
        state, row = start, 0
        for border in (*window.borders, len(features)):
            if border > row:
                _, state = network.recur(features[row:border], *window.previous(row, border), state)
            if border in window.borders:
                state = choose(window.first_valid == border, start, state)
            row = border
    return state


def choose(where: Tensor, one: State, other: State) -> State:
    """Per sequence (``where`` bool ``[B]``) one state or the other; selection, so that neither can spoil the other."""
    return tuple(torch.where(where[None, :, None], a, b) for a, b in zip(one, other, strict=True))
