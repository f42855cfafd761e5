"""The Q-network: encoder, recurrent core, dueling heads (Kapturowski et al. 2019, section 2.3 and appendix).

Shapes: N images, T steps, B sequences, K frame stack, F features, I core input, H core width, A actions.
A core state is a tuple of one float32 ``[layers, B, H]`` per part: (h, c) for LSTM, (h,) for GRU, () without core.
"""

import math

import torch
from torch import Tensor, nn

from r2d2.config import NetworkSpec
from schemas.specs import CoreSpec

State = tuple[Tensor, ...]
PIXEL_SCALE = 1 / 255


class R2D2Network(nn.Module):
    """Q-values of a whole sequence (``unroll``) or of one step (``step``); both give the same numbers.

    The parameters of a bare instance are torch's own random ones: use ``build_network`` or load some.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.convolutions = nn.Sequential()
        channels = spec.input_channels if spec.convolutions else 0
        for out_channels, kernel, stride in spec.convolutions:
            self.convolutions.extend([nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU(inplace=True)])
            channels = out_channels
        self.dense = nn.Sequential()
        width = spec.flat_size
        for out_width in spec.dense:
            self.dense.extend([nn.Linear(width, out_width), nn.ReLU(inplace=True)])
            width = out_width
        if spec.core.kind != "none":
            kind = {"lstm": nn.LSTM, "gru": nn.GRU}[spec.core.kind]
            self.core = kind(spec.core_input_size, spec.core.width, spec.core.layers)
        # The two heads read the same input: their hidden layers are one matrix product.
        self.head_hidden = nn.Linear(spec.hidden_size, 2 * spec.dueling_width)
        self.value = nn.Linear(spec.dueling_width, 1)
        self.advantage = nn.Linear(spec.dueling_width, spec.num_actions)

    def encode(self, stack: Tensor) -> Tensor:
        """Features float ``[..., F]`` of stacked observations ``[..., K, *shape]``, as stored (see ``scaled``)."""
        lead = stack.shape[: stack.ndim - 1 - len(self.spec.observation.shape)]
        return self.dense(self.maps(stack).flatten(1)).unflatten(0, lead)

    def maps(self, stack: Tensor) -> Tensor:
        """What the convolutions put out, ``[N, C, height, width]``; without any, the scaled vectors ``[N, K*D]``."""
        return self.convolutions(self.scaled(stack))

    def scaled(self, stack: Tensor) -> Tensor:
        """The network's input: float32 ``[N, K*C, H, W]`` or ``[N, K*D]`` from ``[..., K, *shape]``.

        uint8 is divided by 255, here and nowhere else; other dtypes pass as they are. ``stack`` may be a strided view
        (overlapping frames): it is read once.

        Raises:
            ValueError: a float image above 1, which someone forgot to scale.
        """
        shape = self.spec.observation.shape
        x = stack * PIXEL_SCALE if stack.dtype == torch.uint8 else stack.to(torch.float32)
        if not self.spec.convolutions:
            return x.reshape(-1, self.spec.flat_size)
        if stack.is_floating_point() and bool((x > 1).any()):
            raise ValueError(f"a float image holds {float(x.max()):g}; allowed: 0 to 1, or uint8 pixels")
        if len(shape) == 3:
            x = x.movedim(-1, -3)
        return x.reshape(-1, self.spec.input_channels, *shape[:2])

    def unroll(
        self, features: Tensor, previous_action: Tensor, previous_reward: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Q-values ``[T, B, A]`` and the state after the last step, all steps of one episode.

        Args:
            features: ``[T, B, F]`` from ``encode``.
            previous_action: int64 ``[T, B]``; -1 means none and becomes an all-zero one-hot.
            previous_reward: float32 ``[T, B]``.
            state: before the first step.
        """
        hidden, state = self.recur(features, previous_action, previous_reward, state)
        return self.heads(hidden), state

    def recur(
        self, features: Tensor, previous_action: Tensor, previous_reward: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """``unroll`` without the heads: ``[T, B, hidden]``, enough where only the state is wanted."""
        parts = [features]
        if self.spec.use_previous_action:
            actions = torch.arange(self.spec.num_actions, device=features.device)
            parts.append((previous_action.unsqueeze(-1) == actions).to(features.dtype))
        if self.spec.use_previous_reward:
            parts.append(previous_reward.unsqueeze(-1).to(features.dtype))
        inputs = torch.cat(parts, -1)
        if self.spec.core.kind == "lstm":
            return self.core(inputs, state)
        if self.spec.core.kind == "gru":
            hidden, last = self.core(inputs, state[0])
            return hidden, (last,)
        return inputs, ()

    def heads(self, hidden: Tensor) -> Tensor:
        """Dueling Q-values ``[..., A]`` of ``[..., hidden]``: V + A - mean A (Wang et al. 2016)."""
        for_value, for_advantage = torch.relu(self.head_hidden(hidden)).chunk(2, -1)
        advantage = self.advantage(for_advantage)
        return self.value(for_value) + advantage - advantage.mean(-1, keepdim=True)

    def step(
        self, stack: Tensor, previous_action: Tensor, previous_reward: Tensor, state: State, first: Tensor
    ) -> tuple[Tensor, State]:
        """One acting step of B lanes: Q-values ``[B, A]`` and the state after it.

        ``stack`` ``[B, K, *shape]``, the rest ``[B]``. Where ``first`` (bool) holds, an episode begins: the lane's
        state is zeroed before the observation is consumed.
        """
        features = self.encode(stack).unsqueeze(0)
        state = reset_state(state, first)
        q, state = self.unroll(features, previous_action.unsqueeze(0), previous_reward.unsqueeze(0), state)
        return q.squeeze(0), state


def build_network(spec: NetworkSpec, generator: torch.Generator) -> R2D2Network:
    """A network on the CPU whose parameters come from ``generator`` alone; torch's global random state is untouched.

    Weights and biases are uniform within 1/sqrt(fan in), torch's own default; the LSTM's forget gate starts at bias 1
    (article section 5.1).
    """
    network = empty_network(spec)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                bound = 1 / math.sqrt(module.weight[0].numel())
                for parameter in module.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, nn.LSTM | nn.GRU):
                bound = 1 / math.sqrt(module.hidden_size)
                for parameter in module.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
        if spec.core.kind == "lstm":
            # Gates rest in the order i, f, g, o, and torch adds two bias vectors: one holds the 1, the other 0.
            forget = slice(spec.core.width, 2 * spec.core.width)
            for layer in range(spec.core.layers):
                getattr(network.core, f"bias_ih_l{layer}")[forget] = 1.0
                getattr(network.core, f"bias_hh_l{layer}")[forget] = 0.0
    return network


