"""Label raw sequences as they arrive: states, initial priorities and lineage of the newest network (article 3.1).

python jobs/collect.py --policy table                  raw sequences into data/pong, without a network
python jobs/label.py                                   data/pong into data/pong-labelled, and back what the learner says
python jobs/learn.py --dataset data/pong-labelled
"""

import jobs.interrupt  # noqa: F401

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from jobs.command_line import dry_run, parse, peek, refuse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.devices import refuse_device
from jobs.flags import TrackingFlags, dataset_uri, default_threads
from jobs.labelling import Labelling
from jobs.parameters import read_parameters
from jobs.presets import DEFAULT_PRESET, CoreOptions, preset_named
from jobs.run_tags import describe, run_tags
from jobs.stopping import StopRequest
from pipeline.action_table import TableConfig
from pipeline.dataset import agree_on_terms, list_collectors, read_provenance, read_terms
from pipeline.provenance import provenance
from pipeline.store import Store, open_store
from pipeline.tracking import TrackingConfig, ending_run, make_tracker
from schemas.terms import DatasetTerms

WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LabelFlags:
    """Flags of label.py.

    Attributes:
        dataset: folder of the raw dataset; default ``data/pong``.
        out: folder of the labelled one, which the learner reads; default ``<dataset>-labelled``.
        preset: ``laptop``, ``paper`` or ``article``: whose core a new labelled dataset has when the raw one has none.
        core: of a new labelled dataset; the learner's network takes it over.
        follow: name of a run that learns from the labelled dataset; default: the only live one.
        params: label with the fixed parameters in this file, checkpoint or run folder instead.
        once: stop when everything that is there has been labelled.
        max_minutes: stop after this many minutes.
        device: of the network; default: cuda where there is a GPU, else cpu.
        threads: torch and decoding threads; default: half the cores.
        dry_run: print the resolved configuration and stop.
    """

    dataset: str = "data/pong"
    out: str | None = None
    preset: str = DEFAULT_PRESET
    core: CoreOptions = field(default_factory=CoreOptions)
    follow: str | None = None
    params: Path | None = None
    table: TableConfig = field(default_factory=TableConfig)
    once: bool = False
    max_minutes: float | None = None
    device: str | None = None
    threads: int = 1
    dry_run: bool = False
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        refuse_device(self.device)
        for name in ("max_minutes", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")
        if self.out is not None and Path(self.out).absolute() == Path(self.dataset).absolute():
            raise ValueError(f"out is {self.out!r}; allowed: another folder than the raw dataset's")

    @property
    def out_uri(self) -> str:
        return self.out or f"{self.dataset.rstrip('/')}-labelled"


def main(argv: Sequence[str]) -> int:
    show_warnings()
    with ExitStack() as ends:
        return _label(argv, StopRequest().listen(), ends)


def _label(argv: Sequence[str], stop: StopRequest, ends: ExitStack) -> int:
    with refusing(OSError), StatusLine("label") as status:
        raw = open_store(peek(argv, "dataset")["dataset"] or dataset_uri(None, None))
        _read(argv, None)  # Refuse what is wrong before waiting.
        terms = _wait_for_terms(raw, stop, status, _read(argv, None).max_minutes)
        if terms is None:
            return 0
        flags = _read(argv, terms)
        out_terms = replace(terms, core=flags.core.spec())
        device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if flags.dry_run:
            dry_run({**asdict(flags), "out": flags.out_uri, "terms": asdict(out_terms), "device": device})
        torch.set_num_threads(flags.threads)
        parameters = read_parameters(flags.params, "params") if flags.params else None
        out = open_store(flags.out_uri, create=True, flag="out")
        refuse_foreign(out)  # Before anything is written there.
        out.clean_leftovers()
        agree_on_terms(out, out_terms)
        tracker = make_tracker(
            TrackingConfig(
                uri=flags.tracking.tracking_uri,
                experiment=flags.tracking.experiment,
                run_name=flags.tracking.run_name or f"label-{out.name}",
                tags=run_tags("label", terms.env, store=out, preset=flags.preset, raw=raw.uri),
                parent_run_id=flags.tracking.parent_run_id,
                description=describe("Labels", terms.env, out, preset=flags.preset, seed=None),
            )
        )
        ends.enter_context(ending_run(tracker, stop.gone_by))
        tracker.params({**asdict(flags), "terms": asdict(out_terms), "provenance": provenance()})
        labelling = Labelling(
            raw=raw,
            terms=terms,
            out=out,
            out_terms=out_terms,
            parameters=parameters,
            follow=flags.follow,
            table=flags.table,
            device=device,
            threads=flags.threads,
            tracker=tracker,
            origin=provenance(role="label", raw=raw.uri),
        )
    problem, failed = None, True
    with StatusLine("label") as status:
        status.say(f"label: {terms.env.env_id} from {raw.uri} into {out.uri}")
        try:
            labelling.run(stop, status, max_minutes=flags.max_minutes, once=flags.once)
            failed = False
        except (ValueError, OSError) as error:
            problem = error
        finally:
            labelling.close(stop, failed=failed)
        status.say(f"label: stopped ({stop.reason or 'failed'}): {labelling.summary()}")
    if problem is not None:
        refuse(problem)
    return 0


def refuse_foreign(out: Store) -> None:
    """Sequences that somebody else wrote would be mixed with the labelled ones."""
    for name in list_collectors(out):
        try:
            role = read_provenance(out, name).get("role")
        except FileNotFoundError:
            role = None
        if role != "label":
            raise ValueError(f"out is {out.uri!r}; allowed: a new folder or one of label.py's, and {name} is neither")


def _read(argv: Sequence[str], terms: DatasetTerms | None) -> LabelFlags:
    """Flags over their defaults: a core that exists already, labelled or raw, else the preset's."""
    given = peek(argv, "dataset", "out", "preset")
    preset = preset_named(given["preset"] or DEFAULT_PRESET)
    default = LabelFlags(threads=default_threads(for_learner=False))
    where = replace(default, dataset=given["dataset"] or default.dataset, out=given["out"])
    labelled = read_terms(open_store(where.out_uri))
    known = labelled or terms
    core = CoreOptions.of(known.core) if known and known.core.parts else preset.network.core
    return parse(LabelFlags, argv, replace(default, core=core), "label.py")


def _wait_for_terms(
    raw: Store, stop: StopRequest, status: StatusLine, max_minutes: float | None
) -> DatasetTerms | None:
    """None when the job was stopped, or its time was up, before there was a dataset."""
    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    while (terms := read_terms(raw)) is None:
        status.show(waits_for=f"a dataset in {raw.uri}; start one with python jobs/collect.py --policy table")
        if stop.wait(WAIT_SECONDS) or (deadline is not None and time.monotonic() >= deadline):
            return None
    return terms


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
