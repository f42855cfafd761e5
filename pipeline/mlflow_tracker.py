"""Runs, parameters, metrics, artifacts and models to MLflow, from a thread of their own.

What cannot be delivered stays queued and is tried again; what is still undelivered at the end is counted and said.
Imports mlflow only when a tracker is made.
"""

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.mlflow_client import connect, system_monitors
from pipeline.mlflow_records import draw_charts, is_hopeless, send_record
from pipeline.model_folder import ModelFolder
from pipeline.tracking import CLOSE_SECONDS, LEAST_CLOSE_SECONDS, MetricNames, TrackingConfig, flatten

SEND_SECONDS = 2.0
RETRY_SECONDS = 5.0
SYSTEM_SECONDS = 10.0
FIRST_CHART_SECONDS, MOST_CHART_SECONDS = 60.0, 600.0  # Twice as long each time: a chart is a second of CPU.
SAY_SECONDS = 5.0
LAST_LOOK_SECONDS = 0.5
BATCH_METRICS = 1000  # MLflow's own limit for one call.
PARAM_CHARACTERS = 500  # MLflow cuts at 6,000 without a word; the whole configuration is an artifact anyway.
NEVER_EQUAL = ("provenance.pid", "provenance.started_unix_seconds", "provenance.command")  # Noise in a comparison.
MAX_QUEUED_METRICS = 200_000


@dataclass(frozen=True)
class _Metric:
    name: str
    value: float
    step: int
    milliseconds: int


