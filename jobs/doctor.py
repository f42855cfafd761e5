"""Examine this machine, or read every shard of a dataset. Changes nothing; exit status 1 on a fault.

python jobs/doctor.py                                versions, GPU, disk, speeds, MLflow, each with what to do about it
python jobs/doctor.py --dataset data/pong
python jobs/doctor.py --dataset data/pong --brief    what it holds, in a second, nothing verified
python jobs/doctor.py --dataset data/pong --fix      also deletes what killed writers left half-written
"""

import jobs.interrupt  # noqa: F401

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from jobs.command_line import parse, refuse, refusing
from jobs.console import StatusLine, show_warnings, table_console
from jobs.dataset_report import brief_rows
from jobs.flags import default_threads
from jobs.machine import FAULT, OK, WARNING, examine
from pipeline.brief import look_briefly
from pipeline.dataset import read_terms
from pipeline.store import open_store
from pipeline.tracking import DEFAULT_URI, TrackingConfig
from pipeline.verify import DatasetReport, verify_dataset
from schemas.shard import NO_LINEAGE

FAULTS_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Flags of doctor.py.

    Attributes:
        dataset: folder of the dataset to examine; default: none, the machine is examined.
        tracking_uri: with no dataset: whether this MLflow can be reached.
        env: with no dataset: the game whose speed is measured.
        threads: decoding threads.
        brief: only say what the dataset holds, from the names of its shards and a few rows.
        fix: delete leftovers of killed writers first; nothing that was ever published is touched.
    """

    dataset: str | None = None
    tracking_uri: str = DEFAULT_URI
    env: str = "ALE/Pong-v5"
    threads: int = 1
    brief: bool = False
    fix: bool = False

    def __post_init__(self) -> None:
        TrackingConfig(uri=self.tracking_uri)
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; allowed: 1 or more")
        if self.dataset is None and (self.brief or self.fix):
            raise ValueError("brief or fix is set; allowed: with --dataset")


def main(argv: Sequence[str]) -> int:
    show_warnings()
    with refusing(OSError):
        flags = parse(DoctorFlags, argv, DoctorFlags(threads=default_threads(for_learner=True)), "doctor.py")
        if flags.dataset is None:
            return examine_machine(flags)
        store = open_store(flags.dataset)
        terms = read_terms(store)
        if terms is None:
            refuse(f"dataset is {flags.dataset!r}; allowed: a folder with a dataset.json")
        if flags.fix:
            print(f"deleted {store.clean_leftovers()} leftovers of killed writers")
        if flags.brief:
            _print_rows(brief_rows(look_briefly(store, terms), terms))
            return 0
        report = verify_dataset(store, threads=flags.threads)
    show(report)
    return 1 if report.faults else 0


def examine_machine(flags: DoctorFlags) -> int:
    """A row for each thing, then what to do about those that are not as they should be."""
    torch.set_num_threads(flags.threads)
    marks = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", FAULT: "[red]fault[/]"}
    table, findings = Table(show_header=False, box=None, pad_edge=False), []
    with StatusLine("doctor") as status:
        for finding in examine(Path.cwd(), flags.tracking_uri, flags.env):
            findings.append(finding)
            table.add_row(finding.name, marks[finding.verdict], escape(finding.value))
            status.show(examined=len(findings))
    table_console().print(table)
    for finding in findings:
        if finding.verdict != OK:
            print(f"{finding.verdict}: {finding.name}: {finding.advice}")
    faults = sum(finding.verdict == FAULT for finding in findings)
    print(f"{faults} faults, {sum(finding.verdict == WARNING for finding in findings)} warnings")
    return 1 if faults else 0


def show(report: DatasetReport) -> None:
    """The report as a table, then one line per fault."""
    episodes = ", ".join(f"{count} {how}" for how, count in sorted(report.episodes.items()) if count)
    versions = sorted(report.versions - {-1})
    rows = {
        "collectors": f"{report.collectors}",
        "shards": f"{report.shards:,} ({report.bytes / 1e6:,.1f} MB)",
        "sequences": f"{report.sequences:,}",
        "env steps": f"{report.env_steps:,}",
        "episodes": episodes or "none has ended",
        "parameter versions": f"{len(versions)}" + (f" ({versions[0]} to {versions[-1]})" if versions else ""),
        "networks": f"{len(report.lineages - {NO_LINEAGE.hex()})}",
        "acted by a network": f"{report.network_sequences:,} sequences",
        "distinct initial priorities": f"{report.distinct_priorities:,} of those",
        "checksum errors": f"{report.corrupt_rows}",
        "bad files": f"{len(report.bad_files)}",
        "duplicates, missing": f"{report.duplicates}, {report.missing_sequences}",
    }
    _print_rows(rows)
    for fault in report.faults[:FAULTS_SHOWN]:
        print(f"fault: {fault}")
    if len(report.faults) > FAULTS_SHOWN:
        print(f"... and {len(report.faults) - FAULTS_SHOWN} more")
    print(f"{len(report.faults)} faults")


def _print_rows(rows: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    table_console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
