"""Where gradients flow, and what a segment costs."""

from dataclasses import replace

import pytest
import torch

from r2d2.config import LearnerConfig
from r2d2.losses import row_weights
from r2d2.training_pass import segments, training_pass
from schemas.geometry import TERMINATED, SequenceGeometry
from tests.r2d2.episodes import cut, join, play

STORED = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4)  # One frame per input: a row is a position.


@pytest.fixture
def run(make_learner, vector_spec):
    """One pass over an episode of 30 steps; gives the gradient that reaches each row's observation."""

    def run(**options):
        learner = make_learner(spec=replace(vector_spec, frame_stack=1), geometry=STORED, stored=STORED)
        batch, _ = cut(play(learner.network, 30, TERMINATED, 0), STORED)
        window = learner.load(batch)
        window = replace(window, frames=window.frames.requires_grad_())
        start = tuple(part.requires_grad_() for part in window.core)
        shares = row_weights(window.transitions.mask, "uniform")
        config = LearnerConfig(**options)
        training_pass(learner.network, learner.target, window, start=start, shares=shares, config=config)
        return window, window.frames.grad.abs().sum(-1), start

    return run


@pytest.mark.parametrize("options", [{}, {"tbptt": 3}, {"tbptt": 3, "tbptt_carry": False}], ids=str)
def test_no_gradient_reaches_burn_in_bootstrap_rows_or_the_stored_state(run, options):
    window, gradient, start = run(**options)
    assert (gradient[:, :4] == 0).all()
    assert (gradient[:, 12:] == 0).all()
    assert all(part.grad is None for part in start)
    trained = window.transitions.mask.T
    assert (gradient[:, 4:12][trained] > 0).all()
    assert (gradient[:, 4:12][~trained] == 0).all()


def test_segments_cover_the_unroll_once():
    assert list(segments(8, 0)) == [(0, 8)]
    assert list(segments(8, 3)) == [(0, 3), (3, 6), (6, 8)]
    assert list(segments(8, 8)) == [(0, 8)]


@pytest.mark.parametrize(("options", "alike"), [({"tbptt": 3}, True), ({"tbptt": 3, "tbptt_carry": False}, False)])
def test_a_carried_state_leaves_values_alone_and_a_cut_one_does_not(make_learner, options, alike):
    """Segments of 3 of 8 rows: the first is the same anyway."""
    learner = make_learner()
    batch, _ = cut(play(learner.network, 30, TERMINATED, 0), learner.stored)
    window = learner.load(batch)
    shares = row_weights(window.transitions.mask, "uniform")

    def q(config):
        return training_pass(learner.network, learner.target, window, start=window.core, shares=shares, config=config).q

    whole, parts = q(LearnerConfig()), q(LearnerConfig(**options))
    torch.testing.assert_close(whole[:3], parts[:3], rtol=0, atol=1e-6)
    assert torch.allclose(whole, parts, rtol=0, atol=1e-6) == alike


def test_a_segments_graph_is_gone_before_the_next_begins(make_learner):
    """The most that autograd keeps at one time, parameters aside, falls with the rows: a quarter, and overhead."""
    learner = make_learner()
    batch = join([cut(play(learner.network, 30, TERMINATED, 0), learner.stored)[0]] * 10)
    window = learner.load(batch)
    shares = row_weights(window.transitions.mask, "uniform")
    parameters = {parameter.untyped_storage().data_ptr() for parameter in learner.network.parameters()}

    def most_kept(config):
        kept = {"now": 0, "most": 0}

        class Saved:
            def __init__(self, tensor):
                self.tensor = tensor
                self.size = 0 if tensor.untyped_storage().data_ptr() in parameters else tensor.numel()
                kept["now"] += self.size
                kept["most"] = max(kept["most"], kept["now"])

            def __del__(self):
                kept["now"] -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            training_pass(learner.network, learner.target, window, start=window.core, shares=shares, config=config)
        return kept["most"]

    assert most_kept(LearnerConfig(tbptt=2)) < 0.4 * most_kept(LearnerConfig())
