"""Forward and backward over one replayed batch: the arithmetic of an update, without the optimiser's step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from r2d2.burn_in import burn_in
from r2d2.config import LearnerConfig
from r2d2.conservative import conservative_losses
from r2d2.losses import sequence_losses, td_errors
from r2d2.networks import R2D2Network, State, zero_state
from r2d2.targets import double_q_targets
from r2d2.tensors import WindowTensors

# Images encoded at a time. Few of them stay in a CPU's caches: 1.2 times as fast as all at once (16 x 80, 2 cores).
IMAGES_AT_ONCE = {"cpu": 128, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class TrainingPass:
    """What came out, none of it with gradient: that is in the parameters.

    Attributes:
        loss: the batch loss, a scalar.
        errors: TD errors ``[T, B]``, 0 in invalid rows.
        q: online Q-values ``[T, B, A]``.
        first_features, last_features: ``[B, F]`` of the first and the last trained row.
    """

    loss: Tensor
    errors: Tensor
    q: Tensor
    first_features: Tensor
    last_features: Tensor


def training_pass(
    online: R2D2Network,
    target: R2D2Network,
    window: WindowTensors,
    *,
    start: State,
    shares: Tensor,
    config: LearnerConfig,
) -> TrainingPass:
    """Accumulates the gradient of ``sum(shares * 0.5 delta^2)`` into ``online``'s parameters.

    Both networks burn in by themselves from ``start``, the state before each sequence's first valid row. Then, per
    segment of truncated backpropagation (the whole unroll unless ``config.tbptt`` is set): the online network with
    gradient over its rows, both networks without over the n rows behind it, targets, backward. A segment's graph is
    gone before the next begins, so memory follows the segment. Gradient never crosses a segment's or the unroll's
    first row; the state does unless ``config.tbptt_carry`` is off, which restarts both networks from zeros there.

    ``shares`` float32 ``[T, B]`` is each row's weight in the batch loss, 0 in invalid rows.

    Source: Kapturowski et al. 2019, section 3; segments: article section 2.3.
    """
    length, n = window.geometry.burn_in, window.geometry.bootstrap
    device = window.frames.device
    precision = autocast(config, device)
    with precision, torch.no_grad():
        target_features = encode_rows(target, window, 0, window.geometry.stored_steps)
        target_state = burn_in(target, target_features[:length], window, start)
        state = burn_in(online, encode_rows(online, window, 0, length), window, start)

    loss, errors, q_values, edge_features = torch.zeros((), device=device), [], [], []
    for first, stop in segments(window.geometry.unroll, config.tbptt):
        if first and not config.tbptt_carry:
            state = target_state = zero_state(online.spec.core, len(window.frames), device)
        here, behind = (length + first, length + stop), (length + stop, length + stop + n)
        with precision:
            with torch.no_grad():
                target_q, target_state = target.unroll(
                    target_features[slice(*here)], *window.previous(*here), target_state
                )
                target_q_behind, _ = target.unroll(
                    target_features[slice(*behind)], *window.previous(*behind), target_state
                )
            features = encode_rows(online, window, *here)
            q, state = online.unroll(features, *window.previous(*here), state)
            state = tuple(part.detach() for part in state)
            with torch.no_grad():
                q_behind, _ = online.unroll(encode_rows(online, window, *behind), *window.previous(*behind), state)

        rows = window.transitions.segment(first, stop, n)
        targets = double_q_targets(
            torch.cat([q.detach(), q_behind]),
            torch.cat([target_q, target_q_behind]),
            reward=rows.reward,
            continues=rows.continues,
            end=rows.end,
            n=n,
            gamma=config.gamma,
            epsilon=config.epsilon,
        )
        segment_errors = td_errors(q, rows.action, targets, rows.mask)
        segment_loss = sequence_losses(segment_errors, shares[first:stop]).sum()
        if config.cql_alpha:
            gaps = conservative_losses(q, rows.action, shares[first:stop])
            segment_loss = segment_loss + config.cql_alpha * gaps.sum()
        segment_loss.backward()
        loss += segment_loss.detach()
        errors.append(segment_errors.detach())
        q_values.append(q.detach())
        edge_features += [features[0].detach(), features[-1].detach()]
    return TrainingPass(
        loss=loss,
        errors=torch.cat(errors),
        q=torch.cat(q_values),
        first_features=edge_features[0],
        last_features=edge_features[-1],
    )


def autocast(config: LearnerConfig, device: torch.device) -> torch.autocast:
    """The context in which networks run; what comes out of it is float32 again once errors are taken."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def segments(unroll: int, length: int) -> Iterator[tuple[int, int]]:
    """``(first, stop)`` of each segment of at most ``length`` rows; one of all rows when ``length`` is 0."""
    length = length or unroll
    for first in range(0, unroll, length):
        yield first, min(first + length, unroll)


def encode_rows(network: R2D2Network, window: WindowTensors, first: int, stop: int) -> Tensor:
    """Features ``[stop-first, B, F]`` of window rows, a bounded number of images at a time."""
    at_once = max(1, IMAGES_AT_ONCE.get(window.frames.device.type, 8192) // len(window.frames))
    pieces = [network.encode(window.stack(row, min(row + at_once, stop))) for row in range(first, stop, at_once)]
    if not pieces:
        return window.previous_reward.new_empty(0, len(window.frames), network.spec.feature_size)
    return torch.cat(pieces, 1).transpose(0, 1)
