"""What a learner's run tells MLflow: means of its updates, the replay's counters, health, returns, where things lie."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from jobs.console import warn
from jobs.health import HealthLog, memory_troubles
from jobs.held_out import HeldOutCheck
from jobs.metrics_window import MetricsWindow
from jobs.models import write_model
from jobs.run_folder import RunFolder
from pipeline.returns import ReturnsFollower
from pipeline.tracking import Tracker
from r2d2.health import LEARNER_TROUBLES, LearnerWatch, MemoryLimit, Trouble
from r2d2.learner import Learner, LearnerOutput
from r2d2.serialize import params_from_bytes
from schemas.records import ReplaySample
from schemas.specs import EnvSpec

METRICS_SECONDS = 10.0
LAST = "last"


class TrainingReport:
    """The learner's side of a ``Tracker``; the step of its metrics is the number of updates.

    Only ``collect/``, what the collectors bring about, goes along the dataset's env steps, as in their own runs.

    Args:
        replay_metrics: of the replay, under their own names.
        returns: of the dataset's episodes; None where it does not grow.
        closing_tags: asked for at the end.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        replay_metrics: Callable[[], dict[str, float]],
        env: EnvSpec,
        folder: RunFolder,
        tracker: Tracker,
        memory: MemoryLimit,
        dq_every: int,
        held_out: HeldOutCheck | None = None,
        returns: ReturnsFollower | None = None,
        closing_tags: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._learner, self._replay_metrics, self._env = learner, replay_metrics, env
        self._folder, self._tracker, self._memory = folder, tracker, memory
        self._dq_every, self._held_out, self._returns, self._closing_tags = dq_every, held_out, returns, closing_tags
        self._watch = LearnerWatch(learner)
        self._health = HealthLog((*LEARNER_TROUBLES, "memory_near_limit"))
        self._judged = -1
        self.window = MetricsWindow()
        self.skipped = self.write_failures = 0

    @property
    def run_id(self) -> str | None:
        return self._tracker.run_id()

    def tell(self, troubles: list[Trouble]) -> None:
        self._health.tell(troubles)

    def say_not_written(self, what: str, error: OSError) -> None:
        self.write_failures += 1
        warn(f"{what} could not be written, training goes on: {error}")

    def updated(self, sample: ReplaySample, output: LearnerOutput, applied: int, seconds: float) -> None:
        """After one call of the learner; measures what is due by the number of updates."""
        self.window.updated(output, seconds)
        self._watch.saw(sample, output, applied)
        if not output.updated:
            return
        updates = self._learner.updates
        if self._dq_every and updates % self._dq_every == 0:
            found = self._learner.discrepancies(sample)
            self._tracker.metrics({f"learn/{name}": value for name, value in found.items()}, updates)
        if self._held_out and updates % self._held_out.every == 0:
            self._judge()

    def report_if_due(self) -> None:
        if self.window.seconds < METRICS_SECONDS:
            return
        self.report()
        self._note_run_id()

    def report(self) -> None:
        self._health.tell([*self._watch.report(), *memory_troubles(self._memory, self._learner.device)])
        values = {
            **self.window.take(),
            **{f"replay/{name}": value for name, value in self._replay_metrics().items()},
            "learn/updates": self._learner.updates,
            "health/skipped_updates": self.skipped,
            "health/write_failures": self.write_failures,
            **self._health.metrics(),
        }
        if self._returns is not None:
            with contextlib.suppress(OSError):  # The dataset is away; the replay says so.
                self._returns.poll()
            env_steps = self._returns.env_steps
            values |= {"learn/env_steps": env_steps, "learn/frames": env_steps * self._env.frame_skip}
            counts = {"env_steps": env_steps, "episodes": self._returns.episodes, **self._returns.take()}
            self._tracker.metrics({f"collect/{name}": value for name, value in counts.items()}, env_steps)
        self._tracker.metrics(values, self._learner.updates)

    def saved(self, path: Path) -> None:
        """A checkpoint stays on the learner's own disk; MLflow knows where."""
        record = {"path": str(path.absolute()), "updates": self._learner.updates}
        self._tracker.text("checkpoints/newest.json", json.dumps(record, indent=1))
        self._tracker.tags({"checkpoint": record["path"]})

    def close(self, *, failed: bool, gone_by: Callable[[], float]) -> None:
        """The last metrics and, unless the job failed, the network as a model; then the run ends."""
        self.report()
        self._judge()
        with contextlib.suppress(OSError):  # The dataset may have gone; its digest is not worth failing for.
            self._tracker.tags(self._closing_tags())
        if not failed:
            self._log_model()
        self._tracker.close(failed=failed, gone_by=gone_by)
        self._note_run_id()

    def _note_run_id(self) -> None:
        """For whoever resumes or evaluates the run."""
        if "mlflow_run_id" not in self._folder.record and (run_id := self._tracker.run_id()):
            try:
                self._folder.write({"mlflow_run_id": run_id})
            except OSError as error:
                self.say_not_written("run.json", error)

    def _judge(self) -> None:
        """How well the network does on the episodes kept apart, once for each number of updates."""
        if self._held_out is not None and self._learner.updates != self._judged:
            self._judged = self._learner.updates
            self._tracker.metrics(self._held_out.measure(self._learner), self._learner.updates)

    def _log_model(self) -> None:
        try:
            parameters = params_from_bytes(self._learner.published())
            model = write_model(self._folder.path / "models" / LAST, parameters, self._env)
            self._tracker.model(model, LAST, self._learner.updates)
        except OSError as error:
            self.say_not_written("the last model", error)
