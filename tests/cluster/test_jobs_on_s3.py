"""Jobs that meet in an object store: its server killed in the middle of a run; two hosts; several services."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.s3_server import s3_server
from pipeline.store import open_store
from pipeline.verify import verify_dataset
from tests.processes import COLLECT, LEARN, ROOT, until, updates_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOKEN = "only for this test 0123456789"
ONE_SMALL_COLLECTOR = [*COLLECT, "--env", "ALE/Pong-v5"]


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """(server, dataset URI), with the environment that clients need; local copies lie in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server, "s3://bucket/d"


def check_every_sequence_is_there_once(uri: str, jobs) -> None:
    report = verify_dataset(open_store(uri))
    assert (report.duplicates, report.faults, report.bad_files, report.corrupt_rows) == (0, [], [], 0)
    published = sum(int(re.findall(r"(\d+) sequences in \d+ shards", job.said)[-1]) for job in jobs)
    assert report.sequences == published
    assert not [job.log for job in jobs if "Traceback" in job.said]


def test_the_s3_server_killed_and_restarted_in_the_middle_of_a_run_costs_no_sequence(remote, start):
    server, uri = remote
    collector = start("collect.py", *ONE_SMALL_COLLECTOR, "--dataset", uri)
    learner = start("learn.py", *LEARN, "--dataset", uri, "--run-name", "l")
    store = open_store(uri)
    until(lambda: updates_of(store, "l") >= 10, seconds=180, what="updates")
    for _ in range(2):
        server.kill()
        until(lambda: "s3://bucket/d is away" in collector.said, seconds=60, what="the collector to say so")
        until(lambda: "s3://bucket/d is away" in learner.said, seconds=60, what="the learner to say so")
        server.start()
        before = updates_of(store, "l")
        until(lambda before=before: updates_of(store, "l") >= before + 10, seconds=120, what="learning to go on")
    assert "s3://bucket/d is back" in collector.said
    assert collector.stop() == 0
    assert learner.stop() == 0
    assert "0 bad shards" in learner.said
    check_every_sequence_is_there_once(uri, [collector])


def test_two_services_share_the_collectors_one_is_killed_and_comes_back(remote, start, monkeypatch):
    _, uri = remote
    monkeypatch.setenv("R2D2_REPLAY_TOKEN", TOKEN)
    settings = ["--dataset", uri, "--run-name", "svc", "--batch-size", "8", "--min-sequences", "24"]
    settings += ["--samples-per-insert", "2", "--snapshot-seconds", "1"]
    collectors, store = [], open_store(uri)
    parts: set[int] = set()
    while parts != {0, 1}:  # Their ids are drawn.
        if collectors[1:]:
            assert collectors[-1].stop() == 0  # One of each part is enough.
        collectors.append(start("collect.py", *ONE_SMALL_COLLECTOR, "--dataset", uri))
        number = len(collectors)
        until(lambda number=number: len(store.folders("shards")) == number, seconds=120, what="a first shard")
        parts = {int(name, 16) % 2 for name in store.folders("shards")}
    services = [start("serve_replay.py", *settings, "--part", f"{i}/2", "--port", "0") for i in range(2)]
    until(lambda: all("at grpc://" in each.said for each in services), seconds=180, what="the services to listen")
    addresses = [re.findall(r"at (grpc://\S+)", each.said)[0] for each in services]
    replays = [text for address in addresses for text in ("--replay", address)]
    learner = start("learn.py", *LEARN[:6], "--tracking-uri", "none", "--dataset", uri, *replays, "--run-name", "l")

    def samples(part: int) -> int:
        from pipeline.progress import Progress

        with contextlib.suppress(FileNotFoundError):
            return Progress.from_bytes(store.get(f"runs/svc/progress-{part}.json")).samples
        return 0

    until(lambda: samples(0) >= 40 and samples(1) >= 40, seconds=180, what="draws from both")
    services[1].process.kill()
    until(lambda: f"{addresses[1]}: not there" in learner.said, seconds=60, what="the loss to be named")
    before = samples(0)
    until(lambda: samples(0) >= before + 24, seconds=120, what="the other to carry on")
    port = addresses[1].rpartition(":")[2]
    services[1] = start("serve_replay.py", *settings, "--part", "1/2", "--port", port, "--resume")
    until(lambda: f"{addresses[1]} is back" in learner.said, seconds=120, what="the restarted one to be found")
    before = samples(1)
    until(lambda: samples(1) > before, seconds=120, what="draws from it")
    for job in (learner, *services, *collectors):
        assert job.stop() == 0
    check_every_sequence_is_there_once(uri, collectors)


@pytest.fixture
def other_host():
    """A network namespace joined to this one; (how to run a command there, this side's address)."""
    name, ours, theirs = f"r2d2-{os.getpid()}", f"10.231.{os.getpid() % 250}.1", f"10.231.{os.getpid() % 250}.2"
    setup = [
        f"ip netns add {name}",
        f"ip link add v{os.getpid()} type veth peer name eth0 netns {name}",
        f"ip addr add {ours}/24 dev v{os.getpid()}",
        f"ip link set v{os.getpid()} up",
        f"ip -n {name} addr add {theirs}/24 dev eth0",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in setup:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {command}: {done.stderr.strip()}")
        yield ["ip", "netns", "exec", name], ours
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_collector_on_one_host_and_service_and_learner_on_another_meet_in_the_store(
    other_host, tmp_path, start, monkeypatch
):
    there, ours = other_host
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("R2D2_REPLAY_TOKEN", TOKEN)
    uri = "s3://bucket/d"
    with s3_server(tmp_path / "s3", ours) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        command = [*there, sys.executable, "-u", str(ROOT / "jobs" / "collect.py"), *ONE_SMALL_COLLECTOR]
        log = Path(tmp_path / "there.log")
        with open(log, "w") as said:
            collector = subprocess.Popen([*command, "--dataset", uri], cwd=tmp_path, stdout=said, stderr=said)
        settings = ["--dataset", uri, "--run-name", "svc", "--batch-size", "8", "--min-sequences", "24"]
        service = start("serve_replay.py", *settings, "--samples-per-insert", "2", "--host", ours, "--port", "0")
        until(lambda: "at grpc://" in service.said, seconds=180, what="the service to listen")
        assert f"{ours} is reachable by others, and token and samples travel in clear" in service.said
        address = re.findall(r"at (grpc://\S+)", service.said)[0]
        learner = start("learn.py", *LEARN[:6], "--tracking-uri", "none", "--dataset", uri, "--replay", address)
        until(lambda: updates_of(open_store(uri), "svc") >= 10, seconds=180, what="updates")
        assert learner.stop() == 0
        assert service.stop() == 0
        collector.terminate()
        assert collector.wait(30) == 0
        report = verify_dataset(open_store(uri))
        assert (report.duplicates, report.faults, report.bad_files) == (0, [], [])
        assert re.search(r"[1-9]\d* parameter versions", log.read_text())
