"""One of several writers: ``python -m tests.tracking.writer URI EXPERIMENT NUMBER SECONDS`` says what it logged."""

import json
import sys
import time
from pathlib import Path

from pipeline.mlflow_tracker import MLflowTracker
from pipeline.tracking import TrackingConfig

NAMES = ("learn/loss", "learn/q_greedy_mean", "replay/size", "collect/return_mean", "health/not_finite")
PAUSE_SECONDS = 0.02
CLOSE_SECONDS = 240.0


def value_of(writer: int, name: str, step: int) -> float:
    """Tells every writer, metric and step apart."""
    return writer + 10 * NAMES.index(name) + 100 * step


def write(uri: str, experiment: str, writer: int, seconds: float) -> dict:
    """Log all metrics at every step, as a job does; returns run id, number of steps and lost metrics."""
    config = TrackingConfig(
        uri=uri, experiment=experiment, run_name=f"writer-{writer}", tags={"writer": str(writer)}, system_metrics=True
    )
    tracker = MLflowTracker(config)
    tracker.params({"writer": writer, "text": "x" * 1000 * writer})
    started, step = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        tracker.metrics({name: value_of(writer, name, step) for name in NAMES}, step)
        step += 1
        time.sleep(PAUSE_SECONDS)
    artifact = Path(f"writer-{writer}.txt")
    artifact.write_text(f"{writer}\n" * 100)
    tracker.artifact(artifact, "files")
    lost = tracker.close(timeout_seconds=CLOSE_SECONDS)
    return {"run_id": tracker.run_id(), "steps": step, "lost": lost, "failures": tracker.failures}


if __name__ == "__main__":
    print(json.dumps(write(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
