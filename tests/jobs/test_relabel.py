"""Relabelling: the network that acted finds the states it had, twice is once, and what comes out is a whole dataset."""

import itertools
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest

from jobs.relabel import UNFINISHED, _run, main
from jobs.relabelling import Counts, Relabelling, one_ahead
from jobs.stopping import FORCED_STATUS
from pipeline.dataset import list_collectors, read_provenance, read_terms, shards_after, write_provenance
from pipeline.environments import EnvironmentConfig
from pipeline.scan import dataset_digest, list_shards
from pipeline.shard_reader import open_shard
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from r2d2.config import LearnerConfig
from r2d2.labeller import Labeller
from r2d2.serialize import params_to_bytes
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import LINEAGE, check_all, collect_golden, golden_network, read_back
from tests.mlflow_session import mlflow_runs, mlflow_template
from tests.ray_session import ray_session

__all__ = ["mlflow_runs", "mlflow_template", "ray_session"]

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)
LSTM = CoreSpec(kind="lstm", layers=1, width=16)
PONG = EnvironmentConfig(
    env_id="ALE/Pong-v5",
    arguments={"img_height": 42, "img_width": 42, "noop_max": 0, "max_num_frames_per_episode": 4 * 30},
)
BREAKOUT = EnvironmentConfig(env_id="ALE/Breakout-v5", arguments={"img_height": 42, "img_width": 42}, life_loss="reset")
CARTPOLE = EnvironmentConfig(env_id="CartPole-v1")
# Of the network, or counted anew in the order of episodes; everything else says how it was acted.
PER_ORDER = {"sequence", "env_steps", "checksum", "episode_return"}


def collect(root, environment=CARTPOLE, core=LSTM, geometry=GEOMETRY, **options):
    golden = collect_golden(root, environment=environment, geometry=geometry, core=core, **options)
    for name in list_collectors(golden.store):
        write_provenance(golden.store, name, {"started_unix_seconds": 1.79e9})
    params = root.parent / f"{root.name}.safetensors"
    params.write_bytes(params_to_bytes(golden.network, 5, LINEAGE, LearnerConfig().acting_values()))
    return golden, params


def relabel(*sources, params, out, tracking_uri="none", **options):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    sources = itertools.chain.from_iterable(("--dataset", str(source)) for source in sources)
    assert main([*sources, "--params", str(params), "--out", str(out), "--tracking-uri", tracking_uri, *flags]) == 0
    return LocalStore(out)


def rows_of(store):
    """(collector, episode, start) -> its columns, pixels and probe."""
    found = {}
    for name in list_shards(store):
        shard = open_shard(store.map_path(name.path), name)
        for row in range(shard.num_rows):
            values = {column: view[row].copy() for column, view in shard.columns.items()}
            values |= {"frame": bytes(shard.frame(row)), "probe": shard.probe(row)}
            found[name.collector, int(values["episode"]), int(values["start"])] = values
    return found


def bytes_of(store):
    return {name.path: store.get(name.path) for name in list_shards(store)}


@pytest.mark.parametrize(
    ("environment", "core"),
    [(CARTPOLE, LSTM), (CARTPOLE, CoreSpec(kind="gru", layers=1, width=16)), (BREAKOUT, LSTM),
     (CARTPOLE, CoreSpec(kind="lstm", layers=2, width=8)), (CARTPOLE, CoreSpec(kind="none"))],
    ids=["vectors", "gru", "images, lives", "two layers", "no core"],
)  # fmt: skip
def test_the_network_that_acted_finds_the_states_it_had(tmp_path, environment, core):
    calls, collectors = (260, 1) if environment is BREAKOUT else (70, 2)
    golden, params = collect(
        tmp_path / "d", environment, core, lanes=3, calls=calls, collectors=collectors, per_shard=7
    )
    store = relabel(golden.store.root, params=params, out=tmp_path / "new")
    before, after = rows_of(golden.store), rows_of(store)
    assert before.keys() == after.keys()
    compared = set()
    for identity, old in before.items():
        new = after[identity]
        for column in old.keys() - PER_ORDER - {"probe"}:
            if column.startswith(("core", "unroll_core", "initial_priority")):
                np.testing.assert_allclose(new[column], old[column], atol=1e-5, rtol=1e-4, err_msg=column)
            else:
                assert np.array_equal(new[column], old[column]), (identity, column)
            compared.add(column)
    assert {"frame", "action", "reward", "epsilon", "lineage", "version_last", "ends", "lane"} <= compared
    report = verify_dataset(store)
    assert report.faults == []
    assert report.env_steps == sum(map(len, golden.acted.q.values()))


