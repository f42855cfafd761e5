"""The golden replay test in every mode. One failure here is a silently wrong R2D2."""

from dataclasses import replace

import pytest

from pipeline.environments import EnvironmentConfig
from schemas.geometry import CUT, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import (
    check_all,
    check_learner_q,
    collect_golden,
)

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)
LSTM = CoreSpec(kind="lstm", layers=1, width=16)
SMALL_PONG = {"img_height": 42, "img_width": 42}
CORES = {"lstm": LSTM, "lstm, 2 layers": CoreSpec(kind="lstm", layers=2, width=8),
         "gru": CoreSpec(kind="gru", layers=1, width=16), "none": CoreSpec(kind="none")}  # fmt: skip


def pong(steps: int) -> EnvironmentConfig:
    """Pong whose episodes are truncated after ``steps`` agent steps."""
    arguments = {**SMALL_PONG, "noop_max": 0, "max_num_frames_per_episode": 4 * steps}
    return EnvironmentConfig(env_id="ALE/Pong-v5", arguments=arguments)


@pytest.mark.parametrize("steps", [3, 8, 9, 30])
def test_atari_episodes_short_exactly_t_t_plus_1_and_several_windows(tmp_path, steps):
    golden = collect_golden(
        tmp_path, environment=pong(steps), geometry=GEOMETRY, core=LSTM, lanes=2, calls=4 * steps + 6
    )
    assert {TRUNCATED, CUT} <= set(golden.batch.ends.tolist())
    check_all(golden)


@pytest.mark.parametrize("life_loss", ["off", "roll", "reset"])
def test_atari_games_that_lose_lives_and_end(tmp_path, life_loss):
    environment = EnvironmentConfig(env_id="ALE/Breakout-v5", arguments=SMALL_PONG, life_loss=life_loss)
    golden = collect_golden(tmp_path, environment=environment, geometry=GEOMETRY, core=LSTM, lanes=3, calls=260)
    assert golden.batch.life_lost.any()
    assert (LIFE_LOST in golden.batch.ends) == (life_loss == "reset")
    assert TERMINATED in golden.batch.ends
    check_all(golden)


@pytest.mark.parametrize("core", CORES.values(), ids=CORES.keys())
@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5"])
def test_every_core_on_vectors_and_images(tmp_path, env_id, core):
    environment = EnvironmentConfig(env_id=env_id, arguments=SMALL_PONG if env_id.startswith("ALE") else {})
    golden = collect_golden(tmp_path, environment=environment, geometry=GEOMETRY, core=core, lanes=2, calls=60)
    check_all(golden)


def test_lanes_of_different_episode_lengths_shard_borders_inside_episodes_and_two_collectors(tmp_path):
    golden = collect_golden(
        tmp_path,
        environment=EnvironmentConfig(env_id="CartPole-v1"),
        geometry=replace(GEOMETRY, frame_stack=1),
        core=LSTM,
        lanes=5,
        calls=70,
        collectors=2,
        per_shard=3,
    )
    assert len({len(steps) for steps in golden.acted.q.values()}) > 5
    check_all(golden)


@pytest.mark.parametrize(("unroll", "stride"), [(8, 8), (8, 2), (5, 5)])
def test_windows_without_burn_in(tmp_path, unroll, stride):
    geometry = SequenceGeometry(burn_in=0, unroll=unroll, bootstrap=3, stride=stride, frame_stack=2)
    golden = collect_golden(tmp_path, environment=pong(21), geometry=geometry, core=LSTM, lanes=1, calls=60)
    check_all(golden)


def test_burn_in_longer_than_the_stride_has_several_borders(tmp_path):
    geometry = SequenceGeometry(burn_in=9, unroll=4, bootstrap=2, stride=2, frame_stack=1)
    environment = EnvironmentConfig(env_id="CartPole-v1")
    golden = collect_golden(tmp_path, environment=environment, geometry=geometry, core=LSTM, lanes=2, calls=60)
    assert len(set(golden.batch.first_valid.tolist())) >= 5
    check_all(golden)


@pytest.mark.parametrize(
    "smaller",
    [
        {"unroll": 4, "stride": 4},
        {"bootstrap": 1},
        {"burn_in": 0},
        {"burn_in": 0, "unroll": 4, "bootstrap": 2},
    ],
)
def test_a_learner_may_crop_the_stored_window(tmp_path, smaller):
    golden = collect_golden(tmp_path, environment=pong(30), geometry=GEOMETRY, core=LSTM, lanes=2, calls=70)
    check_learner_q(golden, replace(GEOMETRY, **smaller))


def test_the_recall_task_with_its_terminal_question(tmp_path):
    environment = EnvironmentConfig(
        env_id="pipeline.environments.recall:Recall-v0", arguments={"trials": 2, "delay": 5}
    )
    golden = collect_golden(
        tmp_path, environment=environment, geometry=replace(GEOMETRY, frame_stack=1), core=LSTM, lanes=3, calls=50
    )
    check_all(golden)
