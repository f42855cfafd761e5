"""A run's folder: one process at a time, one dataset, and a damaged one is nobody else's trouble."""

import json
import subprocess
import sys

import pytest

from jobs import run_folder
from jobs.run_folder import RunFolder, find_run_to_resume


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "RUNS", tmp_path)
    for name, dataset in (("first", "/data/pong"), ("second", "/data/pong"), ("other", "/data/breakout")):
        RunFolder(tmp_path / name).write({"run": name, "dataset": dataset})
    return tmp_path


def test_only_one_process_works_in_a_folder_and_a_killed_one_leaves_it_free(runs):
    holds = "import sys; from pathlib import Path; from jobs.run_folder import RunFolder\n"
    holds += "folder = RunFolder(Path(sys.argv[1])).claim(); print('held', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", holds, str(runs / "first")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="first; allowed: one that no other process works in"):
        RunFolder(runs / "first").claim()
    process.kill()
    process.communicate()
    folder = RunFolder(runs / "first").claim()
    folder.release()
    RunFolder(runs / "first").claim().release()


def test_a_run_is_resumed_on_its_own_dataset_and_on_one_that_was_moved_when_its_record_says_so(runs):
    assert find_run_to_resume(None, "other", "/data/breakout").record["run"] == "other"
    with pytest.raises(ValueError, match="dataset is /moved; allowed: /data/breakout, which this run is of"):
        find_run_to_resume(None, "other", "/moved")
    record = runs / "other" / "run.json"
    record.write_text(json.dumps({"run": "other", "dataset": "/moved"}))
    assert find_run_to_resume(runs / "other", None, "/moved").record["run"] == "other"


def test_a_damaged_record_is_named_and_passed_over_where_another_run_was_meant(runs, capsys):
    (runs / "second" / "run.json").write_text("{")
    assert find_run_to_resume(None, None, "/data/pong").record["run"] == "first"
    assert "warning: passed over: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="is damaged"):
        find_run_to_resume(None, "second", "/data/pong")
