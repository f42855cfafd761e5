"""Both jobs as a user starts them: real processes, a real game, faults of the kinds that happen."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from pipeline.dataset import list_collectors, read_provenance, shards_after
from pipeline.scan import dataset_digest
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from r2d2.serialize import tensors_from_bytes
from tests.processes import COLLECT, LEARN, all_shards, tracked_runs, until, updates_of


def test_learner_first_collector_killed_junk_in_the_dataset_learner_killed_and_resumed(tmp_path, start):
    """One running pair goes through the everyday faults in turn: nothing acknowledged is lost, nothing is twice."""
    store = LocalStore(tmp_path / "data" / "pong")
    learner = start("learn.py", *LEARN, "--checkpoint-seconds", "1", "--run-name", "r")
    until(lambda: "waits for a dataset" in learner.said, what="the learner to say what it waits for")

    first = start("collect.py", *COLLECT)
    until(lambda: updates_of(store) >= 10, what="updates")
    acknowledged = all_shards(store)
    first.process.kill()
    first.wait()
    second = start("collect.py", *COLLECT)
    before = updates_of(store)
    until(lambda: updates_of(store) >= before + 20, what="learning to go on after the collector was killed")
    (collector,) = set(list_collectors(store)) - {name.collector for name in acknowledged}

    newest = shards_after(store, collector, -1)[-1]
    folder = store.map_path(newest.path).parent
    junk = folder / f"{newest.number + 50:09d}-16-100.arrow"
    junk.write_bytes(b"no shard at all")
    (folder / "notes.txt").write_bytes(b"foreign")
    until(lambda: "junk" in learner.said or junk.name in learner.said, what="the junk to be named")
    before = updates_of(store)
    until(lambda: updates_of(store) >= before + 5, what="learning to go on beside junk")
    assert junk.read_bytes() == b"no shard at all"
    junk.unlink()
    (folder / "notes.txt").unlink()

    until(lambda: list((tmp_path / "runs" / "r" / "checkpoints").glob("0*")), what="a checkpoint")
    learner.process.kill()
    learner.wait()
    resumed = start("learn.py", *LEARN, "--resume")
    until(lambda: "resumed run r at update" in resumed.said, what="the resume")
    at = int(re.findall(r"at update (\d+)", resumed.said)[0])
    assert at > 0
    until(lambda: updates_of(store) >= at + 10, what="updates after the resume")

    for job in (second, resumed):
        started = time.monotonic()
        assert job.stop() == 0, job.said
        assert time.monotonic() - started < 10
        assert "Traceback" not in job.said
    report = verify_dataset(store)
    assert report.faults == []
    assert (report.duplicates, report.corrupt_rows) == (0, 0)
    assert len(report.versions - {-1}) > 1
    assert acknowledged <= all_shards(store)
    assert "cut" in {how for how, count in report.episodes.items() if count}
    leftovers = [path for path in tmp_path.rglob("*") if path.name.startswith((".writing", "_0"))]
    assert not leftovers
    ratio = float(re.findall(r"\(([0-9.e+-]+) samples per insert\)", resumed.said)[-1])
    assert 1.0 < ratio < 3.0


def test_ctrl_c_ends_both_within_ten_seconds_and_writes_everything(tmp_path, start):
    store = LocalStore(tmp_path / "cp")
    common = ["--dataset", "cp", "--tracking-uri", "sqlite:///mlflow.db"]
    arguments = ["--env", "CartPole-v1", "--frame-stack", "1", "--envs", "3", "--core-width", "16", *common]
    collector = start("collect.py", *arguments)
    learner = start("learn.py", *LEARN[:-2], *common, "--run-name", "cp-run")
    until(lambda: updates_of(store) >= 5, what="updates")
    until(lambda: tracked_runs(tmp_path / "mlflow.db") == 2, what="both runs in MLflow")
    stopped = {}
    for job in (collector, learner):
        started = time.monotonic()
        assert job.stop(signal.SIGINT) == 0, job.said
        stopped[job] = time.monotonic() - started
    assert max(stopped.values()) < 10, stopped
    progress = json.loads(store.get("runs/cp-run/progress.json"))
    assert progress["closed"] is True
    steps = int(re.findall(r"stopped \(SIGINT\): (\d+) env steps", collector.said)[0])
    assert verify_dataset(store).env_steps == steps
    assert (tmp_path / "runs" / "cp-run" / "params").exists() is False
    assert list((tmp_path / "runs" / "cp-run" / "checkpoints").glob("0*"))

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("r2d2")
    runs = {run.data.tags["role"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"collect", "learn"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs["collect"].data.metrics["collect/env_steps"] == steps
    # The dataset names the run that made it, and both runs name the dataset and what was in it.
    (collector_id,) = list_collectors(store)
    assert read_provenance(store, collector_id)["mlflow_run_id"] == runs["collect"].info.run_id
    assert runs["collect"].data.tags["collector"] == collector_id
    assert {run.data.tags["dataset_uri"] for run in runs.values()} == {str(store.root)}
    assert runs["collect"].data.tags["dataset_digest_close"] == dataset_digest(store)
    assert runs["collect"].data.tags["dataset_digest_start"] != dataset_digest(store)
    assert runs["learn"].data.metrics["learn/updates"] == progress["updates"]
    assert "learn/loss" in runs["learn"].data.metrics
    for run in runs.values():
        assert "commit" in str(run.data.params)
        artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
        expected = {"learn": {"config.json", "checkpoints", "dataset"}, "collect": {"config.json"}}
        assert artifacts - {"plots"} == expected[run.data.tags["role"]]  # A run of seconds may have none yet.


def test_one_seed_and_fixed_parameters_give_the_same_columns(tmp_path, start):
    store = LocalStore(tmp_path / "source")
    source = ["--dataset", "source", *COLLECT]
    collector, learner = (
        start("collect.py", *source, "--seed", "1"),
        start("learn.py", "--dataset", "source", *LEARN, "--run-name", "r"),
    )
    until(lambda: updates_of(store) >= 3, what="parameters")
    for job in (collector, learner):
        assert job.stop() == 0
    params = tmp_path / "source" / "runs" / "r" / "params.safetensors"
    tables = []
    for name, flush in (("a", "5"), ("b", "11")):  # Shard borders aside.
        job = start("collect.py", *COLLECT, "--dataset", name, "--params", str(params), "--seed", "7",
                    "--env-steps", "600",                     "--flush-sequences", flush)  # fmt: skip
        assert job.wait() == 0, job.said
        tables.append(columns_of(LocalStore(tmp_path / name)))
    assert tables[0].keys() == tables[1].keys()
    assert len(tables[0]["sequence"]) > 70
    for column in tables[0].keys() - {"collector", "checksum"}:
        assert tables[0][column] == tables[1][column], column


def columns_of(store: LocalStore) -> dict[str, list]:
    import pyarrow as pa

    (collector,) = list_collectors(store)
    columns: dict[str, list] = {}
    for name in shards_after(store, collector, -1):
        with pa.memory_map(str(store.map_path(name.path))) as source:
            table = pa.ipc.open_file(source).read_all()
            for column in table.column_names:
                values = [str(value) for value in table[column].to_pylist()]  # As text, so that NaN equals NaN.
                columns.setdefault(column, []).extend(values)
    return columns


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("collect.py", ["--env", "ALE/Pongg-v5"], "env is 'ALE/Pongg-v5'; allowed: "),
        ("collect.py", ["--envs", "0"], "envs is 0; allowed: above 0"),
        ("collect.py", ["--preset", "huge"], "preset is 'huge'; allowed: laptop, paper, article"),
        ("collect.py", ["--env", "CartPole-v1", "--dataset", "stored"], "CartPole-v1 here, ALE/Pong-v5 there"),
        ("collect.py", ["--dataset", "/proc/nowhere"], "dataset is '/proc/nowhere'; allowed: a folder"),
        ("collect.py", ["--stride", "7"], "stride is 7; allowed: a divisor of unroll 16"),
        ("collect.py", ["--dataset", "stored", "--unroll", "80"], "window.unroll: 80 here, 40 there"),
        ("collect.py", ["--params", "stored/dataset.json"], "params is 'stored/dataset.json'; allowed: "),
        ("collect.py", ["--tracking-uri", "./mlruns"], "tracking_uri is './mlruns'; allowed: none, sqlite"),
        ("learn.py", ["--dataset", "stored", "--unroll", "80"], "unroll is 80; allowed: at most 40"),
        ("learn.py", ["--dataset", "stored", "--band", "1"], "band is 1; allowed: 24"),
        ("learn.py", ["--dataset", "stored", "--env", "CartPole-v1"], "env is CartPole-v1; allowed: ALE/Pong-v5"),
        ("learn.py", ["--dataset", "stored", "--resume"], "resume is True; allowed: with a run"),
        ("learn.py", ["--capacity", "100"], "capacity is 100; allowed: 500"),
        ("learn.py", ["--tbptt", "-1"], "tbptt is -1; allowed"),
        ("learn.py", ["--no-such-flag"], "no-such-flag"),
        ("learn.py", ["--dataset", "stored", "--mix", "stored=0.5"], "mix is stored; allowed: other datasets than"),
        ("learn.py", ["--dataset", "nowhere", "--offline"], "allowed with --offline: one that is there"),
        ("learn.py", ["--dataset", "nowhere", "--resume"], "allowed with --resume: one that is there"),
        ("learn.py", ["--dataset", "broken"], "broken/dataset.json cannot be used: "),
        ("learn.py", ["--max-minutes", "nan"], "max_minutes is nan; allowed: a finite number"),
        ("learn.py", ["--offline", "--epochs", "inf"], "epochs is inf; allowed: a finite number"),
        ("collect.py", ["--cache-gb", "nan"], "cache_gb is nan; allowed: a finite number"),
        ("collect.py", ["--env-steps", "abc"], "env_steps is 'abc'; allowed: a whole number or None"),
        ("collect.py", ["--envs", "1.5"], "envs is '1.5'; allowed: a whole number"),
        ("collect.py", ["--sticky", "abc"], "sticky is 'abc'; allowed: a number or None"),
        ("collect.py", ["--core-width", "0"], "core layers and width are 1 and 0; allowed: 1 or more"),
        ("collect.py", ["--env", ""], "env is ''; allowed: "),
        ("collect.py", ["--tracking-uri", "foo://x"], "tracking_uri is 'foo://x'; allowed: none, sqlite"),
        ("collect.py", ["--dataset", "a file"], "dataset is 'a file', which is a file or below one; allowed: a folder"),
        ("learn.py", ["--dataset", "stored", "--run-dir", "a file"], "'a file' is no folder"),
        ("doctor.py", ["--dataset", "a file/below"], "dataset is 'a file/below', which is a file or below one"),
        ("doctor.py", ["--dataset", "stored", "--threads", "0"], "threads is 0; allowed: 1 or more"),
        *((script, ["--device", "foo"], "device is 'foo'; allowed on this machine: cpu") for script in
          ("collect.py", "learn.py", "evaluate.py", "analyze.py", "label.py", "relabel.py")),
        ("doctor.py", ["--dataset", "nowhere"], "dataset is 'nowhere'; allowed: a folder with a dataset.json"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_and_status_2(tmp_path, monkeypatch, capsys, script, arguments, reason):
    """In process: each job's ``main``, on a folder that holds a small Pong dataset."""
    from pipeline.dataset import agree_on_terms
    from pipeline.environments import EnvironmentConfig, make_lanes
    from schemas.geometry import SequenceGeometry
    from schemas.specs import CoreSpec
    from schemas.terms import DatasetTerms

    monkeypatch.chdir(tmp_path)
    for folder in ("stored", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "dataset.json").write_text("{x")
    (tmp_path / "a file").touch()
    geometry = SequenceGeometry(burn_in=20, unroll=40, bootstrap=5, stride=20, frame_stack=2)
    env = make_lanes(EnvironmentConfig(), 1).spec
    agree_on_terms(
        LocalStore("stored"), DatasetTerms(env=env, geometry=geometry, core=CoreSpec(kind="lstm", width=128))
    )
    module = __import__(f"jobs.{script[:-3]}", fromlist=["main"])
    with pytest.raises(SystemExit) as stopped:
        module.main(arguments)
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert reason in said
    assert len(said.splitlines()) == 1


