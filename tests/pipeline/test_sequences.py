"""The builder against a slow cutter: nothing lost, nothing crossing, every value what really happened."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rollout import Rollout, VectorStep
from pipeline.sequences import SequenceBuilder
from schemas.geometry import ENDS_NAMES, SequenceGeometry
from schemas.records import ActOutput
from schemas.shard import PROBE_EVERY
from schemas.terms import DatasetTerms
from tests.pipeline.scripted import (
    CORE,
    LINEAGE,
    Episode,
    ScriptedPolicy,
    expected_sequences,
    scripted_lanes,
    split_lives,
)

FIELDS = ("first_valid", "num_steps", "num_observations", "previous_action", "previous_reward")
ARRAYS = ("observation", "action", "reward", "q_values")


def collect(scripts, geometry, calls, life_loss="off"):
    lanes, envs = scripted_lanes(scripts, life_loss)
    terms = DatasetTerms(env=lanes.spec, geometry=geometry, core=CORE)
    rollout = Rollout(lanes, ScriptedPolicy(len(scripts)), geometry.frame_stack, seed=1)
    builder = SequenceBuilder(terms, "me", len(scripts))
    sequences = [sequence for _ in range(calls) for sequence in builder.record(rollout.step())]
    observation, act = rollout.look()
    return sequences + builder.cut(observation, act.q_values), envs, terms


def check_against_slow_cutter(scripts, geometry, calls, life_loss="off"):
    sequences, envs, _ = collect(scripts, geometry, calls, life_loss)
    assert [s.sequence for s in sequences] == list(range(len(sequences)))
    by_lane: dict[int, dict[int, list]] = {}
    for sequence in sequences:
        by_lane.setdefault(sequence.lane, {}).setdefault(sequence.episode, []).append(sequence)
    total_steps = 0
    for lane, env in enumerate(envs):
        lives = [
            life
            for log in env.logs
            for life in split_lives(log, geometry.frame_stack, reset_mode=life_loss == "reset")
            if life.actions
        ]
        episodes = by_lane.get(lane, {})
        assert len(episodes) == len(lives)
        for episode, life in zip(sorted(episodes), lives, strict=True):
            want = expected_sequences(life, geometry, geometry.frame_stack)
            assert [s.start for s in episodes[episode]] == [w["start"] for w in want]
            for got, wanted in zip(episodes[episode], want, strict=True):
                for name in FIELDS:
                    assert getattr(got, name) == wanted[name], name
                if wanted["ends"] == "life_lost" and got.num_observations > got.num_steps:
                    # The next life's network output stands there: no target uses it, for the discount is zero.
                    wanted["q_values"][got.first_valid + got.num_steps] = got.q_values[got.first_valid + got.num_steps]
                for name in ARRAYS:
                    np.testing.assert_array_equal(getattr(got, name), wanted[name], err_msg=name)
                assert ENDS_NAMES[got.ends] == wanted["ends"]
                np.testing.assert_array_equal(np.stack([got.terminated, got.truncated, got.life_lost]), wanted["flags"])
                np.testing.assert_array_equal(got.core, wanted["core"])
                np.testing.assert_array_equal(got.unroll_core, wanted["unroll_core"])
                assert got.lineage == LINEAGE
            trained = Counter(step for wanted in want for step in wanted["trained"])
            steps = len(life.actions)
            assert trained == {step: geometry.times_trained(step, steps) for step in range(steps)}
            owned = [
                int(geometry.owned_steps(*np.array([s.first_valid, s.num_steps, s.ends]))) for s in episodes[episode]
            ]
            assert sum(owned) == steps
            total_steps += steps
    assert sequences[-1].env_steps == total_steps


@st.composite
def geometries(draw):
    unroll = draw(st.integers(1, 8))
    return SequenceGeometry(
        burn_in=draw(st.integers(0, 9)),
        unroll=unroll,
        bootstrap=draw(st.integers(1, 5)),
        stride=draw(st.sampled_from([d for d in range(1, unroll + 1) if unroll % d == 0])),
        frame_stack=draw(st.integers(1, 3)),
    )


@st.composite
def scripts(draw):
    lanes = draw(st.integers(1, 3))
    episode = st.builds(
        Episode,
        steps=st.integers(1, 25),
        truncates=st.booleans(),
        lost=st.frozensets(st.integers(0, 24), max_size=3),
    )
    return [draw(st.lists(episode, min_size=1, max_size=4)) for _ in range(lanes)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    geometry=geometries(),
    scripts=scripts(),
    calls=st.integers(1, 60),
    life_loss=st.sampled_from(["off", "roll", "reset"]),
)
def test_any_episodes_under_any_geometry_are_cut_as_the_slow_cutter_cuts_them(geometry, scripts, calls, life_loss):
    check_against_slow_cutter(scripts, geometry, calls, life_loss)


@pytest.mark.parametrize("steps", [1, 3, 7, 8, 9, 12, 13, 16, 40])
@pytest.mark.parametrize("truncates", [False, True])
def test_episodes_around_the_border_of_the_unroll(steps, truncates):
    geometry = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)
    check_against_slow_cutter([[Episode(steps, truncates)]], geometry, calls=2 * steps + 5)


def test_an_episode_of_ten_steps_gives_the_sequences_a_reader_can_check_by_eye():
    geometry = SequenceGeometry(burn_in=2, unroll=4, bootstrap=2, stride=2)
    sequences, _, _ = collect([[Episode(10)]], geometry, calls=11)
    # start, first valid row, real actions, real observations, ends
    assert [(s.start, s.first_valid, s.num_steps, s.num_observations, ENDS_NAMES[s.ends]) for s in sequences] == [
        (0, 2, 6, 6, "continues"),
        (2, 0, 8, 8, "continues"),
        (4, 0, 8, 8, "terminated"),  # its last row is the episode's last step, its successor is the last sequence
        (6, 0, 6, 7, "terminated"),
    ]
    assert np.isnan(sequences[1].episode_return)
    assert sequences[-1].episode_return == sum((step % 5) - 1.5 for step in range(10))


def test_one_sequence_in_sixty_four_carries_the_state_before_its_last_trained_row():
    geometry = SequenceGeometry(burn_in=0, unroll=1, bootstrap=1, stride=1)
    sequences, _, _ = collect([[Episode(1000)]], geometry, calls=150)
    probed = [s.sequence for s in sequences if s.probe_core]
    assert probed == [0, PROBE_EVERY, 2 * PROBE_EVERY]
    for number in probed:  # L = 0, T = 1: the last trained row is the first unroll row.
        np.testing.assert_array_equal(sequences[number].probe_core, sequences[number].unroll_core)


def test_a_sequence_acted_by_two_networks_has_no_lineage_and_spans_both_versions():
    geometry = SequenceGeometry(burn_in=2, unroll=4, bootstrap=2, stride=4)
    lanes, _ = scripted_lanes([[Episode(50)]])
    policy = ScriptedPolicy(1)
    rollout = Rollout(lanes, policy, 1, seed=0)
    builder = SequenceBuilder(DatasetTerms(env=lanes.spec, geometry=geometry, core=CORE), "me", 1)
    sequences = []
    for call in range(30):
        policy.version = call
        step = rollout.step()
        if call >= 10:
            object.__setattr__(step.act, "lineage", bytes([7] * 16))
        sequences += builder.record(step)
    for sequence in sequences:
        first = sequence.start - geometry.burn_in + sequence.first_valid
        assert (sequence.version_first, sequence.version_last) == (first, first + sequence.num_steps - 1)
        one_network = sequence.version_last < 10 or first >= 10
        assert (sequence.lineage != bytes(16)) == one_network


def one_lane_step(*, first=False, life_lost=False, truncated=False, raised=False):
    """One step of reward 1, or the call in which the environment raised."""
    act = ActOutput(
        action=np.zeros(1, np.int64),
        greedy=np.ones(1, bool),
        q_values=np.zeros((1, 3), np.float32),
        core=(np.zeros((1, 3), np.float32),) * 2,
        version=0,
        lineage=LINEAGE,
    )
    return VectorStep(
        stack=np.zeros((1, 1, 3), np.float32),
        first=np.array([first]),
        act=act,
        epsilons=np.zeros(1, np.float32),
        reward=np.array([0.0 if raised else 1.0], np.float32),
        terminated=np.zeros(1, bool),
        truncated=np.array([truncated]),
        life_lost=np.array([life_lost]),
        is_transition=np.array([not raised]),
    )


FIRST, STEP, LOST = one_lane_step(first=True), one_lane_step(), one_lane_step(life_lost=True)
OVER, OVER_AND_LOST = one_lane_step(truncated=True), one_lane_step(truncated=True, life_lost=True)
RAISED = one_lane_step(raised=True)


@pytest.mark.parametrize(
    ("steps", "returns"),
    [
        ([FIRST, STEP, LOST, FIRST, STEP, OVER, RAISED], [6.0]),
        ([FIRST, STEP, OVER_AND_LOST, RAISED, FIRST, OVER, RAISED], [3.0, 2.0]),
        ([FIRST, STEP, LOST, RAISED, FIRST, OVER, RAISED], [2.0]),
        ([FIRST, STEP, LOST, FIRST, RAISED, FIRST, OVER, RAISED], [2.0]),
    ],
    ids=["over all lives", "over as a life is lost", "raises after a life", "raises within a life"],
)
def test_a_game_return_is_of_that_game_alone(steps, returns):
    """In reset mode; what follows an end, like a failure, is no transition."""
    lanes, _ = scripted_lanes([[Episode(9)]], "reset")
    geometry = SequenceGeometry(burn_in=0, unroll=20, bootstrap=1, stride=20)
    builder = SequenceBuilder(DatasetTerms(env=lanes.spec, geometry=geometry, core=CORE), "me", 1)
    sequences = [sequence for step in steps for sequence in builder.record(step)]
    assert [s.episode_return for s in sequences if np.isfinite(s.episode_return)] == returns
