"""Learning curves of several runs as one: the mean over seeds and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.charts import ENV_STEPS, Histories, over_env_steps, smoothed

POINTS = 100
RESAMPLES = 2000
LOW, HIGH = 0.025, 0.975


@dataclass(frozen=True)
class Curve:
    """One run's metric: ``x`` ascending (env steps or hours), ``y`` smoothed; float64 ``[N]`` each."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Band:
    """Several seeds over one grid: mean and 95 % bootstrap interval, float64 ``[N]``; one seed has no width."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def curve_of(histories: Histories, name: str, over: str, smooth: int) -> Curve | None:
    """A run's curve over ``collect/env_steps`` or ``hours`` since its first record; None without a value."""
    history = histories.get(name)
    if history is None or not len(history):
        return None
    if over == ENV_STEPS:
        x = over_env_steps(history, histories, name).astype(np.float64)
    else:
        x = (history.seconds - min(each.seconds[0] for each in histories.values() if len(each))) / 3600
    order = np.argsort(x, kind="stable")
    return Curve(x[order], smoothed(history.values[order], smooth))


def band_of(curves: Sequence[Curve], generator: np.random.Generator) -> Band | None:
    """Where all of them have values: from the latest first point to the earliest last one; None where that is nowhere.

    The interval is of the mean over seeds: percentiles of the means of seeds drawn anew with replacement.
    """
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if first > last:
        return None
    x = np.linspace(first, last, POINTS)
    values = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    low, high = bootstrap_interval(values, generator)
    return Band(x, values.mean(0), low, high, len(curves))


def bootstrap_interval(values: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the mean over the first axis of ``[seeds, ...]``."""
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([values[chosen].mean(0) for chosen in drawn])
    low, high = np.quantile(means, (LOW, HIGH), axis=0)
    return low, high
