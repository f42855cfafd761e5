"""Curves of several seeds as one."""

import numpy as np
import pytest

from pipeline.charts import ENV_STEPS, History
from pipeline.curves import Curve, band_of, bootstrap_interval, curve_of


def history(steps, seconds, values) -> History:
    return History(np.array(steps), np.array(seconds, float), np.array(values, float))


def test_a_runs_curve_lies_over_env_steps_or_over_hours():
    histories = {
        ENV_STEPS: history([0, 1000], [100, 3700], [0, 1000]),
        "eval/return_mean": history([1, 2, 3], [100, 1900, 3700], [1, 2, 3]),
    }
    over_steps = curve_of(histories, "eval/return_mean", ENV_STEPS, 1)
    assert (over_steps.x.tolist(), over_steps.y.tolist()) == ([0, 500, 1000], [1, 2, 3])
    assert curve_of(histories, "eval/return_mean", "hours", 1).x.tolist() == [0, 0.5, 1]
    assert curve_of(histories, "eval/return_mean", "hours", 2).y.tolist() == [1, 1.5, 2.5]
    assert curve_of(histories, "missing", "hours", 1) is None


def test_the_mean_over_seeds_stands_only_where_all_have_values_within_its_interval():
    curves = [Curve(np.array([0.0, 10]), np.array([0.0, 10])), Curve(np.array([5.0, 20]), np.array([7.0, 22]))]
    band = band_of(curves, np.random.default_rng(0))
    assert (band.x[0], band.x[-1], band.seeds) == (5, 10, 2)
    assert band.mean[0] == pytest.approx(6)
    assert band.mean[-1] == pytest.approx(11)
    assert np.all((band.low < band.mean) & (band.mean < band.high))
    one = band_of(curves[:1], np.random.default_rng(0))
    assert np.array_equal(one.low, one.high)


def test_seeds_that_share_no_step_have_no_mean():
    curves = [Curve(np.array([0.0, 10]), np.array([0.0, 10])), Curve(np.array([11.0, 20]), np.array([7.0, 22]))]
    assert band_of(curves, np.random.default_rng(0)) is None


def test_the_bootstrap_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(400, 1))
    low, high = bootstrap_interval(values, np.random.default_rng(0))
    error = values.std() / 20
    assert low[0] == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    assert high[0] == pytest.approx(values.mean() + 1.96 * error, abs=0.3 * error)
