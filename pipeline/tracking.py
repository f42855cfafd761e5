"""What a job says about its run: the interface, where the run lives, and names that MLflow accepts.

The calls leave from a thread of their own (``mlflow_tracker``), so that tracking never stops training.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipeline.charts import Chart
from pipeline.model_folder import ModelFolder

DEFAULT_URI = "sqlite:///mlflow.db"
SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")  # As MLflow has them.
NONE = "none"
CLOSE_SECONDS = 60.0
LEAST_CLOSE_SECONDS = 2.0
FAILED_CLOSE_SECONDS = 6.0


class Tracker(Protocol):
    """One job's run. No call blocks on the network or on a database, except ``close``."""

    def params(self, values: dict[str, Any]) -> None: ...

    def metrics(self, values: dict[str, float], step: int) -> None: ...

    def text(self, name: str, text: str) -> None: ...

    def artifact(self, path: Path, folder: str = "") -> None: ...

    def model(self, model: ModelFolder, name: str, step: int) -> None: ...

    def dataset(self, name: str, digest: str, source: str, context: str) -> None: ...

    def tags(self, values: dict[str, str]) -> None: ...

    def run_id(self) -> str | None: ...

    def close(
        self,
        *,
        failed: bool = False,
        timeout_seconds: float = CLOSE_SECONDS,
        gone_by: Callable[[], float] = lambda: math.inf,
    ) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where a run lives, and what a person can find it by.

    Attributes:
        uri: an MLflow tracking URI, or ``none``.
        experiment: made when it is missing.
        run_name: MLflow draws one when it is empty.
        tags: as ``run_tags`` makes them.
        description: one or two sentences, shown above the run's metrics.
        run_id: an existing run, to be continued.
        joins: the run is another job's: its state, description and parameters stay as they are, things are only added.
        parent_run_id: the run of the sweep that this one is a part of.
        charts: drawn again and again from what the run has logged, while it runs.
        system_metrics: processor, memory, disk, network and GPU every few seconds.
    """

    uri: str = DEFAULT_URI
    experiment: str = "r2d2"
    run_name: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    description: str = ""
    run_id: str | None = None
    joins: bool = False
    parent_run_id: str | None = None
    charts: tuple[Chart, ...] = ()
    system_metrics: bool = False

    def __post_init__(self) -> None:
        if self.uri != NONE and urlsplit(self.uri).scheme.partition("+")[0] not in SCHEMES:
            raise ValueError(
                f"tracking_uri is {self.uri!r}; allowed: {NONE}, {DEFAULT_URI}, http://host:port or another database "
                "(MLflow no longer stores runs in plain folders)"
            )
        if self.joins and self.run_id is None:
            raise ValueError("run_id is None; allowed: a run, when it is to be joined")


def make_tracker(config: TrackingConfig) -> Tracker:
    if config.uri == NONE:
        return NullTracker()
    from pipeline.mlflow_tracker import MLflowTracker

    return MLflowTracker(config)


@contextlib.contextmanager
def ending_run(tracker: Tracker, gone_by: Callable[[], float] = lambda: math.inf) -> Iterator[Tracker]:
    """The run ends with the block, as failed if that ends by an exception, unless it has been closed before."""
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True, timeout_seconds=FAILED_CLOSE_SECONDS, gone_by=gone_by)
        raise
    tracker.close(gone_by=gone_by)


class NullTracker:
    """``--tracking-uri none``."""

    def params(self, values: dict[str, Any]) -> None: ...

    def metrics(self, values: dict[str, float], step: int) -> None: ...

    def text(self, name: str, text: str) -> None: ...

    def artifact(self, path: Path, folder: str = "") -> None: ...

    def model(self, model: ModelFolder, name: str, step: int) -> None: ...

    def dataset(self, name: str, digest: str, source: str, context: str) -> None: ...

    def tags(self, values: dict[str, str]) -> None: ...

    def run_id(self) -> str | None:
        return None

    def close(
        self,
        *,
        failed: bool = False,
        timeout_seconds: float = CLOSE_SECONDS,
        gone_by: Callable[[], float] = lambda: math.inf,
    ) -> int:
        return 0


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
