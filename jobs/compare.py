"""Several runs beside each other: a table here, and curves over env steps and over time in one PNG. Reads MLflow only.

python jobs/compare.py                                       the learners' runs of the experiment, by their settings
python jobs/compare.py --run-id ID --run-id ID               these runs
python jobs/compare.py --tag game=ALE/Pong-v5 --group-by preset
python jobs/compare.py --parent-run-id ID --group-by claim   the parts of a sweep
"""

import jobs.interrupt  # noqa: F401

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from jobs.command_line import Repeatable, parse, refuse, refusing
from jobs.console import show_warnings, table_console
from pipeline.charts import COLOURS, ENV_STEPS, STYLE, Histories
from pipeline.curves import Curve, band_of, bootstrap_interval, curve_of
from pipeline.mlflow_client import Run, find_run, histories_of, search_runs
from pipeline.tracking import DEFAULT_URI, NONE, TrackingConfig

METRICS = ("eval/return_mean", "collect/return_low_epsilon_mean", "collect/return_mean", "collect/episode_return")
AXES = {ENV_STEPS: "env steps", "hours": "hours"}
COUNTS = {"learn/updates": "updates", ENV_STEPS: "env steps"}
LAST_EVALUATION_SECONDS = 300.0  # After a run's end; what was played later belongs to no point of its curve.


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Flags of compare.py.

    Attributes:
        tracking_uri: where the runs are.
        experiment: theirs.
        run_id: a run, repeatable; default: all those of the experiment that the other flags choose.
        tag: ``name=value``, repeatable: only runs with this tag. Without any: the learners' runs.
        parent_run_id: only the parts of this sweep.
        group_by: tag that runs of one group share, and the game with it; its seeds become one curve. ``run``: every run
            by itself.
        metric: of the curves; default: of evaluation, least exploring lanes, all lanes, for each group the one that
            most of its runs have, the first of equals.
        smooth: points that each point of a curve is the mean of.
        seed: of the bootstrap.
        out: the picture.
    """

    tracking_uri: str = DEFAULT_URI
    experiment: str = "r2d2"
    run_id: Repeatable = ()
    tag: Repeatable = ()
    parent_run_id: str | None = None
    group_by: str = "settings"
    metric: str | None = None
    smooth: int = 5
    seed: int = 0
    out: Path = Path("compare.png")

    def __post_init__(self) -> None:
        TrackingConfig(uri=self.tracking_uri)
        if self.tracking_uri == NONE:
            raise ValueError(f"tracking_uri is {NONE!r}; allowed: where the runs are")
        if self.smooth < 1:
            raise ValueError(f"smooth is {self.smooth}; allowed: 1 or more")
        for text in self.tag:
            if "=" not in text:
                raise ValueError(f"tag is {text!r}; allowed: name=value")


@dataclass(frozen=True)
class Compared:
    """One run with its curves by axis; ``metric`` is the one they show, its group's, None where it does not have it."""

    run: Run
    histories: Histories
    metric: str | None
    curves: dict[str, Curve]


def main(argv: Sequence[str]) -> int:
    show_warnings()
    with refusing(OSError):
        flags = parse(CompareFlags, argv, CompareFlags(), "compare.py")
        runs = _choose(flags)
        if not runs:
            refuse("no run is chosen; allowed: other --tag, --run-id or --experiment")
        logged = sorted({name for run in runs for name in run.metrics})
        if flags.metric is not None and flags.metric not in logged:
            refuse(f"metric is {flags.metric!r}; allowed: what these runs have, {', '.join(logged) or 'none'}")
        groups = {
            label: _compared(members, METRICS if flags.metric is None else (flags.metric,), flags)
            for label, members in _grouped(runs, flags.group_by).items()
        }
        show(groups, np.random.default_rng(flags.seed))
        if any(each.curves for members in groups.values() for each in members):
            plot(groups, flags.out, np.random.default_rng(flags.seed))
            print(f"compare: curves in {flags.out}")
        else:
            print("compare: no run has a return yet, so there are no curves")
    return 0


def show(groups: dict[str, list[Compared]], generator: np.random.Generator) -> None:
    """A row per run, and one per group of several."""
    table = Table("group", "run", "seed", "minutes", *COUNTS.values(), "return, last", "return, best", "of")
    for label, members in groups.items():
        for each in members:
            cells = [_cell(each.run.metrics.get(name)) for name in COUNTS]
            y = each.curves[ENV_STEPS].y if each.curves else np.array([])
            ends = [_cell(y[-1]), _cell(y.max())] if len(y) else ["-", "-"]
            row = [label, each.run.name, each.run.tags.get("seed", "-"), _cell(_minutes(each)), *cells]
            table.add_row(*row, *ends, each.metric or "-")
        shown = [each for each in members if each.curves]
        lasts = np.array([each.curves[ENV_STEPS].y[-1] for each in shown])
        if len(lasts) > 1:
            low, high = bootstrap_interval(lasts, generator)
            mean = f"{lasts.mean():.4g} ({low:.4g} to {high:.4g})"
            blanks = [""] * (2 + len(COUNTS))
            table.add_row(
                f"[bold]{label}[/]", f"[bold]mean of {len(lasts)} seeds[/]", *blanks, mean, "", shown[0].metric
            )
        table.add_section()
    table_console().print(table)


