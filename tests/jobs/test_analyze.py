"""Tables of a dataset: what slow and obvious loops over its episodes give, whoever reads it and in whatever blocks."""

import signal

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.analysis import gather
from jobs.analyze import main
from jobs.report import short
from jobs.stopping import FORCED_STATUS
from jobs.value_tables import value_tables
from pipeline.environments import EnvironmentConfig
from pipeline.episodes import EpisodeReader
from pipeline.monte_carlo import discounted_returns
from pipeline.offline_tables import dataset_tables
from pipeline.scan import LeftOut, TooManyFaults, dataset_digest, list_shards
from pipeline.store import LocalStore
from pipeline.tracking import NullTracker
from r2d2.config import LearnerConfig
from r2d2.serialize import params_from_bytes, params_to_bytes
from schemas.geometry import ENDS_NAMES, TERMINATED, SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import LINEAGE, collect_golden
from tests.mlflow_session import mlflow_runs, mlflow_template
from tests.pipeline.sequence_factory import damage, make_dataset, make_sequences, tiny_terms, write_shards
from tests.ray_session import ray_session

__all__ = ["mlflow_runs", "mlflow_template", "ray_session"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """110 sequences of two collectors, and all of their episodes."""
    root, terms = tmp_path_factory.mktemp("stored"), tiny_terms()
    store = make_dataset(root, terms, 60, lanes=2)
    write_shards(store, terms, make_sequences(terms, 50, collector="c1", seed=1), per_shard=13)
    episodes = []
    for collector in ("c0", "c1"):
        reader = EpisodeReader(store, terms, left_out=LeftOut())
        episodes += reader.read(collector)
    return store, terms, sorted(episodes, key=lambda e: (e.facts.collector, e.facts.number))


def tables_of(store, terms, **options):
    gathered = gather(store, terms, list_shards(store), **options)
    return dataset_tables(gathered.facts, terms, shard_bytes=gathered.shard_bytes)


def counts(table):
    return dict(zip(table["name"].tolist(), table["value"].tolist(), strict=True))


def test_tables_are_what_loops_over_the_episodes_give(stored):
    store, terms, episodes = stored
    tables = tables_of(store, terms)
    table = tables["episodes"]
    assert table["episode"].tolist() == [e.facts.number for e in episodes]
    assert table["steps"].tolist() == [e.facts.steps for e in episodes]
    np.testing.assert_allclose(table["reward_sum"], [e.reward.sum(dtype=np.float64) for e in episodes])
    complete = table["has_all"]
    assert [end for end, whole in zip(table["ends"], complete, strict=True) if whole] == [
        ENDS_NAMES[e.facts.ends] for e, whole in zip(episodes, complete, strict=True) if whole
    ]
    assert 0 < (~complete).sum() <= 3  # One lane's episode each is still open.

    actions = np.concatenate([e.action for e in episodes])
    assert tables["actions"]["steps"].tolist() == np.bincount(actions, minlength=3).tolist()
    rewards = np.concatenate([e.reward for e in episodes]).astype(np.float64)
    assert tables["rewards"]["steps"].sum() == len(rewards)
    assert np.isin(tables["rewards"]["reward"][:-1], rewards).all()
    frames = np.concatenate([e.frames[1:-1] for e in episodes]).reshape(len(rewards), -1)
    duplicates = counts(tables["duplicates"])
    assert duplicates["observations"] == len(rewards)
    assert duplicates["distinct"] == len(np.unique(frames, axis=0))

    coverage = counts(tables["coverage"])
    assert coverage["env_steps"] == len(rewards)
    assert (coverage["sequences_missing"], coverage["sequences_twice"]) == (0, 0)
    whole = [e for e, has_all in zip(episodes, complete, strict=True) if has_all]
    trained = sum(terms.geometry.times_trained(s, e.facts.steps) for e in whole for s in range(e.facts.steps))
    close = coverage["trained_rows_per_env_step"] * len(rewards)
    assert trained <= close <= trained + 3 * terms.geometry.unroll * 20
    known = [e.facts.episode_return for e in whole if e.facts.ends == TERMINATED]
    assert tables["ends"]["episodes"][0] == len(known)
    storage = counts(tables["storage"])
    assert storage["shard_bytes"] == sum(store.map_path(name.path).stat().st_size for name in list_shards(store))


def test_an_action_that_never_occurs_still_has_its_row(tmp_path):
    """Case H-h1: the number of actions is the environment's."""
    from dataclasses import replace

    terms = tiny_terms()
    env = replace(terms.env, action_set=("noop", "left", "right", "never"))
    sequences = make_sequences(terms, 10)
    terms = replace(terms, env=env)
    sequences = [replace(s, q_values=np.zeros((len(s.action), 4), np.float32)) for s in sequences]
    store = make_dataset(tmp_path, terms, 1)
    write_shards(store, terms, [replace(s, collector="c9") for s in sequences])
    table = tables_of(store, terms)["actions"]
    assert table["name"].tolist() == ["noop", "left", "right", "never"]
    assert len(table["steps"]) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pixels", [True, False])
def test_ray_data_gives_the_identical_tables(stored, ray_session, pixels):
    store, terms, _ = stored
    plain, on_ray = (tables_of(store, terms, pixels=pixels, on_ray=ray) for ray in (False, True))
    assert plain.keys() == on_ray.keys()
    assert ("duplicates" in plain) is pixels
    for name, table in plain.items():
        assert table.keys() == on_ray[name].keys()
        for column, values in table.items():
            assert values.dtype == on_ray[name][column].dtype, (name, column)
            assert values.tobytes() == on_ray[name][column].tobytes(), (name, column)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("on_ray", [False, True])
def test_bad_shards_are_named_and_fail_the_job_past_the_limit(tmp_path, ray_session, on_ray):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 40)
    names = list_shards(store)
    store.map_path(names[1].path).write_bytes(b"junk")
    with pytest.raises(TooManyFaults, match=rf"{names[1].number:09d}-8-\d+\.arrow: torn or foreign.*max_bad_shards 0"):
        gather(store, terms, list_shards(store), on_ray=on_ray)
    gathered = gather(store, terms, list_shards(store), on_ray=on_ray, max_bad_shards=1)
    assert list(gathered.bad_shards) == [names[1].path]
    coverage = counts(dataset_tables(gathered.facts, terms, shard_bytes=1)["coverage"])
    assert coverage["sequences_missing"] == names[1].sequences
    assert coverage["env_steps_of_incomplete_episodes"] > 0


