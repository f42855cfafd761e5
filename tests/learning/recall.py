"""``make learn-recall``: a task that needs memory, learnt by the whole system, and the control that has none.

Four trials an episode: a cue for one step, 40 steps of nothing, then the question which of two it was. The gradient
spans 64 steps, so a trial fits, but the state has to arrive. Passes when the recurrent network answers 95 % of the
questions in 200 greedy episodes for each seed, and the network without recurrence at most 60 %, after a number of
updates fixed beforehand.

Neither network is given its previous action: one without memory could act out the cue and copy its own last action from
step to step, which is memory through the back door. The core is thus all that differs, and the only place for the cue.
(The previous reward tells at most how an earlier trial went; cues are drawn afresh.)

    python -m tests.learning.recall [--seeds 3] [--only "no recurrence"]
"""

import sys
from dataclasses import replace

from jobs.alternating import Schedule
from jobs.claims.tasks import recall
from jobs.presets import CoreOptions, Preset
from tests.learning.report import Bound, run_seeds

TRIALS = 4


def without_memory(preset: Preset) -> Preset:
    return replace(preset, network=replace(preset.network, core=CoreOptions(core="none")))


SCHEDULE = Schedule(max_updates=600, evaluate_updates=100, good_enough=None, validation_episodes=50, test_episodes=200)
BOUNDS = {
    "recurrent": Bound(least=0.95, most_seconds=180),
    "no recurrence": Bound(most=0.60, most_seconds=180),
}


def main() -> int:
    presets = {"recurrent": recall(), "no recurrence": without_memory(recall())}
    return run_seeds("recall", __doc__, presets, SCHEDULE, BOUNDS, unit="share of right answers", scale=1 / TRIALS)


if __name__ == "__main__":
    sys.exit(main())
