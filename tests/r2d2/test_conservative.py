"""The conservative term, and where it enters an update."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.calibration import replayed_values
from r2d2.conservative import conservative_losses
from r2d2.losses import row_weights
from r2d2.priorities import sequence_priorities
from r2d2.training_pass import training_pass
from schemas.geometry import TERMINATED, TRUNCATED
from tests.r2d2.episodes import cut, join, play, sample_of


def test_formula_and_padding():
    q = torch.tensor([[[0.0, 1.0], [5.0, 5.0]], [[2.0, -1.0], [7.0, float("nan")]]])
    action = torch.tensor([[0, 1], [0, 0]])
    weights = torch.tensor([[0.5, 1.0], [0.5, 0.0]])  # The last row of the second sequence is padding.
    first = 0.5 * (np.log(1 + np.e) - 0) + 0.5 * (np.log(np.e**2 + np.e**-1) - 2)
    found = conservative_losses(q, action, weights)
    np.testing.assert_allclose(found.numpy(), [first, np.log(2)], rtol=1e-6)
    assert (found >= 0).all()


def test_it_raises_the_value_of_what_was_done_and_lowers_the_others():
    q = torch.zeros(1, 1, 3, requires_grad=True)
    conservative_losses(q, torch.tensor([[1]]), torch.ones(1, 1)).sum().backward()
    np.testing.assert_allclose(q.grad[0, 0].numpy(), [1 / 3, -2 / 3, 1 / 3], rtol=1e-6)


def test_an_update_adds_alpha_times_the_term_and_leaves_errors_and_priorities_alone(make_learner):
    learner = make_learner()
    batch, _ = cut(play(learner.network, 30, TERMINATED, 0), learner.stored)
    window = learner.load(batch)
    shares = row_weights(window.transitions.mask, "uniform") / len(batch)

    def loss_and_gradient(alpha: float):
        learner.network.zero_grad()
        config = replace(learner.config, cql_alpha=alpha)
        found = training_pass(learner.network, learner.target, window, start=window.core, shares=shares, config=config)
        return found, torch.cat([value.grad.flatten() for value in learner.network.parameters()])

    (none, plain), (half, bent), (one, _) = (loss_and_gradient(alpha) for alpha in (0.0, 0.5, 1.0))
    term = conservative_losses(none.q, window.transitions.action, shares).sum()
    assert term > 0.1
    assert one.loss - none.loss == pytest.approx(float(term), rel=1e-5)
    assert half.loss - none.loss == pytest.approx(float(term) / 2, rel=1e-5)
    assert torch.equal(one.errors, none.errors)
    assert not torch.allclose(plain, bent)


def test_values_on_stored_steps_are_those_that_training_computes(make_learner):
    """The held-out and the trained numbers must be comparable: same burn-in, same targets, same errors."""
    learner = make_learner(seed=3)
    with torch.no_grad():
        for value in learner.target.parameters():
            value.mul_(1.5)
    parts = [cut(play(learner.network, steps, ends, seed), learner.stored)[0]
             for steps, ends, seed in ((30, TERMINATED, 0), (9, TRUNCATED, 1))]  # fmt: skip
    batch = join(parts)
    window = learner.load(batch)
    start = learner.start_state(window, torch.from_numpy(learner.usable_states(batch)))
    value, errors = replayed_values(learner.network, learner.target, window, start, learner.config)
    mask = window.transitions.mask
    priorities = sequence_priorities(errors, mask, learner.config.eta).numpy()
    np.testing.assert_allclose(priorities, learner.step(sample_of(batch)).priorities, rtol=1e-5)
    assert (value[~mask] == 0).all()
    assert value[mask].abs().max() > 0