def plot(groups: dict[str, list[Compared]], path: Path, generator: np.random.Generator) -> None:
    """Mean and 95 % bootstrap interval of each group, by env steps and by hours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(1, len(AXES), figsize=(10, 3.8), dpi=120, layout="constrained")
        for axes, (over, unit) in zip(all_axes, AXES.items(), strict=True):
            for number, (label, members) in enumerate(groups.items()):
                curves = [each.curves[over] for each in members if each.curves]
                if not curves:
                    continue
                colour, band = COLOURS[number % len(COLOURS)], band_of(curves, generator)
                seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
                if band is None:
                    axes.plot([], [], color=colour, lw=0.6, label=f"{label}{seeds[:-1]}, nowhere all of them)")
                else:
                    axes.plot(band.x, band.mean, color=colour, lw=1.6, label=f"{label}{seeds}")
                    axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.2, lw=0)
                if seeds:
                    for curve in curves:
                        axes.plot(curve.x, curve.y, color=colour, lw=0.6, alpha=0.5)
            axes.set(xlabel=unit, ylabel="return of an episode")
        all_axes[0].legend(frameon=False, fontsize=8)
        metrics = sorted({each.metric for members in groups.values() for each in members if each.metric})
        figure.suptitle(
            f"{', '.join(metrics)}; shaded: 95 % bootstrap interval of the mean", fontsize=9, x=0.01, ha="left"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
        pyplot.close(figure)


def _choose(flags: CompareFlags) -> list[Run]:
    if flags.run_id:
        found = {run_id: find_run(flags.tracking_uri, run_id) for run_id in flags.run_id}
        for run_id, run in found.items():
            if run is None:
                raise ValueError(f"run_id is {run_id!r}; allowed: a run that {flags.tracking_uri} has")
        return [run for run in found.values() if run is not None]
    tags = dict(text.split("=", 1) for text in flags.tag)
    if flags.parent_run_id:
        tags["mlflow.parentRunId"] = flags.parent_run_id
    return search_runs(flags.tracking_uri, flags.experiment, tags or {"role": "learn"})[::-1]


def _compared(runs: list[Run], metrics: Sequence[str], flags: CompareFlags) -> list[Compared]:
    """A group. All its curves show one metric, for a mean over different ones would mean nothing."""
    metric = max(metrics, key=lambda name: sum(name in run.metrics for run in runs))
    return [_with_curves(run, metric, flags) if metric in run.metrics else Compared(run, {}, None, {}) for run in runs]


def _with_curves(run: Run, metric: str, flags: CompareFlags) -> Compared:
    histories = histories_of(flags.tracking_uri, run.run_id, {metric, ENV_STEPS})
    if run.end_seconds is not None:
        histories = {n: each.until(run.end_seconds + LAST_EVALUATION_SECONDS) for n, each in histories.items()}
    curves = {over: curve for over in AXES if (curve := curve_of(histories, metric, over, flags.smooth)) is not None}
    return Compared(run, histories, metric, curves)


def _grouped(runs: list[Run], group_by: str) -> dict[str, list[Run]]:
    """By label. Returns of different games are never averaged, whatever tag they share."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = run.run_id if group_by == "run" else run.tags.get(group_by, "-")
        groups.setdefault((run.tags.get("game", "?"), key), []).append(run)
    several = len({game for game, _ in groups}) > 1 and group_by not in ("run", "game")
    return {_label(game, key, members[0], group_by, several): members for (game, key), members in groups.items()}


def _label(game: str, key: str, run: Run, group_by: str, several_games: bool) -> str:
    """Settings are a hash: what a person knows them by is the game and the preset. Names may occur twice."""
    short = game.removeprefix("ALE/")
    if group_by == "run":
        return f"{run.name} {run.run_id[:8]}"
    if group_by == "settings":
        return f"{short} {run.tags.get('preset', '?')} {key}"
    return f"{short} {key}" if several_games else key


def _minutes(each: Compared) -> float | None:
    return None if each.run.end_seconds is None else (each.run.end_seconds - each.run.start_seconds) / 60


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
