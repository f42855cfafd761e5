"""The tables of an analysis as files: Parquet, PNG plots, and one HTML page that needs nothing beside it."""

import base64
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.offline_tables import Table

Tables = dict[str, Table]
INK, ACCENT, SECOND, GRID = "#22303c", "#2a6f97", "#c8553d", "#dfe6ec"
ROWS_SHOWN = 25
MAY_LACK = "initial_priority"  # Random play has none: there is nothing to plot.
CARDS = {
    "env_steps": "env steps",
    "sequences": "sequences",
    "games_ended": "games ended",
    "return_mean": "mean return of those",
    "return_max": "greatest return",
    "greedy_share": "share of greedy actions",
    "trained_rows_per_env_step": "times a step is trained",
    "duplicate_share": "share of observations seen before",
    "pixel_compression": "times smaller than raw pixels",
    "shard_bytes_per_env_step": "bytes per env step",
    "sequences_missing": "sequences missing",
    "env_steps_of_incomplete_episodes": "env steps in incomplete episodes",
    "td_error_abs_mean": "mean |TD error| (h-space)",
    "overestimation": "Q minus the return that followed",
    "q_return_correlation": "correlation of the two",
}
STYLE = f"""
:root {{ color-scheme: light; }}
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: {INK}; margin: 0 auto; max-width: 1120px;
  padding: 24px; background: #fff; }}
h1 {{ font-size: 26px; margin: 0 0 4px; }} h2 {{ font-size: 18px; margin: 34px 0 8px; }}
.from {{ color: #66788a; margin: 0 0 20px; overflow-wrap: anywhere; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(168px, 1fr)); gap: 10px; }}
.card {{ background: #f3f7fa; border-radius: 8px; padding: 10px 12px; }}
.card b {{ display: block; font-size: 20px; }} .card span {{ color: #66788a; font-size: 13px; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 14px; }}
img {{ width: 100%; height: auto; border: 1px solid {GRID}; border-radius: 8px; }}
table {{ border-collapse: collapse; font-size: 13px; margin: 6px 0; }} td, th {{ padding: 3px 12px 3px 0;
  text-align: right; border-bottom: 1px solid {GRID}; white-space: nowrap; }}
td:first-child, th:first-child {{ text-align: left; }} th {{ color: #66788a; font-weight: 600; }}
.wide {{ overflow-x: auto; }} .bad {{ background: #fbe9e5; border-radius: 8px; padding: 10px 12px; }}
summary {{ cursor: pointer; font-weight: 600; margin-top: 10px; }}
"""


def write_tables(folder: Path, tables: Tables) -> list[Path]:
    """``<name>.parquet`` each."""
    paths = []
    for name, table in tables.items():
        paths.append(folder / f"{name}.parquet")
        pq.write_table(pa.table({column: pa.array(values) for column, values in table.items()}), paths[-1])
    return paths


