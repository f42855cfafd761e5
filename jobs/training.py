"""The learner's loop: batch, update, priorities back; parameters, checkpoints and metrics when they are due."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from jobs.console import StatusLine, warn
from jobs.health import HealthLog, memory_troubles
from jobs.held_out import HeldOutCheck
from jobs.run_folder import RunFolder
from jobs.stopping import StopRequest
from pipeline.mixed_replay import MixedReplay
from pipeline.params import ParamsPublisher
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter
from pipeline.replay import Replay
from pipeline.replay_client import RemoteReplay
from pipeline.retention import Retention
from pipeline.tracking import Tracker
from r2d2.health import LEARNER_TROUBLES, LearnerWatch, MemoryLimit, never_copied
from r2d2.learner import Learner, LearnerOutput
from r2d2.serialize import tensors_from_bytes, tensors_to_bytes
from schemas.records import ReplaySample

METRICS_SECONDS = 10.0
WAIT_SECONDS = 0.5
RETRY_SECONDS = 5.0
LEARNER_BLOB, REPLAY_BLOB, PARAMS_BLOB = "learner.safetensors", "replay.safetensors", "params.safetensors"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and when to give up.

    Attributes:
        checkpoint_seconds: time between two checkpoints; one is always written at a clean stop.
        checkpoint_updates: also whenever the updates are a multiple of this; 0: by time alone.
        keep: checkpoints kept, 2 or more.
        max_skipped_updates: updates in a row with a loss or gradient that is not finite before the job stops.
    """

    checkpoint_seconds: float = 300.0
    checkpoint_updates: int = 0
    keep: int = 3
    max_skipped_updates: int = 20

    def __post_init__(self) -> None:
        if self.checkpoint_seconds <= 0:
            raise ValueError(f"checkpoint_seconds is {self.checkpoint_seconds}; allowed: above 0")
        if self.checkpoint_updates < 0:
            raise ValueError(f"checkpoint_updates is {self.checkpoint_updates}; allowed: 0 or more")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; allowed: 2 or more")
        if self.max_skipped_updates < 1:
            raise ValueError(f"max_skipped_updates is {self.max_skipped_updates}; allowed: 1 or more")


