"""Learning from a dataset as it is: what is drawn, what is kept apart and judged, and what the run says of its data."""

import numpy as np
import pytest
import torch

from jobs import collect, learn
from jobs.held_out import HeldOutCheck
from jobs.offline import updates_of_epochs
from pipeline.dataset import read_terms
from pipeline.environments import EnvironmentConfig
from pipeline.held_out import HeldOutSequences, held_out_rows
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.monte_carlo import discounted_returns
from pipeline.replay import Replay
from pipeline.scan import LeftOut, dataset_digest, list_shards, open_listed
from pipeline.store import LocalStore
from r2d2.config import LearnerConfig
from r2d2.learner import Learner
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import LINEAGE, collect_golden
from tests.mlflow_session import mlflow_runs, mlflow_template
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms, write_shards
from tests.processes import COLLECT, LEARN

__all__ = ["mlflow_runs", "mlflow_template"]

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)


def test_a_share_keeps_whole_episodes_apart_the_same_ones_every_time():
    episode = np.repeat(np.arange(3000), 3)
    small, large = held_out_rows("c", episode, 0.1), held_out_rows("c", episode, 0.4)
    assert 0.08 < small.mean() < 0.12
    assert (large | ~small).all()
    assert (small.reshape(-1, 3).min(1) == small.reshape(-1, 3).max(1)).all()
    assert (held_out_rows("c", episode[::-1], 0.1) == small[::-1]).all()
    assert (held_out_rows("d", episode, 0.1) != small).any()
    assert not held_out_rows("c", episode, 0.0).any()


def test_what_is_kept_apart_is_never_drawn_and_everything_else_is(tmp_path):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 60, lanes=2)
    write_shards(store, terms, make_sequences(terms, 40, collector="c1", seed=1))
    apart = HeldOutSequences(store, terms, 0.3)
    identity = {}
    for name in list_shards(store):
        columns = open_listed(store, terms, name).columns
        for sequence, episode in zip(columns["sequence"].tolist(), columns["episode"].tolist(), strict=True):
            identity[name.collector, sequence] = name.collector, episode
    held_out = {(collector, episode) for collector, episode, _ in apart.episodes}
    assert 0 < len(apart.episodes) < 100
    assert apart.drawn_sequences + len(apart.episodes) == 100

    limiter = LimiterConfig(batch_size=32, min_sequences=1, samples_per_insert=None)
    replay = Replay(
        store, terms, ReplayConfig(capacity=200, sampler="uniform", held_out=0.3), limiter,
        generator=np.random.default_rng(0),
    )  # fmt: skip
    replay.poll()
    drawn = set()
    for _ in range(60):
        sample = replay.sample(32)
        assert sample.replay_sequences == apart.drawn_sequences
        replay.update_priorities(sample.ids, np.ones(32))
        drawn |= set(sample.batch.identities())
    replay.close()
    assert len(drawn) == apart.drawn_sequences
    assert not {identity[one] for one in drawn} & held_out


