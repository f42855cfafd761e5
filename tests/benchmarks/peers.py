"""``make bench-peers``: the replay against dm-reverb and torchrl on the same columns of the same sequences.

Each peer lives in an environment of its own under ``.peers`` (about 8 GB in all, made once, after asking: ``--yes`` or
``YES=1`` answers). All of them are up at the same time and take turns. Exit 1 when a bound is missed.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from pipeline.decode import BatchDecoder
from pipeline.store import LocalStore
from schemas.records import SequenceBatch
from tests.benchmarks.fill_replay import BENCH, Rows, made_once, play
from tests.benchmarks.replay_decoding import BATCH, open_replay
from tests.benchmarks.replay_service import prefetching, rate
from tests.benchmarks.report import Report

PEERS, SCRIPTS = Path(".peers"), Path(__file__).parent / "peer_scripts"
PACKAGES = {
    "reverb": ["dm-reverb[tensorflow]==0.14.0", "numpy<2"],
    "torchrl": ["torch==2.14.1", "torchrl==0.14.1", "numpy"],
}
PEER_PYTHON = "python3.11"  # The newest that dm-reverb has wheels for.
BATCHES = {"ours": 40, "reverb": 12, "torchrl": 8}
THREADS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--yes", action="store_true", help="install the peers without asking")
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    missing = [name for name in PACKAGES if not (PEERS / name / "complete").exists()]
    if missing and not may_install(missing, flags.yes):
        return 1
    for name in missing:
        install(name)
    store = play("ALE/MsPacman-v5", 25_000)
    columns = export(store)
    report = Report("The replay beside others", "make bench-peers")
    rates = measure(store, columns, flags.rounds)
    ours = rates["ours"]
    report.at_least("sequences/s against dm-reverb", ours / rates["reverb"], 3, "x")
    report.at_least("sequences/s against torchrl LazyMemmapStorage", ours / rates["LazyMemmapStorage"], 4, "x")
    rows = [
        ["this replay, from disk", f"{THREADS} decoding threads", f"{ours:,.0f}", ""],
        row("dm-reverb 0.14.0, prioritised table", "2 workers, server in the process", ours, rates["reverb"]),
        row("torchrl 0.14.1, LazyMemmapStorage", f"{THREADS} torch threads", ours, rates["LazyMemmapStorage"]),
        row("torchrl 0.14.1, LazyTensorStorage", f"{THREADS} torch threads", ours, rates["LazyTensorStorage"]),
    ]
    title = f"Prioritised draws of {BATCH} Ms. Pacman sequences, 3 + 125 frames and every column"
    report.table(f"{title}; medians of {flags.rounds} rounds in turn", ["replay", "threads", "seq/s", "ours"], rows)
    report.write()
    return 1 if report.missed else 0


def row(name: str, threads: str, ours: float, rate: float) -> list[str]:
    return [name, threads, f"{rate:,.0f}", f"{ours / rate:.1f}x"]


def may_install(missing: list[str], yes: bool) -> bool:
    if yes or os.environ.get("YES") == "1":
        return True
    free = shutil.disk_usage(".").free / 1e9
    question = f"Install {' and '.join(missing)} into {PEERS.absolute()}? About 8 GB; {free:.0f} GB are free. [y/N] "
    with contextlib.suppress(EOFError):
        return input(question).strip().lower() in ("y", "yes")
    return False


def install(name: str) -> None:
    python = shutil.which(PEER_PYTHON) or (sys.executable if sys.version_info[:2] == (3, 11) else None)
    if python is None:
        sys.exit(f"{name} needs {PEER_PYTHON}, which is not on the path")
    folder = PEERS / name
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *PACKAGES[name]], check=True)
    (folder / "complete").touch()


def export(store: LocalStore) -> Path:
    """Every column of every sequence, decoded, one ``.npy`` file each."""
    folder = BENCH / "columns"
    with made_once(folder) as empty:
        if empty is not None:
            rows = Rows.of(store)
            with BatchDecoder(rows.terms, THREADS) as decoder:
                batch, ok = decoder.decode_rows(rows.encoded())
            assert ok.all()
            for field in fields(SequenceBatch):
                value = getattr(batch, field.name)
                if field.name in ("collector", "probes", "probe_core"):  # A text, and rarely there.
                    continue
                parts = {f"{field.name}_{i}": part for i, part in enumerate(value)} if isinstance(value, tuple) else {}
                for name, array in (parts or {field.name: value}).items():
                    np.save(folder / f"{name}.npy", array)
    return folder


def measure(store: LocalStore, columns: Path, rounds: int) -> dict[str, float]:
    """Median sequences per second of each; in every round each has its turn."""
    rates: dict[str, list[float]] = defaultdict(list)
    replay = open_replay(store, threads=THREADS)
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(running_peer(name, columns)) for name in PACKAGES}
        batches = stack.enter_context(prefetching(replay))
        for _ in range(rounds):
            rates["ours"].append(rate(batches, BATCHES["ours"]))
            for name, peer in peers.items():
                peer.stdin.write(f"{BATCHES[name]}\n")
                peer.stdin.flush()
                for which, sequences_per_second in json.loads(peer.stdout.readline()).items():
                    rates[which].append(sequences_per_second)
    replay.close()
    return {name: statistics.median(values) for name, values in rates.items()}


@contextlib.contextmanager
def running_peer(name: str, columns: Path) -> Iterator[subprocess.Popen]:
    command = [str(PEERS / name / "bin" / "python"), str(SCRIPTS / f"{name}_peer.py"), str(columns), str(THREADS)]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    log = open(PEERS / f"{name}.log", "w")  # noqa: SIM115
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    process = subprocess.Popen(command, env=quiet, **pipes)
    try:
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                sys.exit(f"{name} failed: see {log.name}")
        yield process
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(30)
        log.close()


if __name__ == "__main__":
    sys.exit(main())
