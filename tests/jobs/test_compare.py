"""compare.py over runs in a real MLflow database."""

import pytest

from jobs import compare

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.


@pytest.fixture
def uri(tmp_path, monkeypatch, mlflow_runs) -> str:
    """Two seeds of one setting, one run of another, and a collector's run; each was played again a day later."""
    from mlflow.entities import Metric, RunTag
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("r2d2")
    for name, settings, role, best in (("a0", "aa", "learn", 10), ("a1", "aa", "learn", 20), ("b0", "bb", "learn", 1),
                                       ("c", "cc", "collect", 99)):  # fmt: skip
        run_id = client.create_run(experiment, run_name=name).info.run_id
        tags = {"settings": settings, "role": role, "seed": name[-1], "game": "ALE/Pong-v5", "preset": "laptop"}
        metrics = []
        for number in range(5):
            milliseconds = 1_700_000_000_000 + 60_000 * number
            metrics.append(Metric("collect/env_steps", 100 * number, milliseconds, 100 * number))
            metrics.append(Metric("eval/return_mean", best * number / 4, milliseconds, number))
        metrics.append(Metric("eval/return_mean", -1e6, 1_700_086_400_000, 4))
        client.log_batch(run_id, metrics, tags=[RunTag(*pair) for pair in tags.items()])
        client.set_terminated(run_id, end_time=1_700_000_240_000)
    return uri


def _runs(uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("r2d2").experiment_id])
    return client, {run.info.run_name: run.info.run_id for run in runs}


def test_seeds_of_one_setting_become_one_mean_with_its_interval(uri, tmp_path, capsys):
    assert compare.main(["--tracking-uri", uri, "--smooth", "1", "--out", "curves.png"]) == 0
    said = capsys.readouterr().out
    for name in ("a0", "a1", "b0"):
        assert f"│ {name} " in said
    assert "│ c " not in said
    assert "mean of 2 seeds" in said
    assert "15 (10 to 20)" in said
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_can_be_named_and_grouped_by_any_tag(uri, capsys):
    _, ids = _runs(uri)
    chosen = [word for name in ("a0", "b0") for word in ("--run-id", ids[name])]
    assert compare.main(["--tracking-uri", uri, *chosen, "--group-by", "game", "--smooth", "1"]) == 0
    said = capsys.readouterr().out
    assert "mean of 2 seeds" in said
    assert "5.5 (1 to 10)" in said
    assert "a1" not in said


def test_returns_of_different_games_are_never_one_mean(uri, capsys):
    client, ids = _runs(uri)
    client.set_tag(ids["a1"], "game", "ALE/Breakout-v5")
    for group_by in ("settings", "role"):
        assert compare.main(["--tracking-uri", uri, "--group-by", group_by, "--tag", "settings=aa"]) == 0
        said = capsys.readouterr().out
        assert "seeds" not in said
        assert "Pong-v5" in said
        assert "Breakout-v5" in said


def test_runs_of_one_name_are_two_when_every_run_stands_by_itself(uri, capsys):
    client, ids = _runs(uri)
    client.set_tag(ids["a1"], "mlflow.runName", "a0")
    assert compare.main(["--tracking-uri", uri, "--group-by", "run"]) == 0
    said = capsys.readouterr().out
    assert "seeds" not in said
    for name in ("a0", "a1"):
        assert f"a0 {ids[name][:8]} " in said


def test_a_group_is_compared_by_one_metric_which_the_table_names(uri, capsys):
    client, ids = _runs(uri)
    for name in ("a0", "a1"):
        client.log_metric(ids[name], "collect/return_mean", 3.0, timestamp=1_700_000_100_000)
    third = client.create_run(client.get_run(ids["a0"]).info.experiment_id, run_name="a2").info.run_id
    for name, value in (("settings", "aa"), ("role", "learn"), ("game", "ALE/Pong-v5"), ("preset", "laptop")):
        client.set_tag(third, name, value)
    client.log_metric(third, "collect/return_mean", 6.0)
    assert compare.main(["--tracking-uri", uri, "--tag", "settings=aa"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "Pong-v5" in line]
    assert len(lines) == 4
    assert all("collect/return_mean" in line for line in lines)
    assert "mean of 3 seeds" in lines[-1]
    assert " 4 (3 to 6) " in lines[-1]


def test_curves_that_share_no_step_are_drawn_without_a_mean(uri, tmp_path):
    client, ids = _runs(uri)
    client.log_metric(ids["a0"], "late", 1.0, timestamp=1_700_000_010_000)
    client.log_metric(ids["a1"], "late", 2.0, timestamp=1_700_000_200_000)
    assert compare.main(["--tracking-uri", uri, "--tag", "settings=aa", "--metric", "late"]) == 0
    assert (tmp_path / "compare.png").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--experiment", "none"], "experiment is 'none'; allowed: one that sqlite"),
        (["--tag", "game=Chess"], "no run is chosen; allowed: "),
        (["--tag", "game"], "tag is 'game'; allowed: name=value"),
        (["--run-id", "f" * 32], "allowed: a run that sqlite"),
        (
            ["--metric", "nosuch"],
            "metric is 'nosuch'; allowed: what these runs have, collect/env_steps, eval/return_mean",
        ),
        (["--smooth", "0"], "smooth is 0; allowed: 1 or more"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(uri, capsys, arguments, reason):
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--tracking-uri", uri, *arguments])
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert reason in said
    assert len(said.splitlines()) == 1
