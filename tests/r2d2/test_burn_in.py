"""The state a window is trained from."""

from dataclasses import replace

import torch

from r2d2.burn_in import burn_in, choose
from schemas.geometry import TERMINATED, SequenceGeometry
from tests.r2d2.episodes import cut, play

STORED = SequenceGeometry(burn_in=5, unroll=4, bootstrap=2, stride=2, frame_stack=2)


def test_burn_in_ends_in_the_state_the_actor_had_wherever_the_sequence_begins(make_learner):
    """First valid rows 5, 3, 1 and 0; the network that acted."""
    learner = make_learner(geometry=STORED, stored=STORED)
    window = learner.load(cut(play(learner.network, 30, TERMINATED, 0), STORED)[0])
    assert window.borders == (1, 3, 5)
    features = learner.network.encode(window.stack(0, 5)).transpose(0, 1)
    state = burn_in(learner.network, features, window, window.core)
    for part, acted in zip(state, window.unroll_core, strict=True):
        torch.testing.assert_close(part, acted, rtol=0, atol=1e-6)


def test_burn_in_carries_no_gradient(make_learner):
    learner = make_learner(geometry=STORED, stored=STORED)
    window = learner.load(cut(play(learner.network, 30, TERMINATED, 0), STORED)[0])
    features = learner.network.encode(window.stack(0, 5)).transpose(0, 1)
    assert features.requires_grad
    assert not any(part.requires_grad for part in burn_in(learner.network, features, window, window.core))


def test_no_burn_in_leaves_the_start_state(make_learner):
    learner = make_learner(geometry=replace(STORED, burn_in=0), stored=STORED)
    window = learner.load(cut(play(learner.network, 30, TERMINATED, 0), STORED)[0])
    state = burn_in(learner.network, torch.zeros(0, len(window.frames), 8), window, window.core)
    assert all(torch.equal(part, start) for part, start in zip(state, window.core, strict=True))


def test_choosing_a_state_lets_nothing_of_the_other_through():
    one, other = torch.ones(1, 2, 3), torch.full((1, 2, 3), torch.nan)
    (chosen,) = choose(torch.tensor([True, True]), (one,), (other,))
    assert torch.equal(chosen, one)
