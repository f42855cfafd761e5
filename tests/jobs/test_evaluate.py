"""evaluate.py as a user calls it, and parameters found wherever they rest."""

import json
import re
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from jobs import evaluate
from jobs.evaluating import Evaluator, PlayFlags, write_film
from jobs.evaluation_source import _from_disk
from jobs.following import Following, FollowLimits, FollowLog
from jobs.models import write_model
from jobs.parameters import read_parameters
from jobs.run_folder import RunFolder
from jobs.stopping import StopRequest
from pipeline.dataset import agree_on_terms
from pipeline.environments import EnvironmentConfig, EnvironmentFailure, make_lanes
from pipeline.mlflow_client import Run
from pipeline.params import ParamsPublisher, PublishConfig
from pipeline.progress import Progress, ProgressWriter
from pipeline.store import LocalStore
from pipeline.tracking import NullTracker, TrackingConfig, make_tracker
from r2d2.config import SMALL, NetworkSpec
from r2d2.networks import build_network
from r2d2.serialize import params_from_bytes, params_to_bytes
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec
from schemas.terms import DatasetTerms

LINEAGE = bytes(range(16))
CORE = CoreSpec(kind="lstm", width=8)
CARTPOLE = ["--env", "CartPole-v1", "--tracking-uri", "none", "--threads", "1"]


def parameters_for(environment: EnvironmentConfig, version: int = 3) -> bytes:
    lanes = make_lanes(environment, 1)
    env = lanes.spec
    lanes.close()
    images = len(env.observation.shape) == 2
    spec = NetworkSpec(
        observation=env.observation,
        num_actions=env.num_actions,
        frame_stack=2 if images else 1,
        convolutions=SMALL if images else (),
        dense=(8,),
        core=CORE,
        dueling_width=8,
    )
    network = build_network(spec, torch.Generator().manual_seed(1))
    with torch.no_grad():  # Large enough that what it remembers decides actions.
        for parameter in network.parameters():
            parameter *= 4.0
    return params_to_bytes(network, version, LINEAGE)


