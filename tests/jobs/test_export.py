"""Out to Parquet and back: nothing lost, and what a row means is what the file says."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.export import main
from pipeline.episodes import EpisodeReader
from pipeline.export_parquet import METADATA_KEY, read_steps
from pipeline.scan import LeftOut
from schemas.geometry import ENDS_NAMES, LIFE_LOST, TRUNCATED, SequenceGeometry
from schemas.specs import ArraySpec
from tests.pipeline.sequence_factory import make_dataset, tiny_terms


@pytest.mark.parametrize(
    "terms",
    [tiny_terms(), tiny_terms(life_loss="reset"),
     tiny_terms(observation=ArraySpec(shape=(4,), dtype="float32"),
                geometry=SequenceGeometry(burn_in=0, unroll=4, bootstrap=2, stride=4))],
    ids=["images", "lives", "vectors"],
)  # fmt: skip
def test_a_round_trip_gives_every_episode_back(tmp_path, monkeypatch, terms):
    monkeypatch.setattr("pipeline.export_parquet.STEPS_PER_FILE", 60)
    store = make_dataset(tmp_path / "d", terms, 60, lanes=2)
    assert main(["--dataset", str(store.root), "--out", str(tmp_path / "out")]) == 0
    reader = EpisodeReader(store, terms, left_out=LeftOut())
    expected, found = list(reader.read("c0")), list(read_steps(tmp_path / "out"))
    assert len(list((tmp_path / "out").iterdir())) > 2
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(expected, found, strict=True):
        history = terms.geometry.frame_stack - 1
        np.testing.assert_array_equal(theirs.frames, ours.frames[history:])
        assert replace(theirs.facts, episode_return=0.0) == replace(ours.facts, episode_return=0.0)
        np.testing.assert_equal(theirs.facts.episode_return, ours.facts.episode_return)
        for name in ("action", "reward", "terminated", "truncated", "life_lost", "greedy", "epsilon"):
            theirs_values, our_values = getattr(theirs, name), getattr(ours, name)
            assert theirs_values.dtype == our_values.dtype, name
            np.testing.assert_array_equal(theirs_values, our_values, err_msg=name)


def test_rows_mean_what_the_file_says_they_mean(tmp_path):
    terms = tiny_terms(life_loss="reset")
    store = make_dataset(tmp_path / "d", terms, 60)
    assert main(["--dataset", str(store.root), "--out", str(tmp_path / "out")]) == 0
    table = pq.read_table(tmp_path / "out")
    described = json.loads(table.schema.metadata[METADATA_KEY])
    assert described["env"]["action_set"] == ["noop", "left", "right"]
    assert "what *that action* brought" in described["conventions"]
    rows = table.to_pylist()
    final = [row for row in rows if row["action"] == -1]
    assert len(final) == len({row["episode"] for row in rows})
    assert {row["reward"] for row in final} == {0.0}
    assert not any(row["terminated"] or row["truncated"] for row in final)
    for before, after in pairwise(rows):
        if after["action"] == -1:  # The last action's row carries the flag, the final observation's none.
            assert before["truncated"] == (after["ends"] == ENDS_NAMES[TRUNCATED])
            assert before["life_lost"] == (after["ends"] == ENDS_NAMES[LIFE_LOST])
            assert after["step"] == before["step"] + 1
    size = int(np.prod(described["env"]["observation"]["shape"]))
    assert {len(row["observation"]) for row in rows} == {size}


def test_episodes_are_chosen_and_a_used_folder_is_refused(tmp_path, capsys):
    store = make_dataset(tmp_path / "d", tiny_terms(), 40)
    out = tmp_path / "out"
    assert main(["--dataset", str(store.root), "--out", str(out), "--where", "steps>=8"]) == 0
    assert {episode.facts.steps >= 8 for episode in read_steps(out)} == {True}
    with pytest.raises(SystemExit):
        main(["--dataset", str(store.root), "--out", str(out)])
    assert "allowed: a new or an empty folder" in capsys.readouterr().err
