"""Priorities: by hand (case H-a3), the same for actor and learner, and the weights that undo them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.config import LearnerConfig
from r2d2.priorities import importance_weights, initial_priorities, sequence_priorities
from schemas.geometry import CUT, LIFE_LOST, TERMINATED, TRUNCATED
from tests.r2d2.episodes import cut, play, sample_of, with_garbage

MASK = (torch.arange(8) < 3).unsqueeze(1)


@pytest.mark.parametrize("padding", [7.0, 0.0, float("nan")])
def test_priority_mixes_maximum_and_mean_of_the_valid_rows_h_a3(padding):
    errors = torch.tensor([0.5, -1.5, 1.0, *[padding] * 5]).unsqueeze(1)
    assert sequence_priorities(errors, MASK, 0.9).item() == pytest.approx(1.45)
    assert sequence_priorities(errors, MASK, 1.0).item() == pytest.approx(1.5)
    assert sequence_priorities(errors, MASK, 0.0).item() == pytest.approx(1.0)


def test_a_nan_error_in_a_valid_row_is_not_hidden():
    errors = torch.tensor([0.5, float("nan"), 1.0, *[0.0] * 5]).unsqueeze(1)
    assert sequence_priorities(errors, MASK, 0.9).isnan().all()


@pytest.mark.parametrize("life_loss", ["off", "roll", "reset"])
@pytest.mark.parametrize("ends", [TERMINATED, TRUNCATED, CUT, LIFE_LOST])
@pytest.mark.parametrize("steps", [1, 7, 8, 9, 11, 30])
def test_an_actors_priorities_are_the_learners_with_the_online_network_as_target(make_learner, steps, ends, life_loss):
    learner = make_learner(life_loss=life_loss)
    batch, q_values = cut(play(learner.network, steps, ends, seed=steps), learner.stored)
    found = initial_priorities(batch, q_values, learner.stored, learner.config, life_loss)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, learner.step(sample_of(batch)).priorities, atol=1e-5)


def test_garbage_in_padding_changes_no_initial_priority(make_learner):
    learner = make_learner()
    for ends in (TERMINATED, CUT):
        batch, q_values = cut(play(learner.network, 13, ends, seed=1), learner.stored)
        clean = initial_priorities(batch, q_values, learner.stored, learner.config, "roll")
        spoilt = initial_priorities(
            with_garbage(batch, learner.stored), q_values, learner.stored, learner.config, "roll"
        )
        np.testing.assert_array_equal(clean, spoilt)


def test_initial_priority_is_nan_only_where_a_needed_value_is(make_learner):
    """Unroll rows 4..11 of a sequence that goes on; rows 7..14 (n = 3) serve as bootstrap."""
    learner = make_learner()
    batch, q_values = cut(play(learner.network, 30, TERMINATED, seed=2), learner.stored)
    for row, needed in ((3, False), (4, True), (11, True), (14, True)):
        spoilt = q_values.copy()
        spoilt[1, row] = np.nan
        found = initial_priorities(batch, spoilt, learner.stored, learner.config, "off")
        assert np.isnan(found[1]) == needed, row
        assert np.isfinite(np.delete(found, 1)).all()


def test_eta_gamma_and_rescaling_reach_the_initial_priority(make_learner):
    learner = make_learner()
    batch, q_values = cut(play(learner.network, 30, TERMINATED, seed=2), learner.stored)
    base = initial_priorities(batch, q_values, learner.stored, LearnerConfig(), "off")
    for change in ({"eta": 0.1}, {"gamma": 0.5}, {"rescaling": False}):
        other = initial_priorities(batch, q_values, learner.stored, replace(LearnerConfig(), **change), "off")
        assert (other != base).all(), change


@pytest.mark.parametrize("steps", [13, 30, 57, 130, 260])
def test_an_initial_priority_is_the_same_to_the_bit_whatever_else_is_in_the_batch(make_learner, steps):
    learner = make_learner()
    batch, q_values = cut(play(learner.network, steps, TERMINATED, seed=steps), learner.stored)
    q_values = (q_values * np.random.default_rng(steps).normal(scale=30, size=q_values.shape)).astype(np.float32)
    whole = initial_priorities(batch, q_values, learner.stored, learner.config, "off")
    alone = [
        initial_priorities(batch.part(b, b + 1), q_values[b : b + 1], learner.stored, learner.config, "off")[0]
        for b in range(len(batch))
    ]
    assert whole.tobytes() == np.array(alone).tobytes()
    assert len(set(alone)) == len(batch) > steps // 8


def test_importance_weights_by_hand():
    """N P = 1, 4, 16 with beta 1/2: 1, 1/2, 1/4; then over the maximum of the batch."""
    found = importance_weights(np.array([0.01, 0.04, 0.16]), 100, 0.5)
    np.testing.assert_allclose(found, [1.0, 0.5, 0.25])
    np.testing.assert_allclose(importance_weights(np.array([0.04, 0.16]), 100, 0.5), [1.0, 0.5])
    assert importance_weights(np.array([0.01, 0.04]), 100, 0.0).tolist() == [1.0, 1.0]
