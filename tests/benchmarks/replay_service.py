"""The rate through a service on loopback against the rate in process, and what eight clients get together.

python -m tests.benchmarks.replay_service grpc://127.0.0.1:7878 --threads 1      one client, until its stdin is closed
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.flight import ServiceConnection
from pipeline.prefetch import BatchSource, Prefetcher
from pipeline.replay_client import RemoteReplay, describe
from pipeline.replay_messages import DrawRequest
from pipeline.store import LocalStore
from tests.benchmarks.replay_decoding import BATCH, open_replay

ROOT = Path(__file__).parent.parent.parent
DEPTH = 2  # Batches ahead: one is drawn, or on its way, while another is decoded.
PATIENCE_SECONDS = 60.0


@contextlib.contextmanager
def running_service(store: LocalStore) -> Iterator[str]:
    """A real serve_replay.py without ratio; its address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", str(ROOT / "jobs" / "serve_replay.py"), "--port", "0"]
        command += ["--dataset", str(Path(store.root).absolute()), "--batch-size", str(BATCH), "--capacity", "100000"]
        command += ["--min-sequences", "1", "--samples-per-insert", "1e9", "--band", "1e12"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"grpc://\S+", line):
                    yield found[0]
                    break
        finally:
            process.terminate()
            process.wait(15)


def connected(address: str, threads: int) -> RemoteReplay:
    connection = ServiceConnection(address)
    while (description := describe(connection)) is None:
        time.sleep(0.1)
    return RemoteReplay(connection, description, threads=threads)


def prefetching(replay: BatchSource) -> Prefetcher:
    """As a learner gets its batches."""
    return Prefetcher(replay, BATCH, depth=DEPTH)


def rate(batches: Prefetcher, number: int) -> float:
    """Sequences per second, after those that were ready have been used up."""
    for _ in range(DEPTH + 2):
        assert batches.next(PATIENCE_SECONDS) is not None
    started = time.perf_counter()
    for _ in range(number):
        assert batches.next(PATIENCE_SECONDS) is not None
    return number * BATCH / (time.perf_counter() - started)


def one_client(store: LocalStore, threads: int, rounds: int, batches: int = 20) -> dict[str, float]:
    """Medians of interleaved rounds, both through a prefetcher, and the bytes of one batch on the wire."""
    local = open_replay(store, threads=threads)
    with running_service(store) as address:
        remote = connected(address, threads)
        request = DrawRequest(client="wire", number=0, batch_size=BATCH)
        while (wire := remote._connection.get(request.to_bytes())).num_rows == 0:
            time.sleep(0.1)  # It indexes the dataset still.
        wire_bytes = pa.ipc.get_record_batch_size(wire)
        with prefetching(local) as here, prefetching(remote) as there:
            pairs = [(rate(here, batches), rate(there, batches)) for _ in range(rounds)]
        remote.close()
    local.close()
    in_process, service = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(there / here for here, there in pairs)
    return {"in_process": in_process, "service": service, "ratio": ratio, "wire_bytes": wire_bytes}


def several_clients(store: LocalStore, clients: int, seconds: float) -> list[float]:
    """Sequences per second of each of so many processes at once, each decoding with one thread."""
    with running_service(store) as address:
        command = [sys.executable, "-m", "tests.benchmarks.replay_service", address, "--seconds", str(seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(clients)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.communicate()[0]) for process in processes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=5.0)
    flags = parser.parse_args()
    remote = connected(flags.address, threads=1)
    with prefetching(remote) as batches:
        rate(batches, 1)
        print("ready", flush=True)
        sys.stdin.readline()
        rate(batches, 1)
        started, drawn = time.perf_counter(), 0
        while time.perf_counter() - started < flags.seconds:
            assert batches.next(PATIENCE_SECONDS) is not None
            drawn += BATCH
        elapsed = time.perf_counter() - started
    remote.close()
    print(json.dumps(drawn / elapsed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
