"""doctor.py without a dataset: the machine's findings, each with what to do when it is not as it should be."""

import http.server
import os
import threading
from collections.abc import Iterator

import pytest

from jobs import machine
from jobs.doctor import main


@pytest.fixture
def server() -> Iterator[str]:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_machine_is_examined_and_nothing_is_left_behind(tmp_path, monkeypatch, capsys, server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name, smaller in (("MEASURED_SECONDS", 0.05), ("LANES", 2), ("BATCH", 2)):
        monkeypatch.setattr(machine, name, smaller)
    assert main(["--tracking-uri", server]) == 0
    said = capsys.readouterr().out
    for name in ("python and packages", "GPU", "processors", "memory", "disk", "/dev/shm", "emulator", "decoding",
                 "acting", "updates", "MLflow"):  # fmt: skip
        assert f"\n{name} " in f"\n{said}"
    assert "ALE/Pong-v5: " in said
    assert f"{server} answers 200" in said
    assert "0 faults, " in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_comes_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "MEASURED_SECONDS", 0.02)
    monkeypatch.setattr(machine, "LEAST_SHM_BYTES", 1e18)
    monkeypatch.setattr(machine, "acting", lambda: 1 / 0)
    for slow in ("emulator", "decoding", "updating"):
        monkeypatch.setattr(machine, slow, lambda *_: machine.Finding(name="quick", value=""))
    assert main(["--tracking-uri", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().out
    assert "warning: /dev/shm: Ray's object store falls back to disk" in said
    assert "fault: MLflow: jobs go on and try again: mlflow server --host 127.0.0.1 --port 9" in said
    assert "fault: acting: make setup" in said
    assert "2 faults, " in said


def test_where_the_system_does_not_say_which_cores_are_usable_all_are(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert machine.processors().value.startswith("12 usable of 12, load ")


def test_what_only_a_dataset_has_is_refused_without_one(capsys):
    for flag in ("--brief", "--fix"):
        with pytest.raises(SystemExit) as stopped:
            main([flag])
        assert stopped.value.code == 2
        assert "brief or fix is set; allowed: with --dataset" in capsys.readouterr().err
