"""Datasets for the benchmarks of the replay: really played, then repeated under new identities.

    python -m tests.benchmarks.fill_replay --env ALE/Pong-v5 --env-steps 8000 --sequences 100000 .bench/pong-100000

Everything lies below ``.bench`` in the current folder and is made once.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from pipeline.codec import EncodedRow, row_layout
from pipeline.dataset import (
    ShardName,
    agree_on_terms,
    list_collectors,
    new_collector_id,
    read_terms,
    shards_after,
    write_provenance,
)
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import encode_shard
from pipeline.store import LocalStore, open_store
from schemas.shard import PROBE_EVERY
from schemas.specs import ArraySpec
from schemas.terms import DatasetTerms
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

ROOT = Path(__file__).parent.parent.parent
BENCH = Path(".bench")
COMPLETE = "_complete"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--env-steps", type=int, default=8000)
    parser.add_argument("--sequences", type=int, default=100_000)
    flags = parser.parse_args()
    played = play(flags.env, flags.env_steps)
    print(repeat(played, flags.folder, flags.sequences).root)
    return 0


def play(env_id: str, env_steps: int) -> LocalStore:
    """``env_steps`` of a real game by a random policy, in the paper's windows, written by ``collect.py``."""
    name = env_id.rpartition("/")[2].partition("-")[0].lower()
    with made_once(BENCH / f"{name}-{env_steps}-steps") as folder:
        if folder is not None:
            command = ["--preset", "paper", "--envs", "16", "--seed", "1", "--tracking-uri", "none", "--env", env_id]
            command += ["--env-steps", str(env_steps), "--dataset", str(folder.absolute())]
            subprocess.run([sys.executable, str(ROOT / "jobs" / "collect.py"), *command], check=True)
    return LocalStore(BENCH / f"{name}-{env_steps}-steps")


def small(sequences: int, per_shard: int) -> LocalStore:
    """Sequences of seven rows of four float32 values, from no game."""
    terms = tiny_terms(observation=ArraySpec(shape=(4,), dtype="float32"))
    with made_once(BENCH / "small") as folder, unsynced():
        if folder is not None:
            make_dataset(folder, terms, 64 * 64, per_shard=64)
    return repeat(LocalStore(BENCH / "small"), BENCH / f"small-{sequences}-by-{per_shard}", sequences, per_shard)


@dataclass(frozen=True)
class Rows:
    """All rows of a dataset's first collector, as many as make whole cycles of probes."""

    terms: DatasetTerms
    collector: str
    records: np.ndarray
    frames: list
    probes: list

    @classmethod
    def of(cls, store: LocalStore) -> "Rows":
        terms = read_terms(store)
        assert terms is not None
        (collector, *_) = list_collectors(store)
        shards = [open_shard(store.map_path(name.path), name) for name in shards_after(store, collector, -1)]
        rows = [shard.row(row) for shard in shards for row in range(shard.num_rows)]
        rows = rows[: len(rows) - len(rows) % PROBE_EVERY]
        records = np.frombuffer(b"".join(row.fixed for row in rows), row_layout(terms).dtype)
        return cls(terms, collector, records, [row.frame for row in rows], [bytes(row.probe) for row in rows])

    def encoded(self) -> list[EncodedRow]:
        """The same rows as they rest."""
        fixed = [record.tobytes() for record in self.records]
        name = self.collector.encode()
        return [EncodedRow(name, *columns) for columns in zip(fixed, self.frames, self.probes, strict=True)]


def repeat(source: LocalStore, target: Path, sequences: int, per_shard: int = 64) -> LocalStore:
    """``target`` with so many sequences: those of ``source`` again and again, each time as later ones.

    Sequence, episode and step numbers go on, so every row is another one to a reader; what it holds repeats. Nothing is
    synced to disk.
    """
    with made_once(target) as folder:
        if folder is not None:
            rows, store = Rows.of(source), open_store(str(folder), create=True)
            agree_on_terms(store, rows.terms)
            collector = new_collector_id()
            write_provenance(store, collector, {"seed": 0, "repeats": str(source.root)})
            for number, first in enumerate(range(0, sequences, per_shard)):
                _write_shard(store, rows, collector, number, first, min(per_shard, sequences - first))
    return LocalStore(target)


def _write_shard(store: LocalStore, rows: Rows, collector: str, number: int, first: int, count: int) -> None:
    cycle, start = np.divmod(np.arange(first, first + count), len(rows.records))
    records = rows.records[start].copy()
    records["sequence"] = np.arange(first, first + count)
    records["episode"] += cycle * (rows.records["episode"].max() + 1)
    records["env_steps"] += cycle * rows.records["env_steps"].max()
    geometry = rows.terms.geometry
    owned = geometry.owned_steps(records["first_valid"], records["num_steps"], records["ends"]).sum()
    data = encode_shard(
        rows.terms, collector, records, [rows.frames[i] for i in start], [rows.probes[i] for i in start]
    )
    path = store.map_path(ShardName(collector, number, count, int(owned)).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """The folder to be filled, empty; None when it has been filled before."""
    if (folder / COMPLETE).exists():
        yield None
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    (folder / COMPLETE).touch()


def unsynced():
    """Many small files are written in here, most of whose time would go into syncing each to disk."""
    return patch("os.fsync")


def shard_bytes(store: LocalStore) -> int:
    return sum(path.stat().st_size for path in Path(store.root).rglob("*.arrow"))


if __name__ == "__main__":
    sys.exit(main())
