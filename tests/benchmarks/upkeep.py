"""``make bench-upkeep``: what logging and checkpoints cost the learner, at the default cadence.

Runs the real ``learn.py`` (laptop preset, Pong shards of a random policy, MLflow on sqlite) with its own methods timed.
Logging: time in the learner's thread, and CPU that MLflow's thread, which shares the interpreter, takes while the
learner runs; what it does once at the start and once when training has ended is shown apart. Exit 1 above 2 % each.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict

import psutil

from jobs import collect, learn
from jobs.training import CheckpointConfig, Training
from jobs.training_report import TrainingReport
from pipeline.mlflow_tracker import MLflowTracker

MOST = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.5)
    flags = parser.parse_args()
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)

    def timed(owner, name, part):
        function = getattr(owner, name)

        def wrapped(*arguments, **named):
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                if threading.current_thread() is threading.main_thread():
                    seconds[part] += time.perf_counter() - started
                    calls[part] += 1

        setattr(owner, name, wrapped)

    cpu: dict[str, float] = {}  # Of MLflow's thread, up to the end of each part of its life.
    deliver, open_run, run = MLflowTracker._deliver, MLflowTracker._open_run, Training.run

    def measured_opening(tracker):
        client = open_run(tracker)
        cpu["opening"] = time.thread_time()
        return client

    def measured_delivery(tracker):
        deliver(tracker)
        cpu["closing"] = time.thread_time()

    def measured_run(training, *arguments, **named):
        try:
            return run(training, *arguments, **named)
        finally:
            (thread,) = (each for each in threading.enumerate() if each.name == "mlflow")
            assert thread.ident is not None
            cpu["running"] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    MLflowTracker._deliver, MLflowTracker._open_run = measured_delivery, measured_opening
    Training.run = measured_run
    timed(Training, "run", "run")
    timed(TrainingReport, "report_if_due", "logging")
    timed(Training, "_save", "checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        collect.main(["--env-steps", "12000", "--tracking-uri", "none"])
        learn.main(["--offline", "--max-minutes", str(flags.minutes), "--checkpoint-seconds", "15"])
        os.chdir("/")
    cadence = CheckpointConfig().checkpoint_seconds
    shares = {
        "logging, in the learner's thread": seconds["logging"] / seconds["run"],
        "logging, CPU of MLflow's thread": (cpu["running"] - cpu["opening"]) / seconds["run"],
        f"checkpoint every {cadence:.0f} s": seconds["checkpoint"] / calls["checkpoint"] / cadence,
    }
    print(f"\nlaptop preset, {seconds['run']:.0f} s, {psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, share in shares.items():
        print(f"  {name:52s} {share:.3%} (at most {MOST:.0%})")
    print(f"  one checkpoint{'':38s} {1e3 * seconds['checkpoint'] / calls['checkpoint']:.0f} ms")
    print(f"  once, importing and opening MLflow{'':18s} {cpu['opening']:.1f} s of CPU")
    print(f"  once, after training: models, last charts{'':11s} {cpu['closing'] - cpu['running']:.1f} s of CPU")
    return 0 if max(shares.values()) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
