"""Stored batches become the tensors of a window."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.tensors import transitions, window_tensors
from schemas.geometry import CUT, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import cut, join, play, with_garbage

CPU = torch.device("cpu")


@pytest.fixture
def network(make_learner):
    return make_learner().network


@pytest.fixture
def batch(network):
    episodes = [(2, TERMINATED), (8, TRUNCATED), (9, CUT), (26, TERMINATED)]
    return join([cut(play(network, steps, ends, seed), GEOMETRY)[0] for seed, (steps, ends) in enumerate(episodes)])


def window_of(batch, spec, geometry=GEOMETRY):
    return window_tensors(
        batch, geometry, GEOMETRY, core=spec.core, num_actions=spec.num_actions, life_loss="roll", device=CPU
    )


def test_masks_cover_exactly_the_steps_an_episode_has(network):
    """T = 8, stride 4: 9 steps make two sequences that train steps 0..7 and 4..8."""
    batch, _ = cut(play(network, 9, TERMINATED, 0), GEOMETRY)
    mask = transitions(batch, GEOMETRY, GEOMETRY, "off").mask
    assert mask.sum(0).tolist() == [8, 5]
    assert mask[:5, 1].all()


@pytest.mark.parametrize(("ends", "zero"), [(TERMINATED, True), (LIFE_LOST, True), (TRUNCATED, False), (CUT, False)])
def test_only_endings_that_forbid_a_bootstrap_have_discount_zero(network, ends, zero):
    batch, _ = cut(play(network, 5, ends, 0), GEOMETRY)
    rows = transitions(batch, GEOMETRY, GEOMETRY, "off")
    assert rows.end.tolist() == [5]
    assert rows.continues[:, 0].tolist() == [1, 1, 1, 1, 0 if zero else 1, 1, 1, 1, 1, 1, 1]


def test_life_loss_roll_zeroes_flagged_rows_and_off_ignores_them(network):
    batch, _ = cut(play(network, 30, TERMINATED, 0), GEOMETRY)
    life_lost = np.zeros_like(batch.life_lost)
    life_lost[0, GEOMETRY.burn_in + 2] = 1
    batch = replace(batch, life_lost=life_lost)
    for mode, zeros in (("roll", [2]), ("off", []), ("reset", [])):
        rows = transitions(batch, GEOMETRY, GEOMETRY, mode)
        assert (rows.continues[:, 0] == 0).nonzero().flatten().tolist() == zeros
        assert rows.mask[:, 0].all()


def test_a_row_whose_bootstrap_was_never_observed_is_not_trained(network):
    """A truncated episode of 5 steps whose final observation is missing: only rows with a full target remain."""
    batch, _ = cut(play(network, 5, TRUNCATED, 0), GEOMETRY)
    batch = replace(batch, num_observations=batch.num_steps)
    assert transitions(batch, GEOMETRY, GEOMETRY, "off").mask[:, 0].tolist() == [True, True, *[False] * 6]


def test_stacks_are_views_of_single_frames_in_temporal_order(batch, vector_spec):
    window = window_of(batch, vector_spec)
    stack = window.stack(3, 7)
    assert stack.shape == (len(batch), 4, 2, 3)
    assert stack.untyped_storage().data_ptr() == window.frames.untyped_storage().data_ptr()
    for row in range(4):
        for frame in range(2):
            assert torch.equal(stack[:, row, frame], window.frames[:, 3 + row + frame])


def test_the_first_row_of_an_episode_has_no_previous_action(batch, vector_spec):
    window = window_of(batch, vector_spec)
    for b in range(len(batch)):
        first = batch.first_valid[b]
        assert window.previous_action[first, b] == batch.previous_action[b]
        assert window.previous_reward[first, b] == batch.previous_reward[b]
        for row in range(first + 1, first + batch.num_steps[b] + 1):
            if row < GEOMETRY.stored_steps:
                assert window.previous_action[row, b] == batch.action[b, row - 1]
                assert window.previous_reward[row, b] == batch.reward[b, row - 1]
    assert (window.previous_action == -1).any()


@pytest.mark.parametrize("crop", [{}, {"burn_in": 2}, {"burn_in": 0, "unroll": 4}, {"bootstrap": 1, "frame_stack": 1}])
def test_garbage_in_padding_reaches_no_tensor(batch, vector_spec, crop):
    used = replace(GEOMETRY, **crop)
    clean, spoilt = (window_of(b, vector_spec, used) for b in (batch, with_garbage(batch, GEOMETRY)))
    for name in ("frames", "previous_action", "previous_reward", "first_valid", "core_known", "begins"):
        assert torch.equal(getattr(clean, name), getattr(spoilt, name)), name
    for name, value in vars(clean.transitions).items():
        assert torch.equal(value, getattr(spoilt.transitions, name)), name


def test_a_cropped_window_holds_the_same_rows(batch, vector_spec):
    used = SequenceGeometry(burn_in=1, unroll=4, bootstrap=2, stride=4, frame_stack=1)
    whole, part = window_of(batch, vector_spec), window_of(batch, vector_spec, used)
    assert torch.equal(part.frames, whole.frames[:, 4:11])
    assert torch.equal(part.stack(0, 7)[:, :, -1], whole.stack(3, 10)[:, :, -1])
    first = batch.first_valid
    for b in range(len(batch)):
        rows = slice(max(3, first[b]), min(10, first[b] + batch.num_steps[b] + 1))
        assert torch.equal(whole.previous_action[rows, b], part.previous_action[rows.start - 3 : rows.stop - 3, b])
    assert torch.equal(part.transitions.mask, whole.transitions.mask[:4] & part.transitions.mask)
    assert torch.equal(part.first_valid, (whole.first_valid - 3).clamp(min=0))


def test_the_start_state_of_a_cropped_window_is_known_where_stored_or_where_an_episode_begins(batch, vector_spec):
    """Stored L = 4, stride 4: first sequences of an episode begin at row 4, second ones at row 0 of their episode."""
    begins = torch.from_numpy(batch.previous_action == -1)
    for burn_in, known in ((4, None), (2, begins & torch.from_numpy(batch.first_valid >= 2)), (0, None)):
        window = window_of(batch, vector_spec, replace(GEOMETRY, burn_in=burn_in))
        assert torch.equal(window.core_known, torch.ones(len(batch), dtype=torch.bool) if known is None else known)
        stored = batch.unroll_core if burn_in == 0 else batch.core
        assert torch.equal(window.core[0][0], torch.from_numpy(stored[0]))


def test_actions_the_network_does_not_have_are_refused_with_both_numbers_h_h1(batch, vector_spec):
    with pytest.raises(ValueError, match="action is 2 in the data; allowed: 0 to 1"):
        window_of(batch, replace(vector_spec, num_actions=2))