@pytest.fixture
def cartpole(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "params.safetensors"
    path.write_bytes(parameters_for(EnvironmentConfig(env_id="CartPole-v1")))
    return path


def said_by(capsys, *arguments: str) -> str:
    assert evaluate.main(arguments) == 0
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_score_and_another_one_another(cartpole, capsys):
    common = ["--checkpoint", str(cartpole), *CARTPOLE, "--episodes", "7", "--envs", "3"]
    first = said_by(capsys, *common, "--seed", "4")
    assert said_by(capsys, *common, "--seed", "4") == first
    assert said_by(capsys, *common, "--seed", "5") != first
    rows = re.findall(r"│ (\d+) +│ (\d+) +│ ([0-9.]+) +│ (\d+) +│", first)
    assert [(int(number), int(lane)) for number, lane, *_ in rows] == [(n, n % 3) for n in range(7)]
    returns = [float(episode_return) for _, _, episode_return, _ in rows]
    assert f"mean return {sum(returns) / 7:.3f}" in first
    assert f"median {sorted(returns)[3]:g}" in first
    assert "7 episodes" in first


def test_a_limited_memory_is_another_policy_and_a_long_one_is_not(cartpole, capsys):
    common = ["--checkpoint", str(cartpole), *CARTPOLE, "--episodes", "6", "--epsilon", "0"]

    def table(said: str) -> str:
        return said[said.index("┏") :]

    unlimited = table(said_by(capsys, *common))
    assert table(said_by(capsys, *common, "--memory-steps", "500")) == unlimited
    short = said_by(capsys, *common, "--memory-steps", "1")
    assert "memory of 1 steps" in short
    assert table(short) != unlimited


def test_a_network_for_other_actions_is_refused_with_both_numbers_and_the_game_h_h1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "params.safetensors"
    path.write_bytes(parameters_for(EnvironmentConfig(env_id="ALE/Breakout-v5")))
    arguments = ["--checkpoint", str(path), "--env", "ALE/Breakout-v5", "--env-arg", "full_action_space=true"]
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([*arguments, "--envs", "1", "--tracking-uri", "none"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "actions of the network is 4; allowed: 18, as ALE/Breakout-v5 has here" in said
    assert len(said.splitlines()) == 1


def test_the_environment_is_that_of_the_dataset_the_run_trained_on(cartpole, tmp_path, capsys):
    """Nothing is said about the environment: the run's record names the dataset, the dataset its terms."""
    lanes = make_lanes(EnvironmentConfig(env_id="CartPole-v1", arguments={"max_episode_steps": 4}), 1)
    terms = DatasetTerms(
        env=lanes.spec, geometry=SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=4), core=CORE
    )
    (tmp_path / "poles").mkdir()
    agree_on_terms(LocalStore(tmp_path / "poles"), terms)
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.write({"run": "r", "dataset": str(tmp_path / "poles")})
    folder.checkpoints(3).save(3, {"learner.safetensors": cartpole.read_bytes()})
    arguments = ["--tracking-uri", "none", "--episodes", "4", "--threads", "1"]
    for checkpoint in ("runs/r", "runs/r/checkpoints/000000003"):
        said = said_by(capsys, "--checkpoint", checkpoint, *arguments)
        assert "CartPole-v1, parameters of update 3" in said
        assert "mean return 4.000" in said
        assert said.count("truncation") == 4
    published = tmp_path / "poles" / "runs" / "r"
    published.mkdir(parents=True)
    (published / "params.safetensors").write_bytes(cartpole.read_bytes())
    assert "mean return 4.000" in said_by(capsys, "--checkpoint", "poles/runs/r", *arguments)


def test_the_folder_of_a_logged_run_names_its_dataset_by_any_uri(cartpole, tmp_path):
    spec = make_lanes(EnvironmentConfig(env_id="CartPole-v1"), 1).spec
    geometry = SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=4)
    (tmp_path / "poles").mkdir()
    agree_on_terms(LocalStore(tmp_path / "poles"), DatasetTerms(env=spec, geometry=geometry, core=CORE))
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.write({"run": "r", "dataset": f"file://{tmp_path / 'poles'}"})
    folder.checkpoints(3).save(3, {"learner.safetensors": cartpole.read_bytes()})
    tags = {"run_folder": str(folder.path)}
    run = Run(run_id="1", name="r", tags=tags, metrics={}, start_seconds=0.0, end_seconds=None)
    assert _from_disk(run).env == spec


def test_a_damaged_newest_checkpoint_of_a_run_is_passed_over(cartpole, tmp_path):
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.write({"run": "r"})
    older = parameters_for(EnvironmentConfig(env_id="CartPole-v1"), version=2)
    for updates, data in ((2, older), (3, cartpole.read_bytes())):
        folder.checkpoints(3).save(updates, {"learner.safetensors": data})
    newest = tmp_path / "runs" / "r" / "checkpoints" / "000000003"
    assert read_parameters(tmp_path / "runs" / "r", "checkpoint").version == 3
    (newest / "learner.safetensors").write_bytes(b"cut short")
    assert read_parameters(tmp_path / "runs" / "r", "checkpoint").version == 2
    with pytest.raises(ValueError, match=r"checkpoint is '.*000000003'; allowed: .*damaged"):
        read_parameters(newest, "checkpoint")


PONG = EnvironmentConfig(env_id="ALE/Pong-v5", arguments={"max_num_frames_per_episode": 480})


def test_the_film_shows_the_very_game_that_was_scored_and_a_second_evaluation_is_the_same(tmp_path):
    sticky = 0.25  # The harder case: the game repeats actions of its own accord.
    parameters = params_from_bytes(parameters_for(PONG))
    flags = PlayFlags(episodes=2, envs=2, seed=3, epsilon=0.3)
    evaluator = Evaluator(replace(PONG, sticky=sticky), flags, films=True)
    first, second = evaluator.evaluate(parameters), evaluator.evaluate(parameters)
    assert first.played == second.played
    assert first.film.score == first.played[0].episode_return
    assert f"protocol paper: up to 30 no-ops, 480 frames, sticky {sticky:g}" in first.conditions
    assert evaluator.evaluate(parameters, stop=lambda: True) is None
    evaluator.close()
    path = write_film(first, tmp_path / "film.gif")
    with Image.open(path) as film:
        assert film.size == (320, 444)
        assert film.n_frames > 50


def test_a_protocol_is_stated_and_flags_come_on_top_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("params.safetensors").write_bytes(parameters_for(PONG))
    arguments = ["--checkpoint", "params.safetensors", "--env", "ALE/Pong-v5", "--episodes", "1", "--threads", "1",
                 "--tracking-uri", "none", "--env-arg", "max_num_frames_per_episode=400", "--out", "out"]  # fmt: skip
    paper, sticky = said_by(capsys, *arguments), said_by(capsys, *arguments, "--protocol", "sticky", "--no-video")
    assert "protocol paper: up to 30 no-ops, 400 frames, sticky 0," in " ".join(paper.split())
    assert "protocol sticky: up to 0 no-ops, 400 frames, sticky 0.25," in " ".join(sticky.split())
    mean = float(re.findall(r"mean return (-?[0-9.]+)", paper)[0])
    assert f"human-normalised {100 * (mean + 20.7) / 35.3:.1f} %" in paper
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "000000003-paper-s0.csv", "000000003-paper-s0.gif", "000000003-sticky-s0.csv",
    ]  # fmt: skip
    header, row = Path("out/000000003-paper-s0.csv").read_text().splitlines()
    assert header == "episode,lane,episode_return,steps,truncated"
    assert row.startswith(f"0,0,{mean:.1f},")
    assert row.endswith("True")


@pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.
def test_run_model_and_checkpoint_give_the_same_score_and_log_to_the_same_run(cartpole, tmp_path, capsys, mlflow_runs):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    owner = make_tracker(TrackingConfig(uri=uri, run_name="r", tags={"role": "learn", "run": "r"}))
    lanes = make_lanes(EnvironmentConfig(env_id="CartPole-v1"), 1)
    model = write_model(tmp_path / "model", params_from_bytes(cartpole.read_bytes()), lanes.spec)
    owner.model(model, "last", 3)
    assert owner.close() == 0
    run_id = owner.run_id()
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.write({"run": "r", "mlflow_run_id": run_id})
    folder.checkpoints(3).save(3, {"learner.safetensors": cartpole.read_bytes()})
    common = ["--tracking-uri", uri, "--episodes", "5", "--threads", "1", "--seed", "2"]
    said = [
        said_by(capsys, *source, *common)
        for source in (
            ["--run-id", run_id],
            ["--model", f"runs:/{run_id}/last"],
            ["--checkpoint", "runs/r", "--env", "CartPole-v1"],
        )
    ]
    assert said[0] == said[1] == said[2]
    assert said[0].endswith(f"evaluate: logged to MLflow run {run_id}\n")
    client, (run,) = mlflow_runs()
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    mean = float(re.findall(r"mean return (-?[0-9.]+)", said[0])[0])
    history = client.get_metric_history(run_id, "eval/return_mean")
    assert [(metric.step, round(metric.value, 3)) for metric in history] == [(3, mean)] * 3
    artifacts = [path.path for path in client.list_artifacts(run_id, "evaluations")]
    assert artifacts == ["evaluations/000000003-paper-s2.csv"]
    with pytest.raises(SystemExit):
        evaluate.main(["--run-id", "0" * 32, *common])
    assert "allowed: a run that sqlite" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::Warning")
def test_following_plays_each_new_version_keeps_the_best_and_ends_with_the_run(
    cartpole, tmp_path, monkeypatch, capfd, mlflow_runs
):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    owner = make_tracker(TrackingConfig(uri=uri, run_name="r", tags={"role": "learn", "run": "r"}))
    environment = EnvironmentConfig(env_id="CartPole-v1")
    geometry = SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=4)
    (tmp_path / "poles").mkdir()
    store = LocalStore(tmp_path / "poles")
    agree_on_terms(store, DatasetTerms(env=make_lanes(environment, 1).spec, geometry=geometry, core=CORE))
    publisher = ParamsPublisher(store, "r", PublishConfig())
    writer = ProgressWriter(
        store, "r", lambda: Progress(sequences_seen=0, sequences_allowed=None, samples=0, updates=0)
    )
    publisher.publish(parameters_for(environment, version=1), 1)
    writer.start()
    monkeypatch.setattr(StopRequest, "listen", lambda stop: stop)  # Signals are the main thread's.
    arguments = ["--follow", "live", "--dataset", "poles", "--episodes", "3", "--every-seconds", "0.01"]
    codes: list[int] = []
    follower = threading.Thread(
        target=lambda: codes.append(evaluate.main([*arguments, "--threads", "1", "--tracking-uri", uri]))
    )
    follower.start()
    said = ""
    for version in (1, 2):
        deadline = time.monotonic() + 60
        while f"update {version}: mean return" not in said:
            said += capfd.readouterr().out
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        publisher.publish(parameters_for(environment, version=version + 1), version + 1)
    writer.close()
    follower.join(60)
    said += capfd.readouterr().out
    assert codes == [0]
    assert "stopped (the run has ended): 3 versions" in said
    assert said.count("the best so far") == 3  # The same network under three numbers: of equals the last.
    assert owner.close() == 0
    client, (run,) = mlflow_runs()
    assert (run.data.tags["best_version"], run.info.status) == ("3", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "eval/return_mean")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert [model.name for model in client.search_logged_models([run.info.experiment_id])] == ["best"]
    assert evaluate.main(["--model", f"runs:/{run.info.run_id}/best", "--tracking-uri", uri, "--episodes", "3"]) == 0


