"""Evaluate a run while it trains: each new version of its parameters, in a process of its own."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.console import StatusLine, warn
from jobs.evaluating import Evaluated, Evaluator, PlayFlags, one_line, scores_csv, write_film
from jobs.models import write_model
from jobs.stopping import StopRequest
from pipeline.dataset import read_terms
from pipeline.mlflow_client import search_runs
from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.store import Store
from pipeline.tracking import NONE, Tracker
from r2d2.serialize import Parameters, params_from_bytes
from schemas.terms import DatasetTerms

BEST = "best"
LIVE = "live"
WAIT_SECONDS = 0.5
SILENT_SECONDS = 60.0
MLFLOW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class FollowLimits:
    """When to evaluate again, and when to stop.

    Attributes:
        every_seconds: least time from the start of one evaluation to the next; the last version is always played.
        updates: stop after a version of at least so many updates has been played.
        max_minutes: stop after this many minutes.
    """

    every_seconds: float = 30.0
    updates: int | None = None
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("every_seconds", "updates", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")


class Following:
    """Finds the run, then yields its parameters version by version until the run ends or a limit is met.

    Args:
        run: its name in the dataset, or ``live`` for the only live one.
    """

    def __init__(self, store: Store, run: str, limits: FollowLimits, stop: StopRequest, status: StatusLine) -> None:
        self._store, self._limits, self._stop, self._status = store, limits, stop, status
        self._follower = RunFollower(store, None if run == LIVE else run)
        self._deadline = None if limits.max_minutes is None else time.monotonic() + 60 * limits.max_minutes
        self._beat, self._beat_at = -1, time.monotonic()
        self.name: str | None = None

    def find(self) -> DatasetTerms | None:
        """Wait for the dataset and for the run; None when stopped or out of time before both were there."""
        what = f"a dataset in {self._store.uri}; start one with python jobs/collect.py"
        while self._goes_on():
            terms = read_terms(self._store)
            if terms is not None:
                self._follower.poll()
                self.name = self._follower.run
                if self.name is not None and self._follower.record is not None:
                    return terms
                what = f"a run that learns from {self._store.uri} ({self._follower.reason or self.name})"
            self._status.show(waits_for=what)
            self._stop.wait(WAIT_SECONDS)
        return None

    def find_mlflow_run(self, uri: str, experiment: str) -> str | None:
        """The id of the learner's run; None, said, when it does not appear within a minute."""
        until = time.monotonic() + MLFLOW_SECONDS
        reason = "there is none yet"
        while uri != NONE and time.monotonic() < until and self._goes_on():
            try:
                if found := search_runs(uri, experiment, {"role": "learn", "run": str(self.name)}):
                    return found[0].run_id
            except ValueError as error:  # The learner may be about to make the database.
                reason = str(error)
            self._status.show(waits_for=f"the run of {self.name} in {uri} ({reason})")
            self._stop.wait(WAIT_SECONDS)
        if uri != NONE and not self._stop:
            warn(f"{uri} has no run of {self.name}: this one logs to a run of its own")
        return None

    def versions(self) -> Iterator[Parameters]:
        """The newest parameters, as soon as they are due; empty when the run has ended or a limit is met."""
        assert self.name is not None
        poller, played_at = ParamsPoller(self._store, self.name), -float("inf")
        last = -1
        while self._goes_on():
            has_ended = self._has_ended()  # Asked first: what a run publishes before it closes is played.
            early_seconds = played_at + self._limits.every_seconds - time.monotonic()
            is_due = has_ended or early_seconds <= 0
            if is_due and (parameters := self._poll(poller)) is not None and parameters.version != last:
                played_at, last = time.monotonic(), parameters.version
                yield parameters
                if self._limits.updates is not None and last >= self._limits.updates:
                    self._stop.ask(f"{self._limits.updates} updates")
            elif has_ended:
                self._stop.ask("the run has ended")
            else:
                what = f"run {self.name} to publish parameters after update {last}"
                if not is_due:
                    what = f"the next evaluation, in {early_seconds:.0f} s (--every-seconds)"
                self._status.show(waits_for=what, version=last)
                self._stop.wait(WAIT_SECONDS)

    def _poll(self, poller: ParamsPoller) -> Parameters | None:
        try:
            data = poller.poll()
            return None if data is None else params_from_bytes(data)
        except (OSError, ValueError) as error:
            warn(f"parameters are not used: {error}")
            return None

    def _has_ended(self) -> bool:
        self._follower.poll()
        record = self._follower.record
        if record is not None and record.beat != self._beat:
            self._beat, self._beat_at = record.beat, time.monotonic()
        if record is not None and record.closed:
            return True
        silent_seconds = time.monotonic() - self._beat_at
        if silent_seconds >= SILENT_SECONDS:
            warn(f"run {self.name} has been silent for {silent_seconds:.0f} s: it counts as ended")
            return True
        return False

    def _goes_on(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop.ask(f"{self._limits.max_minutes} minutes")
        return not self._stop


class FollowLog:
    """Logs each evaluation into the run; keeps the network with the greatest mean return as its model ``best``.

    Evaluations that are not the plain one have a group and files of their own, and choose no model.
    """

    def __init__(self, tracker: Tracker, evaluator: Evaluator, flags: PlayFlags, *, best_before: float | None) -> None:
        self._tracker, self._evaluator, self._flags = tracker, evaluator, flags
        self._folder = tempfile.TemporaryDirectory(prefix="r2d2-follow-")
        self._best = best_before
        self.played = 0

    def log(self, parameters: Parameters, evaluated: Evaluated) -> str:
        """One line about it."""
        version, mean = parameters.version, evaluated.summary["return_mean"]
        self.played += 1
        group, variant = self._flags.group, self._flags.variant
        values = {f"{group}/{name}": value for name, value in evaluated.summary.items()}
        self._tracker.metrics({**values, f"{group}/parameter_version": version}, version)
        folder = Path(self._folder.name) / f"{version:09d}"
        folder.mkdir(exist_ok=True)
        # Of equals the one that has learnt for longer.
        is_best = not variant and (self._best is None or mean >= self._best)
        if is_best:
            self._best = mean
            self._tracker.tags({"best_return": f"{mean:g}", "best_version": str(version)})
            self._tracker.model(write_model(folder / BEST, parameters, self._evaluator.env), BEST, version)
            self._tracker.text("evaluations/best.csv", scores_csv(evaluated.played))
            self._film(evaluated, folder / "best.gif")
        last = f"last-{variant}" if variant else "last"
        self._tracker.text(f"evaluations/{last}.csv", scores_csv(evaluated.played))
        self._film(evaluated, folder / f"{last}.gif")
        return f"evaluate: update {version}: {one_line(evaluated.summary)}{', the best so far' if is_best else ''}"

    def close(self) -> None:
        """Once the tracker has sent what lies here."""
        self._folder.cleanup()

    def _film(self, evaluated: Evaluated, path: Path) -> None:
        if write_film(evaluated, path):
            self._tracker.artifact(path, "videos")
