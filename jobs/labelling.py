"""The labeller's run: raw shards in, their labelled twins out, the learner's words carried back to the collectors."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.console import StatusLine, warn
from jobs.parameters import refuse_misfit
from jobs.stopping import StopRequest
from pipeline.action_table import RecentActions, TableConfig, frame_hashes, table_name
from pipeline.dataset import TERMS_NAME, ShardName, list_collectors, read_provenance, write_provenance
from pipeline.decode import BatchDecoder
from pipeline.labelled_shards import LabelledRows, decode_rows, encode_labelled, unlabelled_shards
from pipeline.lane_labels import LaneLabels, Network, Piece, PieceLabels, RawRows, RowLabels
from pipeline.latency import SampleableLatency
from pipeline.mirror import RunMirror
from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.scan import open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.shard_writer import waited_seconds
from pipeline.store import Store
from pipeline.tracking import Tracker
from r2d2.config import LearnerConfig
from r2d2.labeller import Labeller, RecordedSteps
from r2d2.priorities import initial_priorities
from r2d2.serialize import Parameters, network_of, params_from_bytes
from schemas.terms import DatasetTerms

METRICS_SECONDS = 10.0
POLL_SECONDS = 0.1
RETRY_SECONDS = 1.0
ONCE_TRIES = 30  # Of a shard that cannot be had now.


@dataclass
class LabelCounts:
    """What has been labelled, and what could not be."""

    shards: int = 0
    sequences: int = 0
    env_steps: int = 0
    bad_shards: int = 0
    corrupt_rows: int = 0
    tables: int = 0


class Labelling:
    """Follows a raw dataset and writes its labelled twin. ``run``, then ``close``, in one thread.

    A shard of the twin is durable, and never touched again, before the next raw one is taken: whatever kills this, the
    twin's listing says where to go on.

    Args:
        raw, terms: the dataset to follow and its terms.
        out, out_terms: its twin; only the core differs.
        parameters: fixed ones; None follows those that the run ``follow``, or the only live one, publishes in ``out``.
        origin: provenance of this job.
    """

    def __init__(
        self,
        *,
        raw: Store,
        terms: DatasetTerms,
        out: Store,
        out_terms: DatasetTerms,
        parameters: Parameters | None,
        follow: str | None,
        table: TableConfig,
        device: str,
        threads: int,
        tracker: Tracker,
        origin: dict[str, Any],
    ) -> None:
        self._raw, self._terms, self._out, self._out_terms = raw, terms, out, out_terms
        self._device, self._tracker, self._origin = device, tracker, origin
        self._raw_decoder, self._out_decoder = BatchDecoder(terms, threads), BatchDecoder(out_terms)
        self._follower = RunFollower(out, follow)
        self._poller: tuple[str, ParamsPoller] | None = None
        self._mirror = RunMirror(out, raw)
        self._latency = SampleableLatency()
        self._table_config, self._recent = table, RecentActions(table.table_entries)
        self._table_published_at, self._table_is_new = -np.inf, False
        self._lanes: dict[str, LaneLabels] = {}
        self._last: dict[str, int] = {}
        self._network: Network | None = None
        self._learner = LearnerConfig()
        self._fixed = parameters is not None
        if parameters is not None:
            self._use(parameters)
        self.counts = LabelCounts()
        self._not_now: str | None = None  # A shard that could not be had at the last look.
        self._reported_at, self._reported_steps = time.monotonic(), 0

    def run(self, stop: StopRequest, status: StatusLine, *, max_minutes: float | None, once: bool) -> None:
        """Label until stopped, for ``max_minutes``, or (``once``) until everything that is there has been labelled.

        Raises:
            ValueError: a learner published a network that does not fit the dataset.
            OSError: with ``once``: a shard can still not be had after half a minute.
        """
        deadline, tries = None if max_minutes is None else time.monotonic() + 60 * max_minutes, 0
        self._mirror.start()
        while not stop:
            self._follow()
            did_something = self._turn(stop) if self._network is not None else False
            self._publish_table()
            self._show(status)
            if deadline is not None and time.monotonic() >= deadline:
                stop.ask(f"{max_minutes} minutes")
            if did_something:
                tries = 0
                continue
            if once and self._network is not None:
                tries += 1
                if self._not_now is None:
                    stop.ask("everything is labelled")
                elif tries == ONCE_TRIES and not stop:
                    raise OSError(f"{self._not_now} cannot be labelled: it cannot be opened")
            stop.wait(POLL_SECONDS)

    def close(self, stop: StopRequest, *, failed: bool) -> None:
        """Stop the threads, publish the last table, end the run."""
        self._publish_table(now=True)
        self._mirror.close()
        self._report()
        for decoder in (self._raw_decoder, self._out_decoder):
            decoder.close()
        self._tracker.close(failed=failed, gone_by=stop.gone_by)

    def summary(self) -> str:
        counts = self.counts
        return (
            f"{counts.shards} shards, {counts.sequences} sequences, {counts.env_steps} env steps labelled, "
            f"{counts.bad_shards} bad shards, {counts.corrupt_rows} corrupt sequences; {counts.tables} action tables; "
            f"MLflow run {self._tracker.run_id()}"
        )

    def _turn(self, stop: StopRequest) -> bool:
        """One raw shard of every collector that has one; True when there was any."""
        did_something, self._not_now = False, None
        for collector in list_collectors(self._raw):
            if stop:
                break
            new = unlabelled_shards(self._raw, self._out, collector, self._last.get(collector, -1))
            if new and self._label(new[0], stop):
                self._last[collector] = new[0].number
                did_something = True
            elif new:
                self._not_now = new[0].path
            self._follow()
        return did_something

    def _label(self, name: ShardName, stop: StopRequest) -> bool:
        """Label one shard; False when it cannot be had now."""
        try:
            shard = open_listed(self._raw, self._terms, name)
        except ShardError as error:
            if self._raw.identity(TERMS_NAME) is None:  # The dataset has been moved away.
                return False
            warn(f"{name.path} is not labelled: {error}")
            self.counts.bad_shards += 1
            return True
        except OSError as error:
            warn(f"{name.path} cannot be opened now: {error}")
            stop.wait(RETRY_SECONDS)
            return False
        network = self._network
        assert network is not None
        rows = decode_rows(shard, self._raw_decoder)
        labels = self._lanes_of(name.collector).label(rows, network, self._saw)
        data = encode_labelled(shard, self._out_terms, labels, self._priorities(rows, labels))
        if not self._write(name, data, stop):
            return False
        self._count(name, shard, labels)
        return True

    def _write(self, name: ShardName, data: Any, stop: StopRequest) -> bool:
        """Durable when it returns True; False when the job was stopped before the store took it."""
        has_complained = False
        while True:
            try:
                if self._out.create(name.path, data):
                    return True
                raise ValueError(f"{name.path} has been written by another labeller; allowed: one at a time")
            except OSError as error:
                if not has_complained:
                    warn(f"{name.path} cannot be written, tried again: {error}")
                has_complained = True
                if stop.wait(RETRY_SECONDS):
                    return False

    def _lanes_of(self, collector: str) -> LaneLabels:
        if collector not in self._lanes:
            try:
                provenance: dict[str, Any] | None = read_provenance(self._raw, collector)
            except (OSError, ValueError):
                provenance = None
            write_provenance(self._out, collector, {**self._origin, "collector": provenance})
            found = LabelledRows(self._out, self._out_terms, collector, self._out_decoder)
            self._lanes[collector] = LaneLabels(self._out_terms, found.find)
        return self._lanes[collector]

    def _saw(self, frames: np.ndarray, actions: np.ndarray) -> None:
        self._recent.see(frame_hashes(frames), actions)
        self._table_is_new = True

    def _priorities(self, rows: RawRows, labels: list[RowLabels | None]) -> np.ndarray:
        """NaN for rows without a label, whose columns may hold anything."""
        geometry, life_loss = self._terms.geometry, self._terms.env.life_loss
        priorities = np.full(len(labels), np.nan, np.float32)
        for row, label in enumerate(labels):
            if label is not None:
                one = rows.batch.part(row, row + 1), label.q_values[None]
                priorities[row] = initial_priorities(*one, geometry, self._learner, life_loss)[0]
        return priorities

    def _count(self, name: ShardName, shard: Shard, labels: list[RowLabels | None]) -> None:
        counts, good = self.counts, [label is not None for label in labels]
        counts.shards += 1
        counts.sequences += name.sequences
        counts.env_steps += name.env_steps
        counts.corrupt_rows += good.count(False)
        times = [store.modified_seconds(name.path) for store in (self._raw, self._out)]
        if all(good) and None not in times:
            waited = waited_seconds(self._raw.map_path(name.path))
            on_the_way = times[1] - times[0]  # type: ignore[operator]
            ages = on_the_way + (np.zeros(name.sequences) if waited is None else waited)
            self._latency.labelled(name.collector, int(shard.columns["sequence"][-1]), ages)

    def _follow(self) -> None:
        """Take up what the run has said since the last look."""
        self._follower.poll()
        run = self._mirror.run = self._follower.run
        if self._follower.record is not None:
            self._latency.seen(self._follower.record.seen)
        if run is None or self._fixed:
            return
        if self._poller is None or self._poller[0] != run:
            self._poller = run, ParamsPoller(self._out, run)
        data = self._poller[1].poll()
        if data is None:
            return
        try:
            parameters = params_from_bytes(data)
        except ValueError as error:
            warn(f"parameters are not used: {error}")
            return
        self._use(parameters)

    def _use(self, parameters: Parameters) -> None:
        spec, terms = parameters.spec, self._out_terms
        refuse_misfit(spec, terms.env)
        if spec.core != terms.core:
            raise ValueError(f"core of the network is {spec.core}; allowed: {terms.core}, the labelled dataset's")
        if spec.frame_stack > terms.geometry.frame_stack:
            allowed = f"at most {terms.geometry.frame_stack}, the dataset's"
            raise ValueError(f"frame_stack of the network is {spec.frame_stack}; allowed: {allowed}")
        if parameters.acting is not None:
            self._learner = self._learner.with_acting_values(parameters.acting)
        labeller = Labeller(network_of(parameters), self._device)
        self._network = labelled_by(labeller, parameters.version, parameters.lineage)

    def _publish_table(self, *, now: bool = False) -> None:
        run, network = self._follower.run, self._network
        waited = time.monotonic() - self._table_published_at >= self._table_config.table_seconds
        if run is None or network is None or not self._table_is_new or not (waited or now):
            return
        data = self._recent.encode(self._out_terms.env, network.version, network.lineage)
        self._table_published_at = time.monotonic()
        try:
            self._out.replace(table_name(run), data)
        except OSError as error:
            warn(f"the action table cannot be written: {error}")
            return
        self._table_is_new = False
        self.counts.tables += 1

    def _waits_for(self) -> str:
        if self._network is None:
            waits_for = self._follower.reason or "parameters"
            return f"{waits_for} in {self._out.uri}; start one with python jobs/learn.py --dataset {self._out.uri}"
        return ""

    def _show(self, status: StatusLine) -> None:
        if time.monotonic() - self._reported_at >= METRICS_SECONDS:
            self._report()
        if status.is_due:
            counts, network = self.counts, self._network
            status.show(
                self._waits_for(),
                sequences=counts.sequences,
                env_steps=counts.env_steps,
                version=network.version if network else -1,
                table=len(self._recent),
            )

    def _report(self) -> None:
        counts, now = self.counts, time.monotonic()
        latency = {f"label/{name}": value for name, value in self._latency.take().items()}
        values = {
            **latency,
            "label/shards": counts.shards,
            "label/sequences": counts.sequences,
            "label/env_steps": counts.env_steps,
            "label/env_steps_per_second": (counts.env_steps - self._reported_steps)
            / max(now - self._reported_at, 1e-9),
            "label/bad_shards": counts.bad_shards,
            "label/corrupt_rows": counts.corrupt_rows,
            "label/lost_states": sum(lanes.lost_states for lanes in self._lanes.values()),
            "label/parameter_version": self._network.version if self._network else -1,
            "label/table_entries": len(self._recent),
            "label/tables": counts.tables,
        }
        self._tracker.metrics(values, counts.env_steps)
        self._reported_at, self._reported_steps = now, counts.env_steps


def labelled_by(labeller: Labeller, version: int, lineage: bytes) -> Network:
    """What a network of these parameters says of pieces of episodes."""

    def label(pieces: list[Piece]) -> list[PieceLabels]:
        found = labeller.label([RecordedSteps(**vars(piece)) for piece in pieces])
        return [PieceLabels(q_values=labels.q_values, core=labels.core) for labels in found]

    return Network(label=label, version=version, lineage=lineage)
