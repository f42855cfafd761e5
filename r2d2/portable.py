"""A trained network apart from everything that trained it: numpy in, numpy out, the core state in caller's hands."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r2d2.config import NetworkSpec
from r2d2.networks import R2D2Network, empty_network, state_from_rows, state_to_rows


class PortablePolicy:
    """Q-values and greedy actions, one step at a time. Keeps nothing between calls; any thread may call it."""

    def __init__(self, network: R2D2Network) -> None:
        self._network = network.eval().requires_grad_(False)
        self.spec = network.spec

    def initial_state(self, lanes: int) -> dict[str, np.ndarray]:
        """What an episode begins with: zeros, float32 ``[N, layers * H]`` as ``core_<part>``, none without a core."""
        return {f"core_{part}": np.zeros((lanes, self.spec.core.size), np.float32) for part in self.spec.core.parts}

    def step(
        self,
        observation: np.ndarray,
        previous_action: np.ndarray,
        previous_reward: np.ndarray,
        first: np.ndarray,
        **core: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """One step of N lanes.

        Args:
            observation: ``[N, K, *shape]``: the last K frames or vectors as the environment gives them, newest last.
            previous_action: int64 ``[N]``, -1 for none.
            previous_reward: float32 ``[N]``.
            first: bool ``[N]``: the lane begins an episode, so its core state is zeroed first.
            core: as ``initial_state`` gives it, later as the last step returned it.

        Returns ``q_values`` float32 ``[N, A]`` (in h-space where the learner rescaled), the greedy ``action`` int64
        ``[N]``, and the core state after the step.

        Raises:
            ValueError: a part of the core state is missing or unknown.
        """
        wanted = [f"core_{part}" for part in self.spec.core.parts]
        if core.keys() != set(wanted):
            raise ValueError(f"core state is {sorted(core)}; allowed: {', '.join(wanted) or 'none'}")
        with torch.inference_mode():
            rows = tuple(torch.from_numpy(np.array(core[name], np.float32)) for name in wanted)
            q, state = self._network.step(
                torch.from_numpy(np.array(observation, self.spec.observation.dtype)),
                torch.from_numpy(np.array(previous_action, np.int64)),
                torch.from_numpy(np.array(previous_reward, np.float32)),
                state_from_rows(rows, self.spec.core),
                torch.from_numpy(np.array(first, np.bool_)),
            )
            q_values = q.float().numpy()
            after = {name: part.numpy().copy() for name, part in zip(wanted, state_to_rows(state), strict=True)}
        return {"q_values": q_values, "action": q_values.argmax(-1).astype(np.int64), **after}


def build_policy(spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PortablePolicy:
    """A network from its description (``NetworkSpec.to_json``) and its parameters, named as in its state dict.

    Raises:
        ValueError: no description of a network, or tensors of another one.
    """
    network = empty_network(NetworkSpec.from_json(dict(spec)))
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise ValueError(f"tensors are not those of the network: {' '.join(str(error).split())}") from error
    return PortablePolicy(network)
