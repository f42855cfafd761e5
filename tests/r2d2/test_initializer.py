"""The State Initializer: learns stored states, and nothing else learns from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.initializer import StateInitializer
from r2d2.networks import build_network
from schemas.geometry import TERMINATED
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import cut, play, sample_of


@pytest.fixture(scope="module")
def sample(make_learner):
    return sample_of(cut(play(make_learner().network, 40, TERMINATED, 0), GEOMETRY)[0])


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_states_have_the_cores_shape_for_vectors_and_images(vector_spec, image_spec, generator, kind):
    for spec in (vector_spec, replace(vector_spec, core=replace(vector_spec.core, layers=2)), image_spec):
        network = build_network(spec, generator)
        initializer = StateInitializer(spec, kind, 16, generator)
        stack = torch.zeros(3, 2, *spec.observation.shape, dtype=getattr(torch, spec.observation.dtype))
        state = initializer(network, stack)
        assert [part.shape for part in state] == [(spec.core.layers, 3, 8)] * 2


def test_linear_reads_maps_averaged_over_the_image(image_spec, generator):
    network, initializer = build_network(image_spec, generator), StateInitializer(image_spec, "linear", 16, generator)
    assert [tuple(p.shape) for p in initializer.parameters()] == [(16, 6), (16,)]
    stack = torch.randint(256, (2, 2, 10, 12), dtype=torch.uint8, generator=generator)
    with torch.no_grad():
        expected = initializer.layers(network.maps(stack).mean((2, 3)))
        found = torch.cat([part[0] for part in initializer(network, stack)], 1)
    torch.testing.assert_close(found, expected)


def test_loss_is_the_mean_square_over_own_sequences_by_hand(vector_spec, generator):
    initializer = StateInitializer(vector_spec, "mlp", 4, generator)
    guess = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    stored = (torch.full((1, 3, 8), 2.0), torch.zeros(1, 3, 8))
    stored[0][0, 2] = 100.0
    assert initializer.loss(guess, stored, torch.tensor([True, True, False])).item() == 2.0
    assert initializer.loss(guess, stored, torch.zeros(3, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_it_learns_and_the_network_feels_only_the_start_state(make_learner, sample, kind):
    learner = make_learner(initial_state="initializer", initializer=kind, learning_rate=1e-2)
    losses = [learner.step(sample).metrics["initializer_loss"] for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]
    assert 0 < learner.initializer_share < 1
    assert make_learner().initializer_share == 0


def test_its_error_never_reaches_the_network(make_learner, sample):
    learner = make_learner(initial_state="initializer")
    window = learner.load(sample.batch)
    guess = learner.initializer(learner.network, window.stack(4, 5)[:, 0])
    learner.initializer.loss(guess, window.unroll_core, torch.ones(len(sample.batch), dtype=torch.bool)).backward()
    assert all(parameter.grad is None for parameter in learner.network.parameters())
    assert all(parameter.grad is not None for parameter in learner.initializer.parameters())


def test_a_window_starts_from_its_guess_unless_an_episode_begins_there(make_learner, sample):
    learner = make_learner(initial_state="initializer")
    window = learner.load(sample.batch)
    usable = torch.ones(len(sample.batch), dtype=torch.bool)
    start = learner.start_state(window, usable)
    begins = torch.from_numpy(sample.batch.previous_action == -1)
    assert begins.sum() == 2  # Sequences 0 and 1: rows 4 and 0 hold step 0.
    assert all((part[:, begins] == 0).all() for part in start)
    guess = learner.initializer(learner.network, window.stack(0, 1)[:, 0])
    torch.testing.assert_close(start[0][:, ~begins], guess[0][:, ~begins].detach())


def test_foreign_states_are_not_learnt(make_learner, sample):
    lineage = sample.batch.lineage.copy()
    lineage[:] = 0
    foreign = replace(sample, batch=replace(sample.batch, lineage=lineage))
    learner = make_learner(initial_state="initializer")
    assert learner.step(foreign).metrics["initializer_loss"] == 0.0
    assert np.isfinite(learner.step(sample).metrics["initializer_loss"])
