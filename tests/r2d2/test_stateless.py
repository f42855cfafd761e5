"""Acting without a network: by the table where it knows the frame, at random elsewhere."""

import numpy as np

from r2d2.stateless import StatelessPolicy
from schemas.shard import NO_LINEAGE
from schemas.specs import CoreSpec

LANES, ACTIONS, CALLS = 4, 5, 2000


def play(policy, frame=0):
    """``CALLS`` steps whose newest frame is ``frame``: (actions, greedy), each ``[CALLS, LANES]``."""
    stack = np.zeros((LANES, 2, 3), np.uint8)
    stack[:, -1] = frame
    nothing = np.full(LANES, -1), np.zeros(LANES, np.float32), np.zeros(LANES, bool)
    out = [policy.act(stack, *nothing) for _ in range(CALLS)]
    return np.stack([act.action for act in out]), np.stack([act.greedy for act in out])


def make(epsilons, core="none"):
    return StatelessPolicy(CoreSpec(kind=core, width=2), ACTIONS, np.array(epsilons), np.random.default_rng(0))


def test_without_a_table_every_action_is_as_likely_and_none_is_greedy():
    policy = make([0.0] * LANES)
    actions, greedy = play(policy)
    counts = np.bincount(actions.ravel(), minlength=ACTIONS)
    assert abs(counts / counts.sum() - 1 / ACTIONS).max() < 0.02
    assert not greedy.any()
    assert (policy.epsilons == 1).all()
    assert (policy.lookups, policy.hits) == (0, 0)


def test_known_frames_are_acted_on_with_each_lanes_epsilon_and_unknown_ones_at_random():
    policy = make([0.0, 0.0, 0.5, 1.0])
    policy.set_table(lambda frames: np.where(frames[:, 0] == 7, 3, -1))
    actions, greedy = play(policy, frame=7)
    share = (actions == 3).mean(0)
    assert share[0] == share[1] == 1
    np.testing.assert_allclose(share[2:], [0.5 + 0.5 / ACTIONS, 1 / ACTIONS], atol=0.03)
    assert (greedy == (actions == 3)).all()
    assert policy.hits == policy.lookups == CALLS * LANES
    actions, greedy = play(policy, frame=8)
    assert abs((actions == 3).mean(0) - 1 / ACTIONS).max() < 0.03
    assert not greedy.any()
    assert (policy.hits, policy.lookups) == (CALLS * LANES, 2 * CALLS * LANES)


def test_it_says_of_itself_that_no_network_acted():
    policy = make([0.1] * LANES, core="lstm")
    out = policy.act(np.zeros((LANES, 1, 3), np.uint8), np.zeros(LANES, int), np.zeros(LANES), np.zeros(LANES, bool))
    assert (out.version, out.lineage) == (-1, NO_LINEAGE)
    assert np.isnan(out.q_values).all()
    assert [part.shape for part in out.core] == [(LANES, 2)] * 2
    assert not any(part.any() for part in out.core)
