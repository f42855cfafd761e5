"""Several jobs log at once: no metric is lost, none lands in another's run, another step or another value."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.tracking.services import mlflow_server, postgres
from tests.tracking.writer import NAMES, value_of, write

WRITERS, SECONDS, EXPERIMENT = 4, 60.0, "writers"
pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.


def check(uri: str, written: dict[int, dict]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    runs = {int(run.data.tags["writer"]): run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == written.keys()
    for writer, run in runs.items():
        said = written[writer]
        assert (run.info.run_id, run.info.status, said["lost"]) == (said["run_id"], "FINISHED", 0)
        assert run.data.params["writer"] == str(writer)
        for name in NAMES:
            logged = client.get_metric_history(run.info.run_id, name)
            found = sorted((metric.step, metric.value) for metric in logged)
            assert found == [(step, value_of(writer, name, step)) for step in range(said["steps"])], (writer, name)
        path = client.download_artifacts(run.info.run_id, f"files/writer-{writer}.txt")
        assert Path(path).read_text() == f"{writer}\n" * 100


def write_together(uri: str, folder: Path, seconds: float) -> dict[int, dict]:
    """Four processes; what each says of itself."""
    command = [sys.executable, "-m", "tests.tracking.writer", uri, EXPERIMENT]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    jobs = [
        subprocess.Popen([*command, str(writer), str(seconds)], cwd=folder, env=environment, stdout=subprocess.PIPE)
        for writer in range(WRITERS)
    ]
    outputs = [job.communicate(timeout=seconds + 400)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * WRITERS
    said = {writer: json.loads(output) for writer, output in enumerate(outputs)}
    print({writer: {name: each[name] for name in ("steps", "failures")} for writer, each in said.items()})
    return said


def test_four_writers_for_a_second_on_sqlite(tmp_path, monkeypatch, mlflow_runs):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    written: dict[int, dict] = {}
    threads = [
        threading.Thread(target=lambda writer=writer: written.update({writer: write(uri, EXPERIMENT, writer, 1.0)}))
        for writer in range(WRITERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check(uri, written)


@pytest.mark.slow
def test_four_processes_for_a_minute_on_an_empty_sqlite_file(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    check(uri, write_together(uri, tmp_path, SECONDS))


@pytest.mark.slow
def test_four_processes_for_a_minute_on_a_server_over_http(tmp_path):
    with mlflow_server(tmp_path, f"sqlite:///{tmp_path}/server.db") as uri:
        check(uri, write_together(uri, tmp_path, SECONDS))


@pytest.mark.slow
def test_four_processes_for_a_minute_on_a_server_with_postgresql_behind_it(tmp_path):
    with postgres(tmp_path) as database, mlflow_server(tmp_path, database) as uri:
        check(uri, write_together(uri, tmp_path, SECONDS))
