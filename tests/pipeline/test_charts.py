"""Charts of what a run has logged."""

import numpy as np
import pytest

from pipeline.charts import DIAGNOSTICS, ENV_STEPS, LEARNING_CURVE, History, draw, over_env_steps, smoothed

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # matplotlib's own, of its dependencies.


def history(steps, seconds, values) -> History:
    return History(np.array(steps), np.array(seconds, float), np.array(values, float))


def test_evaluations_stand_where_the_dataset_was_at_that_time():
    histories = {
        ENV_STEPS: history([0, 1000, 3000], [0, 10, 20], [0, 1000, 3000]),
        "eval/return_mean": history([25, 50], [5, 15], [-20, -19]),
        "collect/return_mean": history([1000, 3000], [10, 20], [-20, -19]),
    }
    for name, expected in (("eval/return_mean", [500, 2000]), ("collect/return_mean", [1000, 3000])):
        assert over_env_steps(histories[name], histories, name).tolist() == expected


def test_smoothing_is_the_mean_of_each_value_and_those_before_it():
    assert smoothed(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert smoothed(np.array([1.0, 2.0]), 1).tolist() == [1.0, 2.0]


def test_a_chart_is_a_png_once_there_is_something_to_draw(tmp_path):
    path = tmp_path / "chart.png"
    assert draw(LEARNING_CURVE, {}, path) is False
    assert not path.exists()
    histories = {"collect/return_mean": history([10, 20], [0, 60], [1, 2])}
    assert draw(LEARNING_CURVE, histories, path, "a run") is True
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw(DIAGNOSTICS, histories, tmp_path / "other.png") is False