class MLflowTracker:
    """Queues what it is given; a daemon thread opens the run and delivers in batches.

    Attributes:
        lost_metrics: dropped because the queue was full, or undelivered at ``close``.
        failures: calls to MLflow that raised.
    """

    def __init__(self, config: TrackingConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._metrics: deque[_Metric] = deque()
        self._calls: deque[tuple[str, tuple]] = deque()
        self._names = MetricNames()
        self._run_id: str | None = config.run_id
        self._run_known = threading.Event()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._status, self._is_hurried = "FINISHED", False
        self._give_up_at = math.inf
        self._told: dict[str, int] = {}
        self._last_step = 0
        self._monitors: list[Any] = []
        self._monitored_at, self._charted_at = -math.inf, time.monotonic()
        self._chart_seconds = FIRST_CHART_SECONDS
        self.lost_metrics = 0
        self.failures = 0
        self._thread = threading.Thread(target=self._deliver, name="mlflow", daemon=True)
        self._thread.start()

    def params(self, values: dict[str, Any]) -> None:
        """Also stores the whole of ``values``, uncut, as the artifact ``config.json``.

        In a run that is another job's, whose parameters are its own, only as ``<role>.json``.
        """
        whole = json.dumps(values, indent=1, default=str)
        if self._config.joins:
            self.text(f"{self._config.tags.get('role', 'joined')}.json", whole)
            return
        short = {
            self._names.legal(name): str(value)[:PARAM_CHARACTERS]
            for name, value in flatten(values).items()
            if name not in NEVER_EQUAL
        }
        self._call("params", short)
        self.text("config.json", whole)

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Finite values only; MLflow's databases refuse the others, which health metrics count."""
        milliseconds = int(time.time() * 1000)
        new = [
            _Metric(self._names.legal(name), float(value), step, milliseconds)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        with self._lock:
            self._last_step = step
            self._metrics.extend(metric for metric in new if self._is_new(metric))
            while len(self._metrics) > MAX_QUEUED_METRICS:
                self._metrics.popleft()
                self.lost_metrics += 1

    def text(self, name: str, text: str) -> None:
        self._call("text", name, text)

    def artifact(self, path: Path, folder: str = "") -> None:
        """The file at ``path``, under its own name in ``folder``; it must be there until it has been sent."""
        self._call("artifact", str(path), folder)

    def model(self, model: ModelFolder, name: str, step: int) -> None:
        """``runs:/<run>/<name>`` is this model from then on; an earlier one of that name in this run is deleted."""
        self._call("model", model, name, step)

    def dataset(self, name: str, digest: str, source: str, context: str) -> None:
        """What the run reads or writes, as MLflow's own dataset; ``digest`` has at most 36 characters."""
        self._call("dataset", name, digest, source, context)

    def tags(self, values: dict[str, str]) -> None:
        self._call("tags", values)

    def run_id(self) -> str | None:
        """None until the run has been opened."""
        return self._run_id if self._run_known.is_set() else None

    def close(
        self,
        *,
        failed: bool = False,
        timeout_seconds: float = CLOSE_SECONDS,
        gone_by: Callable[[], float] = lambda: math.inf,
    ) -> int:
        """Deliver what is queued, end the run, and return how many metrics were lost (also said on stderr).

        Waits for at most ``timeout_seconds``, saying every few seconds for what. Once ``gone_by`` gives a (monotonic)
        time, no longer than that, but two seconds in any case. A second call changes nothing.
        """
        if self._closing.is_set():
            return self.lost_metrics
        self._status = "FAILED" if failed else "FINISHED"
        started = said_at = time.monotonic()
        self._is_hurried = math.isfinite(gone_by())
        self._give_up_at = started + timeout_seconds
        self._closing.set()
        self._wake.set()
        while self._thread.is_alive() and time.monotonic() < self._give_up_at + LAST_LOOK_SECONDS:
            self._thread.join(0.1)
            now = time.monotonic()
            if math.isfinite(gone_by()):
                self._is_hurried = True
                self._give_up_at = min(self._give_up_at, max(gone_by(), started + LEAST_CLOSE_SECONDS))
            if now - said_at >= SAY_SECONDS:
                said_at = now
                _say(
                    f"tracking: waits for {self._config.uri} to take {len(self._metrics)} metrics and "
                    f"{len(self._calls)} other records, {max(self._give_up_at - now, 0):.0f} s more"
                )
        with self._lock:
            self.lost_metrics += len(self._metrics)
            lost_calls = len(self._calls)
            self._metrics.clear()
        if self.lost_metrics or lost_calls:
            _say(f"tracking: {self.lost_metrics} metrics and {lost_calls} other records could not be delivered")
        elif self._thread.is_alive():
            _say("tracking: everything is delivered but the last charts")
        return self.lost_metrics

    def _call(self, kind: str, *arguments: Any) -> None:
        with self._lock:
            self._calls.append((kind, arguments))

    def _is_new(self, metric: _Metric) -> bool:
        """A resumed run comes to steps that it logged before it was killed: its curves stay in order."""
        return metric.step > self._told.get(metric.name, -1)

    def _deliver(self) -> None:
        client = None
        while True:
            try:
                if client is None:
                    client = self._open_run()
                self._send_metrics(client)
                if self._closing.is_set():
                    # First what is quick: a run may be added to when it has ended, and this thread may be cut short.
                    if not self._config.joins:
                        client.set_terminated(str(self._run_id), self._status)
                    self._send_calls(client)
                    if not self._is_hurried:
                        self._draw_if_due(client)
                        self._monitor_if_due()
                        self._send_metrics(client)
                    return
                self._send_calls(client)
                self._draw_if_due(client)
                self._monitor_if_due()
                self._wake.wait(SEND_SECONDS)
            except Exception as error:  # Whatever MLflow raises must not reach the job.
                self.failures += 1
                if self.failures == 1 or self.failures % 20 == 0:
                    _say(f"tracking: {_one_line(error)}; trying again every {RETRY_SECONDS:.0f} s, training goes on")
                self._closing.wait(RETRY_SECONDS)
                if time.monotonic() > self._give_up_at:
                    return
                if self._closing.is_set():
                    time.sleep(0.5)

    def _open_run(self):
        client, experiment = connect(self._config.uri, self._config.experiment)
        if self._run_id is None:
            tags = dict(self._config.tags)
            if self._config.parent_run_id is not None:
                tags["mlflow.parentRunId"] = self._config.parent_run_id
            if self._config.description:
                tags["mlflow.note.content"] = self._config.description
            run = client.create_run(experiment, run_name=self._config.run_name or None, tags=tags)
            self._run_id = run.info.run_id
        elif self._config.joins:
            client.get_run(self._run_id)
        else:
            client.update_run(self._run_id, status="RUNNING")
            self._forget_what_was_told(client)
        self._run_known.set()
        return client

    def _forget_what_was_told(self, client) -> None:
        """Drop what a resumed run has queued at steps that it had logged already before it was killed."""
        told = client.get_run(self._run_id).data._metric_objs
        with self._lock:
            self._told = {metric.key: metric.step for metric in told}
            self._metrics = deque(metric for metric in self._metrics if self._is_new(metric))

    def _monitor_if_due(self) -> None:
        """The machine's load, along the steps of the job's own metrics."""
        now = time.monotonic()
        if not self._config.system_metrics or now - self._monitored_at < SYSTEM_SECONDS:
            return
        self._monitors = self._monitors or system_monitors()
        self._monitored_at = now
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        self.metrics(values, self._last_step)

    def _draw_if_due(self, client) -> None:
        is_due = time.monotonic() - self._charted_at >= self._chart_seconds or self._closing.is_set()
        if not self._config.charts or not is_due:
            return
        self._charted_at = time.monotonic()
        self._chart_seconds = min(2 * self._chart_seconds, MOST_CHART_SECONDS)
        try:
            draw_charts(client, str(self._run_id), self._config.charts, self._config.run_name)
        except Exception as error:  # A picture is worth no metric: the next one comes soon.
            self.failures += 1
            _say(f"tracking: charts are left out: {_one_line(error)}")

    def _send_calls(self, client) -> None:
        while True:
            with self._lock:
                call = self._calls[0] if self._calls else None
            if call is None:
                return
            try:
                send_record(client, self._config.uri, str(self._run_id), *call)
            except Exception as error:
                if not is_hopeless(error):
                    raise
                self.failures += 1  # Trying again would hold up everything behind it for ever.
                _say(f"tracking: a record ({call[0]}) is left out: {_one_line(error)}")
            with self._lock:
                self._calls.popleft()

    def _send_metrics(self, client) -> None:
        from mlflow.entities import Metric

        while True:
            with self._lock:
                batch = [self._metrics[i] for i in range(min(BATCH_METRICS, len(self._metrics)))]
            if not batch:
                return
            client.log_batch(self._run_id, metrics=[Metric(m.name, m.value, m.milliseconds, m.step) for m in batch])
            with self._lock:
                for _ in batch:
                    self._metrics.popleft()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
