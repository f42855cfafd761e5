"""How far a run is: the record that a replay's owner publishes, and what a collector makes of it.

    runs/<run>/progress.json     replaced atomically by the owner, read by everyone else (design.md, ratio control)

Nobody compares clocks: a run is live when a watcher sees its beat change.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from pipeline.parts import WHOLE, Part, number_of
from pipeline.store import Store, StoreAway

PUBLISH_SECONDS = 1.0  # At least every 2 s by design: half of it leaves room for a slow disk.
LOOK_SECONDS = 0.05
CHANGE_SECONDS = 0.2  # A changed allowance is published as soon as the last record is so old.
LIVE_SECONDS = 5.0
SILENT_SECONDS = 30.0
WHEN_SILENT = ("wait", "collect")
_RECORD = r"progress(-\d+)?\.json"

_log = logging.getLogger(__name__)


def progress_name(run: str, part: Part = WHOLE) -> str:
    return f"runs/{run}/progress.json" if part == WHOLE else f"runs/{run}/progress-{part.index}.json"


def progress_names(store: Store, run: str) -> list[str]:
    """The records there are of a run: one, or one of each part."""
    return [f"runs/{run}/{name}" for name in store.files(f"runs/{run}") if re.fullmatch(_RECORD, name)]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One record.

    Attributes:
        sequences_seen: published by all collectors as far as the replay knows, evicted ones included.
        seen: the same by collector.
        oldest: number of the first shard that is still held or to be looked at, by collector.
        sequences_allowed: how many sequences there may be in all; None: any number.
        samples, updates: drawn sequences and learner updates so far.
        beat: grows with each record.
        closed: the owner has stopped cleanly.
        part: ``I/N``: of the collectors it speaks of.
    """

    sequences_seen: int
    seen: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    sequences_allowed: int | None
    samples: int
    updates: int
    beat: int = 0
    closed: bool = False
    part: str = str(WHOLE)

    def to_bytes(self) -> bytes:
        values = asdict(self)
        if self.part == str(WHOLE):
            del values["part"]
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Progress":
        """Raises ValueError when this is no complete record."""
        try:
            values = json.loads(data)
            record = cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
            counts = [record.sequences_seen, record.samples, record.updates, record.beat]
            counts += [*record.seen.values(), *record.oldest.values()]
            counts += [] if record.sequences_allowed is None else [record.sequences_allowed]
            if not all(type(count) is int for count in counts):
                raise ValueError("a count is no whole number")
            Part.parse(record.part)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a progress record: {error}") from error
        return record


