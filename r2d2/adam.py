"""The optimiser's memory by parameter name, so that a checkpoint does not depend on the order of parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor

KEYS = ("step", "exp_avg", "exp_avg_sq")


def moments(optimizer: torch.optim.Adam, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of Adam's state, as ``<key>.<parameter name>``; nothing before the first step."""
    return {
        f"{key}.{name}": moment
        for name, value in trained.items()
        for key, moment in optimizer.state.get(value, {}).items()
    }


def restore_moments(optimizer: torch.optim.Adam, trained: Mapping[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Continue where ``moments`` was taken; with nothing ``saved``, from the start.

    Raises:
        ValueError: naming what is missing or does not fit.
    """
    optimizer.state.clear()
    if not saved:
        return
    for name, value in trained.items():
        state = optimizer.state[value]
        for key in KEYS:
            moment = saved.get(f"{key}.{name}")
            wanted = () if key == "step" else value.shape
            if moment is None or moment.shape != wanted:
                raise ValueError(f"adam: {key} of {name} is missing or not of shape {tuple(wanted)}")
            # In the parameter's own memory order, which the fused optimiser takes for granted.
            like = value if key != "step" else torch.zeros((), device=value.device)
            state[key] = torch.empty_like(like, requires_grad=False).copy_(moment)
