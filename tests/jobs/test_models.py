"""Networks as models: they load without pickle through MLflow, and with torch, numpy and safetensors alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.models import environment_of, write_model
from jobs.parameters import read_parameters
from pipeline.mlflow_models import download_model
from pipeline.mlflow_tracker import MLflowTracker
from pipeline.tracking import TrackingConfig
from r2d2 import build_policy
from r2d2.config import SMALL, NetworkSpec
from r2d2.networks import build_network
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import Parameters
from schemas.specs import ArraySpec, CoreSpec, EnvSpec

ENV = EnvSpec(env_id="ALE/Pong-v5", observation=ArraySpec(shape=(84, 84), dtype="uint8"), action_set=("a", "b", "c"))
SPEC = NetworkSpec(
    observation=ENV.observation,
    num_actions=3,
    frame_stack=2,
    convolutions=SMALL,
    dense=(16,),
    core=CoreSpec(kind="lstm", width=8),
    dueling_width=8,
)


def parameters_of(spec: NetworkSpec = SPEC) -> Parameters:
    network = build_network(spec, torch.Generator().manual_seed(3))
    return Parameters(spec=spec, tensors=dict(network.state_dict()), version=7, lineage=bytes(range(16)))


def steps_of(lanes: int, number: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(5)
    return [
        {
            "observation": draw.integers(0, 255, (lanes, 2, 84, 84), np.uint8),
            "previous_action": draw.integers(-1, 3, lanes),
            "previous_reward": draw.normal(size=lanes).astype(np.float32),
            "first": draw.random(lanes) < 0.3,
        }
        for _ in range(number)
    ]


def test_a_portable_policy_gives_what_the_acting_policy_gives_while_the_caller_holds_the_state():
    parameters = parameters_of()
    acting = RecurrentPolicy(SPEC.core, 3, np.zeros(4), np.random.default_rng(0))
    network = build_network(SPEC, torch.Generator().manual_seed(3))
    acting.set_network(network, 7, parameters.lineage)
    portable = build_policy(json.loads(json.dumps(SPEC.to_json())), parameters.tensors)
    state = portable.initial_state(4)
    for step in steps_of(4, 6):
        answer = portable.step(**step, **state)
        expected = acting.act(step["observation"], step["previous_action"], step["previous_reward"], step["first"])
        np.testing.assert_allclose(answer["q_values"], expected.q_values, atol=1e-6)
        assert answer["action"].tolist() == expected.action.tolist()
        state = {name: answer[name] for name in state}
    assert state.keys() == {"core_h", "core_c"}
    with pytest.raises(ValueError, match=r"core state is \['core_h'\]; allowed: core_h, core_c"):
        portable.step(**step, core_h=state["core_h"])
    with pytest.raises(ValueError, match="tensors are not those of the network"):
        build_policy(SPEC.to_json(), {"value.bias": torch.zeros(1)})


ALONE = """
import sys

class NothingElse:
    refused = ("mlflow", "pyarrow", "gymnasium", "ale_py", "pandas", "pipeline", "jobs", "tyro", "rich", "xxhash")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.refused:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NothingElse())
sys.path.insert(0, sys.argv[1])
import numpy as np
import load

policy = load.load_policy()
import r2d2
assert r2d2.__file__.startswith(sys.argv[1]), r2d2.__file__
example = dict(np.load(sys.argv[2]))
answer = policy.step(**example, **policy.initial_state(len(example["first"])))
np.savez(sys.argv[3], **answer)
"""


def test_load_py_needs_torch_numpy_and_safetensors_only_and_not_even_this_project(tmp_path):
    model = write_model(tmp_path / "model", parameters_of(), ENV)
    moved = tmp_path / "elsewhere"
    model.path.rename(moved)
    (step,) = steps_of(3, 1)
    np.savez(tmp_path / "example.npz", **step)
    result = subprocess.run(
        [sys.executable, "-S", "-c", _with_site_packages(ALONE), str(moved), "example.npz", "answer.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr
    policy = build_policy(SPEC.to_json(), parameters_of().tensors)
    expected = policy.step(**step, **policy.initial_state(3))
    with np.load(tmp_path / "answer.npz") as answer:
        assert answer.files == list(expected)
        for name in expected:
            np.testing.assert_allclose(answer[name], expected[name], atol=1e-6)


def _with_site_packages(code: str) -> str:
    """The libraries without the project: ``-S`` leaves out what an editable install would add."""
    folders = [path for path in sys.path if path.endswith("site-packages")]
    return f"import sys; sys.path += {folders!r}\n{code}"


def test_a_models_folder_is_taken_wherever_parameters_are_and_names_its_environment(tmp_path):
    write_model(tmp_path / "model", parameters_of(), ENV)
    found = read_parameters(tmp_path / "model", "checkpoint")
    assert (found.version, found.lineage, found.spec) == (7, bytes(range(16)), SPEC)
    assert environment_of(tmp_path / "model") == ENV
    assert environment_of(tmp_path) is None


LOADS = """
import sys, mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
example = dict(np.load(sys.argv[3]))
np.savez(sys.argv[4], **model.predict(example))
print([each.name for each in model.metadata.signature.inputs], [each.name for each in model.metadata.signature.outputs])
"""


@pytest.mark.filterwarnings("ignore::Warning")  # MLflow's own, of its dependencies.
def test_a_logged_model_loads_where_pickle_is_forbidden_and_an_older_one_of_its_name_is_gone(
    tmp_path, monkeypatch, mlflow_runs
):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MLflowTracker(TrackingConfig(uri=uri, run_name="n"))
    model = write_model(tmp_path / "model", parameters_of(), ENV)
    tracker.model(model, "last", 6)
    tracker.model(model, "last", 7)
    assert tracker.close() == 0
    client, (run,) = mlflow_runs()
    kept = client.search_logged_models([run.info.experiment_id])
    assert [(each.name, str(each.status)) for each in kept] == [("last", "READY")]
    assert not [path for path in Path(kept[0].artifact_location).rglob("*") if path.suffix in (".pkl", ".pth", ".pt")]
    (step,) = steps_of(3, 1)
    policy = build_policy(SPEC.to_json(), parameters_of().tensors)
    example = {**step, **policy.initial_state(3)}
    np.savez(tmp_path / "example.npz", **example)
    said = subprocess.run(
        [sys.executable, "-c", LOADS, uri, f"runs:/{run.info.run_id}/last", "example.npz", "answer.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"},
    )
    assert said.returncode == 0, said.stderr
    inputs, outputs = said.stdout.splitlines()[-1].split("] [")
    for name in ("observation", "previous_action", "previous_reward", "first", "core_h", "core_c"):
        assert name in inputs
    for name in ("q_values", "action", "core_h", "core_c"):
        assert name in outputs
    with np.load(tmp_path / "answer.npz") as answer:
        for name, value in policy.step(**example).items():
            np.testing.assert_allclose(answer[name], value, atol=1e-6)
    folder, run_id = download_model(uri, f"runs:/{run.info.run_id}/last", tmp_path / "down")
    assert (read_parameters(folder, "model").version, run_id) == (7, run.info.run_id)
    with pytest.raises(ValueError, match="model is 'models:/nothing/1'; allowed: "):
        download_model(uri, "models:/nothing/1", tmp_path / "down")