class ProgressWriter:
    """Publishes a run's record from a thread of its own, so that the beat goes on while the learner compiles.

    A record that cannot be written (full disk, folder away) is counted in ``failures``, said once, and followed by the
    next one; nothing is raised.

    Args:
        source: the current values, called from the thread; its ``beat`` and ``closed`` are filled in here.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        source: Callable[[], Progress],
        clock: Callable[[], float] = time.monotonic,
        *,
        part: Part = WHOLE,
    ) -> None:
        self._store, self._name, self._source, self._clock = store, progress_name(run, part), source, clock
        self._beat = self._last_beat()
        self._published_at = -float("inf")
        self._allowed: int | None = None
        self._is_failing = False
        self.failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)

    def start(self) -> "ProgressWriter":
        """Publish the first record, then go on in the background."""
        self._publish(self._source())
        self._thread.start()
        return self

    def close(self, *, clean: bool = True) -> None:
        """Stop, after a last record that says ``closed``; a stop that is not ``clean`` leaves a run fallen silent.

        Closing twice is fine.
        """
        if not self._stop.is_set():
            self._stop.set()
            if self._thread.is_alive():
                self._thread.join()
            if clean:
                self._publish(replace(self._source(), closed=True))

    def publish_if_due(self) -> bool:
        """Publish when the allowance has changed or the beat is due; True when it did."""
        record, age_seconds = self._source(), self._clock() - self._published_at
        has_changed = record.sequences_allowed != self._allowed
        is_due = age_seconds >= (CHANGE_SECONDS if has_changed else PUBLISH_SECONDS)
        if is_due:
            self._publish(record)
        return is_due

    def _work(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.publish_if_due()

    def _publish(self, record: Progress) -> None:
        self._beat += 1
        self._published_at = self._clock()
        try:
            self._store.replace(self._name, replace(record, beat=self._beat).to_bytes())
        except OSError as error:
            self.failures += 1
            if not self._is_failing:
                _log.warning("%s cannot be written (%s): collectors see a silent run", self._name, error)
            self._is_failing = True
        else:
            self._is_failing, self._allowed = False, record.sequences_allowed

    def _last_beat(self) -> int:
        """Of an earlier start: going on from it, the first record of this one is a change to every watcher."""
        try:
            return Progress.from_bytes(self._store.get(self._name)).beat
        except (OSError, ValueError):
            return 0


class Verdict(NamedTuple):
    """May the collector go on? ``reason`` says why not, or why it runs without a limit; else it is empty."""

    allowed: bool
    reason: str


class SeveralLiveRuns(ValueError):
    """More than one run learns from this dataset, and the collector was not told which to follow."""


@dataclass
class _Watched:
    """One run as this watcher sees it, all times by the watcher's own clock.

    ``changed_at``: when the beat last changed or, until it did (``has_changed``), when the run was first looked at.
    """

    record: Progress | None
    changed_at: float
    has_changed: bool = False
    identity: str | None = None
    has_complained: bool = False

    @property
    def is_closed(self) -> bool:
        return self.record is not None and self.record.closed

    def is_live(self, now: float) -> bool:
        return self.has_changed and not self.is_closed and now - self.changed_at <= LIVE_SECONDS

    def may_turn_out_live(self, now: float) -> bool:
        has_beat = self.record is not None and not self.is_closed
        return has_beat and not self.has_changed and now - self.changed_at <= LIVE_SECONDS


class RunFollower:
    """Decides which run a collector follows, and how far that run lets it go.

    With ``follow`` that run, whether it exists yet or not. Without: the only live one, else the only unclosed one, else
    the only one; of several none is chosen. A run once followed is left only for the only live one. A dataset's only
    run is followed at once; of several, only watching for 5 s tells which are live.

    Args:
        collector: whose record is read where several services share the dataset.
        when_silent: what to do when a run that has not closed has been silent for 30 s: ``wait`` at its last allowance,
            or ``collect`` without limit.
        clock: seconds, monotonic; another machine's clock is never compared with it.

    Attributes:
        run: the run that is followed, or None.
        reason: why none is, when none is.
    """

    def __init__(
        self,
        store: Store,
        follow: str | None = None,
        *,
        collector: str = "0",
        when_silent: str = "wait",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if when_silent not in WHEN_SILENT:
            raise ValueError(f"when_silent is {when_silent!r}; allowed: {', '.join(WHEN_SILENT)}")
        self._store, self._follow, self._when_silent, self._clock = store, follow, when_silent, clock
        self._collector, self._records = collector, {}
        self._runs: dict[str, _Watched] = {}
        self._has_decided = False
        self.run: str | None = follow
        self.reason = ""

    @property
    def record(self) -> Progress | None:
        """The last good record of the followed run."""
        watched = self._runs.get(self.run) if self.run is not None else None
        return watched.record if watched else None

    def poll(self) -> None:
        """Read what is new, and choose.

        Raises:
            SeveralLiveRuns: at the start, several runs are live; one line that names them.
        """
        now = self._clock()
        try:
            names = [self._follow] if self._follow is not None else self._store.folders("runs")
        except StoreAway:
            names = []
        for name in names:
            self._watch(name, now)
        if self._follow is None:
            if names:  # None at all: the dataset is away, or too young.
                self._runs = {name: self._runs[name] for name in names}
            self._choose(now)

    def may_collect(self, my_published_sequences: int, collector: str) -> Verdict:
        """May ``collector``, which has published so many sequences, go on to collect? (design.md, ratio control)"""
        if self.run is None:
            return Verdict(self._has_decided, self.reason)
        record = self.record
        if record is None:
            return Verdict(True, f"run {self.run} has no progress record")
        if record.closed:
            return Verdict(True, f"run {self.run} has closed")
        silent_seconds = self._clock() - self._runs[self.run].changed_at
        is_silent = silent_seconds >= SILENT_SECONDS
        if is_silent and self._when_silent == "collect":
            return Verdict(True, f"run {self.run} has been silent for {silent_seconds:.0f} s")
        if record.sequences_allowed is None:
            return Verdict(True, "")
        published = record.sequences_seen - record.seen.get(collector, 0) + my_published_sequences
        if published < record.sequences_allowed:
            return Verdict(True, "")
        if is_silent:
            return Verdict(False, f"run {self.run}, silent for {silent_seconds:.0f} s (--when-silent collect goes on)")
        return Verdict(False, f"run {self.run} to learn: {published} of {record.sequences_allowed} sequences are there")

    def _watch(self, name: str, now: float) -> None:
        is_first_look = name not in self._runs
        watched = self._runs.setdefault(name, _Watched(None, now))
        path = progress_name(name)
        try:
            path = self._record_of(name)
            identity = self._store.identity(path)
            if identity is None or identity == watched.identity:
                return
            data = self._store.get(path)
            watched.identity = identity
            record = Progress.from_bytes(data)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            if not watched.has_complained:
                _log.warning("%s says nothing: %s", path, error)
            watched.has_complained = True
            return
        watched.has_complained = False
        # The first look at a record does not tell when it was written.
        if not is_first_look and (watched.record is None or record.beat != watched.record.beat):
            watched.has_changed, watched.changed_at = True, now
        watched.record = record

    def _record_of(self, run: str) -> str:
        """The name of the record that speaks of our collector."""
        if run in self._records:
            return self._records[run]
        names = progress_names(self._store, run)
        whole = progress_name(run)
        if names and whole not in names:
            total = Part.parse(Progress.from_bytes(self._store.get(names[0])).part).total
            self._records[run] = progress_name(run, Part(index=number_of(self._collector) % total, total=total))
        elif names:
            self._records[run] = whole
        return self._records.get(run, whole)

    def _choose(self, now: float) -> None:
        runs = self._runs
        live = [name for name in runs if runs[name].is_live(now)]
        if len(runs) > 1 and any(each.may_turn_out_live(now) for each in runs.values()):
            self.reason = f"a sign of which run is live: {', '.join(runs)}"
            return
        candidates = live
        if self.run is None:
            candidates = live or [name for name in runs if not runs[name].is_closed] or list(runs)
        if len(candidates) == 1:
            self.run = candidates[0]
        elif len(live) > 1 and not self._has_decided:
            raise SeveralLiveRuns(f"follow is not set; allowed: one of the live runs, {', '.join(live)}")
        self.reason = f"--follow, to choose one of: {', '.join(candidates)}" if candidates else "a learner's run"
        self._has_decided = True
