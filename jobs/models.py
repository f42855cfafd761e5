"""Trained networks as folders that load anywhere, and as MLflow models made of them."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import numpy as np

from pipeline.model_folder import ModelFolder
from r2d2.portable import build_policy
from r2d2.serialize import Parameters, tensors_to_bytes
from schemas.specs import EnvSpec

SCRIPTS = Path(__file__).parent / "model_scripts"
PROJECT = Path(__file__).parent.parent
SPEC, LOADER, PARAMS = "spec.json", "load.py", "params.safetensors"
NEEDS = ("torch", "numpy", "safetensors")


def write_model(folder: Path, parameters: Parameters, env: EnvSpec) -> ModelFolder:
    """A folder that needs only torch, numpy and safetensors: ``python -c 'import load; load.load_policy()'`` in it.

    spec.json            network, environment, version, lineage
    params.safetensors   as a learner publishes them: every job that takes parameters takes this folder
    load.py, code/       the loader, and the parts of this project that it needs
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, lineage = parameters.spec.to_json(), parameters.lineage.hex()
    values = {"spec": spec, "version": parameters.version, "lineage": lineage, "acting": parameters.acting}
    (folder / PARAMS).write_bytes(tensors_to_bytes(parameters.tensors, values))
    description = {"network": spec, "environment": env.to_json(), "version": parameters.version, "lineage": lineage}
    (folder / SPEC).write_text(json.dumps(description, indent=1) + "\n")
    shutil.copy(SCRIPTS / LOADER, folder / LOADER)
    for package in ("r2d2", "schemas"):
        copy = folder / "code" / package
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(PROJECT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    policy = build_policy(spec, parameters.tensors)
    observation = parameters.spec.observation
    inputs = {
        "observation": np.zeros((1, parameters.spec.frame_stack, *observation.shape), observation.dtype),
        "previous_action": np.full(1, -1, np.int64),
        "previous_reward": np.zeros(1, np.float32),
        "first": np.ones(1, np.bool_),
        **policy.initial_state(1),
    }
    return ModelFolder(
        path=folder,
        script=SCRIPTS / "mlflow_model.py",
        inputs=inputs,
        outputs=policy.step(**inputs),
        requirements=tuple(f"{name}=={_public_version(name)}" for name in NEEDS),
    )


def environment_of(folder: Path) -> EnvSpec | None:
    """The environment that the network in a model's folder was made for; None where there is no such record."""
    try:
        return EnvSpec.from_json(json.loads((folder / SPEC).read_bytes())["environment"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _public_version(package: str) -> str:
    """Without the build (``+cpu``), which no index but torch's own knows."""
    return importlib.metadata.version(package).partition("+")[0]