def test_golden_replay_holds_for_what_was_relabelled(tmp_path):
    golden, params = collect(tmp_path / "d", PONG, lanes=2, calls=80)
    store = relabel(golden.store.root, params=params, out=tmp_path / "new")
    rows, batch = read_back(store, golden.terms)
    check_all(replace(golden, store=store, rows=rows, batch=batch))


def test_relabelling_again_changes_nothing_and_another_network_changes_the_states(tmp_path):
    golden, params = collect(tmp_path / "d", lanes=3, calls=60)
    once = relabel(golden.store.root, params=params, out=tmp_path / "once")
    twice = relabel(tmp_path / "once", params=params, out=tmp_path / "twice")
    assert bytes_of(once) == bytes_of(twice)
    other = tmp_path / "other.safetensors"
    network = golden_network(golden.terms.env, golden.terms.core, 2, seed=9)
    other.write_bytes(params_to_bytes(network, 77, bytes(16 * [7])))
    different = relabel(tmp_path / "once", params=other, out=tmp_path / "different")
    before, after = rows_of(once), rows_of(different)
    later = [identity for identity in before if identity[2] > 0]
    assert len(later) > 5
    for column, rows in (("unroll_core_h", later), ("initial_priority", before)):
        assert not any(np.allclose(before[row][column], after[row][column]) for row in rows), column
    report = verify_dataset(different)
    assert (report.faults, report.versions, report.lineages) == ([], {77}, {bytes(16 * [7]).hex()})


@pytest.mark.parametrize("window", ["0/6/2/6", "6/12/4/3"])
def test_another_window_is_what_acting_would_have_cut(tmp_path, window):
    """The same games collected under the other window from the start, and recut from a dataset of the first one."""
    burn_in, unroll, bootstrap, stride = (int(part) for part in window.split("/"))
    wanted = SequenceGeometry(burn_in=burn_in, unroll=unroll, bootstrap=bootstrap, stride=stride, frame_stack=2)
    golden, params = collect(tmp_path / "d", PONG, lanes=2, calls=80)
    store = relabel(golden.store.root, params=params, out=tmp_path / "new", recut=window)
    terms = read_terms(store)
    assert terms.geometry == wanted
    rows, batch = read_back(store, terms)
    check_all(replace(golden, terms=terms, store=store, rows=rows, batch=batch))
    assert verify_dataset(store).faults == []
    deeper = relabel(tmp_path / "new", params=params, out=tmp_path / "deeper", recut="2/2/1/1/4")
    assert verify_dataset(deeper).faults == []
    back = relabel(tmp_path / "deeper", params=params, out=tmp_path / "back", recut="4/8/3/4/2")
    once = relabel(golden.store.root, params=params, out=tmp_path / "once")
    assert bytes_of(back) == bytes_of(once)


def test_the_digest_of_a_parent_names_what_was_read_of_one_that_grows(tmp_path, monkeypatch):
    golden, params = collect(tmp_path / "d", lanes=2, calls=40, per_shard=7)
    last = list_shards(golden.store)[-1].path
    data = golden.store.get(last)
    golden.store.delete(last)
    digest = dataset_digest(golden.store)
    expected = bytes_of(relabel(golden.store.root, params=params, out=tmp_path / "before"))

    def meanwhile(*args):
        golden.store.put(last, data)
        return _run(*args)

    monkeypatch.setattr("jobs.relabel._run", meanwhile)
    store = relabel(golden.store.root, params=params, out=tmp_path / "new")
    assert bytes_of(store) == expected
    assert read_provenance(store, "collector0")["parents"] == {str(golden.store.root): digest}