def test_what_followed_each_step_of_terminated_episodes(stored):
    store, terms, episodes = stored
    found = discounted_returns(store, terms, 0.9, LeftOut())
    expected = {(e.facts.collector, e.facts.number): e for e in episodes if e.facts.ends == TERMINATED}
    assert found.keys() == expected.keys()
    for key, values in found.items():
        reward = expected[key].reward.astype(np.float64)
        slow = [sum(0.9 ** (k - t) * reward[k] for k in range(t, len(reward))) for t in range(len(reward))]
        np.testing.assert_allclose(values, slow, rtol=1e-9)


def test_values_are_replayed_on_the_right_rows_of_a_shard_whose_first_one_is_corrupt(tmp_path):
    of_damage = {}
    for column in ("sequence", "reward"):
        golden = collect_golden(
            tmp_path / column,
            environment=EnvironmentConfig(env_id="CartPole-v1"),
            geometry=SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4),
            core=CoreSpec(kind="lstm", layers=1, width=8),
            lanes=2,
            calls=40,
        )
        damage(golden.store, list_shards(golden.store)[0], column, 0, bit=4)
        parameters = params_from_bytes(params_to_bytes(golden.network, 9, LINEAGE, LearnerConfig().acting_values()))
        shards = list_shards(golden.store)
        facts = gather(golden.store, golden.terms, shards).facts
        of_damage[column] = value_tables(golden.store, golden.terms, shards, facts, parameters, sequences=100)
    for name, table in of_damage["reward"].items():
        for column, values in table.items():
            np.testing.assert_array_equal(of_damage["sequence"][name][column], values, err_msg=f"{name} {column}")


