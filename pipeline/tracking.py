"""Runs, parameters and metrics to MLflow, from a thread of their own, so that tracking never stops training.

What cannot be delivered stays queued and is tried again; what is still undelivered at the end is counted and said.
The only module that imports mlflow, and only when a tracker is made.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

DEFAULT_URI = "sqlite:///mlflow.db"
NONE = "none"
SEND_SECONDS = 2.0
RETRY_SECONDS = 5.0
CLOSE_SECONDS = 6.0  # A stopped job is to be gone within ten seconds.
BATCH_METRICS, BATCH_PARAMS = 1000, 100  # MLflow's own limits for one call.
PARAM_CHARACTERS = 500  # MLflow cuts at 6,000 without a word; the whole configuration is an artifact anyway.
MAX_QUEUED_METRICS = 200_000


class Tracker(Protocol):
    """One job's run. No call blocks on the network or on a database, except ``close``."""

    def params(self, values: dict[str, Any]) -> None: ...

    def metrics(self, values: dict[str, float], step: int) -> None: ...

    def text(self, name: str, text: str) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def tags(self, values: dict[str, str]) -> None: ...

    def run_id(self) -> str | None: ...

    def close(self, *, failed: bool = False, timeout_seconds: float = CLOSE_SECONDS) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """``uri``: an MLflow tracking URI, or ``none``. ``run_id`` continues an existing run."""

    uri: str = DEFAULT_URI
    experiment: str = "r2d2"
    run_name: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None

    def __post_init__(self) -> None:
        scheme = urlsplit(self.uri).scheme
        if self.uri != NONE and (scheme in ("", "file") or len(scheme) == 1):
            raise ValueError(
                f"tracking_uri is {self.uri!r}; allowed: {NONE}, {DEFAULT_URI}, http://host:port or another database "
                "(MLflow no longer stores runs in plain folders)"
            )


def make_tracker(config: TrackingConfig) -> Tracker:
    return NullTracker() if config.uri == NONE else MLflowTracker(config)


