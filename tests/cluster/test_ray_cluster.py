"""Collectors on Ray as a user starts them: a node and an actor killed, a long TMPDIR, a tiny /dev/shm."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.processes import COLLECT, all_shards, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def collectors_of(store: LocalStore) -> int:
    return len({name.collector for name in all_shards(store)})


def actors_below(job) -> list[psutil.Process]:
    """Worker processes that hold a collector."""
    found = [
        each for each in psutil.process_iter(["cmdline"]) if "CollectorActor" in " ".join(each.info["cmdline"] or ())
    ]
    ours = {each.pid for each in psutil.Process(job.process.pid).children(recursive=True)}
    return [each for each in found if each.pid in ours]


def test_an_actor_killed_takes_its_place_on_the_ladder_again_and_a_stop_flushes_all(tmp_path, start):
    store = LocalStore(tmp_path / "d")
    job = start("collect.py", *COLLECT, "--dataset", "d", "--collectors", "2", "--seed", "5")
    until(lambda: collectors_of(store) == 2, seconds=180, what="both collectors to publish")
    victim = actors_below(job)[0]
    victim.kill()
    until(lambda: collectors_of(store) == 3, seconds=120, what="another collector in its place")
    assert job.stop(signal.SIGINT) == 0
    assert re.search(r"collector \d has died: .*; another takes its place", job.said)
    assert "Traceback" not in job.said
    report = verify_dataset(store)
    assert (report.collectors, report.duplicates, report.faults, report.bad_files) == (3, 0, [], [])
    total = int(re.findall(r"stopped \(SIGINT\): ([\d,]+) env steps", job.said)[-1].replace(",", ""))
    assert total > 0


def test_a_node_of_a_two_node_cluster_is_killed_and_collecting_goes_on_on_the_other(tmp_path, start, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20})
    try:
        second = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        store = LocalStore(tmp_path / "d")
        job = start("collect.py", *COLLECT, "--dataset", "d", "--collectors", "2", "--ray-address", cluster.address)
        until(lambda: collectors_of(store) == 2, seconds=180, what="both collectors to publish")
        cluster.remove_node(second, allow_graceful=False)
        until(lambda: collectors_of(store) == 3, seconds=180, what="another collector on the node that is left")
        assert job.stop(signal.SIGTERM) == 0
        report = verify_dataset(store)
        assert (report.duplicates, report.faults, report.bad_files) == (0, [], [])
        assert "has died" in job.said
    finally:
        cluster.shutdown()


def test_h_e1_with_a_temporary_folder_of_80_characters_ray_starts_elsewhere(tmp_path):
    long = tmp_path / ("t" * 80)
    long.mkdir()
    said = run_collect(tmp_path, {**os.environ, "TMPDIR": str(long)}, [])
    assert "TMPDIR makes Ray's folder" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="a small /dev/shm of its own needs root")
def test_h_e1_with_64_mib_of_shared_memory_ray_runs_with_a_warning(tmp_path):
    small = 'mount -t tmpfs -o size=67108864 tmpfs /dev/shm && exec "$@"'
    said = run_collect(tmp_path, dict(os.environ), ["unshare", "-m", "sh", "-c", small, "sh"])
    assert "/dev/shm has 64 MiB free" in said


def run_collect(folder, environment, before) -> str:
    from tests.processes import ROOT

    command = [*before, sys.executable, str(ROOT / "jobs" / "collect.py"), *COLLECT, "--dataset", "d"]
    command += ["--collectors", "2", "--env-steps", "600"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert verify_dataset(LocalStore(folder / "d")).faults == []
    return done.stdout + done.stderr
