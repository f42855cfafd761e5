"""What a person finds a run by in MLflow: tags, the description, and one short name for all its settings."""

import getpass
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from jobs.presets import DEFAULT_PRESET
from pipeline.provenance import commit
from pipeline.store import Store
from schemas.specs import EnvSpec

# What two runs may differ in and still be two tries of one thing. Flags of the environment, set or not, say less than
# its description, which is taken instead.
PER_RUN = frozenset({
    "seed", "run_name", "run_dir", "resume", "tracking_uri", "experiment", "parent_run_id", "dataset", "preset",
    "updates", "epochs", "max_minutes", "env_steps", "dry_run", "device", "threads", "checkpoint_seconds",
    "checkpoint_updates", "keep", "env", "env_arg", "sticky", "life_loss",
})  # fmt: skip


def run_tags(
    role: str, env: EnvSpec, *, store: Store | None = None, preset: str | None = None, seed: int | None = None,
    flags: dict[str, Any] | None = None, **more: str,
) -> dict[str, str]:  # fmt: skip
    """``settings`` is the same for runs that differ in their seed, names and limits alone: compare.py groups by it."""
    tags = {
        "role": role,
        "game": env.env_id,
        "preset": preset or DEFAULT_PRESET,
        "commit": commit(),
        "mlflow.source.name": f"jobs/{Path(sys.argv[0]).name}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit().partition("+")[0],
        "mlflow.user": _user(),
    }
    if seed is not None:
        tags["seed"] = str(seed)
    if store is not None:
        tags |= {"dataset": store.name, "dataset_uri": store.uri}
    if flags is not None:
        tags["settings"] = settings_of(env, flags)
    return tags | more


def settings_of(env: EnvSpec, flags: dict[str, Any]) -> str:
    """Eight hexadecimal digits of the environment as it is described and of all that ``flags`` add to it."""
    text = json.dumps({"identity": env.to_json(), "flags": _kept(flags)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def describe(doing: str, env: EnvSpec, store: Store | None, *, preset: str | None, seed: int | None) -> str:
    """One sentence for the top of the run's page."""
    where = f", dataset `{store.uri}`" if store is not None else ""
    drawn = f", seed {seed}" if seed is not None else ""
    return f"{doing} **{env.env_id}** with preset `{preset or DEFAULT_PRESET}`{drawn}{where}; commit `{commit()[:12]}`."


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items() if name not in PER_RUN}
    return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
