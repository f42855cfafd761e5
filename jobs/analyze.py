"""What is in a dataset: episodes, returns, actions, rewards, priorities, coverage, bytes. Changes nothing in it.

python jobs/analyze.py --dataset data/pong                       a summary here, tables, plots and a page in analysis/
python jobs/analyze.py --dataset data/pong --params runs/NAME    also Q against returns, TD errors and dQ of a network
"""

import jobs.interrupt  # noqa: F401

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.table import Table as Shown

from jobs.analysis import gather, headline
from jobs.command_line import dry_run, parse, refusing
from jobs.console import StatusLine, show_warnings, table_console
from jobs.devices import refuse_device
from jobs.flags import TrackingFlags, default_threads
from jobs.parameters import read_parameters, refuse_misfit
from jobs.report import short, write_page, write_plots, write_tables
from jobs.stopping import interruptible
from jobs.value_tables import value_tables
from pipeline.dataset import read_terms
from pipeline.offline_tables import dataset_tables
from pipeline.provenance import provenance
from pipeline.scan import digest_of, list_shards
from pipeline.store import open_store
from pipeline.tracking import TrackingConfig, ending_run, make_tracker

ON_RAY_FROM = 20_000  # Sequences from which Ray's start is worth it.


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags:
    """Flags of analyze.py.

    Attributes:
        dataset: folder of the dataset.
        out: folder of the tables, plots and the page; default ``analysis/<name of the dataset>``.
        params: a network to hold against the data: a params.safetensors, a checkpoint, or a run's folder.
        value_sequences: with ``--params``: on how many sequences, taken evenly over the dataset.
        pixels: decode every observation and count those seen before; off is several times as fast.
        ray: read with Ray Data; default: from 20,000 sequences on. The tables are the same.
        max_bad_shards: shards that may be unreadable before the job fails.
        threads: of torch, with ``--params``.
        device: of the network; default: cuda where there is a GPU, else cpu.
        dry_run: print the resolved configuration and stop.
    """

    dataset: str = "data/pong"
    out: Path | None = None
    params: Path | None = None
    value_sequences: int = 256
    pixels: bool = True
    ray: bool | None = None
    max_bad_shards: int = 0
    threads: int = 1
    device: str | None = None
    dry_run: bool = False
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        refuse_device(self.device)
        for name, least in (("value_sequences", 1), ("max_bad_shards", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} or more")


def main(argv: Sequence[str]) -> int:
    show_warnings()
    started, written = time.monotonic(), None

    def left() -> str:
        return "nothing was written" if written is None else f"{written} is not complete: run it again"

    with refusing(OSError), interruptible("analyze", left) as stop, StatusLine("analyze") as status:
        flags = parse(AnalyzeFlags, argv, AnalyzeFlags(threads=default_threads(for_learner=True)), "analyze.py")
        torch.set_num_threads(flags.threads)
        store = open_store(flags.dataset)
        terms = read_terms(store)
        if terms is None:
            raise ValueError(f"dataset is {flags.dataset!r}; allowed: a folder with a dataset.json")
        parameters = None
        if flags.params is not None:
            parameters = read_parameters(flags.params, "params")
            refuse_misfit(parameters.spec, terms.env)
        out = flags.out or Path("analysis") / store.name
        if flags.dry_run:
            dry_run({**asdict(flags), "out": str(out), "terms": asdict(terms)})
        shards = list_shards(store)  # Once, for more may come meanwhile.
        on_ray = flags.ray
        if on_ray is None:
            on_ray = sum(name.sequences for name in shards) >= ON_RAY_FROM
        gathered = gather(
            store,
            terms,
            shards,
            pixels=flags.pixels,
            max_bad_shards=flags.max_bad_shards,
            on_ray=on_ray,
            progress=lambda done, of: status.show(sequences=f"{done:,} of {of:,}"),
        )
        tables = dataset_tables(gathered.facts, terms, shard_bytes=gathered.shard_bytes)
        if parameters is not None:
            tables |= value_tables(
                store,
                terms,
                shards,
                gathered.facts,
                parameters,
                sequences=flags.value_sequences,
                device=flags.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                progress=lambda done, of: status.show(replayed_sequences=f"{done:,} of {of:,}"),
            )
        out.mkdir(parents=True, exist_ok=True)
        written = out
        numbers, digest = headline(tables), digest_of(shards)
        bad = [f"{path}: {reason}" for path, reason in gathered.bad_shards.items()]
        bad += [f"{path} row {row}: checksum or pixels wrong" for path, row in sorted(gathered.corrupt_rows)]
        title = f"{terms.env.env_id} in {store.name}"
        paths = write_tables(out, tables)
        plots = write_plots(out, tables, title)
        page = out / "report.html"
        write_page(
            page,
            title=title,
            source=f"{store.uri}, digest {digest}",
            numbers=numbers,
            tables=tables,
            plots=plots,
            bad=bad,
        )
        tracker = make_tracker(
            TrackingConfig(
                uri=flags.tracking.tracking_uri,
                experiment=flags.tracking.experiment,
                run_name=flags.tracking.run_name or f"analyze-{store.name}",
                parent_run_id=flags.tracking.parent_run_id,
                tags={
                    "role": "analyze", "game": terms.env.env_id, "dataset": store.name, "digest": digest,
                    "dataset_uri": store.uri,
                },
            )
        )  # fmt: skip
        with ending_run(tracker, stop.gone_by):
            tracker.params({**asdict(flags), "terms": asdict(terms), "provenance": provenance(role="analyze")})
            tracker.metrics({f"analyze/{name}": value for name, value in numbers.items()}, 0)
            for path in (*paths, *plots, page):
                tracker.artifact(path)
    _show(numbers, tables, bad)
    print(
        f"analyze: {len(tables)} tables, {len(plots)} plots and {page} in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    return 0


def _show(numbers: dict[str, float], tables: dict, bad: list[str]) -> None:
    shown = Shown(show_header=False, box=None, pad_edge=False)
    for name, value in numbers.items():
        shown.add_row(name.replace("_", " "), short(value))
    ends = zip(tables["ends"]["ends"], tables["ends"]["episodes"], strict=True)
    shown.add_row("episodes by end", ", ".join(f"{count} {how}" for how, count in ends if count))
    table_console().print(shown)
    for line in bad:
        print(f"left out: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
