"""The replay service and its learner as a user starts them: real processes, killed and started again."""

import json
import os
import re
import signal
import time

import numpy as np
import pytest

from jobs import learn, serve_replay
from pipeline.flight import ServiceConnection
from pipeline.params import params_name
from pipeline.progress import Progress, progress_name
from pipeline.replay_client import RemoteReplay, describe
from pipeline.store import LocalStore
from schemas.specs import ArraySpec
from tests.pipeline.replay_factory import unsynced
from tests.pipeline.sequence_factory import make_dataset, tiny_terms
from tests.processes import until

TERMS = tiny_terms(observation=ArraySpec(shape=(4,), dtype="float32"))
REPLAY = ["--batch-size", "8", "--min-sequences", "20", "--samples-per-insert", "1000", "--band", "1e9"]
LEARN = [
    "--dense", "8", "--dueling-width", "8", "--batch-size", "8", "--publish-updates", "5", "--publish-seconds", "0.2",
    "--tracking-uri", "none",
]  # fmt: skip


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    with unsynced():
        for seed, name in enumerate(("new", "old")):
            make_dataset(root / name, TERMS, 60, collector=name, seed=seed)
    return root


def progress_of(store):
    return Progress.from_bytes(store.get(progress_name("svc")))


def port_of(service):
    until(lambda: "at grpc://" in service.said, what="the service to listen")
    return int(re.findall(r"at grpc://127.0.0.1:(\d+)", service.said)[0])


def test_service_killed_and_resumed_under_a_learner_and_a_client_that_vanishes(
    tmp_path, datasets, start, monkeypatch, capsys
):
    store = LocalStore(datasets / "new")
    mix = ["--mix", f"{datasets / 'old'}=0.25"]
    serve = ["--dataset", str(store.root), *mix, *REPLAY, "--snapshot-seconds", "0.5"]
    leftover = store.root / ".writing-of-a-killed-writer"
    leftover.touch()
    os.utime(leftover, (0, 0))
    first = start("serve_replay.py", *serve, "--port", "0", "--run-name", "svc")
    port = port_of(first)
    assert not leftover.exists()
    address = f"grpc://127.0.0.1:{port}"
    learner = start("learn.py", *LEARN, "--replay", address, "--run-name", "l", "--checkpoint-seconds", "1")

    connection = ServiceConnection(address)
    description = describe(connection)
    assert (description.run, description.dataset, description.largest_batch) == ("svc", str(store.root), 8)
    vanishing = RemoteReplay(connection, description)
    sample = vanishing.sample(8, ahead=True)  # Never consumed, never heard of again.
    assert np.mean(sample.batch.collector == b"old") == 0.25

    until(lambda: progress_of(store).updates >= 20, what="updates through the service")
    snapshots = tmp_path / "runs" / "svc" / "checkpoints"
    # Two more: the first of them may have been begun before the twentieth update.
    seen = {path.name for path in snapshots.glob("0*")}
    until(lambda: len({path.name for path in snapshots.glob("0*")} - seen) >= 2, what="two more snapshots")
    assert store.identity(params_name("svc")) is not None
    assert store.identity(params_name("l")) is None
    first.process.kill()
    first.wait()
    until(lambda: "not there" in learner.said, what="the learner to say that the service is away")

    second = start("serve_replay.py", *serve, "--port", str(port), "--resume")
    until(lambda: "is back" in learner.said, what="the learner to take up the service again")
    assert "resumed run svc from" in second.said
    restored = int(re.findall(r"inserted sequences, (\d+) samples; ", second.said)[0])
    assert restored >= 6 * 8
    before = progress_of(store)
    until(lambda: progress_of(store).updates >= before.updates + 20, what="learning to go on")
    assert progress_of(store).samples > restored

    started = time.monotonic()
    assert learner.stop(signal.SIGTERM) == 0
    assert second.stop(signal.SIGINT) == 0
    assert time.monotonic() - started < 15
    assert progress_of(store).closed
    checkpoints = list((tmp_path / "runs" / "l" / "checkpoints").glob("0*"))
    assert checkpoints
    for job in (first, second, learner):
        assert "Traceback" not in job.said
    assert re.search(r"serve: stopped \(SIGINT\): \d+ samples of 60 sequences", second.said)

    # The learner's own run goes on through the service, or says why it cannot without one.
    monkeypatch.chdir(tmp_path)
    with_its_own_replay = [*LEARN, "--dataset", store.root, "--resume", "--offline"]
    assert "the checkpoint holds no replay: a service kept it" in one_line_refusal(
        learn.main, with_its_own_replay, capsys
    )


