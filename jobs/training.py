"""The learner's loop: batch, update, priorities back; parameters, checkpoints and reports when they are due."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from jobs.console import StatusLine, warn
from jobs.run_folder import RunFolder
from jobs.stopping import StopRequest
from jobs.training_report import TrainingReport
from pipeline.mixed_replay import MixedReplay
from pipeline.params import ParamsPublisher
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter
from pipeline.replay import Replay
from pipeline.replay_client import RemoteReplay
from pipeline.retention import Retention
from pipeline.several_replays import SeveralReplays
from r2d2.health import never_copied
from r2d2.learner import Learner, LearnerOutput
from r2d2.serialize import tensors_from_bytes, tensors_to_bytes
from schemas.records import ReplaySample

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
        replay: Replay | MixedReplay | RemoteReplay | SeveralReplays,
        prefetcher: Prefetcher,
        progress: ProgressWriter | None,
        publisher: ParamsPublisher | None,
        retention: Retention | None,
        folder: RunFolder,
        report: TrainingReport,
        config: CheckpointConfig,
    ) -> None:
        self._learner, self._replay, self._prefetcher, self._progress = learner, replay, prefetcher, progress
        self._publisher, self._folder, self._report, self._config = publisher, folder, report, config
        self._retention = retention
        self._publish_again_at = -float("inf")
        self._checkpoints = folder.checkpoints(config.keep)
        self._checkpointed_at = time.monotonic()
        self._skipped_in_a_row = 0
        self._last_saved = -1

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
        self._report.tell(never_copied(updates, self._learner.updates, period))
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
            self._report.window.waited(time.monotonic() - started)
            if sample is not None:
                self._update(sample)
            self._show(status, waits_for="" if sample is not None else self._prefetcher.waits_for())
            self._report.report_if_due()
            if self._checkpoint_is_due():
                self._save()
            if self._retention:
                self._retention.enforce_if_due()

    def close(self, stop: StopRequest, *, failed: bool) -> bool:
        """Stop the threads; then, unless the job failed, write the last parameters, checkpoint, model and metrics.

        Returns False when something could not be written (it has been said).
        """
        self._prefetcher.close()
        written = True
        if not failed:
            written = all([self._publish(), self._save()])  # Either may fail; the other is written all the same.
        if self._progress:
            self._progress.close(clean=not failed)
        self._report.close(failed=failed, gone_by=stop.gone_by)
        self._replay.close()
        self._folder.release()
        return written

    def summary(self) -> str:
        counts = self._replay.metrics()
        publications = self._publisher.publications if self._publisher else 0
        return (
            f"{self._learner.updates} updates, {counts['samples']:.0f} samples of {counts['inserted']:.0f} sequences "
            f"({counts['samples_per_insert']:.3g} samples per insert), {publications} publications, "
            f"{counts['corrupt_rows']:.0f} checksum errors, {counts['bad_shards']:.0f} bad shards; "
            f"MLflow run {self._report.run_id}; run folder {self._folder.path}"
        )

    def _update(self, sample: ReplaySample) -> None:
        started = time.monotonic()
        output = self._learner.step(sample)
        taken = self._replay.update_priorities(sample.ids, output.priorities)
        self._report.updated(sample, output, taken.applied, time.monotonic() - started)
        if output.updated:
            self._skipped_in_a_row = 0
        else:
            self._skip(sample, output)
        self._publish_if_due()

    def _skip(self, sample: ReplaySample, output: LearnerOutput) -> None:
        """Nothing was changed by this update; say so, keep what it was made of, and give up after several in a row."""
        self._report.skipped += 1
        self._skipped_in_a_row += 1
        name = f"skipped/{self._learner.updates:09d}-{self._report.skipped:06d}.json"
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
            self._report.say_not_written(name, error)
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
            self._publisher.publish(self._learner.published(), self._learner.updates)
        except OSError as error:
            self._report.say_not_written("parameters", error)
            return False
        return True

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
            PARAMS_BLOB: self._learner.published(),
        }
        try:
            path = self._checkpoints.save(self._learner.updates, blobs)
        except OSError as error:
            self._report.say_not_written("checkpoint", error)
            return False
        self._last_saved = self._learner.updates
        self._report.saved(path)
        return True

    def _show(self, status: StatusLine, waits_for: str) -> None:
        if not status.is_due:
            return
        counts = self._replay.metrics()
        status.show(
            waits_for,
            updates=self._learner.updates,
            updates_per_second=self._report.window.updates_per_second,
            loss=self._report.window.last.get("loss"),
            sequences=int(counts["size"]),
            samples_per_insert=counts["samples_per_insert"],
        )
