"""What a network and a learner may be made of."""

from dataclasses import replace

import pytest

from r2d2.config import NATURE, SMALL, LearnerConfig, NetworkSpec, is_image
from schemas.specs import ArraySpec, CoreSpec
from tests.r2d2.conftest import GEOMETRY

ATARI = ArraySpec(shape=(84, 84), dtype="uint8")


def test_the_nature_encoder_ends_in_7_by_7_maps_of_64():
    spec = NetworkSpec(observation=ATARI, num_actions=18)
    assert spec.map_shape == (64, 7, 7)
    assert (spec.flat_size, spec.feature_size) == (3136, 512)
    assert spec.core_input_size == 512 + 18 + 1
    assert replace(spec, dense=(), use_previous_reward=False).core_input_size == 3136 + 18


def test_a_spec_survives_json(vector_spec, image_spec):
    for spec in (vector_spec, image_spec, NetworkSpec(observation=ATARI, num_actions=6, convolutions=SMALL)):
        assert NetworkSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match="num_actions"):
        NetworkSpec.from_json({k: v for k, v in vector_spec.to_json().items() if k != "num_actions"})
    with pytest.raises(ValueError, match="not the description"):
        NetworkSpec.from_json({**vector_spec.to_json(), "colour": 1})


@pytest.mark.parametrize(
    ("shape", "expected"), [((84, 84), True), ((64, 48, 3), True), ((3, 84, 84), False), ((4,), False), ((), False)]
)
def test_images_are_told_from_other_arrays_without_guessing_axes(shape, expected):
    assert is_image(ArraySpec(shape=shape, dtype="uint8")) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_actions": 0}, "num_actions is 0"),
        ({"frame_stack": 0}, "frame_stack is 0"),
        ({"dense": (512, 0)}, "dense is"),
        ({"convolutions": ((32, 8),)}, "convolutions is"),
        ({"observation": ArraySpec(shape=(3, 84, 84), dtype="uint8"), "convolutions": NATURE}, r"\(3, 84, 84\)"),
        ({"observation": ArraySpec(shape=(20, 20), dtype="uint8"), "convolutions": NATURE}, r"\(20, 20\).*larger"),
    ],
)
def test_impossible_networks_are_refused_by_name(image_spec, change, message):
    with pytest.raises(ValueError, match=message):
        replace(image_spec, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 1.1},
        {"eta": -0.1},
        {"beta": 2.0},
        {"learning_rate": 0.0},
        {"adam_epsilon": 0.0},
        {"clip_norm": -1.0},
        {"rescaling_epsilon": -1e-3},
        {"target_copy_updates": 0},
        {"initial_state": "random"},
        {"initializer": "deep"},
        {"initializer_width": 0},
        {"tbptt": -1},
        {"tbptt_carry": False},
        {"time_weighting": "early"},
        {"precision": "float16"},
        {"trust_stored_state": True, "initial_state": "zero"},
    ],
)
def test_impossible_settings_are_refused_by_name(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*; allowed: "):
        LearnerConfig(**change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tbptt": 9}, "tbptt is 9; allowed: at most unroll 8"),
        ({"tbptt": 4}, "tbptt"),
        ({"initial_state": "initializer"}, "init"),
    ],
)
def test_settings_that_do_not_fit_network_or_window_are_refused(vector_spec, settings, message):
    spec = vector_spec if settings == {"tbptt": 9} else replace(vector_spec, core=CoreSpec(kind="none"))
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**settings).refuse_impossible(spec, GEOMETRY)


def test_a_network_with_another_frame_stack_than_the_window_is_refused(vector_spec):
    with pytest.raises(ValueError, match="frame_stack of the network is 1; allowed: 2"):
        LearnerConfig().refuse_impossible(replace(vector_spec, frame_stack=1), GEOMETRY)