def test_a_learner_mixes_datasets_in_its_own_process(tmp_path, datasets, start):
    mix = ["--mix", f"{datasets / 'old'}=0.5:0.25@10"]
    arguments = [*LEARN, "--dataset", str(datasets / "new"), *mix, "--offline", "--run-name", "m"]
    learner = start("learn.py", *arguments, "--updates", "12", "--deterministic")
    assert learner.wait() == 0
    # Shares of 0.5, 0.475 .. 0.275 in ten batches and 0.25 in two: 35 of 96 rows are the old dataset's.
    assert "12 updates, 61 samples of 60 sequences" in learner.said
    assert "Traceback" not in learner.said


def one_line_refusal(main, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("main", "arguments", "line"),
    [
        (learn.main, ["--replay", "somewhere"], "replay is 'somewhere'; allowed: grpc://host:port"),
        (learn.main, ["--replay", "grpc://a:1", "--mix", "b=0.5"], "mix is set; allowed: without --replay"),
        (learn.main, ["--mix", "old=1.5"], "mix is old=1.5; allowed: a share from 0 to less than 1"),
        (serve_replay.main, ["--port", "70000"], "port is 70000; allowed: 0 to 65535"),
        (serve_replay.main, ["--host", "0.0.0.0", "--dataset", "not-there-yet"], "host is 0.0.0.0"),
        (serve_replay.main, ["--run-name", "a/b"], "run_name is 'a/b'"),
        (serve_replay.main, ["--capacity", "100", "--min-sequences", "200"], "capacity is 100; allowed: 200"),
    ],
)
def test_wrong_flags_are_refused_with_one_line(main, arguments, line, capsys):
    assert line in one_line_refusal(main, arguments, capsys)


def test_flags_that_a_service_would_ignore_and_batches_it_does_not_give_are_refused(
    datasets, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags, _, terms = serve_replay.read_flags(
        serve_replay.ServeReplayFlags, ["--dataset", str(datasets / "new"), *REPLAY, "--port", "0"], "serve_replay.py"
    )
    with serve_replay.StatusLine("serve") as status:
        serving = serve_replay.Serving(flags, terms, flags.serve.security(), status)
    capsys.readouterr()
    try:
        replay = ["--replay", f"grpc://127.0.0.1:{serving.port}", *LEARN]
        line = one_line_refusal(learn.main, [*replay, "--capacity", "7000"], capsys)
        assert line == "error: capacity is 7000; allowed: not with --replay, give it to serve_replay.py"
        line = one_line_refusal(learn.main, [*replay, "--batch-size", "16"], capsys)
        assert line == "error: batch_size is 16; allowed: at most 8, which the replay service gives"
        line = one_line_refusal(learn.main, [*replay, "--dataset", "nowhere"], capsys)
        assert "nowhere; allowed: where this machine sees the dataset of the replay service" in line
        taken = ["--dataset", datasets / "new", *REPLAY, "--port", serving.port]
        assert f"port is {serving.port}; allowed: " in one_line_refusal(serve_replay.main, taken, capsys)
    finally:
        serving.close(clean=True)
    assert json.loads((tmp_path / "runs" / serving.run / "run.json").read_text())["job"] == "serve_replay"
