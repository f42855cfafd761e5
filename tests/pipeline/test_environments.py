"""Lanes: NEXT_STEP handled exactly, units of the frame cap, every wrong input refused by name."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pipeline.environments import EnvironmentConfig, EnvironmentFailure, make_lanes
from pipeline.environments.gym import GymLanes
from pipeline.rollout import Rollout
from pipeline.sequences import SequenceBuilder
from schemas.geometry import CUT, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.terms import DatasetTerms
from tests.pipeline.scripted import CORE, ScriptedPolicy


class Counting(gymnasium.Env):
    """Starts at ``base``, rises by 1 a step, rewards the step number."""

    def __init__(self, base: int, terminates_at: int | None = None, truncates_at: int | None = None) -> None:
        self.observation_space, self.action_space = Box(0, 1000, (1,), np.float32), Discrete(3)
        self._base, self._ends = base, (terminates_at, truncates_at)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.array([self._base], np.float32), {}

    def step(self, action):
        self._step += 1
        terminated, truncated = (self._step == end for end in self._ends)
        return np.array([self._base + self._step], np.float32), float(self._step), terminated, truncated, {}


def counting_lanes(mode=AutoresetMode.NEXT_STEP):
    makers = [lambda: Counting(0, terminates_at=3), lambda: Counting(100, truncates_at=4)]
    return GymLanes(SyncVectorEnv(makers, autoreset_mode=mode), "Counting-v0", {})


def test_case_h_b1_the_reset_call_is_no_transition_and_the_truncated_observation_is_kept():
    lanes = counting_lanes()
    geometry = SequenceGeometry(burn_in=0, unroll=4, bootstrap=1, stride=4)
    rollout = Rollout(lanes, ScriptedPolicy(2), 1, seed=0)
    builder = SequenceBuilder(DatasetTerms(env=lanes.spec, geometry=geometry, core=CORE), "me", 2)
    steps = [rollout.step() for _ in range(6)]
    np.testing.assert_array_equal([s.reward for s in steps], np.transpose([[1, 2, 3, 0, 1, 2], [1, 2, 3, 4, 0, 1]]))
    sequences = [sequence for step in steps for sequence in builder.record(step)]
    observation, act = rollout.look()
    np.testing.assert_array_equal(observation[:, 0], [2, 101])
    sequences += builder.cut(observation, act.q_values)

    owned = [int(geometry.owned_steps(*np.array([s.first_valid, s.num_steps, s.ends]))) for s in sequences]
    assert sum(owned) == 10
    assert sequences[-1].env_steps == 10
    sums = {lane: sum(float(s.reward.sum()) for s in sequences if s.lane == lane) for lane in (0, 1)}
    assert sums == {0: 9.0, 1: 11.0}
    for s in sequences:
        pairs = list(zip(s.observation[: s.num_steps, 0], s.observation[1 : s.num_observations, 0], strict=False))
        assert all(after == before + 1 for before, after in pairs)
    (terminated,) = [s for s in sequences if s.ends == TERMINATED]
    assert terminated.observation[:, 0].tolist() == [0, 1, 2, 3, 0]
    (truncated,) = [s for s in sequences if s.ends == TRUNCATED]
    assert truncated.observation[:, 0].tolist() == [100, 101, 102, 103, 104]
    assert (truncated.num_observations, truncated.terminated.any(), truncated.truncated[3]) == (5, False, True)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_case_h_b1_other_autoreset_modes_are_refused_by_name(mode):
    with pytest.raises(ValueError, match=rf"autoreset_mode.*{mode.name}.*NEXT_STEP"):
        counting_lanes(mode)


def test_case_h_b2_the_frame_cap_counts_frames_and_truncates():
    config = EnvironmentConfig(arguments={"max_num_frames_per_episode": 400, "noop_max": 0})
    lanes = make_lanes(config, 1)
    lanes.reset(0)
    truncated_at = []
    for call in range(1, 203):
        lanes.send(np.zeros(1, np.int64))
        step = lanes.recv()
        assert not step.terminated.any()
        if step.truncated[0]:
            truncated_at.append(call)
        assert step.is_transition[0] == (call not in (101, 202))
    assert truncated_at == [100, 201]
    assert lanes.spec.frame_skip * 100 == 400
    assert make_lanes(EnvironmentConfig(), 1).spec.arguments["max_num_frames_per_episode"] == 108_000


def test_case_h_h1_the_number_of_actions_is_read_from_the_environment():
    def actions(env_id, full):
        return make_lanes(EnvironmentConfig(env_id=env_id, arguments={"full_action_space": full}), 1).spec.num_actions

    assert (actions("ALE/Skiing-v5", False), actions("ALE/Skiing-v5", True)) == (3, 9)
    assert (actions("ALE/Breakout-v5", False), actions("ALE/Breakout-v5", True)) == (4, 18)
    assert (actions("ALE/Pong-v5", False), actions("ALE/Pong-v5", True)) == (6, 18)


@pytest.mark.parametrize("actions", [[0, 6], [-1, 0], [0], [0.0, 1.0]])
def test_a_wrong_action_is_refused_before_the_emulator_sees_it(actions):
    lanes = make_lanes(EnvironmentConfig(), 2)
    lanes.reset(0)
    with pytest.raises(ValueError, match=r"actions are .*allowed"):
        lanes.send(np.array(actions))


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "CartPole-v1"])
def test_one_seed_gives_the_same_steps_whatever_the_threads(env_id):
    def play(threads):
        lanes = make_lanes(EnvironmentConfig(env_id=env_id), 3, threads)
        seen = [lanes.reset(5)]
        random = np.random.default_rng(0)
        for _ in range(40):
            lanes.send(random.integers(0, lanes.spec.num_actions, 3))
            seen.append(lanes.recv().observation)
        return np.stack(seen)

    np.testing.assert_array_equal(play(1), play(2))


def test_lives_lost_are_seen_once_and_are_no_episode_end():
    lanes = make_lanes(EnvironmentConfig(env_id="ALE/Breakout-v5", arguments={"noop_max": 0}), 2, 2)
    lanes.reset(0)
    lost = np.zeros(2, int)
    random = np.random.default_rng(3)
    for _ in range(600):
        lanes.send(random.integers(0, 4, 2))
        step = lanes.recv()
        lost += step.life_lost
        if step.terminated.any():
            break
    assert step.terminated.any()
    assert lost[step.terminated].tolist() == [5] * int(step.terminated.sum())


class WithDict(Counting):
    def __init__(self) -> None:
        super().__init__(0)
        self.observation_space = Dict({"x": Box(0, 1, (1,))})


gymnasium.register(id="WithDict-v0", entry_point=WithDict)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"env_id": "ALE/Pongg-v5"}, r"env is 'ALE/Pongg-v5'; allowed: .*Did you mean: `Pong`"),
        ({"env_id": "CartPole-v9"}, r"env is 'CartPole-v9'; allowed: "),
        ({"env_id": "nowhere_to_be_found:X-v0"}, r"env is 'nowhere.*No module named"),
        ({"env_id": "Pendulum-v1"}, r"action space of Pendulum-v1 is Box.*allowed: Discrete"),
        ({"env_id": "WithDict-v0"}, r"observation space of WithDict-v0 is Dict.*allowed: Box"),
        ({"env_id": "CartPole-v1", "arguments": {"x": 1}}, r"env_arg is {'x': 1}; allowed"),
        ({"env_id": "CartPole-v1", "sticky": 0.25}, r"sticky is 0.25; allowed: 0"),
        ({"arguments": {"img_height": 0}}, r"env_arg img_height is 0; allowed"),
        ({"arguments": {"stack_num": 4}}, r"env_arg is 'stack_num'; allowed for Atari: img_height"),
    ],
)
def test_wrong_environments_are_refused_in_one_line(config, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        make_lanes(EnvironmentConfig(**config), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("lanes", "threads", "field"), [(0, 1, "envs"), (1, 0, "threads")])
def test_counts_below_one_are_refused(lanes, threads, field):
    with pytest.raises(ValueError, match=rf"{field} is 0; allowed: 1 or more"):
        make_lanes(EnvironmentConfig(), lanes, threads)


def test_the_recall_task_asks_for_the_cue_and_only_memory_can_tell():
    config = EnvironmentConfig(env_id="pipeline.environments.recall:Recall-v0", arguments={"trials": 3, "delay": 5})
    lanes = make_lanes(config, 1)
    observation = lanes.reset(0)[0]
    cue, total = 0, 0.0
    for step in range(21):
        phase = step % 7
        if phase == 0:
            cue = int(observation.argmax())
            assert cue in (0, 1)
        else:
            assert observation.argmax() == (3 if phase == 6 else 2)
        lanes.send(np.array([cue]))
        result = lanes.recv()
        assert result.reward[0] == (phase == 6)
        total += result.reward[0]
        observation = result.observation[0]
    assert (total, bool(result.terminated[0])) == (3.0, True)


class Raising(Counting):
    """Raises at its third step, each time; and for ever once ``broken``."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__(0)
        self._broken = broken

    def step(self, action):
        if self._step == 2 or self._broken:
            raise RuntimeError("the emulator\nfell over")
        return super().step(action)


