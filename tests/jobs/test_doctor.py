"""``--brief`` and ``--fix``: quick answers, and no more repaired than was asked for."""

import os

import numpy as np

from jobs.doctor import main
from pipeline.brief import look_briefly
from pipeline.dataset import shards_after
from pipeline.scan import dataset_digest, list_shards
from pipeline.verify import verify_dataset
from tests.pipeline.sequence_factory import LINEAGE, make_dataset, make_sequences, tiny_terms, write_shards


def test_a_brief_look_counts_what_a_whole_one_counts_and_opens_few_shards(tmp_path, capsys, monkeypatch):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 60)
    write_shards(store, terms, make_sequences(terms, 20, collector="c1", seed=1))
    report, brief = verify_dataset(store), look_briefly(store, terms)
    for name in ("collectors", "shards", "sequences", "env_steps", "bytes"):
        assert getattr(brief, name) == getattr(report, name), name
    assert brief.opened_shards == 4 < brief.shards
    assert (brief.versions, brief.lineages) == ({3}, {LINEAGE.hex()})
    assert brief.digest == dataset_digest(store)
    monkeypatch.setattr("jobs.doctor.verify_dataset", None)  # It reads nothing more.
    assert main(["--dataset", str(tmp_path), "--brief"]) == 0
    said = capsys.readouterr().out
    assert "80" in said
    assert "Tiny-v0" in said


def test_a_brief_look_at_a_dataset_that_grows_is_of_one_moment(tmp_path, monkeypatch):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 16)
    digest = dataset_digest(store)

    def meanwhile(*args):
        found = shards_after(*args)
        write_shards(store, terms, make_sequences(terms, 8, collector="c1", seed=1))
        return found

    monkeypatch.setattr("pipeline.brief.shards_after", meanwhile)
    brief = look_briefly(store, terms)
    assert (brief.digest, brief.sequences) == (digest, 16)


def test_nothing_is_repaired_unless_asked_and_then_only_leftovers_go(tmp_path, capsys):
    store = make_dataset(tmp_path, tiny_terms(), 20)
    folder = store.map_path(list_shards(store)[0].path).parent
    leftover, foreign = folder / ".writing-0123456789abcdef", folder / "notes.txt"
    for path in (leftover, foreign):
        path.write_bytes(b"x")
        os.utime(path, (1e9, 1e9))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["--dataset", str(tmp_path)]) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert main(["--dataset", str(tmp_path), "--fix"]) == 1  # The foreign file is still a fault.
    assert "deleted 1 leftovers" in capsys.readouterr().out
    del before[leftover]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert np.all([foreign.exists(), not leftover.exists()])
