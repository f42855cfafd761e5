"""``make learn-cartpole``: CartPole-v1 with the velocities hidden, which only memory can make up for.

Passes when 20 greedy episodes return 475 or more on average (of 500) for each seed.

    python -m tests.learning.cartpole [--seeds 3]
"""

import sys

from jobs.alternating import Schedule
from jobs.claims.tasks import masked_cartpole
from tests.learning.report import Bound, run_seeds

SCHEDULE = Schedule(max_updates=8_000, evaluate_updates=50, good_enough=490, validation_episodes=50, test_episodes=20)
BOUNDS = {"recurrent": Bound(least=475, most_seconds=360)}


def main() -> int:
    return run_seeds("cartpole", __doc__, {"recurrent": masked_cartpole()}, SCHEDULE, BOUNDS, unit="mean return")


if __name__ == "__main__":
    sys.exit(main())
