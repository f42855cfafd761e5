"""evaluate.py as a user calls it, and parameters found wherever they rest."""

import json
import re
from pathlib import Path

import pytest
import torch

from jobs import evaluate
from jobs.parameters import read_parameters
from jobs.run_folder import RunFolder
from pipeline.dataset import agree_on_terms
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.store import LocalStore
from r2d2.config import SMALL, NetworkSpec
from r2d2.networks import build_network
from r2d2.serialize import params_to_bytes
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "checkpoint is not given; allowed: a params.safetensors"),
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
