"""A memory of k steps: the same numbers as unrolling the last k observations from zero, at every step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.limited_memory import LimitedMemoryPolicy
from r2d2.networks import build_network, zero_state
from r2d2.policy import RecurrentPolicy
from schemas.specs import CoreSpec

LANES, STEPS = 3, 11


@pytest.fixture(params=[{}, {"kind": "gru"}, {"layers": 2}], ids=["lstm", "gru", "two layers"])
def network(vector_spec, generator, request):
    return build_network(replace(vector_spec, core=replace(vector_spec.core, **request.param)), generator)


@pytest.fixture
def episodes(rng):
    """Inputs of STEPS calls; lane 1 begins a new episode at call 4, lane 2 at calls 6 and 7."""
    first = np.zeros((STEPS, LANES), np.bool_)
    first[0], first[4, 1], first[6, 2], first[7, 2] = True, True, True, True
    action = np.where(first, -1, rng.integers(3, size=(STEPS, LANES)))
    reward = np.where(first, 0, rng.normal(size=(STEPS, LANES))).astype(np.float32)
    return rng.normal(size=(STEPS, LANES, 2, 3)).astype(np.float32), action, reward, first


def act_through(policy, episodes) -> np.ndarray:
    return np.stack([policy.act(*call).q_values for call in zip(*episodes, strict=True)])


@pytest.mark.parametrize("memory_steps", [1, 2, 5])
def test_every_step_sees_its_last_k_observations_of_the_same_episode(network, episodes, memory_steps):
    policy = LimitedMemoryPolicy(network, memory_steps, np.zeros(LANES), np.random.default_rng(0))
    found = act_through(policy, episodes)
    observation, action, reward, first = (torch.from_numpy(part) for part in episodes)
    for lane in range(LANES):
        for t in range(STEPS):
            began = max(s for s in range(t + 1) if first[s, lane])
            rows = slice(max(began, t - memory_steps + 1), t + 1)
            with torch.no_grad():
                features = network.encode(observation[rows, lane])[:, None]
                q, _ = network.unroll(
                    features, action[rows, lane][:, None], reward[rows, lane][:, None], zero_state(network.spec.core, 1)
                )
            np.testing.assert_allclose(found[t, lane], q[-1, 0].numpy(), atol=1e-6, rtol=1e-5)


def test_a_memory_longer_than_the_episodes_is_unlimited(network, episodes):
    limited = LimitedMemoryPolicy(network, STEPS + 5, np.zeros(LANES), np.random.default_rng(0))
    full = RecurrentPolicy(network.spec.core, 3, np.zeros(LANES), np.random.default_rng(0))
    full.set_network(network, 0, bytes(16))
    np.testing.assert_allclose(act_through(limited, episodes), act_through(full, episodes), atol=1e-6, rtol=1e-5)


def test_what_cannot_be_limited_is_refused(network, vector_spec, generator):
    with pytest.raises(ValueError, match="memory_steps is 0"):
        LimitedMemoryPolicy(network, 0, np.zeros(LANES), np.random.default_rng(0))
    without_core = build_network(replace(vector_spec, core=CoreSpec(kind="none")), generator)
    with pytest.raises(ValueError, match="only for a network with a recurrent core"):
        LimitedMemoryPolicy(without_core, 3, np.zeros(LANES), np.random.default_rng(0))
