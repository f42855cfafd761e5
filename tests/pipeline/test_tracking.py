"""Tracking against a real MLflow on sqlite: nothing raises into the job, nothing is altered silently."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.charts import LEARNING_CURVE
from pipeline.mlflow_tracker import MLflowTracker
from pipeline.tracking import MetricNames, NullTracker, TrackingConfig, ending_run, make_tracker

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.


def client_of(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def test_case_h_f1_names_lengths_and_counts_survive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MLflowTracker(TrackingConfig(uri=uri, experiment="e", run_name="n", tags={"role": "test"}))
    config = {"long": "x" * 7000, "many": {f"p{i:03d}": i for i in range(120)}, "provenance": {"pid": 7}}
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
from pipeline.charts import LEARNING_CURVE
from pipeline.mlflow_tracker import MLflowTracker
from pipeline.tracking import TrackingConfig
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


@pytest.fixture
def uri(tmp_path, mlflow_template, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)  # Artifacts of a run lie in the current folder.
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_a_run_can_be_found_and_a_job_that_joins_it_adds_without_changing_it(uri, tmp_path):
    parent = MLflowTracker(TrackingConfig(uri=uri, run_name="sweep"))
    assert parent.close() == 0
    owner = MLflowTracker(
        TrackingConfig(
            uri=uri, run_name="child", tags={"role": "learn"}, description="Learns.", parent_run_id=parent.run_id(),
            charts=(LEARNING_CURVE,), system_metrics=True,
        )
    )  # fmt: skip
    owner.params({"seed": 1})
    owner.dataset("pong", "a" * 32, "/data/pong", "training")
    while owner.run_id() is None:
        time.sleep(0.02)
    guest = MLflowTracker(TrackingConfig(uri=uri, run_id=owner.run_id(), joins=True, tags={"role": "evaluate"}))
    guest.params({"seed": 2})
    guest.metrics({"eval/return_mean": 3.0}, 7)
    assert guest.close() == 0
    client = client_of(uri)
    assert client.get_run(owner.run_id()).info.status == "RUNNING"
    owner.metrics({"collect/return_mean": 1.0, "collect/env_steps": 50}, 50)
    assert owner.close() == 0
    run = client.get_run(owner.run_id())
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "1"}
    assert run.data.metrics["eval/return_mean"] == 3.0
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id()
    assert run.data.tags["mlflow.note.content"] == "Learns."
    assert run.data.tags["role"] == "learn"
    assert run.inputs.dataset_inputs[0].dataset.digest == "a" * 32
    assert run.data.metrics["system/system_memory_usage_percentage"] > 0
    names = {path.path for path in client.list_artifacts(owner.run_id())}
    assert names == {"config.json", "evaluate.json", "plots"}
    (plot,) = client.list_artifacts(owner.run_id(), "plots")
    assert plot.path == "plots/learning_curve.png"


def test_a_resumed_run_logs_no_step_of_a_metric_twice_and_each_metric_has_its_own_steps(uri):
    first = MLflowTracker(TrackingConfig(uri=uri))
    first.metrics({"learn/loss": 1.0}, 5)
    first.metrics({"collect/env_steps": 1000.0}, 1000)
    assert first.close() == 0
    again = MLflowTracker(TrackingConfig(uri=uri, run_id=first.run_id()))
    for step in (4, 5, 6):
        again.metrics({"learn/loss": 10.0 + step}, step)
    assert again.close() == 0
    history = client_of(uri).get_metric_history(first.run_id(), "learn/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(5, 1.0), (6, 16.0)]


def test_what_can_never_be_delivered_holds_nothing_up(uri, tmp_path, capfd):
    tracker = MLflowTracker(TrackingConfig(uri=uri))
    tracker.artifact(tmp_path / "gone.png", "plots")
    tracker.tags({"after": "it"})
    tracker.metrics({"a": 1.0}, 0)
    assert tracker.close() == 0
    assert "a record (artifact) is left out: FileNotFoundError" in capfd.readouterr().err
    run = client_of(uri).get_run(tracker.run_id())
    assert (run.data.tags["after"], run.data.metrics) == ("it", {"a": 1.0})


def test_a_job_that_ended_by_itself_waits_and_says_so_until_somebody_wants_it_gone(monkeypatch, capfd):
    monkeypatch.setattr("pipeline.mlflow_tracker.SAY_SECONDS", 0.3)
    monkeypatch.setattr("pipeline.mlflow_tracker.LEAST_CLOSE_SECONDS", 0.1)
    tracker = MLflowTracker(TrackingConfig(uri="http://127.0.0.1:9"))
    tracker.metrics({"a": 1.0}, 0)
    started = time.monotonic()
    assert tracker.close(gone_by=lambda: started + 1.0 if time.monotonic() - started > 0.8 else math.inf) == 1
    assert 0.9 < time.monotonic() - started < 5
    assert "tracking: waits for http://127.0.0.1:9 to take 1 metrics and 0 other records, 5" in capfd.readouterr().err


@pytest.mark.parametrize("error", [None, ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_the_work_the_run_ends_as_failed_unless_it_ended_well(monkeypatch, error):
    monkeypatch.setattr(MLflowTracker, "_deliver", lambda tracker: None)
    tracker = MLflowTracker(TrackingConfig())
    with contextlib.suppress(BaseException), ending_run(tracker):
        if error is not None:
            raise error
    assert tracker._status == ("FINISHED" if error is None else "FAILED")


def test_a_run_that_has_been_closed_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(MLflowTracker, "_deliver", lambda tracker: None)
    with ending_run(MLflowTracker(TrackingConfig())) as tracker:
        tracker.close(failed=True)
    assert tracker._status == "FAILED"  # type: ignore[attr-defined]
