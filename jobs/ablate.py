"""Tests the article's claims: ``python jobs/ablate.py --claim C5``. Runs what is missing in results/, then judges."""

import jobs.interrupt  # noqa: F401

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from jobs.claims.catalogue import CLAIMS, conditions
from jobs.claims.document import write_document
from jobs.claims.experiments import run_cell
from jobs.claims.results import FOLDER, Cell, Results
from jobs.claims.verdicts import overall
from jobs.command_line import parse, refusing
from jobs.console import table_console
from jobs.flags import TrackingFlags
from jobs.stopping import StopRequest
from pipeline.tracking import TrackingConfig, ending_run, make_tracker


@dataclass(frozen=True, kw_only=True)
class AblationFlags:
    """What to test.

    Attributes:
        claim: one of C1 to C23; default: all of them.
        seeds: runs of each condition, 5 or more for a verdict where learning is compared.
        quick: a smoke test: every experiment in seconds, once, in a folder that is thrown away.
        write: only write docs/claims.md from what is there.
        max_minutes: begin no further run after so long.
        results: folder of the results.
        list: print the claims and stop.
    """

    claim: str | None = None
    seeds: int = 5
    quick: bool = False
    write: bool = False
    max_minutes: float | None = None
    results: Path = FOLDER
    list: bool = False

    def __post_init__(self) -> None:
        if self.claim is not None and self.claim not in CLAIMS:
            raise ValueError(f"claim is {self.claim!r}; allowed: {', '.join(CLAIMS)}")
        if self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds}; allowed: 1 or more")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(f"max_minutes is {self.max_minutes}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class AblateFlags:
    """Flags of ablate.py."""

    ablation: AblationFlags = field(default_factory=AblationFlags)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)


def main(argv: Sequence[str]) -> int:
    with refusing():
        flags = parse(AblateFlags, argv, AblateFlags(), "ablate.py")
        chosen = flags.ablation
        if chosen.list:
            for name, claim in CLAIMS.items():
                print(f"{name:4} {claim.text}")
            return 0
        if chosen.quick:
            with TemporaryDirectory() as folder:
                return _test(chosen, flags.tracking, Results(Path(folder)), seeds=1)
        results = Results(chosen.results)
    if not chosen.write and (status := _test(chosen, flags.tracking, results, chosen.seeds)):
        return status
    if chosen.results == FOLDER:
        print(f"written: {write_document(results)}")
    return 0


def _test(chosen: AblationFlags, tracking: TrackingFlags, results: Results, seeds: int) -> int:
    names = [chosen.claim] if chosen.claim else list(CLAIMS)
    torch.set_num_threads(1)  # These networks are too small to share, and one seed then gives one result.
    wanted = [(*pair, seed) for name in names for pair in _pairs(name) for seed in range(seeds)]
    missing = [key for key in dict.fromkeys(wanted) if not results.has(*key)]
    stop, started = StopRequest().listen(), time.monotonic()
    for position, (experiment, variant, seed) in enumerate(missing, 1):
        if stop:
            print(f"stopped ({stop.reason}): {len(missing) - position + 1} runs are missing")
            return 0
        if chosen.max_minutes is not None and time.monotonic() - started > 60 * chosen.max_minutes:
            print(f"stopped ({chosen.max_minutes:g} minutes): {len(missing) - position + 1} runs are missing")
            break
        if results.has(experiment, variant, seed):
            continue
        began = time.monotonic()
        cell = run_cell(experiment, variant, seed, quick=chosen.quick)
        path = results.add(cell)
        if not chosen.quick:
            _log(cell, tracking, names)
        shown = f"score {cell.values['score']:.3f}" if "score" in cell.values else "measured"
        what = f"{experiment}, {variant}" if variant else experiment
        print(f"{position}/{len(missing)}  {what}, seed {seed}: {shown}, {time.monotonic() - began:.0f} s, {path.name}")
        sys.stdout.flush()
    _show(results, names)
    return 0


def _pairs(name: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(pair for part in CLAIMS[name].parts for pair in conditions(part)))


def _log(cell: Cell, tracking: TrackingFlags, claims: list[str]) -> None:
    tracker = make_tracker(
        TrackingConfig(
            uri=tracking.tracking_uri,
            experiment=f"{tracking.experiment}-claims",
            run_name=" ".join(filter(None, (tracking.run_name, cell.experiment, cell.variant, str(cell.seed)))),
            parent_run_id=tracking.parent_run_id,
            tags={"role": "ablate", "task": cell.experiment, "variant": cell.variant, "seed": str(cell.seed)},
        )
    )
    with ending_run(tracker):
        tracker.params({"experiment": cell.experiment, "variant": cell.variant, "seed": cell.seed, **cell.provenance})
        for updates, env_steps, score in cell.looks:
            tracker.metrics({"eval/score": score, "collect/env_steps": env_steps}, int(updates))
        tracker.metrics(cell.values, int(cell.values.get("updates", 0)))


def _show(results: Results, names: list[str]) -> None:
    table = Table("claim", "verdict", "figures", show_lines=True)
    for name in names:
        findings = [part.judge(results) for part in CLAIMS[name].parts]
        table.add_row(name, overall(findings), "\n".join(finding.figures for finding in findings))
    table_console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
