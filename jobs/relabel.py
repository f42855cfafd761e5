"""Write a dataset anew under one network: its states, initial priorities, versions and lineage (article section 3.1).

python jobs/relabel.py --dataset data/pong --params runs/NAME --out data/pong-relabelled
python jobs/relabel.py --dataset data/pong --params runs/NAME --out data/long --recut 40/80/5/40/4
python jobs/relabel.py --dataset data/a --dataset data/b --params FILE --out data/best --where "return>=10"
"""

import jobs.interrupt  # noqa: F401

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from jobs.command_line import Repeatable, dry_run, parse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.devices import refuse_device
from jobs.flags import TrackingFlags, default_threads
from jobs.parameters import KINDS, read_parameters, refuse_misfit
from jobs.relabelling import Counts, Relabelling
from jobs.stopping import interruptible
from pipeline.dataset import TERMS_NAME, ShardName, agree_on_terms, link_run, list_collectors, read_terms, shards_after
from pipeline.episode_filter import Condition
from pipeline.provenance import provenance
from pipeline.scan import dataset_digest, digest_of
from pipeline.store import Store, open_store
from pipeline.tracking import TrackingConfig, ending_run, make_tracker
from r2d2.config import NetworkSpec
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms

Job = tuple[str, str, list[ShardName]]  # A dataset, a collector of it, what of it to read.
UNFINISHED = "holds an unfinished relabelling, no dataset yet: delete it before you start again"