def empty_network(spec: NetworkSpec) -> R2D2Network:
    """A network on the CPU with uninitialised parameters, to be loaded into. Draws no random numbers."""
    with torch.device("meta"):
        network = R2D2Network(spec)
    return network.to_empty(device="cpu")


def zero_state(core: CoreSpec, lanes: int, device: torch.device | str = "cpu") -> State:
    """The state an episode begins with."""
    return tuple(torch.zeros(core.layers, lanes, core.width, device=device) for _ in core.parts)


def reset_state(state: State, where: Tensor) -> State:
    """``state`` with the lanes of ``where`` (bool ``[B]``) zeroed."""
    return tuple(part.masked_fill(where[None, :, None], 0.0) for part in state)


def state_to_rows(state: State) -> tuple[Tensor, ...]:
    """Storage form, one ``[B, layers * H]`` per part, layer-major; a view where there is one layer."""
    return tuple(part.transpose(0, 1).reshape(part.shape[1], -1) for part in state)


def state_from_rows(rows: tuple[Tensor, ...], core: CoreSpec) -> State:
    """The inverse of ``state_to_rows``: contiguous ``[layers, B, H]`` per part."""
    return tuple(part.reshape(-1, core.layers, core.width).transpose(0, 1).contiguous() for part in rows)