gymnasium.register(id="Raising-v0", entry_point=Raising)


def test_an_environment_that_raises_costs_its_open_episode_only():
    lanes = make_lanes(EnvironmentConfig(env_id="Raising-v0"), 2)
    geometry = SequenceGeometry(burn_in=0, unroll=4, bootstrap=1, stride=4)
    rollout = Rollout(lanes, ScriptedPolicy(2), 1, seed=0)
    builder = SequenceBuilder(DatasetTerms(env=lanes.spec, geometry=geometry, core=CORE), "me", 2)
    steps = [rollout.step() for _ in range(6)]
    assert [bool(s.is_transition[0]) for s in steps] == [True, True, False, True, True, False]
    sequences = [sequence for step in steps for sequence in builder.record(step)]
    assert lanes.restarts == 4
    assert lanes.last_failure == "RuntimeError: the emulator fell over"
    assert [(s.lane, s.num_steps, s.num_observations, s.ends) for s in sequences] == [
        (lane, 2, 3, CUT) for _ in range(2) for lane in range(2)
    ]
    for s in sequences:  # What was seen before the failed step is kept, and nothing joins it to the new episode.
        assert s.observation[:3, 0].tolist() == [0, 1, 2]
        assert s.reward.tolist() == [1, 2, 0, 0, 0]


def test_environments_that_keep_raising_end_the_job_with_one_line():
    config = EnvironmentConfig(env_id="Raising-v0", arguments={"broken": True}, max_failures=3)
    lanes = make_lanes(config, 1)
    lanes.reset(0)
    for _ in range(2):
        lanes.send(np.zeros(1, np.int64))
        assert not lanes.recv().is_transition.any()
    lanes.send(np.zeros(1, np.int64))
    with pytest.raises(EnvironmentFailure, match="raised in 3 steps in a row: RuntimeError: the emulator fell over"):
        lanes.recv()
