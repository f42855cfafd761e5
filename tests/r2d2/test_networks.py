"""Networks: inputs as stored, unroll equal to steps, initialisation from one generator."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.config import SMALL, NetworkSpec
from r2d2.networks import build_network, reset_state, state_from_rows, state_to_rows, zero_state
from schemas.specs import ArraySpec, CoreSpec

CORES = [
    CoreSpec(kind="lstm", layers=1, width=8),
    CoreSpec(kind="lstm", layers=2, width=8),
    CoreSpec(kind="gru", layers=1, width=8),
    CoreSpec(kind="none"),
]


def random_state(core: CoreSpec, lanes: int, generator: torch.Generator):
    return tuple(torch.randn(core.layers, lanes, core.width, generator=generator) for _ in core.parts)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_unroll_equals_repeated_steps(vector_spec, generator, core):
    network = build_network(replace(vector_spec, core=core), generator)
    steps, batch = 7, 5
    stacks = torch.randn(steps, batch, 2, 3, generator=generator)
    actions = torch.randint(-1, 3, (steps, batch), generator=generator)
    rewards = torch.randn(steps, batch, generator=generator)
    start = random_state(core, batch, generator)
    with torch.no_grad():
        q, last = network.unroll(network.encode(stacks), actions, rewards, start)
        state, nobody = start, torch.zeros(batch, dtype=torch.bool)
        for t in range(steps):
            step_q, state = network.step(stacks[t], actions[t], rewards[t], state, nobody)
            torch.testing.assert_close(step_q, q[t], rtol=0, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-6)


def test_a_state_is_reset_before_the_first_observation_is_consumed_h_a3():
    """An accumulator in the core's place: x = 1..6, stored state 10, step 3 begins an episode."""
    state, outputs = (torch.full((1, 1, 1), 10.0),), []
    for x, first in zip([1.0, 2, 3, 4, 5, 6], [False, False, False, True, False, False], strict=True):
        (h,) = reset_state(state, torch.tensor([first]))
        state = (h + x,)
        outputs.append(state[0].item())
    assert outputs == [11, 13, 16, 4, 9, 15]