def test_an_epoch_is_as_many_draws_as_can_be_drawn(tmp_path):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 100)
    limiter = LimiterConfig(batch_size=16, min_sequences=1, samples_per_insert=None)
    assert updates_of_epochs(2, store, terms, ReplayConfig(), limiter) == 13  # 200 / 16
    assert updates_of_epochs(2, store, terms, ReplayConfig(capacity=50), limiter) == 7
    left = HeldOutSequences(store, terms, 0.3).drawn_sequences
    assert updates_of_epochs(1, store, terms, ReplayConfig(held_out=0.3), limiter) == -(-left // 16) < 7


def test_held_out_metrics_are_those_of_the_network_that_acted(tmp_path):
    """Against Q-values logged while acting: every held-out row, none of the others."""
    golden = collect_golden(
        tmp_path / "d", environment=EnvironmentConfig(env_id="CartPole-v1"), geometry=GEOMETRY,
        core=CoreSpec(kind="lstm", layers=1, width=16), lanes=3, calls=80,
    )  # fmt: skip
    config = LearnerConfig(gamma=0.9, rescaling=False)
    learner = Learner(golden.network.spec, config, geometry=GEOMETRY, stored=GEOMETRY, lineage=LINEAGE)
    for network in (learner.network, learner.target):
        network.load_state_dict(golden.network.state_dict())
    check = HeldOutCheck(golden.store, golden.terms, share=0.5, gamma=0.9, every=1)
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    metrics = check.measure(learner)
    check.close()
    assert all(torch.equal(value, before[name]) for name, value in learner.network.state_dict().items())

    followed = discounted_returns(golden.store, golden.terms, 0.9, LeftOut())
    apart = {(collector, episode) for collector, episode, _ in check.sequences.episodes}
    assert 0 < len(apart) < len(golden.acted.q)
    gaps = []
    for (collector, episode, start), (shard, row) in zip(check.sequences.episodes, check.sequences.rows, strict=True):
        if (collector, episode) in followed:
            q = golden.acted.q[collector, episode]
            actions = shard.columns["action"][row]
            for t in range(start, min(start + GEOMETRY.unroll, len(q))):
                gaps.append(q[t][actions[t - start + GEOMETRY.burn_in]] - followed[collector, episode][t])
    assert metrics["held_out/overestimation"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert metrics["held_out/calibration_error"] == pytest.approx(np.mean(np.abs(gaps)), abs=1e-4)
    assert metrics["held_out/td_error_abs_mean"] > 0


def test_a_share_that_keeps_nothing_or_all_apart_is_refused(tmp_path):
    terms = tiny_terms()
    store = make_dataset(tmp_path, terms, 4)
    with pytest.raises(ValueError, match=r"held_out is 1e-09; allowed: a share that at least one episode"):
        HeldOutCheck(store, terms, share=1e-9, gamma=0.9, every=1)
    with pytest.raises(ValueError, match=r"held_out is 0.9999; allowed: a share that leaves an episode"):
        HeldOutCheck(store, terms, share=0.9999, gamma=0.9, every=1)


@pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.
def test_an_offline_run_with_epochs_held_out_episodes_and_the_conservative_term(
    tmp_path, monkeypatch, capfd, mlflow_runs
):
    monkeypatch.chdir(tmp_path)
    short_games = ["--env-arg", "max_num_frames_per_episode=120"]
    store = LocalStore(tmp_path / "d")
    assert collect.main([*COLLECT, *short_games, "--env-steps", "600", "--dataset", str(store.root)]) == 0
    files = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    assert learn.main([
        *LEARN, "--dataset", "d", "--offline", "--epochs", "1", "--held-out", "0.3", "--held-out-every", "4",
        "--cql-alpha", "0.5", "--deterministic", "--run-name", "off", "--tracking-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
    ]) == 0  # fmt: skip
    said = capfd.readouterr()
    said = said.out + said.err
    left = HeldOutSequences(store, read_terms(store), 0.3).drawn_sequences
    updates = -(-left // 8)
    assert f"1 epochs are {updates} updates" in said
    assert f"{updates} updates, " in said
    assert files == {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}

    client, (logged,) = mlflow_runs()
    digest = dataset_digest(store)
    tags = logged.data.tags
    assert (tags["dataset_digest_start"], tags["dataset_digest_close"], tags["dataset_uri"]) == (
        digest, digest, str(store.root),
    )  # fmt: skip
    history = client.get_metric_history(logged.info.run_id, "held_out/td_error_abs_mean")
    assert [metric.step for metric in history] == sorted({*range(4, updates + 1, 4), updates})
    assert logged.data.params["learner.cql_alpha"] == "0.5"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--epochs", "1"], "epochs is 1.0; allowed: with --offline and without --updates"),
     (["--epochs", "1", "--offline", "--updates", "5"], "epochs is 1.0; allowed: with --offline and without"),
     (["--held-out", "0.1"], "held_out is 0.1; allowed: with --offline"),
     (["--held-out", "1", "--offline"], "held_out is 1.0; allowed: 0 to below 1"),
     (["--cql-alpha", "-1"], "cql_alpha is -1.0; allowed: 0 or more")],
)  # fmt: skip
def test_bad_input_gets_one_line(tmp_path, monkeypatch, capsys, arguments, reason):
    from jobs.learn import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(arguments)
    assert reason in capsys.readouterr().err
