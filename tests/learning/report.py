"""Seeds of a learning task one after the other, and the table that says whether they met their bounds."""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jobs.alternating import Alternation, Outcome, Schedule, one_thread
from jobs.presets import Preset
from tests.benchmarks.report import Report

HEADER = ["network", "seed", "result", "seconds", "CPU seconds", "load", "env steps", "updates", "samples per insert"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What every seed must reach (``least``) or must not exceed (``most``), within ``most_seconds`` of wall-clock."""

    least: float | None = None
    most: float | None = None
    most_seconds: float

    def hold(self, report: Report, what: str, result: float, seconds: float) -> None:
        if self.least is not None:
            report.at_least(what, result, self.least)
        if self.most is not None:
            report.at_most(what, result, self.most)
        report.at_most(f"{what}, wall-clock", seconds, self.most_seconds, " s")


def run_seeds(
    task: str,
    description: str,
    presets: dict[str, Preset],
    schedule: Schedule,
    bounds: dict[str, Bound],
    *,
    unit: str,
    scale: float = 1.0,
) -> int:
    """Every preset with seeds 0, 1, ...; a row for each run, kept in docs/performance.md. Exit status: 1 on a miss.

    ``scale`` turns a mean return into the result, which is in ``unit``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each network (default 3)")
    parser.add_argument("--only", choices=list(presets), help="one of the networks alone; nothing is written")
    arguments = parser.parse_args()
    one_thread()
    report = Report(f"Learning: {task}", f"make learn-{task}")
    rows = []
    for name, preset in presets.items():
        for seed in range(arguments.seeds if arguments.only in (None, name) else 0):
            print(f"{name}, seed {seed}:", flush=True)
            outcome = run(preset, seed, schedule)
            rows.append(row(name, seed, outcome, scale))
            bounds[name].hold(report, f"{name}, seed {seed}", scale * outcome.mean_return, outcome.seconds)
    report.table(f"{task}: {unit}, one process with one torch thread", HEADER, rows)
    if arguments.only is None:
        report.write()
    return 1 if report.missed else 0


def run(preset: Preset, seed: int, schedule: Schedule) -> Outcome:
    """One run in a dataset of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return Alternation(preset, seed, Path(folder)).learn(schedule, lambda line: print(line, flush=True))


def row(name: str, seed: int, outcome: Outcome, scale: float) -> list[str]:
    return [
        name,
        str(seed),
        f"{scale * outcome.mean_return:.3f}",
        f"{outcome.seconds:.0f}",
        f"{outcome.cpu_seconds:.0f}",
        f"{os.getloadavg()[0]:.1f}",
        f"{outcome.env_steps:,}",
        f"{outcome.updates:,}",
        f"{outcome.samples_per_insert:.2f}",
    ]