@dataclass(frozen=True, kw_only=True)
class RelabelFlags:
    """Flags of relabel.py.

    Attributes:
        dataset: a dataset to read, repeatable: several are merged. Their environments must be the same.
        out: folder of the new dataset; must not hold anything yet.
        params: the network: a params.safetensors, a checkpoint, or a run's folder.
        recut: another window, ``L/T/n/stride`` or ``L/T/n/stride/K`` in agent steps; default: the first dataset's.
        where: ``return>=10``, repeatable, all must hold: which episodes to take, by return, steps, version (the newest
            that acted), lane, collector, ends, env_steps (the collector's own, so far), started (its start, ISO date).
        max_bad_shards: shards of each collector that may be unreadable before the job fails.
        workers: Ray workers that take one collector each; 0: all in this process, one after the other.
        threads: torch and decoding threads (of each worker).
        device: of the network; default: cuda where there is a GPU, else cpu.
        dry_run: print the resolved configuration and stop.
    """

    dataset: Repeatable = ()
    out: str = ""
    params: Path = Path()
    recut: str | None = None
    where: Repeatable = ()
    max_bad_shards: int = 0
    workers: int = 0
    threads: int = 1
    device: str | None = None
    dry_run: bool = False
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        refuse_device(self.device)
        for name, least in (("max_bad_shards", 0), ("workers", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        if self.recut is not None:
            parse_window(self.recut)
        for text in self.where:
            Condition.parse(text)


def parse_window(text: str, frame_stack: int = 1) -> SequenceGeometry:
    """``L/T/n/stride`` or ``L/T/n/stride/K``. Raises ValueError."""
    parts = text.split("/")
    if len(parts) not in (4, 5) or not all(part.isdigit() for part in parts):
        raise ValueError(f"recut is {text!r}; allowed: L/T/n/stride or L/T/n/stride/K, whole numbers")
    names = ("burn_in", "unroll", "bootstrap", "stride", "frame_stack")
    return SequenceGeometry(**{"frame_stack": frame_stack, **dict(zip(names, map(int, parts), strict=False))})


def main(argv: Sequence[str]) -> int:
    show_warnings()
    out = None

    def left() -> str:
        if out is None or not out.folders():
            return "nothing was written"
        return f"{out.uri} is complete" if read_terms(out) else f"{out.uri} {UNFINISHED}"

    with refusing(OSError), interruptible("relabel", left) as stop:
        flags = parse(RelabelFlags, argv, RelabelFlags(threads=default_threads(for_learner=True)), "relabel.py")
        for name in ("dataset", "out"):
            if not getattr(flags, name):
                raise ValueError(f"{name} is not given; allowed: a folder")
        if flags.params == Path():
            raise ValueError(f"params is not given; allowed: {KINDS}")
        parameters = read_parameters(flags.params, "params")
        stores = [open_store(uri) for uri in flags.dataset]
        sources = list(zip(flags.dataset, map(_terms_of, flags.dataset, stores), strict=True))
        terms = output_terms([terms for _, terms in sources], parameters.spec, flags.recut)
        # Listed once, for more may come meanwhile: what the digests name is what is read.
        jobs = [(store.uri, name, shards_after(store, name, -1)) for store in stores for name in list_collectors(store)]
        _refuse_twins(jobs)
        if flags.dry_run:
            dry_run({**asdict(flags), "terms": asdict(terms), "collectors": len(jobs)})
        new = open_store(flags.out, create=True, flag="out")
        if new.folders() or new.files():
            why = f" (it {UNFINISHED})" if "shards" in new.folders() and read_terms(new) is None else ""
            raise ValueError(f"out is {flags.out!r}; allowed: a new or an empty folder{why}")
        out = new
        torch.set_num_threads(flags.threads)
        parents = {
            store.uri: digest_of(name for uri, _, shards in jobs if uri == store.uri for name in shards)
            for store in stores
        }
        origin = provenance(
            role="relabel", parents=parents, params=str(flags.params.absolute()), version=parameters.version,
            lineage=parameters.lineage.hex(), where=list(flags.where),
        )  # fmt: skip
        tracker = make_tracker(
            TrackingConfig(
                uri=flags.tracking.tracking_uri,
                experiment=flags.tracking.experiment,
                run_name=flags.tracking.run_name or f"relabel-{out.name}",
                parent_run_id=flags.tracking.parent_run_id,
                tags={"role": "relabel", "game": terms.env.env_id, "dataset": out.name},
            )
        )
        with ending_run(tracker, stop.gone_by):
            tracker.params({**asdict(flags), "terms": asdict(terms), "provenance": origin})
            tracker.tags(
                {f"parent.{number}": f"{uri} {digest}" for number, (uri, digest) in enumerate(parents.items())}
            )
            work = Relabelling(
                out_uri=out.uri,
                terms=terms,
                params_path=str(flags.params.absolute()),
                where=flags.where,
                max_bad_shards=flags.max_bad_shards,
                device=flags.device or ("cuda" if torch.cuda.is_available() else "cpu"),
                threads=flags.threads,
                origin=origin,
            )
            with StatusLine("relabel") as status:
                total = _run(work, jobs, flags.workers, status)
            # Only now is there a dataset: whoever looked before saw none.
            agree_on_terms(out, terms)
            tracker.metrics({f"relabel/{name}": value for name, value in asdict(total).items()}, 0)
            tracker.tags({"digest": dataset_digest(out), "dataset_uri": out.uri})
        if run_id := tracker.run_id():
            for collector in list_collectors(out):
                link_run(out, collector, run_id)
    print(
        f"relabel: {total.episodes:,} episodes, {total.steps:,} env steps, {total.sequences:,} sequences in "
        f"{flags.out}; "
        f"{total.filtered_episodes:,} episodes refused by --where; left out: {total.bad_shards} bad shards, "
        f"{total.corrupt_rows} corrupt sequences, {total.lost_steps} steps whose episode has no beginning",
        flush=True,
    )
    return 0


def output_terms(inputs: Sequence[DatasetTerms], spec: NetworkSpec, recut: str | None) -> DatasetTerms:
    """Terms of the new dataset: the inputs' environment, the network's core, the window asked for.

    Raises:
        ValueError: inputs of different environments, a network for another one, or frames that were never stored.
    """
    first = inputs[0]
    for other in inputs[1:]:
        if differences := replace(first, geometry=other.geometry, core=other.core).differences(other):
            raise ValueError(f"datasets of different environments: {'; '.join(differences)}")
    refuse_misfit(spec, first.env)
    geometry = parse_window(recut, first.geometry.frame_stack) if recut else first.geometry
    if spec.frame_stack > geometry.frame_stack:
        raise ValueError(f"frame_stack of the network is {spec.frame_stack}; allowed: at most {geometry.frame_stack}")
    shallowest = min(terms.geometry.frame_stack for terms in inputs)
    if geometry.frame_stack > shallowest and first.env.life_loss == "reset":
        raise ValueError(
            f"frame_stack is {geometry.frame_stack}; allowed: at most {shallowest}, for the frames before a lost life "
            "are not stored"
        )
    return DatasetTerms(env=first.env, geometry=geometry, core=spec.core)


def _run(work: Relabelling, jobs: list[Job], workers: int, status: StatusLine) -> Counts:
    total = Counts()

    def show(counts: Counts, done: int) -> None:
        status.show(collectors=f"{done} of {len(jobs)}", **asdict(counts))

    if workers:
        from pipeline.ray_workers import run_on_workers

        for done, counts in enumerate(run_on_workers(work, jobs, workers, cpus=work.threads), start=1):
            total += counts
            show(total, done)
        return total
    for done, job in enumerate(jobs):
        for counts in work.steps(*job):
            show(total + counts, done)
        total += counts
    return total


def _terms_of(uri: str, store: Store) -> DatasetTerms:
    terms = read_terms(store)
    if terms is None:
        raise ValueError(f"dataset is {uri!r}; allowed: a folder with a {TERMS_NAME}")
    return terms


def _refuse_twins(jobs: list[Job]) -> None:
    """A sequence is known by its collector and number for ever: one collector cannot come from two places."""
    seen: dict[str, str] = {}
    for uri, name, _ in jobs:
        if name in seen:
            raise ValueError(f"collector {name} is in {seen[name]} and in {uri}; allowed: each once")
        seen[name] = uri


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