def test_datasets_merge_and_episodes_are_chosen(tmp_path, mlflow_runs):
    a, params = collect(tmp_path / "a", lanes=2, calls=60)
    b, _ = collect(tmp_path / "b", lanes=2, calls=60, collectors=2)
    with pytest.raises(SystemExit):  # Both have a collector0.
        relabel(a.store.root, b.store.root, params=params, out=tmp_path / "twins")
    collector1 = relabel(b.store.root, params=params, out=tmp_path / "b1", where="collector=collector1")
    merged = relabel(a.store.root, tmp_path / "b1", params=params, out=tmp_path / "merged")
    assert list_collectors(merged) == ["collector0", "collector1"]
    assert rows_of(collector1).keys() < rows_of(merged).keys()
    parents = read_provenance(merged, "collector1")["parents"]
    assert parents == {str(a.store.root): dataset_digest(a.store), str(tmp_path / "b1"): dataset_digest(collector1)}
    assert read_provenance(merged, "collector1")["collector"]["collector"]["started_unix_seconds"] == 1.79e9

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    chosen = relabel(a.store.root, params=params, out=tmp_path / "chosen", where="return>=10", tracking_uri=uri)
    _, (run,) = mlflow_runs()
    assert read_provenance(chosen, "collector0")["mlflow_run_id"] == run.info.run_id
    assert run.data.tags["digest"] == dataset_digest(chosen)
    assert run.data.tags["parent.0"] == f"{a.store.root} {dataset_digest(a.store)}"
    returns = {episode: len(q) for (_, episode), q in a.acted.q.items()}
    complete = {row["episode"] for row in rows_of(a.store).values() if row["ends"] in (1, 2)}
    kept = {int(identity[1]) for identity in rows_of(chosen)}
    assert kept == {int(episode) for episode in complete if returns[int(episode)] >= 10}
    assert 0 < len(kept) < len(returns)
    assert verify_dataset(chosen).faults == []


def test_nothing_is_a_dataset_before_all_of_it_is_there(tmp_path, capsys):
    golden, params = collect(tmp_path / "d", lanes=1, calls=60, per_shard=3)
    bad = golden.store.map_path(shards_after(golden.store, "collector0", -1)[1].path)
    bad.write_bytes(b"junk")
    with pytest.raises(SystemExit) as stopped:
        relabel(golden.store.root, params=params, out=tmp_path / "new")
    assert stopped.value.code == 2
    assert bad.name in capsys.readouterr().err
    assert read_terms(LocalStore(tmp_path / "new")) is None
    survived = relabel(golden.store.root, params=params, out=tmp_path / "other", max_bad_shards=1)
    assert verify_dataset(survived).faults == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"recut": "4/8/3"}, "recut is '4/8/3'; allowed: L/T/n/stride"),
     ({"recut": "4/8/3/5"}, "stride is 5; allowed: a divisor of unroll 8"),
     ({"recut": "4/8/3/4/1"}, "frame_stack of the network is 2; allowed: at most 1"),
     ({"where": "luck>1"}, "where is 'luck>1'; allowed: return, steps"),
     ({"params": "nowhere"}, "params is 'nowhere'; allowed: "),
     ({"out": "d"}, "allowed: a new or an empty folder")],
)  # fmt: skip
def test_bad_input_gets_one_line(tmp_path, monkeypatch, capsys, options, reason):
    monkeypatch.chdir(tmp_path)
    golden, params = collect(tmp_path / "d", lanes=1, calls=20)
    with pytest.raises(SystemExit):
        relabel(golden.store.root, **{"params": params, "out": "new", **options})
    said = capsys.readouterr().err.strip()
    assert reason in said
    assert len(said.splitlines()) == 1


