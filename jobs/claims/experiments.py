"""Runs one cell: a task under a variant and a seed, or a repetition of a measurement."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jobs.alternating import Alternation, Outcome
from jobs.claims.measures import MEASURES
from jobs.claims.results import Cell
from jobs.claims.tasks import QUICK, TASKS
from jobs.claims.variants import VARIANTS
from pipeline.provenance import provenance


def run_cell(
    experiment: str, variant: str, seed: int, *, quick: bool, say: Callable[[str], None] = lambda line: None
) -> Cell:
    """``quick`` does the least that passes through every part: its figures mean nothing."""
    if experiment in MEASURES:
        values, looks = MEASURES[experiment](seed, quick), []
    else:
        outcome = _learn(experiment, variant, seed, quick, say)
        scale = TASKS[experiment].scale
        values = {
            "score": scale * outcome.mean_return,
            "seconds": outcome.seconds,
            "cpu_seconds": outcome.cpu_seconds,
            "env_steps": float(outcome.env_steps),
            "updates": float(outcome.updates),
            "largest gradient norm of the first updates": max(outcome.first_gradient_norms, default=0.0),
            **outcome.discrepancies,
        }
        looks = [[look.updates, look.env_steps, scale * look.mean_return] for look in outcome.looks]
    return Cell(
        experiment=experiment,
        variant=variant,
        seed=seed,
        values=values,
        looks=looks,
        provenance={name: value for name, value in provenance().items() if name not in ("host", "pid")},
    )


def _learn(task: str, variant: str, seed: int, quick: bool, say: Callable[[str], None]) -> Outcome:
    chosen = VARIANTS[variant]
    preset = chosen.settings(TASKS[task].preset())
    schedule = chosen.schedule(QUICK if quick else TASKS[task].schedule)
    if quick:
        preset = replace(preset, limiter=replace(preset.limiter, min_sequences=8, batch_size=2, samples_per_insert=1.0))
    with tempfile.TemporaryDirectory() as folder, chosen.patched():
        return Alternation(preset, seed, Path(folder), chosen.parts).learn(schedule, say)
