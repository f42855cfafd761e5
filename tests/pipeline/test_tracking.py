"""Tracking against a real MLflow on sqlite: nothing raises into the job, nothing is altered silently."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.tracking import MetricNames, MLflowTracker, NullTracker, TrackingConfig, make_tracker

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.


def client_of(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def test_case_h_f1_names_lengths_and_counts_survive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MLflowTracker(TrackingConfig(uri=uri, experiment="e", run_name="n", tags={"role": "test"}))
    config = {"long": "x" * 7000, "many": {f"p{i:03d}": i for i in range(120)}}
    tracker.params(config)
    started = time.monotonic()
    for step in range(200):
        tracker.metrics({"return@100": step, "timing(s)/learn": 2.0 * step, "nan": float("nan")}, step)
    assert time.monotonic() - started < 0.5, "logging must not wait for the database"
    assert tracker.close(timeout_seconds=60) == 0
    client = client_of(uri)
    run = client.get_run(tracker.run_id())
    assert run.info.status == "FINISHED"
    assert (run.info.run_name, run.data.tags["role"]) == ("n", "test")
    assert len(run.data.params) == 121
    history = client.get_metric_history(tracker.run_id(), "return_100")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(i, i) for i in range(200)]
    assert client.get_run(tracker.run_id()).data.metrics["timing_s_/learn"] == 398.0
    path = client.download_artifacts(tracker.run_id(), "config.json", str(tmp_path))
    assert json.loads(Path(path).read_bytes()) == config


def test_case_h_f1_illegal_names_become_legal_and_stay_distinct():
    names = MetricNames()
    legal = [names.legal(name) for name in ("a@b", "a(b", "a_b", "a@b", "/", "é")]
    assert legal == ["a_b", "a_b_2", "a_b_3", "a_b", "_", "__2"]


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:///tmp/mlruns", ""])
def test_case_h_f1_a_folder_is_refused_at_the_start_in_one_line(uri):
    with pytest.raises(ValueError, match=r"tracking_uri is .*; allowed: none, sqlite") as caught:
        TrackingConfig(uri=uri)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_down_costs_counted_metrics_and_never_the_job(capfd):
    tracker = MLflowTracker(TrackingConfig(uri="http://127.0.0.1:9", experiment="e"))
    tracker.metrics({"a": 1.0, "b": 2.0}, 0)
    started = time.monotonic()
    assert tracker.close(timeout_seconds=1.0) == 2
    assert time.monotonic() - started < 6
    assert tracker.run_id() is None
    assert "2 metrics and 0 other records could not be delivered" in capfd.readouterr().err


def test_none_is_a_real_mode():
    tracker = make_tracker(TrackingConfig(uri="none"))
    assert isinstance(tracker, NullTracker)
    tracker.params({"a": 1})
    tracker.metrics({"a": 1.0}, 0)
    assert (tracker.close(), tracker.run_id()) == (0, None)


TWO = """
import sys
from pipeline.tracking import MLflowTracker, TrackingConfig
tracker = MLflowTracker(TrackingConfig(uri=sys.argv[1], experiment="shared"))
tracker.metrics({"a": 1.0}, 0)
lost = tracker.close(timeout_seconds=60)
print(tracker.run_id(), lost)
"""


def test_two_jobs_that_start_at_once_on_an_empty_folder_share_the_experiment(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    jobs = [
        subprocess.Popen([sys.executable, "-c", TWO, uri], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [job.communicate(timeout=120)[0].split() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    client = client_of(uri)
    experiment = client.get_experiment_by_name("shared")
    assert {client.get_run(run_id).info.experiment_id for run_id, _ in said} == {experiment.experiment_id}
    assert [lost for _, lost in said] == ["0", "0"]