def test_the_digest_names_what_was_read_of_a_dataset_that_grows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    terms = tiny_terms()
    store = make_dataset(tmp_path / "d", terms, 16)
    digest = dataset_digest(store)

    def meanwhile(*args, **kwargs):
        write_shards(store, terms, make_sequences(terms, 8, collector="late"))
        return gather(*args, **kwargs)

    monkeypatch.setattr("jobs.analyze.gather", meanwhile)
    monkeypatch.setattr("jobs.analyze.write_plots", lambda *_: [])
    assert main(["--dataset", "d", "--tracking-uri", "none"]) == 0
    assert f"digest {digest}" in (tmp_path / "analysis" / "d" / "report.html").read_text()
    assert set(pq.read_table(tmp_path / "analysis" / "d" / "episodes.parquet")["collector"].to_pylist()) == {"c0"}


@pytest.mark.parametrize(
    ("value", "shown"), [(np.inf, "inf"), (-np.inf, "-inf"), (np.nan, "–"), (12345.0, "12,345"), (0.12345, "0.1235")]
)
def test_every_number_can_be_shown(value, shown):
    assert short(value) == shown


def test_the_job_writes_tables_plots_and_a_page_that_needs_nothing_else_and_logs_them(
    tmp_path, monkeypatch, capsys, mlflow_runs
):
    monkeypatch.chdir(tmp_path)
    golden = collect_golden(
        tmp_path / "d",
        environment=EnvironmentConfig(env_id="CartPole-v1"),
        geometry=SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2),
        core=CoreSpec(kind="lstm", layers=1, width=16),
        lanes=3,
        calls=60,
    )
    params = tmp_path / "params.safetensors"
    params.write_bytes(params_to_bytes(golden.network, 9, LINEAGE, LearnerConfig().acting_values()))
    assert main(["--dataset", "d", "--params", str(params), "--threads", "1"]) == 0
    said, out = capsys.readouterr().out, tmp_path / "analysis" / "d"
    assert "env steps" in said
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) >= 10
    assert "http://" not in page
    assert 'src="data:' in page
    for name in ("episodes", "actions", "calibration", "dq_by_age"):
        assert pq.read_table(out / f"{name}.parquet").num_rows > 0
    dq = pq.read_table(out / "dq_by_age.parquet").to_pandas().set_index("strategy")
    # The network that acted, at the version that acted plus 4: a stored start is exact, a zero one is not.
    assert set(dq["age_from"]) == {4}
    assert dq.loc["stored", "dq_first"] < 1e-4
    assert dq.loc["zero", "dq_first"] > 10 * dq.loc["stored", "dq_first"]

    client, (run,) = mlflow_runs()
    assert run.data.tags["digest"] == dataset_digest(LocalStore(tmp_path / "d"))
    assert run.data.metrics["analyze/env_steps"] == sum(map(len, golden.acted.q.values()))
    logged = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "episodes.parquet", "actions.png", "config.json"} <= logged


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--dataset", "nowhere"], "dataset is 'nowhere'; allowed: a folder with a dataset.json"),
     (["--value-sequences", "0"], "value_sequences is 0; allowed: 1 or more"),
     (["--dataset", "d", "--params", "nowhere"], "params is 'nowhere'; allowed: ")],
)  # fmt: skip
def test_bad_input_gets_one_line(tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    make_dataset(tmp_path / "d", tiny_terms(), 8)
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().err.strip()
    assert reason in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("stage", "left"), [("gather", "nothing was written"), ("write_plots", "out is not complete")])
def test_an_analysis_that_is_stopped_says_what_it_leaves(stored, tmp_path, monkeypatch, capsys, stage, left):
    monkeypatch.setattr(f"jobs.analyze.{stage}", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as stopped:
        main(["--dataset", str(stored[0].root), "--out", str(tmp_path / "out"), "--tracking-uri", "none"])
    said = capsys.readouterr().out.splitlines()[-1]
    assert stopped.value.code == FORCED_STATUS
    assert said.startswith("analyze: stopped (SIGINT), ")
    assert left in said


def test_the_analysis_is_a_part_of_the_sweep_that_is_named(stored, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("jobs.analyze.make_tracker", lambda config: made.append(config) or NullTracker())
    arguments = ["--dataset", str(stored[0].root), "--out", str(tmp_path / "out"), "--parent-run-id", "p"]
    assert main(arguments) == 0
    assert [config.parent_run_id for config in made] == ["p"]
