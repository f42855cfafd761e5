"""The acting policy: random until told, then the network's own numbers and states."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.networks import build_network
from r2d2.policy import RecurrentPolicy
from schemas.shard import NO_LINEAGE
from schemas.specs import CoreSpec

LANES = 3
ONE, OTHER = b"1" * 16, b"2" * 16
NOBODY = np.zeros(LANES, np.bool_)


@pytest.fixture
def network(vector_spec, generator):
    return build_network(vector_spec, generator)


@pytest.fixture
def policy(vector_spec):
    return RecurrentPolicy(vector_spec.core, vector_spec.num_actions, np.zeros(LANES), np.random.default_rng(0))


@pytest.fixture
def act(policy, rng):
    def act(first=NOBODY):
        observation = rng.normal(size=(LANES, 2, 3)).astype(np.float32)
        return policy.act(observation, np.array([0, 1, -1]), np.ones(LANES, np.float32), first)

    return act


def test_without_a_network_it_acts_uniformly_and_says_so(policy, act):
    outputs = [act() for _ in range(400)]
    counts = np.bincount(np.concatenate([output.action for output in outputs]), minlength=3)
    assert (np.abs(counts / counts.sum() - 1 / 3) < 0.05).all()
    assert policy.epsilons.tolist() == [1.0] * LANES
    assert (outputs[0].version, outputs[0].lineage) == (-1, NO_LINEAGE)
    assert not outputs[0].greedy.any()
    assert np.isnan(outputs[0].q_values).all()
    assert outputs[0].q_values.shape == (LANES, 3)
    assert [part.tolist() for part in outputs[0].core] == [np.zeros((LANES, 8)).tolist()] * 2


def test_it_acts_greedily_on_the_networks_values_and_reports_the_state_before(policy, network, act, rng):
    policy.set_network(network, 7, ONE)
    assert policy.epsilons.tolist() == [0.0] * LANES
    state = None
    for t in range(5):
        observation = rng.normal(size=(LANES, 2, 3)).astype(np.float32)
        action, reward = np.array([t % 3, -1, 2]), np.full(LANES, t, np.float32)
        first = np.array([t == 0, t == 3, False])
        output = policy.act(observation, action, reward, first)
        before = tuple(torch.from_numpy(part.copy())[None] for part in output.core)
        with torch.no_grad():
            q, after = network.step(
                torch.from_numpy(observation),
                torch.from_numpy(action),
                torch.from_numpy(reward),
                before,
                torch.zeros(LANES, dtype=torch.bool),
            )
        np.testing.assert_allclose(output.q_values, q.numpy(), atol=1e-6)
        assert (output.action == q.argmax(-1).numpy()).all()
        assert output.greedy.all()
        assert (output.version, output.lineage) == (7, ONE)
        for part, was in zip(output.core, state or np.zeros((2, LANES, 8)), strict=True):
            np.testing.assert_allclose(part, np.where(first[:, None], 0, was), atol=1e-6)
        state = [part[0].numpy() for part in after]


def test_states_survive_a_new_version_and_not_a_new_lineage(policy, network, vector_spec, act):
    policy.set_network(network, 1, ONE)
    act()
    policy.set_network(build_network(vector_spec, torch.Generator().manual_seed(9)), 2, ONE)
    kept = act()
    assert all(part.any(1).all() for part in kept.core)
    policy.set_network(network, 3, OTHER)
    assert not any(part.any() for part in act().core)


def test_arrays_handed_out_are_never_written_again(policy, network, act):
    policy.set_network(network, 1, ONE)
    outputs = [act() for _ in range(3)]
    copies = [[part.copy() for part in output.core] for output in outputs]
    act(first=np.ones(LANES, np.bool_))
    policy.set_network(network, 2, OTHER)
    act()
    for output, copy in zip(outputs, copies, strict=True):
        np.testing.assert_array_equal(np.stack(output.core), np.stack(copy))


@pytest.mark.parametrize("core", [CoreSpec(kind="gru", width=4), CoreSpec(kind="none")], ids=str)
def test_it_holds_whatever_state_its_core_has(vector_spec, generator, core, rng):
    policy = RecurrentPolicy(core, 3, np.zeros(LANES), np.random.default_rng(0))
    policy.set_network(build_network(replace(vector_spec, core=core), generator), 0, ONE)
    inputs = rng.normal(size=(LANES, 2, 3)).astype(np.float32), np.zeros(LANES, int), np.zeros(LANES, np.float32)
    assert len(policy.act(*inputs, NOBODY).core) == len(core.parts)
    assert all(part.any() for part in policy.act(*inputs, NOBODY).core)


def test_a_network_with_fewer_frames_sees_the_newest(vector_spec, generator, policy, rng):
    network = build_network(replace(vector_spec, frame_stack=1), generator)
    policy.set_network(network, 0, ONE)
    observation = rng.normal(size=(LANES, 2, 3)).astype(np.float32)
    full = policy.act(observation, np.zeros(LANES, int), np.zeros(LANES, np.float32), NOBODY)
    policy.set_network(network, 0, OTHER)
    newest = policy.act(observation[:, 1:], np.zeros(LANES, int), np.zeros(LANES, np.float32), NOBODY)
    np.testing.assert_array_equal(full.q_values, newest.q_values)


def test_a_network_for_another_game_or_core_is_refused_and_the_old_one_kept_h_h1(
    policy, network, vector_spec, generator
):
    policy.set_network(network, 1, ONE)
    with pytest.raises(ValueError, match="the network has 18 actions, the environment 3"):
        policy.set_network(build_network(replace(vector_spec, num_actions=18), generator), 2, ONE)
    with pytest.raises(ValueError, match="core"):
        policy.set_network(build_network(replace(vector_spec, core=CoreSpec(kind="none")), generator), 2, ONE)
    assert policy.version == 1


def test_one_seed_gives_one_stream_of_actions(vector_spec, network, rng):
    observation = rng.normal(size=(20, LANES, 2, 3)).astype(np.float32)

    def actions():
        policy = RecurrentPolicy(vector_spec.core, 3, np.full(LANES, 0.5), np.random.default_rng(4))
        policy.set_network(network, 0, ONE)
        rest = np.zeros(LANES, int), np.zeros(LANES, np.float32), NOBODY
        return np.stack([policy.act(frame, *rest).action for frame in observation])

    np.testing.assert_array_equal(actions(), actions())


def test_actor_and_learner_see_the_same_pixels_h_h2(image_spec, generator, make_learner, rng):
    network = build_network(image_spec, generator)
    policy = RecurrentPolicy(image_spec.core, 4, np.zeros(2), rng)
    policy.set_network(network, 0, ONE)
    stack = rng.integers(0, 256, (2, 2, 10, 12)).astype(np.uint8)
    acted = policy.act(stack, np.array([-1, -1]), np.zeros(2, np.float32), np.ones(2, np.bool_))
    state = tuple(torch.from_numpy(part)[None] for part in acted.core)
    with torch.no_grad():
        features = network.encode(torch.from_numpy(stack)[:, None]).transpose(0, 1)
        q, _ = network.unroll(features, torch.full((1, 2), -1), torch.zeros(1, 2), state)
    np.testing.assert_allclose(acted.q_values, q[0].numpy(), atol=1e-6)
