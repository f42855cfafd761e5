"""PNG charts of a run's metrics, drawn from what has been logged: learning curve and diagnostics."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INK, GRID = "#22303c", "#dfe6ec"
COLOURS = ("#2a6f97", "#c8553d", "#4b8b3b", "#8a5aa8", "#b08900", "#55606b")
ENV_STEPS = "collect/env_steps"
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "axes.edgecolor": "#9aa9b7", "font.size": 9, "text.color": INK,
}  # fmt: skip


@dataclass(frozen=True)
class History:
    """One metric of one run: ``steps`` int64, ``seconds`` float64 (Unix time) and ``values`` float64, each ``[N]``."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def at(self, seconds: np.ndarray) -> np.ndarray:
        """The value that the metric had at other times, straight lines in between, the end values outside."""
        return np.interp(seconds, self.seconds, self.values)

    def until(self, seconds: float) -> "History":
        """What was logged by then."""
        kept = self.seconds <= seconds
        return History(self.steps[kept], self.seconds[kept], self.values[kept])


Histories = Mapping[str, History]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes: ``metrics`` maps a metric's name to its label. ``over`` is a metric's name, or hours."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    over: str = "updates"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture, ``<name>.png``, of panels side by side, ``columns`` in a row."""

    name: str
    panels: tuple[Panel, ...]
    columns: int = 2

    @property
    def metrics(self) -> set[str]:
        return {ENV_STEPS} | {name for panel in self.panels for name in panel.metrics}


RETURNS = {
    "eval/return_mean": "evaluation (mean)",
    "collect/return_low_epsilon_mean": "least exploring lanes",
    "collect/return_mean": "all lanes",
}
LEARNING_CURVE = Chart(
    name="learning_curve",
    panels=tuple(
        Panel(title="Return of an episode", unit="return", metrics=RETURNS, over=x) for x in (ENV_STEPS, "hours")
    ),
)
DIAGNOSTICS = Chart(
    name="diagnostics",
    columns=3,
    panels=(
        Panel(title="Loss", unit="weighted squared TD error", metrics={"learn/loss": "loss"}),
        Panel(title="Gradient norm", unit="before clipping", metrics={"learn/gradient_norm": "norm"}),
        Panel(
            title="Q-values",
            unit="h-space",
            metrics={"learn/q_greedy_mean": "mean of greedy", "learn/q_greedy_max": "greatest"},
        ),
        Panel(title="|TD error|", unit="h-space", metrics={"learn/td_error_abs_mean": "mean"}),
        Panel(title="Ratio", unit="samples per insert", metrics={"replay/samples_per_insert": "samples per insert"}),
        Panel(title="Speed", unit="updates/s", metrics={"learn/updates_per_second": "updates"}),
    ),
)


def over_env_steps(history: History, histories: Histories, name: str) -> np.ndarray:
    """Env steps at each point of ``history``: its own steps where it counts them, else those at the same time."""
    if name.startswith("collect/") or ENV_STEPS not in histories or not len(histories[ENV_STEPS]):
        return history.steps
    return histories[ENV_STEPS].at(history.seconds)


def draw(chart: Chart, histories: Histories, path: Path, title: str = "") -> bool:
    """Write ``chart`` to ``path``; False, and nothing written, while none of its metrics has a value."""
    panels = [panel for panel in chart.panels if any(len(histories.get(name, ())) for name in panel.metrics)]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(chart.columns, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(STYLE):
        width, height = 4.4 * columns, 2.9 * rows
        # Fixed margins: a layout that matplotlib finds by itself is half of a chart's processor time.
        margins = {"left": 0.7 / width, "right": 1 - 0.2 / width, "bottom": 0.55 / height, "top": 1 - 0.65 / height}
        figure, grid = pyplot.subplots(
            rows,
            columns,
            figsize=(width, height),
            dpi=110,
            squeeze=False,
            gridspec_kw={**margins, "wspace": 0.25, "hspace": 0.4},
        )
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, panel, histories)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, metadata={"Software": None})
        pyplot.close(figure)
    return True


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to ``window - 1`` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (sums[last] - sums[first]) / (last - first)


def _draw_panel(axes, panel: Panel, histories: Histories) -> None:
    for colour, (name, label) in zip(COLOURS, panel.metrics.items(), strict=False):
        history = histories.get(name)
        if history is None or not len(history):
            continue
        started = min(each.seconds[0] for each in histories.values() if len(each))
        if panel.over == ENV_STEPS:
            x = over_env_steps(history, histories, name)
        else:
            x = (history.seconds - started) / 3600 if panel.over == "hours" else history.steps
        window = max(1, len(history) // 50)
        if window > 1:
            axes.plot(x, history.values, color=colour, alpha=0.2, lw=0.8)
        marks = {"marker": "o", "ms": 3} if len(history) < 30 else {}
        axes.plot(x, smoothed(history.values, window), color=colour, lw=1.4, label=label, **marks)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set(xlabel={ENV_STEPS: "env steps", "hours": "hours"}.get(panel.over, panel.over), ylabel=panel.unit)
    if len(panel.metrics) > 1:
        axes.legend(frameon=False, fontsize=8)