@pytest.mark.filterwarnings("ignore")
def test_workers_on_ray_write_the_same_bytes(tmp_path, ray_session):
    golden, params = collect(tmp_path / "d", lanes=2, calls=50, collectors=3)
    plain = relabel(golden.store.root, params=params, out=tmp_path / "plain")
    on_ray = relabel(golden.store.root, params=params, out=tmp_path / "ray", workers=2)
    assert bytes_of(plain) == bytes_of(on_ray)
    golden.store.map_path(list_shards(golden.store)[0].path).write_bytes(b"junk")
    with pytest.raises(SystemExit):
        relabel(golden.store.root, params=params, out=tmp_path / "failed", workers=2)
    assert read_terms(LocalStore(tmp_path / "failed")) is None


@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_no_machine_of_ray_could_run_is_refused(tmp_path, ray_session, capsys):
    golden, params = collect(tmp_path / "d", lanes=1, calls=20)
    with pytest.raises(SystemExit):
        relabel(golden.store.root, params=params, out=tmp_path / "new", workers=1, threads=999)
    assert "threads is 999; allowed: at most " in capsys.readouterr().err


def test_workers_anywhere_get_the_absolute_place_of_what_they_read(tmp_path, monkeypatch):
    golden, params = collect(tmp_path / "d", lanes=1, calls=20)
    seen = []
    monkeypatch.chdir(golden.store.root.parent)
    monkeypatch.setattr(Relabelling, "steps", lambda work, uri, collector, shards: seen.append(uri) or iter([Counts()]))
    relabel(golden.store.root.name, params=params, out=tmp_path / "new")
    assert seen == [golden.store.uri]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_relabelling_that_is_stopped_says_what_it_leaves_and_its_run_has_failed(
    tmp_path, monkeypatch, capsys, mlflow_runs, number
):
    golden, params = collect(tmp_path / "d", lanes=1, calls=60)
    out = tmp_path / "new"
    monkeypatch.setattr(Labeller, "label", lambda *_: signal.raise_signal(number))
    with pytest.raises(SystemExit) as stopped:
        relabel(golden.store.root, params=params, out=out, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert stopped.value.code == FORCED_STATUS
    (said,) = capsys.readouterr().out.splitlines()
    assert said == f"relabel: stopped ({number.name}), {out} {UNFINISHED}"
    assert [run.info.status for run in mlflow_runs()[1]] == ["FAILED"]


def test_a_folder_that_holds_an_unfinished_relabelling_is_refused_as_that(tmp_path, capsys):
    golden, params = collect(tmp_path / "d", lanes=1, calls=20)
    out = relabel(golden.store.root, params=params, out=tmp_path / "new")
    (out.root / "dataset.json").unlink()
    with pytest.raises(SystemExit):
        relabel(golden.store.root, params=params, out=out.root)
    assert f"allowed: a new or an empty folder (it {UNFINISHED})" in capsys.readouterr().err


def test_the_run_is_a_part_of_the_sweep_that_is_named(tmp_path, mlflow_runs):
    golden, params = collect(tmp_path / "d", lanes=1, calls=20)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    relabel(golden.store.root, params=params, out=tmp_path / "new", tracking_uri=uri, parent_run_id="p")
    assert [run.data.tags["mlflow.parentRunId"] for run in mlflow_runs()[1]] == ["p"]


def test_one_group_is_made_ahead_and_no_more_and_what_it_raises_arrives():
    made, closed = [], threading.Event()

    def items():
        try:
            for number in range(4):
                made.append(number)
                yield number
            raise ValueError("broken on purpose")
        finally:
            closed.set()

    ahead, found = one_ahead(items()), []
    for item in itertools.islice(ahead, 4):
        assert len(made) <= item + 2
        found.append(item)
    assert found == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="broken on purpose"):
        next(ahead)
    assert closed.is_set()


def test_whoever_stops_early_ends_what_was_made_ahead():
    closed = threading.Event()

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    ahead = one_ahead(items())
    assert next(ahead) == 0
    ahead.close()
    assert closed.is_set()
