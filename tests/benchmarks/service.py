"""``make bench-service``: two Ray collectors against one process with as many lanes; how soon shards get through S3.

Rates are of the whole: env steps found in the dataset over the time between its first and its last shard. Exit 1 when a
bound does not hold.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from jobs.s3_server import s3_server
from pipeline.dataset import ShardName, list_collectors, read_terms, shards_after
from pipeline.object_store import ObjectStore
from pipeline.shard_writer import waited_seconds
from pipeline.store import LocalStore, Store
from tests.benchmarks.report import Report

ROOT = Path(__file__).parent.parent.parent
LEAST_RATIO, FIRST_SECONDS, LATER_SECONDS = 0.9, 5.0, 20.0
POLL_SECONDS, LEAST_SHARDS = 1.0, 20  # As often as a learner looks.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--envs", type=int, default=16, help="lanes in all")
    flags = parser.parse_args()
    report = Report("service", "make bench-service")
    pairs = []
    for _ in range(flags.rounds):
        one = rate(["--envs", str(flags.envs), "--threads", "1"], flags.seconds)
        two = rate(["--envs", str(flags.envs // 2), "--threads", "1", "--collectors", "2"], flags.seconds)
        pairs.append((one, two))
        print(f"one process {one:,.0f} steps/s, two on Ray {two:,.0f}", flush=True)
    ratio = statistics.median(two / one for one, two in pairs)
    rows = [[f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.3f}"] for one, two in pairs]
    title = f"env steps/s, Pong, laptop preset without a learner, {flags.envs} lanes, {flags.rounds} rounds in turn"
    report.table(title, ["one process, one thread (two are slower)", "two collectors on Ray", "ratio"], rows)
    report.at_least("two Ray collectors on two cores, against one process with the same lanes", ratio, LEAST_RATIO)
    first, *later = delays(flags.seconds)
    report.at_most("first shard through S3, last step until a reader has it", first, FIRST_SECONDS, " s")
    report.at_most("any other shard, the same", max(later), LATER_SECONDS, " s")
    report.table("shards through S3", ["shards", "median s", "longest s"],
                 [[len(later), f"{statistics.median(later):.2f}", f"{max(later):.2f}"]])  # fmt: skip
    report.write()
    return 1 if report.missed else 0


def collector(folder: Path, arguments: list[str], dataset: str) -> subprocess.Popen:
    command = [sys.executable, "-u", str(ROOT / "jobs" / "collect.py"), "--tracking-uri", "none", "--seed", "1"]
    return subprocess.Popen(
        [*command, "--dataset", dataset, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rate(arguments: list[str], seconds: float) -> float:
    """Env steps a second of a collector, or of several, from their first shards on."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "d")
        process = collector(Path(folder), arguments, "d")
        threading.Thread(target=lambda: process.stdout and process.stdout.read(), daemon=True).start()
        wanted = 2 if "--collectors" in arguments else 1
        while len({name.collector for name in shards(store)}) < wanted:
            assert process.poll() is None, "the collector has ended"
            time.sleep(0.2)
        time.sleep(5)
        before, started = steps_published(store), time.monotonic()
        time.sleep(seconds)
        found, elapsed = steps_published(store) - before, time.monotonic() - started
        process.terminate()
        process.wait(30)
        return found / elapsed


def steps_published(store: Store) -> int:
    return sum(name.env_steps for name in shards(store))


def shards(store: Store) -> list[ShardName]:
    return [name for each in list_collectors(store) for name in shards_after(store, each, -1)]


def delays(seconds: float) -> list[float]:
    """Of each shard in turn: seconds from the last step of its oldest sequence until a reader has fetched it.

    A shard says how long its sequences waited before it was put; the rest is from the store's time to ours: one clock.
    """
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder) / "s3") as server:
        os.environ.update(server.environment)
        store = ObjectStore("s3://bucket/d", cache_bytes=10**9, cache_root=Path(folder) / "cache")
        process = collector(Path(folder), ["--envs", "8", "--threads", "1"], "s3://bucket/d")
        threading.Thread(target=lambda: process.stdout and process.stdout.read(), daemon=True).start()
        found: dict[ShardName, float] = {}
        deadline = time.monotonic() + 60 + seconds
        while time.monotonic() < deadline and (not found or len(found) < LEAST_SHARDS):
            assert process.poll() is None, "the collector has ended"
            for name in shards(store) if read_terms(store) else []:
                if name not in found:
                    waited = waited_seconds(store.map_path(name.path))
                    assert waited is not None
                    put_at = store.modified_seconds(name.path) or 0.0
                    found[name] = float(max(waited)) + time.time() - put_at
            time.sleep(POLL_SECONDS)
        process.terminate()
        process.wait(30)
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    sys.exit(main())
