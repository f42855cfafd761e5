"""``make demo``: play, learn and evaluate a real game at once for three minutes, then the doctor, and what came of it.

Everything lies below ``.demo`` in the current folder; a second demo makes a second dataset there.
"""

import jobs.interrupt  # noqa: F401

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from jobs.command_line import parse, refusing
from jobs.doctor import show
from jobs.parameters import read_parameters
from jobs.stopping import StopRequest
from pipeline.mlflow_client import find_run, list_artifacts
from pipeline.mlflow_models import download_model
from pipeline.store import LocalStore, Store
from pipeline.verify import verify_dataset

FOLDER = Path(".demo")
ON_THE_PAGE = {
    "metrics": ("learn/loss", "eval/return_mean", "collect/env_steps", "system/cpu_utilization_percentage"),
    "artifacts": ("plots/learning_curve.png", "plots/diagnostics.png", "videos/best.gif", "evaluations/best.csv"),
    "models": ("best", "last"),
}
LEAST_DISTINCT_PRIORITIES = 0.95
POLL_SECONDS = 0.1
OWN_SECONDS = 10.0  # In which a job ends after a signal.
MOST_MINUTES_LONGER = 3.0  # The evaluation ends with the run; this is for a learner that never began.


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """Flags of demo.py.

    Attributes:
        env: gymnasium id to play.
        minutes: how long the two jobs run.
    """

    env: str = "ALE/Pong-v5"
    minutes: float = 3.0


def main(argv: Sequence[str]) -> int:
    with refusing():
        flags = parse(DemoFlags, argv, DemoFlags(), "demo.py")
    FOLDER.mkdir(exist_ok=True)
    name = next(f"demo-{n}" for n in count(1) if not (FOLDER / f"demo-{n}").exists())
    tracking = f"sqlite:///{FOLDER.absolute()}/mlflow.db"
    common = ["--dataset", name, "--max-minutes", str(flags.minutes), "--tracking-uri", tracking]
    watching = ["--dataset", name, "--follow", "live", "--tracking-uri", tracking, "--episodes", "2", "--threads", "1"]
    most = ["--every-seconds", "45", "--max-minutes", str(flags.minutes + MOST_MINUTES_LONGER)]
    stop = StopRequest().listen()
    jobs = {
        "collect": Job("collect.py", [*common, "--env", flags.env]),
        "learn": Job("learn.py", [*common, "--checkpoint-seconds", "60"]),
        "evaluate": Job("evaluate.py", [*watching, *most]),
    }
    try:
        statuses = [job.wait(stop) for job in jobs.values()]
    finally:
        end_all(jobs.values(), stop)
    print()
    if stop:
        print(f"demo: stopped ({stop.reason}), what it made is in {FOLDER.absolute()}")
        return 1
    if any(statuses):
        print(f"demo failed: exit statuses {statuses}")
        return 1
    return _report(LocalStore(FOLDER / name), jobs, tracking)


class Job:
    """One of the two processes; its output is passed on line by line, and kept."""

    def __init__(self, script: str, arguments: list[str]) -> None:
        command = [sys.executable, "-u", str(Path(__file__).parent.absolute() / script), *arguments]
        print(f"$ python jobs/{script} {' '.join(arguments)}", flush=True)
        self._process = subprocess.Popen(
            command, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def wait(self, stop: StopRequest) -> int | None:
        """Its exit status; None when somebody wants the demo gone before there is one."""
        while (status := self._process.poll()) is None and not stop.by_signal:
            time.sleep(POLL_SECONDS)
        self._reader.join(5 if status is not None else 0)
        return status

    def end(self, own_seconds: float = 0) -> None:
        """Ends it unless it has ended by itself within ``own_seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(own_seconds)
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(15)
        self._reader.join(5)

    def find(self, pattern: str) -> str:
        """The last match of a one-group pattern in what the job said, or ``?``."""
        found = re.findall(pattern, "\n".join(self.said))
        return found[-1] if found else "?"

    def _pass_on(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.said.append(line.rstrip())
            print(line, end="", flush=True)


def end_all(jobs: Iterable[Job], stop: StopRequest) -> None:
    """A terminal's Ctrl-C has reached the jobs already: told a second time they would save nothing."""
    for job in jobs:
        job.end(own_seconds=OWN_SECONDS if stop.reason == "SIGINT" else 0)


def _report(store: Store, jobs: dict[str, Job], tracking: str) -> int:
    report = verify_dataset(store)
    show(report)
    collect, learn = jobs["collect"], jobs["learn"]
    versions = collect.find(r"(\d+) parameter versions")
    updates, ratio = learn.find(r"(\d+) updates"), learn.find(r"([0-9.e+-]+) samples per insert")
    run_ids = {name: jobs[name].find(r"MLflow run (\w+)") for name in ("collect", "learn")}
    score = jobs["evaluate"].find(r"mean return (\S+)")
    print(f"updates                     {updates}")
    print(f"parameter versions used     {versions}")
    print(f"samples per insert          {ratio}")
    print(f"last evaluation             mean return {score}")
    print(f"checksum errors             {report.corrupt_rows}")
    print(f"MLflow runs                 {', '.join(f'{name} {run_id}' for name, run_id in run_ids.items())}")
    print(f"to see them                 {Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri {tracking}")
    print(f"to play the best network    python jobs/evaluate.py --tracking-uri {tracking} "
          f"--model runs:/{run_ids['learn']}/best")  # fmt: skip
    faults = [*report.faults, *missing_on_the_page(tracking, run_ids["learn"])]
    if not versions.isdigit() or int(versions) < 2:
        faults.append(f"the collector used {versions} parameter versions; it must take up new ones")
    if report.distinct_priority_share < LEAST_DISTINCT_PRIORITIES:
        faults.append(f"only {report.distinct_priority_share:.0%} of the initial priorities are distinct")
    for fault in faults:
        print(f"fault: {fault}")
    print("demo: failed" if faults else "demo: all is well")
    return 1 if faults else 0


def missing_on_the_page(tracking: str, run_id: str) -> list[str]:
    """What the learner's page in MLflow should show and does not."""
    run = find_run(tracking, run_id)
    if run is None:
        return [f"MLflow has no run {run_id}"]
    missing = [name for name in ON_THE_PAGE["metrics"] if name not in run.metrics]
    artifacts = list_artifacts(tracking, run_id)
    missing += [name for name in ON_THE_PAGE["artifacts"] if name not in artifacts]
    with tempfile.TemporaryDirectory() as folder:
        for name in ON_THE_PAGE["models"]:
            try:
                read_parameters(download_model(tracking, f"runs:/{run_id}/{name}", Path(folder))[0], "model")
            except ValueError as error:
                missing.append(f"model {name} ({error})")
    return [f"the run's page has no {name}" for name in missing]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
