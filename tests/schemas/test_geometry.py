"""Window arithmetic against counting by hand and by brute force."""

from collections import Counter

import numpy as np
import pytest

from schemas.geometry import CONTINUES, TERMINATED, SequenceGeometry

PAPER = SequenceGeometry(burn_in=40, unroll=80, bootstrap=5, stride=40, frame_stack=4)


def test_the_papers_window_by_hand():
    assert (PAPER.stored_steps, PAPER.stored_frames) == (125, 128)
    assert [PAPER.last_sequence(steps) for steps in (1, 80, 81, 120, 121)] == [0, 0, 1, 1, 2]
    first = PAPER.window(0, 1000, ended=False)
    assert (first.start, first.first_valid, first.num_steps, first.num_observations) == (0, 40, 85, 85)
    second = PAPER.window(1, 1000, ended=False)
    assert (second.start, second.first_valid, second.num_steps, second.holds_end) == (40, 0, 125, False)
    # An episode of 100 steps: its second and last sequence holds steps 0 .. 99 and the final observation.
    last = PAPER.window(1, 100, ended=True)
    assert (last.first_valid, last.num_steps, last.num_observations, last.holds_end) == (0, 100, 101, True)


@pytest.mark.parametrize(("unroll", "stride"), [(8, 4), (8, 8), (6, 2), (1, 1), (5, 1)])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 8, 9, 16, 17, 31])
def test_every_step_is_trained_as_often_as_counted_and_owned_once(unroll, stride, steps):
    geometry = SequenceGeometry(burn_in=3, unroll=unroll, bootstrap=2, stride=stride)
    last = next(k for k in range(steps + 1) if k * stride + unroll >= steps)
    assert geometry.last_sequence(steps) == last
    trained = Counter(step for k in range(last + 1) for step in range(k * stride, min(k * stride + unroll, steps)))
    assert trained == {step: geometry.times_trained(step, steps) for step in range(steps)}
    windows = [geometry.window(k, steps, ended=True) for k in range(last + 1)]
    owned = geometry.owned_steps(
        np.array([w.first_valid for w in windows]),
        np.array([w.num_steps for w in windows]),
        np.array([TERMINATED if w.holds_end else CONTINUES for w in windows]),
    )
    assert owned.sum() == steps
    assert owned[:-1].tolist() == [stride] * last


@pytest.mark.parametrize(
    ("field", "value"), [("burn_in", -1), ("unroll", 0), ("bootstrap", 0), ("stride", 0), ("frame_stack", 0)]
)
def test_impossible_lengths_are_refused_by_name(field, value):
    lengths = {"burn_in": 4, "unroll": 8, "bootstrap": 1, "stride": 4, "frame_stack": 1, field: value}
    with pytest.raises(ValueError, match=rf"{field} is {value}; allowed"):
        SequenceGeometry(**lengths)


def test_a_stride_that_does_not_divide_the_unroll_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"stride is 3; allowed: a divisor of unroll 8, one of \[1, 2, 4, 8\]"):
        SequenceGeometry(burn_in=0, unroll=8, bootstrap=1, stride=3)


def test_a_larger_window_than_stored_is_refused_by_name():
    smaller = SequenceGeometry(burn_in=0, unroll=40, bootstrap=3, stride=40, frame_stack=1)
    smaller.refuse_larger(PAPER)
    with pytest.raises(ValueError, match="unroll is 80; allowed: at most 40"):
        PAPER.refuse_larger(SequenceGeometry(burn_in=40, unroll=40, bootstrap=5, stride=40, frame_stack=4))
