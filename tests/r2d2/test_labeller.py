"""Whole episodes under one network give what acting gave, step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.labeller import Labeller, RecordedSteps
from r2d2.networks import build_network
from r2d2.policy import RecurrentPolicy
from schemas.specs import CoreSpec

CORES = [CoreSpec(kind="lstm", layers=1, width=8), CoreSpec(kind="lstm", layers=2, width=4),
         CoreSpec(kind="gru", layers=1, width=8), CoreSpec(kind="none")]  # fmt: skip


def act(network, steps, rng, depth):
    """An episode as a policy acts it: what was recorded, and its Q-values and states."""
    spec = network.spec
    shape = spec.observation.shape
    frames = np.zeros((depth - 1 + steps + 1, *shape), spec.observation.dtype)
    drawn = rng.integers(0, 255, (steps + 1, *shape)) if len(shape) > 1 else rng.standard_normal((steps + 1, *shape))
    frames[depth - 1 :] = drawn
    policy = RecurrentPolicy(spec.core, spec.num_actions, np.array([0.5]), rng)
    policy.set_network(network, 1, bytes(16))
    action, reward, q, core = np.array([-1]), np.zeros(1, np.float32), [], []
    actions, rewards = [], []
    for t in range(steps + 1):
        out = policy.act(frames[None, t : t + depth], action, reward, np.array([t == 0]))
        q.append(out.q_values[0])
        core.append([part[0] for part in out.core])
        if t < steps:
            action, reward = out.action, rng.standard_normal(1).astype(np.float32)
            actions.append(int(action[0]))
            rewards.append(float(reward[0]))
    steps = RecordedSteps(frames=frames, action=np.array(actions, np.int32), reward=np.array(rewards, np.float32))
    return steps, np.stack(q), [np.stack([state[part] for state in core]) for part in range(len(spec.core.parts))]


@pytest.mark.parametrize("core", CORES, ids=lambda core: f"{core.kind} {core.layers}")
@pytest.mark.parametrize("kind", ["vector_spec", "image_spec"])
@pytest.mark.parametrize("depth", [2, 4])
def test_labels_are_what_the_acting_policy_had_whatever_runs_beside_it(request, rng, core, kind, depth):
    spec = replace(request.getfixturevalue(kind), core=core)
    network = build_network(spec, torch.Generator().manual_seed(1))
    acted = [act(network, steps, rng, depth) for steps in (7, 1, 20, 7, 3)]
    labeller = Labeller(network)
    together = labeller.label([steps for steps, _, _ in acted])
    for (steps, q, core_states), labels in zip(acted, together, strict=True):
        (alone,) = labeller.label([steps])
        assert len(labels.core) == len(core.parts)
        for found in (labels, alone):
            np.testing.assert_allclose(found.q_values, q, atol=1e-5, rtol=1e-5)
            for part, expected in zip(found.core, core_states, strict=True):
                np.testing.assert_allclose(part, expected, atol=1e-5, rtol=1e-5)
                assert not part[0].any()


def test_states_are_the_same_where_they_are_wanted_and_missing_elsewhere(vector_spec, rng):
    network = build_network(vector_spec, torch.Generator().manual_seed(1))
    acted = [act(network, steps, rng, 2) for steps in (30, 4, 11)]
    wanted = [np.array([0, 5, 20]), np.array([3]), np.array([0, 10])]
    some = [replace(steps, states_at=at) for (steps, _, _), at in zip(acted, wanted, strict=True)]
    for (_, q, core), at, labels in zip(acted, wanted, Labeller(network).label(some), strict=True):
        np.testing.assert_allclose(labels.q_values, q, atol=1e-5, rtol=1e-5)
        for part, expected in zip(labels.core, core, strict=True):
            np.testing.assert_allclose(part[at], expected[at], atol=1e-5, rtol=1e-5)
    assert np.isnan(labels.core[0][7]).all()


def test_an_action_that_the_network_does_not_have_is_refused(vector_spec, rng):
    network = build_network(vector_spec, torch.Generator().manual_seed(1))
    steps, _, _ = act(network, 5, rng, 2)
    steps.action[3] = 3
    with pytest.raises(ValueError, match="an action is outside 0 to 2"):
        Labeller(network).label([steps])
    assert Labeller(network).label([]) == []