@pytest.mark.parametrize("core", CORES[:3], ids=str)
def test_steps_across_an_episodes_border_equal_two_unrolls_h_a3(vector_spec, generator, core):
    """Lane 0 changes episode at step 3, lane 1 does not."""
    network = build_network(replace(vector_spec, core=core), generator)
    stacks = torch.randn(6, 2, 2, 3, generator=generator)
    actions, rewards = torch.randint(3, (6, 2), generator=generator), torch.randn(6, 2, generator=generator)
    start = random_state(core, 2, generator)
    with torch.no_grad():
        features, state, stepped = network.encode(stacks), start, []
        for t in range(6):
            q, state = network.step(stacks[t], actions[t], rewards[t], state, torch.tensor([t == 3, False]))
            stepped.append(q)
        whole, _ = network.unroll(features, actions, rewards, start)
        second, _ = network.unroll(features[3:], actions[3:], rewards[3:], zero_state(core, 2))
    stepped = torch.stack(stepped)
    torch.testing.assert_close(stepped[:, 1], whole[:, 1], rtol=0, atol=1e-6)
    torch.testing.assert_close(stepped[:3, 0], whole[:3, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(stepped[3:, 0], second[:, 0], rtol=0, atol=1e-6)


def test_no_previous_action_is_an_all_zero_one_hot(vector_spec, generator):
    network = build_network(replace(vector_spec, core=CoreSpec(kind="none")), generator)
    inputs, _ = network.recur(torch.zeros(1, 3, 8), torch.tensor([[-1, 0, 2]]), torch.tensor([[0.5, 0.0, -2.0]]), ())
    assert inputs[0, :, 8:].tolist() == [[0, 0, 0, 0.5], [1, 0, 0, 0.0], [0, 0, 1, -2.0]]


@pytest.mark.parametrize(("action", "reward"), [(True, False), (False, True), (False, False)])
def test_inputs_that_are_switched_off_change_nothing(vector_spec, generator, action, reward):
    spec = replace(vector_spec, use_previous_action=action, use_previous_reward=reward)
    network = build_network(spec, generator)
    features, state = torch.randn(2, 1, 8, generator=generator), zero_state(spec.core, 1)

    def q(previous_action, previous_reward):
        return network.unroll(
            features, torch.full((2, 1), previous_action), torch.full((2, 1), previous_reward), state
        )[0]

    assert torch.equal(q(0, 1.0), q(2, 1.0)) == (not action)
    assert torch.equal(q(0, 1.0), q(0, 2.0)) == (not reward)


def test_dueling_heads_add_value_and_centred_advantage(vector_spec, generator):
    network = build_network(vector_spec, generator)
    hidden = torch.randn(5, 8, generator=generator)
    inner = torch.relu(network.head_hidden(hidden))
    torch.testing.assert_close(network.heads(hidden).mean(-1), network.value(inner[:, :8]).squeeze(-1))
    advantage = network.advantage(inner[:, 8:])
    torch.testing.assert_close(network.heads(hidden).diff(), advantage.diff())


def test_initialisation_follows_its_generator_and_leaves_the_global_one_alone(image_spec):
    before = torch.random.get_rng_state()
    networks = [build_network(image_spec, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before)
    same, again, other = (torch.cat([p.flatten() for p in n.parameters()]) for n in networks)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert same.isfinite().all()


def test_the_forget_gate_starts_at_bias_one(vector_spec, generator):
    core = CoreSpec(kind="lstm", layers=2, width=8)
    network = build_network(replace(vector_spec, core=core), generator)
    for layer in range(2):
        bias = getattr(network.core, f"bias_ih_l{layer}") + getattr(network.core, f"bias_hh_l{layer}")
        assert (bias[8:16] == 1).all()
        assert (bias[:8].abs() < 1).all()
        assert (bias[16:].abs() < 1).all()


def test_the_laptop_network_has_about_400_000_parameters(generator):
    spec = NetworkSpec(
        observation=ArraySpec(shape=(84, 84), dtype="uint8"),
        num_actions=6,
        frame_stack=2,
        convolutions=SMALL,
        dense=(256,),
        core=CoreSpec(kind="lstm", layers=1, width=128),
        dueling_width=128,
    )
    assert 350_000 < sum(p.numel() for p in build_network(spec, generator).parameters()) < 450_000


def test_there_are_as_many_values_as_the_spec_has_actions_h_h1(vector_spec, generator):
    """Whatever actions occur in the data: their number is the environment's."""
    network = build_network(replace(vector_spec, num_actions=4), generator)
    q, _ = network.unroll(
        torch.zeros(1, 2, 8), torch.tensor([[0, 2]]), torch.zeros(1, 2), zero_state(network.spec.core, 2)
    )
    assert q.shape == (1, 2, 4)


def test_uint8_pixels_are_scaled_exactly_once_h_h2(image_spec, generator):
    network = build_network(image_spec, generator)
    scaled = network.scaled(torch.full((1, 2, 10, 12), 128, dtype=torch.uint8))
    assert scaled.dtype == torch.float32
    assert (scaled - 0.501961).abs().max() < 1e-6
    in_range = torch.full((1, 2, 10, 12), 0.50196)
    assert torch.equal(network.scaled(in_range), in_range)


def test_a_float_image_that_was_never_scaled_is_refused_h_h2(image_spec, vector_spec, generator):
    with pytest.raises(ValueError, match="float image holds 128"):
        build_network(image_spec, generator).encode(torch.full((1, 2, 10, 12), 128.0))
    build_network(vector_spec, generator).encode(torch.full((1, 2, 3), 128.0))  # A vector is no image.


def test_trailing_channels_move_in_front_without_transposing_the_image_h_h2(generator):
    spec = NetworkSpec(
        observation=ArraySpec(shape=(2, 3, 1), dtype="float32"),
        num_actions=2,
        frame_stack=1,
        convolutions=((2, 2, 1),),
        core=CoreSpec(kind="none"),
    )
    image = torch.arange(6.0).reshape(1, 1, 2, 3, 1) / 5
    assert (build_network(spec, generator).scaled(image) * 5).tolist() == [[[[0, 1, 2], [3, 4, 5]]]]


def test_stacked_colour_images_keep_every_frames_channels_together(generator):
    spec = NetworkSpec(
        observation=ArraySpec(shape=(8, 8, 3), dtype="uint8"), num_actions=2, frame_stack=2, convolutions=((2, 4, 2),)
    )
    stack = torch.randint(256, (5, 2, 8, 8, 3), dtype=torch.uint8, generator=generator)
    scaled = build_network(spec, generator).scaled(stack)
    assert scaled.shape == (5, 6, 8, 8)
    for frame in range(2):
        for channel in range(3):
            torch.testing.assert_close(scaled[:, 3 * frame + channel], stack[:, frame, :, :, channel] / 255)


def test_vectors_of_any_shape_and_dtype_are_flattened_frame_after_frame(generator):
    ram = ArraySpec(shape=(2, 3, 5), dtype="uint8")
    spec = NetworkSpec(observation=ram, num_actions=2, frame_stack=2, convolutions=(), dense=(4,))
    stack = torch.randint(256, (3, 2, 2, 3, 5), dtype=torch.uint8, generator=generator)
    torch.testing.assert_close(build_network(spec, generator).scaled(stack), stack.reshape(3, 60) / 255)
    numbers = replace(spec, observation=ArraySpec(shape=(2, 3, 5), dtype="float64"))
    wide = torch.randn(3, 2, 2, 3, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(build_network(numbers, generator).scaled(wide), wide.reshape(3, 60).float())


def test_storage_form_of_a_state_is_layer_major_and_comes_back(generator):
    core = CoreSpec(kind="lstm", layers=2, width=3)
    state = random_state(core, 4, generator)
    rows = state_to_rows(state)
    np.testing.assert_array_equal(rows[1][2], torch.cat([state[1][0, 2], state[1][1, 2]]))
    torch.testing.assert_close(state_from_rows(rows, core), state, rtol=0, atol=0)
