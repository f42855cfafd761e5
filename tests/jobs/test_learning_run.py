"""learn.py in process on a small dataset: what it reports, what it keeps of failed updates, what it goes on from."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import collect, learn
from jobs.parameters import read_parameters
from jobs.run_folder import RunFolder
from pipeline.collector import Collector
from pipeline.tracking import NullTracker
from r2d2.health import LEARNER_TROUBLES
from r2d2.learner import Learner

COLLECT = ["--dataset", "cp", "--env", "CartPole-v1", "--frame-stack", "1", "--core-width", "8", "--burn-in", "4",
           "--unroll", "8", "--bootstrap", "3", "--stride", "8", "--envs", "4", "--seed", "1", "--threads", "1",
           "--env-steps", "800", "--tracking-uri", "none"]  # fmt: skip
LEARN = ["--dataset", "cp", "--dense", "16", "--dueling-width", "8", "--batch-size", "8", "--min-sequences", "20",
         "--samples-per-insert", "100", "--band", "200", "--threads", "1", "--deterministic",
         "--tracking-uri", "none"]  # fmt: skip


class Recorder(NullTracker):
    """Keeps the metrics it is given."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[int, float]]] = {}
        self.ended: list[str] = []

    def metrics(self, values, step):
        for name, value in values.items():
            self.seen.setdefault(name, []).append((step, value))

    def close(self, *, failed=False, **_):
        self.ended.append("failed" if failed else "finished")
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a dataset of a random policy; runs of several tests gather in it."""
    path = tmp_path_factory.mktemp("learning")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert collect.main(COLLECT) == 0
    return path


@pytest.fixture
def recorder(folder, monkeypatch) -> Recorder:
    monkeypatch.chdir(folder)
    recorder = Recorder()
    monkeypatch.setattr(learn, "make_tracker", lambda config: recorder)
    return recorder


def test_dq_of_all_start_strategies_and_every_health_counter_are_reported(recorder):
    options = ["--trust-stored-state", "--initial-state", "initializer", "--tbptt", "3", "--dq-every", "2"]
    assert learn.main([*LEARN, *options, "--updates", "6", "--run-name", "reported"]) == 0
    for strategy in ("zero", "burn_in", "stored", "both"):
        assert [step for step, _ in recorder.seen[f"learn/dq_first/{strategy}"]] == [2, 4, 6]
        # A batch may hold no probe, and so no state before its last trained row.
        assert {step for step, _ in recorder.seen.get(f"learn/dq_last/{strategy}", [])} <= {2, 4, 6}
    assert {f"health/{name}" for name in (*LEARNER_TROUBLES, "memory_near_limit")} <= recorder.seen.keys()
    for name in ("learn/loss", "learn/dq_first", "learn/initializer_loss", "learn/foreign_state_share"):
        assert recorder.seen[name]
    assert all(math.isfinite(value) for seen in recorder.seen.values() for _, value in seen)
    assert recorder.seen["health/target_not_copied"][-1][1] == 1  # A period of 2500 in 6 updates.
    assert recorder.seen["health/not_finite"][-1][1] == 0


def test_an_update_that_is_not_finite_leaves_its_sequences_and_ends_the_job_after_several(
    recorder, folder, monkeypatch, capsys
):
    step, calls = Learner.step, []

    def failing(learner, sample):
        output = step(learner, sample)
        calls.append(len(calls))
        fails = len(calls) in (2, 4, 5, 6)
        return replace(output, updated=False, metrics={**output.metrics, "loss": math.nan}) if fails else output

    monkeypatch.setattr(Learner, "step", failing)
    with pytest.raises(SystemExit) as stopped:
        learn.main([*LEARN, "--max-skipped-updates", "3", "--updates", "50", "--run-name", "skipping"])
    assert stopped.value.code == 2
    assert len(calls) == 6  # One skipped update in between did not count.
    said = capsys.readouterr().err
    assert "error: 3 updates in a row had a loss or gradient that is not finite" in said
    assert said.count("warning: update skipped") == 4
    kept = sorted((folder / "runs" / "skipping" / "skipped").glob("*.json"))
    assert len(kept) == 4
    (collector,) = [path.name for path in (folder / "cp" / "shards").iterdir()]
    for path in kept:
        record = json.loads(path.read_bytes())
        assert record["metrics"]["loss"] == "nan"
        assert len(record["sequences"]) == 8
        assert {name for name, _ in record["sequences"]} == {collector}
        assert all(0 <= number < 200 for _, number in record["sequences"])
    assert recorder.seen["health/skipped_updates"][-1][1] == 4
    assert recorder.seen["health/not_finite"][-1][1] == 1


def test_init_from_goes_on_from_a_runs_network_lineage_and_version(recorder, folder):
    assert learn.main([*LEARN, "--updates", "5", "--gamma", "0.9", "--no-rescaling", "--run-name", "teacher"]) == 0
    teacher = read_parameters(folder / "runs" / "teacher", "init_from")
    assert teacher.version == 5
    assert teacher.acting == {"gamma": 0.9, "eta": 0.9, "rescaling": False, "rescaling_epsilon": 1e-3}
    assert learn.main([*LEARN, "--updates", "2", "--init-from", "runs/teacher", "--run-name", "pupil"]) == 0
    pupil = read_parameters(folder / "cp" / "runs" / "pupil", "init_from")
    assert (pupil.lineage, pupil.version) == (teacher.lineage, 7)
    assert pupil.acting["gamma"] == 0.99  # The preset's, not the teacher's.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--init-from", "nowhere"], "init_from is 'nowhere'; allowed: a params.safetensors, a checkpoint folder"),
        (["--init-from", "cp/dataset.json", "--resume"], "init_from is 'cp/dataset.json'; allowed: without --resume"),
        (["--dq-every", "-1"], "dq_every is -1; allowed: 0 or more"),
        (["--most-memory-share", "0"], "most_memory_share is 0.0; allowed: above 0, to 1"),
        (["--tbptt", "9"], "tbptt is 9; allowed: at most unroll 8"),
        (["--no-tbptt-carry"], "tbptt_carry is False; allowed: True unless tbptt is set"),
        (["--initial-state", "zero", "--trust-stored-state"], "trust_stored_state is True; allowed: False when"),
        (["--core", "none", "--initial-state", "initializer"], "initial_state is initializer; allowed: stored or zero"),
        (["--initial-state", "guess"], "initial_state is 'guess'; allowed: stored, zero, initializer"),
        (["--precision", "int8"], "precision is 'int8'; allowed: float32, bfloat16"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused_by_name(recorder, capsys, arguments, reason):
    with pytest.raises(SystemExit) as stopped:
        learn.main([*LEARN, "--updates", "1", *arguments])
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert reason in said
    assert len(said.splitlines()) == 1


def test_more_processes_than_sequences_are_refused(recorder, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(SystemExit):
        learn.main([*LEARN, "--updates", "1"])
    assert "batch_size is 8; allowed: at least one sequence for each of 9 processes" in capsys.readouterr().err


def test_a_job_that_is_refused_once_its_run_exists_ends_it_as_failed(recorder, monkeypatch):
    def refuse(*_):
        raise ValueError("retention is wrong; allowed: another")

    monkeypatch.setattr(learn, "Retention", refuse)
    with pytest.raises(SystemExit):
        learn.main([*LEARN, "--run-name", "refused", "--updates", "1"])
    assert recorder.ended == ["failed"]


def test_a_collector_that_dies_of_anything_ends_its_run_as_failed(recorder, tmp_path, monkeypatch):
    def die(_):
        raise RuntimeError("a bug")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collect, "make_tracker", lambda config: recorder)
    monkeypatch.setattr(Collector, "turn", die)
    with pytest.raises(RuntimeError):
        collect.main(COLLECT)
    assert set(recorder.ended) == {"failed"}


def test_collectors_that_ray_refuses_end_their_run_as_failed(recorder, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("ray_address is 'x'; allowed: another")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collect, "make_tracker", lambda config: recorder)
    monkeypatch.setattr(collect, "start_ray", refuse)
    with pytest.raises(SystemExit):
        collect.main([*COLLECT, "--collectors", "2"])
    assert recorder.ended == ["failed"]


def test_the_shortest_run_knows_its_page_when_it_is_resumed(recorder, folder, monkeypatch):
    monkeypatch.setattr(recorder, "run_id", lambda: "page" if recorder.ended else None, raising=False)
    assert learn.main([*LEARN, "--run-name", "short", "--updates", "1"]) == 0
    assert RunFolder(folder / "runs" / "short").record["mlflow_run_id"] == "page"