class NullTracker:
    """``--tracking-uri none``."""

    def params(self, values: dict[str, Any]) -> None: ...

    def metrics(self, values: dict[str, float], step: int) -> None: ...

    def text(self, name: str, text: str) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def tags(self, values: dict[str, str]) -> None: ...

    def run_id(self) -> str | None:
        return None

    def close(self, *, failed: bool = False, timeout_seconds: float = CLOSE_SECONDS) -> int:
        return 0


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
        self._status = "FINISHED"
        self._give_up_at = math.inf
        self._told_before = -1
        self.lost_metrics = 0
        self.failures = 0
        self._thread = threading.Thread(target=self._deliver, name="mlflow", daemon=True)
        self._thread.start()

    def params(self, values: dict[str, Any]) -> None:
        """Also stores the whole of ``values``, uncut, as the artifact ``config.json``."""
        short = {self._names.legal(name): str(value)[:PARAM_CHARACTERS] for name, value in flatten(values).items()}
        with self._lock:
            self._calls.append(("params", (short,)))
            self._calls.append(("text", ("config.json", json.dumps(values, indent=1, default=str))))

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Finite values only; MLflow's databases refuse the others, which health metrics count."""
        milliseconds = int(time.time() * 1000)
        if step <= self._told_before and self._config.run_id is not None:
            return  # A resumed run comes to steps that it logged before it was killed: its curves stay in order.
        new = [
            _Metric(self._names.legal(name), float(value), step, milliseconds)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        with self._lock:
            self._metrics.extend(new)
            while len(self._metrics) > MAX_QUEUED_METRICS:
                self._metrics.popleft()
                self.lost_metrics += 1

    def text(self, name: str, text: str) -> None:
        with self._lock:
            self._calls.append(("text", (name, text)))

    def artifact(self, path: Path) -> None:
        """The file at ``path``, under its own name; it must be there until it has been sent."""
        with self._lock:
            self._calls.append(("artifact", (str(path),)))

    def tags(self, values: dict[str, str]) -> None:
        with self._lock:
            self._calls.append(("tags", (values,)))

    def run_id(self) -> str | None:
        """None until the run has been opened."""
        return self._run_id if self._run_known.is_set() else None

    def close(self, *, failed: bool = False, timeout_seconds: float = CLOSE_SECONDS) -> int:
        """Deliver what is queued, end the run, and return how many metrics were lost (also said on stderr)."""
        self._status = "FAILED" if failed else "FINISHED"
        self._give_up_at = time.monotonic() + timeout_seconds
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds + 0.5)
        with self._lock:
            self.lost_metrics += len(self._metrics)
            lost_calls = len(self._calls)
            self._metrics.clear()
        if self.lost_metrics or lost_calls or self._thread.is_alive():
            _say(f"tracking: {self.lost_metrics} metrics and {lost_calls} other records could not be delivered")
        return self.lost_metrics

    def _deliver(self) -> None:
        client = None
        while True:
            try:
                if client is None:
                    client = self._open_run()
                self._send(client)
                if self._closing.is_set():
                    self._send(client)
                    client.set_terminated(str(self._run_id), self._status)
                    return
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
        _quiet_mlflow()
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        with _only_one_process(self._config.uri):
            client = MlflowClient(tracking_uri=self._config.uri)  # Makes the tables of an empty database.
            found = client.get_experiment_by_name(self._config.experiment)
            try:
                experiment = found.experiment_id if found else client.create_experiment(self._config.experiment)
            except MlflowException:  # Another host was faster.
                found = client.get_experiment_by_name(self._config.experiment)
                if found is None:
                    raise
                experiment = found.experiment_id
        if self._run_id is None:
            run = client.create_run(experiment, run_name=self._config.run_name or None, tags=self._config.tags)
            self._run_id = run.info.run_id
        else:
            client.update_run(self._run_id, status="RUNNING")
            self._forget_what_was_told(client)
        self._run_known.set()
        return client

    def _forget_what_was_told(self, client) -> None:
        """Drop what a resumed run has queued at steps that it had logged already before it was killed."""
        told = client.get_run(self._run_id).data._metric_objs
        self._told_before = max((metric.step for metric in told), default=-1)
        with self._lock:
            self._metrics = deque(metric for metric in self._metrics if metric.step > self._told_before)

    def _send(self, client) -> None:
        from mlflow.entities import Metric, Param, RunTag

        while True:
            with self._lock:
                call = self._calls[0] if self._calls else None
            if call is None:
                break
            kind, arguments = call
            if kind == "text":
                name, text = arguments
                client.log_text(self._run_id, text, name)
            elif kind == "artifact":
                client.log_artifact(self._run_id, *arguments)
            elif kind == "params":
                pairs = list(arguments[0].items())
                for at in range(0, len(pairs), BATCH_PARAMS):
                    client.log_batch(self._run_id, params=[Param(*pair) for pair in pairs[at : at + BATCH_PARAMS]])
            else:
                client.log_batch(self._run_id, tags=[RunTag(*pair) for pair in arguments[0].items()])
            with self._lock:
                self._calls.popleft()
        while True:
            with self._lock:
                batch = [self._metrics[i] for i in range(min(BATCH_METRICS, len(self._metrics)))]
            if not batch:
                return
            client.log_batch(self._run_id, metrics=[Metric(m.name, m.value, m.milliseconds, m.step) for m in batch])
            with self._lock:
                for _ in batch:
                    self._metrics.popleft()


class MetricNames:
    """Maps any name to one that MLflow accepts, and two different names to two different ones (case H-f1)."""

    def __init__(self) -> None:
        self._legal: dict[str, str] = {}
        self._taken: set[str] = set()

    def legal(self, name: str) -> str:
        known = self._legal.get(name)
        if known is None:
            base = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name).strip("/") or "_"
            known, copies = base, 1
            while known in self._taken:
                copies += 1
                known = f"{base}_{copies}"
            self._taken.add(known)
            self._legal[name] = known
        return known


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@contextlib.contextmanager
def _only_one_process(uri: str) -> Iterator[None]:
    """Serialises the first open of an sqlite database, which races between processes (tables and experiment)."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{database}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _quiet_mlflow() -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
