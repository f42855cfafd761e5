"""One update against the slow oracle: priorities, loss and the gradient of every parameter, option by option."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.networks import build_network
from schemas.geometry import CUT, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.specs import CoreSpec
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import cut, join, play, sample_of, with_garbage
from tests.r2d2.oracle import slow_update

# Shorter than an unroll, exactly one, one more, several windows: each kind of ending.
EPISODES = [
    (1, TERMINATED),
    (5, TRUNCATED),
    (8, TERMINATED),
    (9, CUT),
    (21, TERMINATED),
    (23, TRUNCATED),
    (30, LIFE_LOST),
]
NO_CLIPPING = 1e9


def experience(network, stored=GEOMETRY):
    """Every sequence of all those episodes, acted by an older version of the network."""
    older = build_network(network.spec, torch.Generator().manual_seed(99))
    return join([cut(play(older, steps, ends, seed), stored)[0] for seed, (steps, ends) in enumerate(EPISODES)])


def assert_equals_oracle(learner, batch):
    learner.target.load_state_dict(build_network(learner.spec, torch.Generator().manual_seed(5)).state_dict())
    sample = sample_of(batch)
    priorities, loss, gradients = slow_update(
        learner.network,
        learner.target,
        sample,
        used=learner.geometry,
        stored=learner.stored,
        config=learner.config,
        life_loss=learner.life_loss,
        usable=learner.usable_states(batch),
    )
    output = learner.step(sample_of(with_garbage(batch, learner.stored)))
    assert output.updated
    np.testing.assert_allclose(output.priorities, priorities, atol=2e-5)
    assert output.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    for name, parameter in learner.network.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-3, atol=1e-6, msg=lambda text, n=name: n + text
        )


OPTIONS = {
    "paper": {},
    "no rescaling": {"rescaling": False},
    "no importance weights": {"importance_weights": False},
    "eta 1": {"eta": 1.0},
    "zero start": {"initial_state": "zero"},
    "recent": {"time_weighting": "recent"},
    "tbptt carried": {"tbptt": 3},
    "tbptt cut": {"tbptt": 3, "tbptt_carry": False},
    "tbptt recent": {"tbptt": 2, "time_weighting": "recent"},
    "contiguous memory": {"channels_last": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_update_equals_the_oracle_with_each_option(make_learner, options):
    learner = make_learner(clip_norm=NO_CLIPPING, **options)
    assert_equals_oracle(learner, experience(learner.network))


@pytest.mark.parametrize("life_loss", ["roll", "reset"])
def test_update_equals_the_oracle_in_each_life_loss_mode(make_learner, life_loss):
    learner = make_learner(clip_norm=NO_CLIPPING, life_loss=life_loss)
    assert_equals_oracle(learner, experience(learner.network))


@pytest.mark.parametrize("kind", ["gru", "none", "lstm of two layers"])
def test_update_equals_the_oracle_with_each_core(make_learner, vector_spec, kind):
    core = CoreSpec(kind="lstm", layers=2, width=6) if kind == "lstm of two layers" else CoreSpec(kind=kind, width=6)
    learner = make_learner(spec=replace(vector_spec, core=core), clip_norm=NO_CLIPPING)
    assert_equals_oracle(learner, experience(learner.network))


@pytest.mark.parametrize("dense", [(10,), ()], ids=["dense", "straight into the core"])
def test_update_equals_the_oracle_on_images(make_learner, image_spec, dense):
    learner = make_learner(spec=replace(image_spec, dense=dense, use_previous_reward=False), clip_norm=NO_CLIPPING)
    assert_equals_oracle(learner, experience(learner.network))


CROPS = {
    "no burn-in": {"burn_in": 0},
    "less burn-in": {"burn_in": 3},
    "shorter unroll": {"unroll": 4},
    "smaller horizon": {"bootstrap": 1},
    "fewer frames": {"frame_stack": 1},
    "all of them": {"burn_in": 1, "unroll": 4, "bootstrap": 2, "frame_stack": 1},
}


@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_update_equals_the_oracle_in_a_smaller_window(make_learner, vector_spec, crop):
    used = replace(GEOMETRY, **crop)
    spec = replace(vector_spec, frame_stack=used.frame_stack)
    learner = make_learner(spec=spec, geometry=used, clip_norm=NO_CLIPPING)
    acted = make_learner()  # The actor sees the stored stack; only the columns matter here.
    assert_equals_oracle(learner, experience(acted.network))


def test_update_equals_the_oracle_where_sequences_begin_at_several_borders(make_learner, vector_spec):
    """Stride 2 in a burn-in of 5: first valid rows 5, 3, 1 and 0."""
    stored = SequenceGeometry(burn_in=5, unroll=4, bootstrap=2, stride=2, frame_stack=2)
    learner = make_learner(geometry=stored, stored=stored, clip_norm=NO_CLIPPING)
    batch = experience(learner.network, stored)
    assert set(batch.first_valid) == {5, 3, 1, 0}
    assert_equals_oracle(learner, batch)


def test_update_equals_the_oracle_without_stored_burn_in(make_learner):
    stored = replace(GEOMETRY, burn_in=0)
    learner = make_learner(geometry=stored, stored=stored, clip_norm=NO_CLIPPING)
    assert_equals_oracle(learner, experience(learner.network, stored))


def test_foreign_states_start_from_zero(make_learner):
    learner = make_learner(lineage=bytes(16), clip_norm=NO_CLIPPING)
    batch = experience(learner.network)
    assert not learner.usable_states(batch).any()
    assert_equals_oracle(learner, batch)
    trusting = make_learner(lineage=bytes(16), clip_norm=NO_CLIPPING, trust_stored_state=True)
    assert trusting.usable_states(batch).all()
    assert_equals_oracle(trusting, batch)
