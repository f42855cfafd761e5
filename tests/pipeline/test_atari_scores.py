"""The figures that scores are normalised with."""

import gymnasium
import pytest

import pipeline.environments  # noqa: F401
from pipeline.atari_scores import TABLE, scores_of


def test_random_play_is_nothing_and_a_human_a_hundred_percent():
    pong = scores_of("ALE/Pong-v5")
    assert (pong.random, pong.human, pong.r2d2) == (-20.7, 14.6, 21.0)
    assert pong.human_normalised(-20.7) == 0
    assert pong.human_normalised(14.6) == pytest.approx(100)
    assert pong.human_normalised(21.0) == pytest.approx(118.13, abs=0.01)


def test_every_game_is_found_under_the_emulators_own_name_and_the_source_is_named():
    games = {name for name in gymnasium.registry if name.startswith("ALE/")}
    rows = [line for line in TABLE.read_text().splitlines() if line and not line.startswith(("#", "game,"))]
    assert len({name for name in games if scores_of(name)}) == len(rows) == 57
    assert scores_of("ALE/MsPacman-v5").human == 6951.6
    assert scores_of("CartPole-v1") is None
    assert "Kapturowski et al. 2019" in TABLE.read_text()
