"""A dataset for other tools, as Parquet with one row a step or as a Minari dataset. Changes nothing in it.

python jobs/export.py --dataset data/pong --out export/pong
python jobs/export.py --dataset data/pong --out export/best --where "return>=10"
python jobs/export.py --dataset data/pong --out export/pong-v0 --format minari
"""

import jobs.interrupt  # noqa: F401

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.command_line import Repeatable, parse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.flags import default_threads
from jobs.relabelling import collector_start
from jobs.stopping import interruptible
from pipeline.dataset import list_collectors, read_terms
from pipeline.episode_filter import Condition
from pipeline.episodes import Episode, EpisodeReader
from pipeline.export_minari import write_minari
from pipeline.export_parquet import write_steps
from pipeline.scan import LeftOut
from pipeline.store import open_store

WRITERS = {"parquet": write_steps, "minari": write_minari}


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Flags of export.py.

    Attributes:
        dataset: folder of the dataset.
        out: folder to write; must not hold anything yet. As a Minari dataset its name is the dataset's id, NAME-v0.
        format: ``parquet`` or ``minari`` (pip install 'minari[hdf5]').
        where: ``return>=10``, repeatable: which episodes, as in relabel.py.
        max_bad_shards: shards that may be unreadable before the job fails.
        threads: decoding threads.
    """

    dataset: str = "data/pong"
    out: Path | None = None
    format: str = "parquet"
    where: Repeatable = ()
    max_bad_shards: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.format not in WRITERS:
            raise ValueError(f"format is {self.format!r}; allowed: {', '.join(WRITERS)}")


def main(argv: Sequence[str]) -> int:
    show_warnings()
    out = None

    def left() -> str:
        if out is None or not out.exists() or not any(out.iterdir()):
            return "nothing was written"
        return f"{out} holds an unfinished export: delete it before you start again"

    with refusing(OSError), interruptible("export", left), StatusLine("export") as status:
        flags = parse(ExportFlags, argv, ExportFlags(threads=default_threads(for_learner=True)), "export.py")
        store = open_store(flags.dataset)
        terms = read_terms(store)
        if terms is None:
            raise ValueError(f"dataset is {flags.dataset!r}; allowed: a folder with a dataset.json")
        if flags.out is None:
            raise ValueError("out is not given; allowed: a folder")
        conditions, left_out = [Condition.parse(text) for text in flags.where], LeftOut(flags.max_bad_shards)

        def episodes() -> Iterator[Episode]:
            for collector in list_collectors(store):
                started = collector_start(store, collector)
                reader = EpisodeReader(
                    store,
                    terms,
                    left_out=left_out,
                    threads=flags.threads,
                    keep=lambda facts, started=started: all(each.holds(facts, started) for each in conditions),
                )
                for episode in reader.read(collector):
                    status.show(collector=collector, episodes=reader.episodes, env_steps=reader.steps)
                    yield episode
                reader.close()

        out = flags.out
        count, steps = WRITERS[flags.format](flags.out, terms, episodes())
    print(
        f"export: {count:,} episodes, {steps:,} env steps in {flags.out}; left out: {len(left_out.bad_shards)} bad "
        f"shards, {len(left_out.corrupt_rows)} corrupt sequences",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
