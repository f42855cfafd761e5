"""Out to Parquet or Minari and back: nothing lost, and what a row means is what the file says."""

import json
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.export import main
from jobs.stopping import FORCED_STATUS
from pipeline.episodes import EpisodeReader
from pipeline.export_minari import INFOS
from pipeline.export_parquet import METADATA_KEY, episode_table, read_steps, write_steps
from pipeline.scan import LeftOut
from schemas.geometry import CUT, ENDS_NAMES, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.specs import ArraySpec
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

every_kind = pytest.mark.parametrize(
    "terms",
    [tiny_terms(), tiny_terms(life_loss="reset"),
     tiny_terms(observation=ArraySpec(shape=(4,), dtype="float32"),
                geometry=SequenceGeometry(burn_in=0, unroll=4, bootstrap=2, stride=4))],
    ids=["images", "lives", "vectors"],
)  # fmt: skip


@every_kind
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


def test_every_condition_must_hold(tmp_path):
    store = make_dataset(tmp_path / "d", tiny_terms(), 40)
    out = tmp_path / "out"
    assert main(["--dataset", str(store.root), "--out", str(out), "--where", "steps>=8", "--where", "steps<=9"]) == 0
    assert {8 <= episode.facts.steps <= 9 for episode in read_steps(out)} == {True}


def test_episodes_are_chosen_and_a_used_folder_is_refused(tmp_path, capsys):
    store = make_dataset(tmp_path / "d", tiny_terms(), 40)
    out = tmp_path / "out"
    assert main(["--dataset", str(store.root), "--out", str(out), "--where", "steps>=8"]) == 0
    assert {episode.facts.steps >= 8 for episode in read_steps(out)} == {True}
    with pytest.raises(SystemExit):
        main(["--dataset", str(store.root), "--out", str(out)])
    assert "allowed: a new or an empty folder" in capsys.readouterr().err


def test_a_long_episode_is_still_one_row_group(tmp_path, monkeypatch):
    schema = pa.schema([("step", pa.int8())])
    monkeypatch.setattr("pipeline.export_parquet.step_schema", lambda terms: schema)
    table = pa.table({"step": np.zeros(1_100_000, np.int8)}, schema)
    monkeypatch.setattr("pipeline.export_parquet.episode_table", lambda episode, schema: table)
    episodes = [SimpleNamespace(facts=SimpleNamespace(steps=1)) for _ in range(2)]
    assert write_steps(tmp_path / "out", tiny_terms(), episodes) == (2, 2)
    assert pq.ParquetFile(tmp_path / "out" / "part-00000.parquet").num_row_groups == 2


def test_of_an_export_that_breaks_off_nothing_looks_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.export_parquet.STEPS_PER_FILE", 10)
    terms, out = tiny_terms(), tmp_path / "out"
    store = make_dataset(tmp_path / "d", terms, 60)
    episodes = list(EpisodeReader(store, terms, left_out=LeftOut()).read("c0"))
    seen = []

    def breaks_off():
        yield from episodes
        seen.extend(sorted(path.name for path in out.iterdir()))
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_steps(out, terms, breaks_off())
    assert len(seen) > 2
    assert all(name.startswith("_part-") for name in seen)
    assert not list(out.iterdir())

    write_steps(out, terms, episodes)
    (out / "part-00001.parquet").rename(out / "_part-00001.parquet")  # As a kill would leave it.
    with pytest.raises(ValueError, match="holds an export that was broken off"):
        next(read_steps(out))


@every_kind
def test_minari_reads_every_episode_as_it_was(tmp_path, monkeypatch, terms):
    store = make_dataset(tmp_path / "d", terms, 60, lanes=2)
    assert main(["--dataset", str(store.root), "--out", str(tmp_path / "all" / "tiny-v0"), "--format", "minari"]) == 0
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "all"))
    dataset = minari.load_dataset("tiny-v0")
    expected = list(EpisodeReader(store, terms, left_out=LeftOut()).read("c0"))
    found = list(dataset.iterate_episodes())
    assert len(found) == len(expected) == dataset.total_episodes > 5
    assert dataset.total_steps == sum(episode.facts.steps for episode in expected)
    assert dataset.observation_space.contains(found[0].observations[0])
    assert "bootstrap from the final observation" in dataset.storage.metadata["description"]
    for ours, theirs, metadata in zip(
        expected, found, dataset.storage.get_episode_metadata(range(len(expected))), strict=True
    ):
        np.testing.assert_array_equal(theirs.observations, ours.frames[terms.geometry.frame_stack - 1 :])
        assert len(theirs.observations) == len(theirs.actions) + 1
        np.testing.assert_array_equal(theirs.actions, ours.action)
        np.testing.assert_array_equal(theirs.rewards, ours.reward)
        for name in INFOS:
            np.testing.assert_array_equal(theirs.infos[name][1:], getattr(ours, name), err_msg=name)
        assert metadata["ends"] == ENDS_NAMES[ours.facts.ends]
        assert (metadata["collector"], metadata["number"]) == (ours.facts.collector, ours.facts.number)


def test_minari_bootstraps_where_the_learner_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = set()
    for life_loss in ("off", "reset"):
        terms = tiny_terms(life_loss=life_loss)
        store = make_dataset(tmp_path / life_loss, terms, 60, lanes=2)
        out = Path(f"{life_loss}-v0")
        assert main(["--dataset", str(store.root), "--out", str(out), "--format", "minari"]) == 0
        for episode, ours in zip(
            minari.MinariDataset(out / "data").iterate_episodes(),
            EpisodeReader(store, terms, left_out=LeftOut()).read("c0"),
            strict=True,
        ):
            flags = episode.terminations[-1], episode.truncations[-1]
            assert flags == {TERMINATED: (1, 0), LIFE_LOST: (1, 0), TRUNCATED: (0, 1), CUT: (0, 1)}[ours.facts.ends]
            assert not episode.terminations[:-1].any()
            assert not episode.truncations[:-1].any()
            seen.add(ours.facts.ends)
    assert seen == {TERMINATED, LIFE_LOST, TRUNCATED, CUT}


@pytest.mark.parametrize(("out", "format", "says"), [
    ("tiny", "minari", "allowed: a folder named like a Minari dataset, NAME-v0"),
    ("tiny-v0", "csv", "format is 'csv'; allowed: parquet, minari"),
])  # fmt: skip
def test_a_wrong_name_or_format_is_one_line(tmp_path, capsys, out, format, says):
    store = make_dataset(tmp_path / "d", tiny_terms(), 10)
    with pytest.raises(SystemExit):
        main(["--dataset", str(store.root), "--out", str(tmp_path / out), "--format", format])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("parts", [0, 1])
def test_an_export_that_is_stopped_leaves_nothing_and_says_so(tmp_path, monkeypatch, capsys, parts):
    written = []

    def table(*arguments):
        if len(written) == parts:
            signal.raise_signal(signal.SIGTERM)
        written.append(arguments)
        return episode_table(*arguments)

    monkeypatch.setattr("pipeline.export_parquet.STEPS_PER_FILE", 1)
    monkeypatch.setattr("pipeline.export_parquet.episode_table", table)
    store, out = make_dataset(tmp_path / "d", tiny_terms(), 60), tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        main(["--dataset", str(store.root), "--out", str(out)])
    (said,) = capsys.readouterr().out.splitlines()
    assert stopped.value.code == FORCED_STATUS
    assert said == "export: stopped (SIGTERM), nothing was written"
    assert list(out.iterdir()) == []