def test_pyarrow_alone_reads_a_shard_without_a_copy(tmp_path, start):
    job = start("collect.py", *COLLECT, "--dataset", "d", "--env-steps", "300")
    assert job.wait() == 0, job.said
    shard = next((tmp_path / "d").rglob("*.arrow"))
    code = (
        "import pyarrow as pa, sys\n"
        "table = pa.ipc.open_file(pa.memory_map(sys.argv[1])).read_all()\n"
        "columns = [table[name] for name in ('action', 'reward', 'core_h')]\n"
        "print(len(table), pa.total_allocated_bytes())\n"
    )
    said = subprocess.run([sys.executable, "-c", code, str(shard)], capture_output=True, text=True, check=True).stdout
    rows, allocated = said.split()
    assert int(rows) > 0
    assert int(allocated) == 0


def test_ten_updates_a_kill_and_ten_more_are_twenty_bit_for_bit(tmp_path, start):
    """Deterministic mode on a fixed dataset, from real checkpoints on disk: learner, target, optimiser, priorities."""
    assert start("collect.py", *COLLECT, "--seed", "3", "--env-steps", "1200").wait() == 0
    common = [*LEARN, "--offline", "--deterministic", "--checkpoint-updates", "10", "--keep", "9"]
    whole = start("learn.py", *common, "--run-name", "whole", "--updates", "20")
    assert whole.wait() == 0, whole.said
    halves = start("learn.py", *common, "--run-name", "halves", "--updates", "100000")
    checkpoints = tmp_path / "runs" / "halves" / "checkpoints"
    until((checkpoints / "000000010").exists, what="the checkpoint at update 10")
    halves.process.kill()
    halves.wait()
    for later in checkpoints.glob("0*"):  # It may have come further before the kill reached it.
        if later.name != "000000010":
            shutil.rmtree(later)
    resumed = start("learn.py", *common, "--run-name", "halves", "--resume", "--updates", "20")
    assert resumed.wait() == 0, resumed.said
    assert "resumed run halves at update 10" in resumed.said
    for blob in ("params.safetensors", "learner.safetensors", "replay.safetensors"):
        once, twice = (
            (tmp_path / "runs" / run / "checkpoints" / "000000020" / blob).read_bytes() for run in ("whole", "halves")
        )
        assert without_lineage(once) == without_lineage(twice), blob
    assert not (tmp_path / "data" / "pong" / "runs").exists(), "offline writes nothing into the dataset"


def without_lineage(data: bytes) -> tuple[dict, dict]:
    """Tensors as bytes, and the values beside them but for what is drawn or timed anew in every run."""
    tensors, values = tensors_from_bytes(data)
    kept = {name: value for name, value in values.items() if name not in ("lineage", "waiting_seconds")}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, kept