def write_plots(folder: Path, tables: Tables, title: str) -> list[Path]:
    """A PNG for each table that has a plot and something to show in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    with pyplot.rc_context({
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
        "axes.axisbelow": True, "axes.edgecolor": "#9aa9b7", "font.size": 9, "text.color": INK,
    }):  # fmt: skip
        for name, draw in PLOTS.items():
            table = tables.get(name)
            if table is None or not len(next(iter(table.values()))) or np.isnan(table.get(MAY_LACK, 0)).all():
                continue
            figure, axes = pyplot.subplots(figsize=(4.6, 3.1), dpi=110, layout="constrained")
            draw(axes, table)
            axes.set_title(axes.get_title(), loc="left", fontsize=10, fontweight="bold")
            axes.set_title("")
            figure.savefig(folder / f"{name}.png", metadata={"Software": None, "Title": title})
            pyplot.close(figure)
            paths.append(folder / f"{name}.png")
    return paths


def write_page(
    path: Path, *, title: str, source: str, numbers: dict[str, float], tables: Tables, plots: list[Path], bad: list[str]
) -> None:
    """One HTML file with everything in it."""
    cards = "".join(
        f"<div class=card><b>{short(numbers[name])}</b><span>{html.escape(text)}</span></div>"
        for name, text in CARDS.items()
        if name in numbers
    )
    images = "".join(
        f'<img alt="{plot.stem}" src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
        for plot in plots
    )
    left_out = "".join(f"<div>{html.escape(line)}</div>" for line in bad)
    warning = f"<h2>Left out</h2><div class=bad>{left_out}</div>" if bad else ""
    details = "".join(
        f"<details><summary>{html.escape(name.replace('_', ' '))}</summary>{_html_table(table)}</details>"
        for name, table in tables.items()
    )
    path.write_text(
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p class=from>{html.escape(source)}</p><div class=cards>{cards}</div>{warning}"
        f"<h2>Plots</h2><div class=plots>{images}</div><h2>Tables</h2>{details}</body></html>\n"
    )


def short(value: Any) -> str:
    """A number as people like to read it; texts as they are."""
    if isinstance(value, str | np.str_):
        return str(value)
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    number = float(value)
    if np.isnan(number):
        return "–"
    if abs(number) < 1e15 and number == int(number):
        return f"{int(number):,}"
    return f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"


def _html_table(table: Table) -> str:
    columns, rows = list(table), len(next(iter(table.values()))) if table else 0
    head = "".join(f"<th>{html.escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(short(table[column][row]))}</td>" for column in columns) + "</tr>"
        for row in range(min(rows, ROWS_SHOWN))
    )
    more = f"<p class=from>{rows - ROWS_SHOWN:,} more rows in the Parquet file</p>" if rows > ROWS_SHOWN else ""
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>{more}"


def _bars(axes: Any, labels: list[str], values: np.ndarray, title: str, unit: str, *, log: bool = False) -> None:
    axes.bar(range(len(labels)), values, color=ACCENT, log=log)
    slanted = len(labels) > 6 or max(map(len, labels), default=0) > 9
    turn = {"rotation": 40, "ha": "right"} if slanted else {}
    axes.set_xticks(range(len(labels)), labels, fontsize=8, **turn)
    axes.set(title=title, ylabel=unit)
    axes.grid(False, axis="x")


def _steps(axes: Any, table: Table, name: str, title: str, xlabel: str) -> None:
    low, high = table[f"{name}_from"], table[f"{name}_to"]
    axes.bar(low, table["count"], width=(high - low) * 0.94, align="edge", color=ACCENT)
    axes.set(title=title, xlabel=xlabel, ylabel="episodes")


def _returns(name: str, title: str, xlabel: str) -> Callable[[Any, Table], None]:
    def draw(axes: Any, table: Table) -> None:
        middle = (table[f"{name}_from"] + table[f"{name}_to"] - 1) / 2
        lineages = table.get("lineage", np.zeros(len(middle)))
        for number, lineage in enumerate(np.unique(lineages)):  # Versions of different networks are no one line.
            here = lineages == lineage
            least, greatest, mean = (table[name][here] for name in ("min", "max", "mean"))
            labels = ("least to greatest", "mean") if number == 0 else (None, None)
            axes.fill_between(middle[here], least, greatest, color=ACCENT, alpha=0.15, lw=0, label=labels[0])
            axes.plot(middle[here], mean, color=ACCENT, marker="o", ms=4, label=labels[1])
        axes.set(title=title, xlabel=xlabel, ylabel="return of a game")
        if len(middle) == 1:  # One version alone would get ticks between versions.
            axes.set_xticks(middle)
        axes.legend(frameon=False, fontsize=8)

    return draw


def _by_lane(axes: Any, table: Table) -> None:
    place = np.arange(len(table["epsilon"]))
    axes.errorbar(place, table["mean"], yerr=table["std"], fmt="o", color=ACCENT, ecolor="#9dbfd3", ms=5)
    every = max(1, len(place) // 10)
    axes.set_xticks(place[::every], [f"{epsilon:.2g}" for epsilon in table["epsilon"][::every]], fontsize=8)
    axes.set(title="Returns by lane: mean and deviation", xlabel="epsilon of the lanes", ylabel="return of a game")


def _versions(axes: Any, table: Table) -> None:
    labels = []
    for lineage, low, high in zip(table["lineage"], table["version_from"], table["version_to"], strict=True):
        if set(lineage) == {"0"}:  # No network, or more than one in the same sequence.
            labels.append("random" if high <= 0 else "mixed")
        else:
            labels.append(f"{low}–{high - 1}" if high - low > 1 else str(low))
    _bars(axes, labels, table["sequences"], "Sequences by parameter version", "sequences")


def _priorities(axes: Any, table: Table) -> None:
    axes.plot(table["quantile"], table["initial_priority"], color=ACCENT, marker="o", ms=4)
    axes.set(title="Initial priorities", xlabel="quantile", ylabel="priority")


def _calibration(axes: Any, table: Table) -> None:
    axes.errorbar(table["q_mean"], table["return_mean"], yerr=table["return_std"], fmt="o", color=ACCENT,
                  ecolor="#9dbfd3", ms=4)  # fmt: skip
    ends = [
        min(table["q_mean"].min(), table["return_mean"].min()),
        max(table["q_mean"].max(), table["return_mean"].max()),
    ]
    axes.plot(ends, ends, color=SECOND, lw=1, ls="--", label="equal")
    axes.set(title="Q against the return that followed", xlabel="Q(s, a)", ylabel="discounted return")
    axes.legend(frameon=False, fontsize=8)


def _dq(axes: Any, table: Table) -> None:
    colours = {"zero": SECOND, "burn_in": "#e0a458", "stored": "#6aa84f", "both": ACCENT}
    for strategy, colour in colours.items():
        here = table["strategy"] == strategy
        age = (table["age_from"][here] + table["age_to"][here] - 1) / 2
        axes.plot(
            age, table["dq_first"][here], color=colour, marker="o", ms=4, label=f"{strategy.replace('_', '-')}, first"
        )
        axes.plot(age, table["dq_last"][here], color=colour, marker="s", ms=4, ls="--", mfc="none")
    axes.set(title="dQ by parameter age (dashed: last step)", xlabel="age, versions", ylabel="dQ")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend(frameon=False, fontsize=7)


PLOTS: dict[str, Callable[[Any, Table], None]] = {
    "returns_over_time": _returns("env_steps", "Returns over time", "env steps of the collector"),
    "returns_by_lane": _by_lane,
    "returns_by_version": _returns("version", "Returns by parameter version", "newest version that acted (-1: random)"),
    "lengths": lambda axes, table: _steps(axes, table, "steps", "Episode lengths", "env steps"),
    "ends": lambda axes, table: _bars(
        axes, table["ends"].tolist(), table["episodes"], "How episodes ended", "episodes"
    ),
    "actions": lambda axes, table: _bars(axes, table["name"].tolist(), table["share"], "Actions", "share of steps"),
    "rewards": lambda axes, table: _bars(
        axes, [short(value) for value in table["reward"]], table["steps"], "Rewards", "steps (log)", log=True
    ),
    "versions": _versions,
    "priorities": _priorities,
    "calibration": _calibration,
    "dq_by_age": _dq,
}
