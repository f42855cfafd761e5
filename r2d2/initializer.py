"""The State Initializer: a start state guessed from one observation (article section 3.2)."""

import math

import torch
from torch import Tensor, nn

from r2d2.config import NetworkSpec
from r2d2.networks import R2D2Network, State, state_from_rows


class StateInitializer(nn.Module):
    """Maps an observation to the core state before it, where none is stored or it is not to be used.

    ``mlp`` is two layers on the encoder's features, ``linear`` one layer on the convolutions' output averaged over the
    image (on the features themselves for vectors). It learns to reproduce stored states; that error reaches its own
    parameters only, so an observation of the burn-in never receives a gradient.
    """

    def __init__(self, spec: NetworkSpec, kind: str, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.core = spec.core
        self.pools = kind == "linear" and bool(spec.convolutions)
        inputs = spec.map_shape[0] if self.pools else spec.feature_size
        outputs = len(spec.core.parts) * spec.core.size
        sizes = [inputs, width, outputs] if kind == "mlp" else [inputs, outputs]
        with torch.device("meta"):
            layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1])]
            if kind == "mlp":
                layers += [nn.ReLU(), nn.Linear(sizes[1], sizes[2])]
            self.layers = nn.Sequential(*layers)
        self.to_empty(device="cpu")
        with torch.no_grad():
            for layer in self.layers:
                for parameter in layer.parameters():
                    bound = 1 / math.sqrt(layer.get_parameter("weight").shape[1])
                    parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, network: R2D2Network, stack: Tensor) -> State:
        """States for observations ``[B, K, *shape]``; nothing flows back into ``network``."""
        with torch.no_grad():
            inputs = network.maps(stack).mean((2, 3)) if self.pools else network.encode(stack)
        values = self.layers(inputs).float()
        return state_from_rows(values.chunk(len(self.core.parts), -1), self.core)

    def loss(self, guess: State, stored: State, own: Tensor, count: float | None = None) -> Tensor:
        """Mean squared error against the ``stored`` states of the sequences ``own`` (bool ``[B]``); 0 without any.

        ``count`` is how many of those the whole batch holds, where this is a part of it.
        """
        count = float(own.sum()) if count is None else count
        error = sum((a - b).square().mean((0, 2)) for a, b in zip(guess, stored, strict=True))
        return torch.where(own, error, 0.0).sum() / (max(count, 1.0) * len(guess))
