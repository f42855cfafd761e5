"""Seeds of a learning task one after the other, and the table that says whether they met their bounds."""

import argparse
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.presets import Preset
from tests.learning.alternate import Alternation, Outcome, Schedule, one_thread


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a run must reach, or must not; ``most_seconds`` of wall-clock per run."""

    least: float = -math.inf
    most: float = math.inf
    most_seconds: float

    def misses(self, result: float, seconds: float) -> list[str]:
        found = []
        if result < self.least:
            found.append(f"below {self.least:g}")
        if result > self.most:
            found.append(f"above {self.most:g}")
        if seconds > self.most_seconds:
            found.append(f"longer than {self.most_seconds:g} s")
        return found


def run_seeds(
    description: str,
    presets: dict[str, Preset],
    schedule: Schedule,
    bounds: dict[str, Bound],
    *,
    unit: str,
    scale: float = 1.0,
) -> int:
    """Every preset with seeds 0, 1, ...; prints a row for each run. Exit status: 1 when a bound was missed.

    ``scale`` turns a mean return into the result, which is in ``unit``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each network (default 3)")
    parser.add_argument("--only", choices=list(presets), help="one of the networks alone")
    parser.add_argument("--quiet", action="store_true", help="only the table")
    arguments = parser.parse_args()
    one_thread()
    table = Table("network", "seed", unit, "bound", "seconds", "CPU seconds", "load", "env steps", "updates", "verdict")
    missed = False
    for name, preset in presets.items():
        if arguments.only not in (None, name):
            continue
        for seed in range(arguments.seeds):
            outcome = run(preset, seed, schedule, quiet=arguments.quiet, title=f"{name}, seed {seed}")
            misses = bounds[name].misses(scale * outcome.mean_return, outcome.seconds)
            missed |= bool(misses)
            table.add_row(*row(name, seed, outcome, bounds[name], scale), ", ".join(misses) or "met")
    Console(width=140, highlight=False).print(table)
    print("missed" if missed else "all bounds met")
    return int(missed)


def run(preset: Preset, seed: int, schedule: Schedule, *, quiet: bool, title: str) -> Outcome:
    """One run in a dataset of its own, which is gone afterwards."""
    print(f"{title}:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        alternation = Alternation(preset, seed, Path(folder))
        return alternation.learn(schedule, (lambda line: None) if quiet else (lambda line: print(line, flush=True)))


def row(name: str, seed: int, outcome: Outcome, bound: Bound, scale: float) -> list[str]:
    wanted = f">= {bound.least:g}" if math.isfinite(bound.least) else f"<= {bound.most:g}"
    return [
        name,
        str(seed),
        f"{scale * outcome.mean_return:.3f}",
        wanted,
        f"{outcome.seconds:.0f}",
        f"{outcome.cpu_seconds:.0f}",
        f"{os.getloadavg()[0]:.1f}",
        f"{outcome.env_steps:,}",
        f"{outcome.updates:,}",
    ]