class Logged(NullTracker):
    """What has been logged, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def metrics(self, values, step):
        self.names += values

    def text(self, name, text):
        self.names.append(name)

    def model(self, model, name, step):
        self.names.append(f"model {name}")


@pytest.mark.parametrize("flags", [{"memory_steps": 4}, {"protocol": "sticky"}, {}])
def test_only_the_plain_evaluation_chooses_the_best_and_the_others_are_curves_of_their_own(cartpole, flags):
    play = PlayFlags(episodes=1, **flags)
    parameters, tracker = read_parameters(cartpole, "checkpoint"), Logged()
    with closing(Evaluator(EnvironmentConfig(env_id="CartPole-v1"), play, films=False)) as evaluator:
        evaluated = evaluator.evaluate(parameters)
        assert evaluated is not None
        with closing(FollowLog(tracker, evaluator, play, best_before=None)) as log:
            said = log.log(parameters, evaluated)
    plain = not flags
    assert ("the best so far" in said) == ("model best" in tracker.names) == plain
    assert ("eval/return_mean" in tracker.names) == ("evaluations/last.csv" in tracker.names) == plain
    assert (f"eval/{play.variant}/return_mean" in tracker.names) == (not plain)


def test_following_says_whether_it_waits_for_the_run_or_for_its_own_time(cartpole, tmp_path):
    class Shown:
        def show(self, waits_for, **_):
            seen.append(waits_for)
            stop.ask("seen")

    store = LocalStore(tmp_path)
    record = ProgressWriter(
        store, "r", lambda: Progress(sequences_seen=0, sequences_allowed=None, samples=0, updates=0)
    )
    record.start()
    for published, expected in ((False, "run r to publish parameters after"), (True, "the next evaluation, in 30 s")):
        seen, stop = [], StopRequest()
        if published:
            ParamsPublisher(store, "r", PublishConfig()).publish(cartpole.read_bytes(), 3)
        following = Following(store, "r", FollowLimits(), stop, Shown())  # type: ignore[arg-type]
        following.name = "r"
        list(following.versions())
        assert seen[0].startswith(expected)
    record.close()


def test_following_a_run_that_never_comes_says_what_it_waits_for_and_ends_in_time(cartpole, capfd):
    arguments = ["--follow", "nobody", "--dataset", "nowhere", "--max-minutes", "0.04", "--tracking-uri", "none"]
    assert evaluate.main(arguments) == 0
    said = capfd.readouterr().out
    assert "waits for a dataset in" in said
    assert "stopped (0.04 minutes), nothing was played" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "checkpoint is not given; allowed: a checkpoint (--checkpoint), a run of MLflow"),
        (["--checkpoint", "params.safetensors"], "env is not given; allowed: an environment, or --dataset"),
        (["--env", "CartPole-v1", "--checkpoint", "nowhere"], "checkpoint is 'nowhere'; allowed: "),
        (["--env", "CartPole-v1", "--checkpoint", "empty"], "neither is there"),
        (["--env", "CartPole-v1", "--checkpoint", "notes.json"], "no complete safetensors object"),
        (["--env", "ALE/Pong-v5", "--checkpoint", "params.safetensors"], "actions of the network is 2; allowed: 6"),
        (["--env", "MountainCar-v0", "--checkpoint", "params.safetensors"], "allowed: 3, as MountainCar-v0 has here"),
        (["--env", "Acrobot-v1", "--checkpoint", "params.safetensors"], "as Acrobot-v1 has here"),
        (["--checkpoint", "params.safetensors", "--episodes", "0"], "episodes is 0; allowed: 1 or more"),
        (["--checkpoint", "params.safetensors", "--memory-steps", "0"], "memory_steps is 0; allowed: 1 or more"),
        (["--checkpoint", "params.safetensors", "--epsilon", "2"], "epsilon is 2.0; allowed: 0 to 1"),
        (["--checkpoint", "params.safetensors", "--protocol", "x"], "protocol is 'x'; allowed: paper, sticky, trained"),
        (["--checkpoint", "params.safetensors", "--run-id", "x"], "run_id is given; allowed: without checkpoint"),
        (["--checkpoint", "params.safetensors", "--updates", "3"], "allowed: with --follow"),
        (["--run-id", "x"], "tracking_uri is 'none'; allowed: where the run is, with --run-id and --model"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(cartpole, tmp_path, capsys, arguments, reason):
    (tmp_path / "notes.json").write_text(json.dumps({"a": 1}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([*arguments, "--envs", "1", "--tracking-uri", "none"])
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert reason in said
    assert len(said.splitlines()) == 1


def test_an_environment_that_fails_is_one_line_and_the_run_has_failed(cartpole, monkeypatch, capsys):
    ended = []

    def fail(*_):
        raise EnvironmentFailure("CartPole-v1 keeps raising")

    class Recorder(NullTracker):
        def close(self, *, failed=False, **_):
            ended.append(failed)
            return 0

    monkeypatch.setattr(evaluate, "make_tracker", lambda config: Recorder())
    monkeypatch.setattr(Evaluator, "evaluate", fail)
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(["--checkpoint", str(cartpole), *CARTPOLE])
    assert (stopped.value.code, ended) == (2, [True])
    assert capsys.readouterr().err == "error: CartPole-v1 keeps raising\n"
