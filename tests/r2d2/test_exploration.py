"""The epsilon ladder and the draw of actions."""

import numpy as np
import pytest

from r2d2.exploration import epsilon_greedy, epsilon_ladder


def test_the_ladder_spans_from_four_tenths_to_its_eighth_power():
    np.testing.assert_allclose(epsilon_ladder(3), [0.4, 0.4**4.5, 0.4**8], rtol=1e-12)
    assert epsilon_ladder(1).tolist() == [0.4]


def test_processes_that_share_a_ladder_stand_on_its_rungs():
    parts = [epsilon_ladder(2, offset=offset, total=6) for offset in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(parts), epsilon_ladder(6))


@pytest.mark.parametrize(("lanes", "offset", "total"), [(3, 4, 6), (0, 0, None), (2, -1, 6)])
def test_lanes_off_the_ladder_are_refused(lanes, offset, total):
    with pytest.raises(ValueError, match="ladder is"):
        epsilon_ladder(lanes, offset=offset, total=total)


def test_each_lane_explores_as_often_as_its_epsilon_says():
    """Greedy lanes take action 3; a lane of epsilon e differs from it with chance 3/4 e."""
    rng, epsilons = np.random.default_rng(0), np.array([0.0, 0.4, 1.0])
    q_values = np.tile(np.array([0.0, 1.0, 2.0, 3.0], np.float32), (3, 1))
    draws = [epsilon_greedy(q_values, epsilons, rng) for _ in range(4000)]
    actions, greedy = (np.stack(x) for x in zip(*draws, strict=True))
    assert (greedy == (actions == 3)).all()
    np.testing.assert_allclose(1 - greedy.mean(0), [0, 0.3, 0.75], atol=0.03)
    assert set(actions[:, 2]) == {0, 1, 2, 3}


def test_the_random_stream_does_not_depend_on_what_the_network_says():
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    epsilon_greedy(np.zeros((4, 3), np.float32), np.zeros(4), one)
    epsilon_greedy(np.ones((4, 3), np.float32), np.ones(4), other)
    assert one.bit_generator.state == other.bit_generator.state
