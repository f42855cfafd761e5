"""From cells to verdicts. The rules are fixed here, before anything is run.

An effect is what a condition loses against its control, as a share of the control's mean, with a bootstrap 95 %
interval over seeds. *held*: the interval excludes no effect (or, for "harmless", a loss above the margin). *refuted*:
it excludes what is claimed. Else it *could not be tested*, because the interval holds both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jobs.claims.results import Cell, Results

HELD, REFUTED, UNTESTED = "held", "refuted", "could not be tested"
RESAMPLES, SEED = 10_000, 0
MARGIN = 0.05
LEAST_SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Of one part of a claim: its verdict, and the figures in words."""

    verdict: str
    figures: str


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its bootstrap 95 % interval."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(statistic: Callable[..., np.ndarray], *samples: np.ndarray) -> Interval:
    """``statistic`` of each resampling of ``samples`` (1-d each, resampled by themselves; vectorised over axis 1)."""
    random = np.random.default_rng(SEED)
    drawn = [each[random.integers(0, len(each), (RESAMPLES, len(each)))] for each in samples]
    # One of the values found, never one between two: they may be infinite.
    low, high = np.nanquantile(statistic(*drawn), [0.025, 0.975], method="inverted_cdf")
    (mean,) = statistic(*(each[None] for each in samples))
    return Interval(mean=float(mean), low=float(low), high=float(high))


def score(cell: Cell) -> float:
    """The mean of the learning curve: high for what learns early and stays there."""
    return float(np.mean([look[2] for look in cell.looks]))


def loss_share(control: np.ndarray, condition: np.ndarray) -> np.ndarray:
    """Against a control that came to nothing: a loss of minus infinity, or of 0 when the condition did as well."""
    control, condition = control.mean(1), condition.mean(1)
    nothing = np.where(condition > 0, np.inf, 1.0)
    return 1 - np.divide(condition, control, out=nothing, where=control != 0)


@dataclass(frozen=True, kw_only=True)
class Loses:
    """``condition`` scores lower than ``control``, by ``least`` of it at least."""

    task: str
    condition: str
    control: str = "ours"
    least: float = 0.0
    value: Callable[[Cell], float] = field(default=score, repr=False)

    def judge(self, results: Results) -> Finding:
        control, condition = _values(self, results)
        if min(len(control), len(condition)) < LEAST_SEEDS:
            return _too_few(self.task, self.condition, min(len(control), len(condition)))
        lost = bootstrap(loss_share, control, condition)
        verdict = UNTESTED
        if lost.low > 0 and lost.high >= self.least:
            verdict = HELD
        elif lost.high < max(self.least, MARGIN):
            verdict = REFUTED
        return Finding(verdict=verdict, figures=_in_words(self, control, condition, lost))


@dataclass(frozen=True, kw_only=True)
class Harmless:
    """``condition`` scores as ``control`` does, or higher, but for ``margin`` of it."""

    task: str
    condition: str
    control: str = "ours"
    margin: float = MARGIN
    value: Callable[[Cell], float] = field(default=score, repr=False)

    def judge(self, results: Results) -> Finding:
        control, condition = _values(self, results)
        if min(len(control), len(condition)) < LEAST_SEEDS:
            return _too_few(self.task, self.condition, min(len(control), len(condition)))
        lost = bootstrap(loss_share, control, condition)
        verdict = UNTESTED
        if lost.high <= self.margin:
            verdict = HELD
        elif lost.low > 0:
            verdict = REFUTED
        return Finding(verdict=verdict, figures=_in_words(self, control, condition, lost))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Seeds of ``condition`` scatter more than those of ``control``: standard deviations, not means."""

    task: str
    condition: str
    control: str = "ours"

    def judge(self, results: Results) -> Finding:
        control = np.array([score(cell) for cell in results.of(self.task, self.control)])
        condition = np.array([score(cell) for cell in results.of(self.task, self.condition)])
        if min(len(control), len(condition)) < LEAST_SEEDS:
            return _too_few(self.task, self.condition, min(len(control), len(condition)))

        def log_ratio(calm: np.ndarray, wild: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log(wild.std(1, ddof=1) / calm.std(1, ddof=1))

        ratio = bootstrap(log_ratio, control, condition)
        verdict = HELD if ratio.low > 0 else REFUTED if ratio.high < 0 else UNTESTED
        return Finding(
            verdict=verdict,
            figures=f"{self.task}: standard deviation of {self.condition} over that of {self.control} "
            f"{np.exp(ratio.mean):.2f} [{np.exp(ratio.low):.2f}, {np.exp(ratio.high):.2f}], {len(control)} seeds each",
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure of a measurement lies where the claim says: ``least`` to ``most``."""

    measurement: str
    figure: str
    unit: str = ""
    least: float = -np.inf
    most: float = np.inf

    def judge(self, results: Results) -> Finding:
        values = np.array([cell.values[self.figure] for cell in results.of(self.measurement)])
        if not len(values):
            return Finding(verdict=UNTESTED, figures=f"{self.measurement} has not been run")
        found = bootstrap(lambda drawn: drawn.mean(1), values)
        verdict = UNTESTED
        if self.least <= found.low and found.high <= self.most:
            verdict = HELD
        elif found.high < self.least or found.low > self.most:
            verdict = REFUTED
        return Finding(verdict=verdict, figures=f"{self.figure}: {found:.4g} {self.unit}".rstrip())


Part = Loses | Harmless | Spread | Measured


def overall(findings: list[Finding]) -> str:
    """A claim holds when all its parts do, and falls with any of them."""
    verdicts = {finding.verdict for finding in findings}
    if REFUTED in verdicts:
        return REFUTED
    return HELD if verdicts == {HELD} else UNTESTED


def _values(part: Loses | Harmless, results: Results) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([part.value(cell) for cell in results.of(part.task, part.control)]),
        np.array([part.value(cell) for cell in results.of(part.task, part.condition)]),
    )


def _too_few(task: str, condition: str, seeds: int) -> Finding:
    return Finding(verdict=UNTESTED, figures=f"{task}, {condition}: {seeds} of {LEAST_SEEDS} seeds have been run")


def _in_words(part: Loses | Harmless, control: np.ndarray, condition: np.ndarray, lost: Interval) -> str:
    return (
        f"{part.task}: {part.condition} {condition.mean():.3f} against {part.control} {control.mean():.3f}, "
        f"loses {100 * lost.mean:.1f} % [{100 * lost.low:.1f}, {100 * lost.high:.1f}], {len(condition)} seeds"
    )