class Training:
    """Everything one learner run consists of, wired. ``restore``, then ``run``, then ``close``, in one thread."""

    def __init__(
        self,
        *,
        learner: Learner,
        replay: Replay | MixedReplay | RemoteReplay,
        prefetcher: Prefetcher,
        progress: ProgressWriter | None,
        publisher: ParamsPublisher | None,
        retention: Retention | None,
        folder: RunFolder,
        tracker: Tracker,
        config: CheckpointConfig,
        memory: MemoryLimit,
        dq_every: int,
        held_out: HeldOutCheck | None = None,
        closing_tags: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._learner, self._replay, self._prefetcher, self._progress = learner, replay, prefetcher, progress
        self._publisher, self._folder, self._tracker, self._config = publisher, folder, tracker, config
        self._retention = retention
        self._write_failures = 0
        self._publish_again_at = -float("inf")
        self._checkpoints = folder.checkpoints(config.keep)
        self._checkpointed_at = time.monotonic()
        self._skipped = self._skipped_in_a_row = 0
        self._window = MetricsWindow()
        self._memory, self._dq_every = memory, dq_every
        self._watch, self._health = LearnerWatch(learner), HealthLog((*LEARNER_TROUBLES, "memory_near_limit"))
        self._last_saved = -1
        self._held_out, self._closing_tags, self._judged = held_out, closing_tags, -1

    def restore(self) -> Iterator[str]:
        """Continue from the newest complete checkpoint; yields a line for each thing to know."""
        checkpoint, passed_over = self._checkpoints.load_newest()
        yield from passed_over
        if checkpoint is None:
            yield f"no complete checkpoint in {self._folder.path}: starting the run over"
            return
        self._learner.restore(*tensors_from_bytes(checkpoint.blobs[LEARNER_BLOB]))
        arrays, values = tensors_from_bytes(checkpoint.blobs[REPLAY_BLOB])
        restored = self._replay.restore({name: value.numpy() for name, value in arrays.items()}, values)
        self._last_saved = checkpoint.updates
        yield f"resumed run {self._folder.record['run']} at update {self._learner.updates} from {checkpoint.path}"
        yield restored

    def run(self, stop: StopRequest, status: StatusLine, *, updates: int | None, max_minutes: float | None) -> None:
        """Train until stopped, or until ``updates`` in all, or for ``max_minutes``."""
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        period = self._learner.config.target_copy_updates
        self._health.tell(never_copied(updates, self._learner.updates, period))
        self._publish_if_due()
        if self._progress:
            self._progress.start()
        self._prefetcher.start()
        while not stop:
            if updates is not None and self._learner.updates >= updates:
                stop.ask(f"{updates} updates")
                break
            if deadline is not None and time.monotonic() >= deadline:
                stop.ask(f"{max_minutes} minutes")
                break
            started = time.monotonic()
            sample = self._prefetcher.next(WAIT_SECONDS)
            self._window.waited(time.monotonic() - started)
            if sample is not None:
                self._update(sample)
            self._show(status, waits_for="" if sample is not None else self._prefetcher.waits_for())
            self._log(status)
            if self._checkpoint_is_due():
                self._save()
            if self._retention:
                self._retention.enforce_if_due()

    def close(self, *, failed: bool) -> bool:
        """Stop the threads; then, unless the job failed, write the last parameters, checkpoint and metrics.

        Returns False when something could not be written (it has been said).
        """
        self._prefetcher.close()
        written = True
        if not failed:
            written = all([self._publish(), self._save()])  # Either may fail; the other is written all the same.
        self._report()
        self._judge()
        with contextlib.suppress(OSError):  # The dataset may have gone; its digest is not worth failing for.
            self._tracker.tags(self._closing_tags())
        if self._progress:
            self._progress.close(clean=not failed)
        self._replay.close()
        self._tracker.close(failed=failed)
        return written

    def summary(self) -> str:
        counts = self._replay.metrics()
        publications = self._publisher.publications if self._publisher else 0
        return (
            f"{self._learner.updates} updates, {counts['samples']:.0f} samples of {counts['inserted']:.0f} sequences "
            f"({counts['samples_per_insert']:.3g} samples per insert), {publications} publications, "
            f"{counts['corrupt_rows']:.0f} checksum errors, {counts['bad_shards']:.0f} bad shards; "
            f"MLflow run {self._tracker.run_id()}; run folder {self._folder.path}"
        )

    def _update(self, sample: ReplaySample) -> None:
        started = time.monotonic()
        output = self._learner.step(sample)
        taken = self._replay.update_priorities(sample.ids, output.priorities)
        self._window.updated(output, time.monotonic() - started)
        self._watch.saw(sample, output, taken.applied)
        if output.updated:
            self._skipped_in_a_row = 0
            if self._dq_every and self._learner.updates % self._dq_every == 0:
                found = self._learner.discrepancies(sample)
                self._tracker.metrics({f"learn/{name}": value for name, value in found.items()}, self._learner.updates)
            if self._held_out and self._learner.updates % self._held_out.every == 0:
                self._judge()
        else:
            self._skip(sample, output)
        self._publish_if_due()

    def _judge(self) -> None:
        """How well the network does on the episodes kept apart, once for each number of updates."""
        if self._held_out is not None and self._learner.updates != self._judged:
            self._judged = self._learner.updates
            self._tracker.metrics(self._held_out.measure(self._learner), self._learner.updates)

    def _skip(self, sample: ReplaySample, output: LearnerOutput) -> None:
        """Nothing was changed by this update; say so, keep what it was made of, and give up after several in a row."""
        self._skipped += 1
        self._skipped_in_a_row += 1
        name = f"skipped/{self._learner.updates:09d}-{self._skipped:06d}.json"
        record = {
            "updates": self._learner.updates,
            "sequences": sample.batch.identities(),
            "metrics": {name: str(value) for name, value in output.metrics.items()},
        }
        warn(
            f"update skipped: loss or gradient not finite ({self._skipped_in_a_row} in a row); "
            f"its sequences: {self._folder.path / name}"
        )
        try:
            self._folder.keep(name, record)
        except OSError as error:
            self._say_not_written(name, error)
        if self._skipped_in_a_row >= self._config.max_skipped_updates:
            raise ValueError(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite: the "
                "learning rate is too high, or rewards or observations are not finite"
            )

    def _publish_if_due(self) -> None:
        is_due = self._publisher is not None and self._publisher.is_due(self._learner.updates)
        if is_due and time.monotonic() >= self._publish_again_at and not self._publish():
            self._publish_again_at = time.monotonic() + RETRY_SECONDS

    def _publish(self) -> bool:
        """False when the dataset's store did not take the parameters; the last ones stay there, training goes on."""
        if self._publisher is None:
            return True
        try:
            self._publisher.publish(self._params(), self._learner.updates)
        except OSError as error:
            self._say_not_written("parameters", error)
            return False
        return True

    def _params(self) -> bytes:
        return self._learner.published()

    def _say_not_written(self, what: str, error: OSError) -> None:
        self._write_failures += 1
        warn(f"{what} could not be written, training goes on: {error}")

    def _checkpoint_is_due(self) -> bool:
        every = self._config.checkpoint_updates
        by_updates = bool(every) and self._learner.updates % every == 0 and self._learner.updates != self._last_saved
        by_time = time.monotonic() - self._checkpointed_at >= self._config.checkpoint_seconds
        return by_time or (by_updates and self._learner.updates > 0)

    def _save(self) -> bool:
        """False when the disk did not take the checkpoint; the ones before it stay, the next interval tries again."""
        self._checkpointed_at = time.monotonic()
        if self._learner.updates == self._last_saved:
            return True
        arrays, values = self._replay.state()
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
        blobs = {
            LEARNER_BLOB: tensors_to_bytes(*self._learner.state()),
            REPLAY_BLOB: tensors_to_bytes(tensors, values),
            PARAMS_BLOB: self._params(),
        }
        try:
            self._checkpoints.save(self._learner.updates, blobs)
        except OSError as error:
            self._say_not_written("checkpoint", error)
            return False
        self._last_saved = self._learner.updates
        return True

    def _show(self, status: StatusLine, waits_for: str) -> None:
        if not status.is_due:
            return
        counts = self._replay.metrics()
        status.show(
            waits_for,
            updates=self._learner.updates,
            updates_per_second=self._window.updates_per_second,
            loss=self._window.last.get("loss"),
            sequences=int(counts["size"]),
            samples_per_insert=counts["samples_per_insert"],
        )

    def _log(self, status: StatusLine) -> None:
        if self._window.seconds < METRICS_SECONDS:
            return
        self._report()
        if "mlflow_run_id" not in self._folder.record and (run_id := self._tracker.run_id()):
            try:
                self._folder.write({"mlflow_run_id": run_id})
            except OSError as error:
                self._say_not_written("run.json", error)

    def _report(self) -> None:
        self._health.tell([*self._watch.report(), *memory_troubles(self._memory, self._learner.device)])
        values = {**self._window.take(), **self._replay_metrics(), **self._health.metrics()}
        self._tracker.metrics(values, self._learner.updates)

    def _replay_metrics(self) -> dict[str, float]:
        counts = {f"replay/{name}": value for name, value in self._replay.metrics().items()}
        return {
            **counts,
            "learn/updates": self._learner.updates,
            "health/skipped_updates": self._skipped,
            "health/write_failures": self._write_failures,
        }


class MetricsWindow:
    """Means of what the updates since the last report measured."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._sums: dict[str, tuple[float, int]] = {}
        self._updates = 0
        self._waited = self._busy = 0.0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def updated(self, output: LearnerOutput, seconds: float) -> None:
        self._busy += seconds
        self._updates += 1
        self.last = output.metrics
        for name, value in output.metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def updates_per_second(self) -> float:
        return self._updates / max(self.seconds, 1e-9)

    def take(self) -> dict[str, float]:
        """The report, as ``learn/<name>``; a new window begins."""
        report = {f"learn/{name}": total / count for name, (total, count) in self._sums.items()}
        report["learn/updates_per_second"] = self.updates_per_second
        report["learn/waiting_share"] = self._waited / max(self.seconds, 1e-9)
        if self._updates:
            report["learn/update_seconds"] = self._busy / self._updates
        self._begin()
        return report
