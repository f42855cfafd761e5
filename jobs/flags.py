"""Flags that several jobs share, and how the unset ones are filled: from the dataset's terms, else from the preset."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jobs.command_line import Repeatable, parse, peek
from jobs.console import warn
from jobs.presets import DEFAULT_PRESET, Preset, preset_named
from pipeline.dataset import read_terms
from pipeline.environments import EnvironmentConfig
from pipeline.file_system import network_file_system
from pipeline.store import DEFAULT_CACHE_BYTES, Store, open_store
from pipeline.tracking import DEFAULT_URI, TrackingConfig
from schemas.specs import EnvSpec
from schemas.terms import DatasetTerms


@dataclass(frozen=True, kw_only=True)
class DatasetFlags:
    """Which dataset and which environment. What is not given is the dataset's, or the preset's for a new dataset.

    Attributes:
        dataset: folder of the dataset, or ``s3://bucket/prefix`` (``gs://``, ``az://``: not tested); default
            ``data/<game>``.
        cache_gb: of an object store's shards, gigabytes kept on this machine; the least recently used go first.
        preset: ``laptop``, ``paper`` or ``article``: the defaults of all other flags. Default: laptop, but windows and
            core of an existing dataset.
        env: a gymnasium id such as ``ALE/Pong-v5`` (default) or ``CartPole-v1``, or ``module:EnvId``.
        env_arg: ``name=value``, repeatable: an argument of the environment, such as ``noop_max=0``.
        sticky: Atari: probability of repeating the previous action (paper: 0).
        life_loss: ``off`` (paper), ``roll`` (zero discount at a lost life) or ``reset`` (a boundary too).
    """

    dataset: str | None = None
    cache_gb: float = DEFAULT_CACHE_BYTES / 1e9
    preset: str | None = None
    env: str | None = None
    env_arg: Repeatable = ()
    sticky: float | None = None
    life_loss: str | None = None

    def __post_init__(self) -> None:
        if self.env == "":
            raise ValueError("env is ''; allowed: a gymnasium id or module:EnvId")
        if self.cache_gb <= 0:
            raise ValueError(f"cache_gb is {self.cache_gb}; allowed: above 0")

    def store(self) -> Store:
        return open_store(dataset_uri(self.dataset, self.env), cache_bytes=int(self.cache_gb * 1e9))

    def open_store(self) -> Store:
        """The store, with a warning where its promises do not hold."""
        store = self.store()
        if not store.is_remote and (kind := network_file_system(Path(store.uri))):
            warn(f"{store.uri} lies on a network file system ({kind}): datasets are only safe on local disks")
        return store

    def names_identity(self) -> bool:
        """Any flag that speaks of the environment was given."""
        return bool(self.env_arg) or any(v is not None for v in (self.env, self.sticky, self.life_loss))

    def environment(self, preset: Preset, terms: DatasetTerms | None) -> EnvironmentConfig:
        """The environment meant: the dataset's identity or the preset's, with what the flags say on top."""
        return self.over(preset.environment if terms is None else configuration_of(terms.env))

    def over(self, base: EnvironmentConfig) -> EnvironmentConfig:
        """``base`` with what the flags say on top."""
        given = dict(_argument(text) for text in self.env_arg)
        is_same = self.env is None or self.env == base.env_id
        # Another kind of environment takes none of the arguments meant for the first.
        keeps = is_same or ((self.env or "").startswith("ALE/") and base.env_id.startswith("ALE/"))
        return EnvironmentConfig(
            env_id=self.env or base.env_id,
            arguments={**(base.arguments if keeps else {}), **given},
            sticky=base.sticky if self.sticky is None else self.sticky,
            life_loss=self.life_loss or base.life_loss,
        )


@dataclass(frozen=True, kw_only=True)
class TrackingFlags:
    """Where the run is logged.

    Attributes:
        tracking_uri: an MLflow tracking URI, or ``none``. A relative sqlite file lies in the current folder.
        experiment: MLflow experiment, made when it is missing.
        run_name: name of this run, drawn when not given; a learner publishes under ``runs/<name>`` of its dataset.
        parent_run_id: MLflow run id of the sweep that this run is a part of.
    """

    tracking_uri: str = DEFAULT_URI
    experiment: str = "r2d2"
    run_name: str | None = None
    parent_run_id: str | None = None

    def __post_init__(self) -> None:
        TrackingConfig(uri=self.tracking_uri)
        if self.run_name is not None:
            check_run_name(self.run_name)


def configuration_of(env: EnvSpec) -> EnvironmentConfig:
    """How to make such an environment again."""
    return EnvironmentConfig(
        env_id=env.env_id, arguments=dict(env.arguments), sticky=env.sticky, life_loss=env.life_loss
    )


class JobFlags(Protocol):
    """A job's whole set of flags."""

    @property
    def source(self) -> DatasetFlags: ...

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> Any: ...


Flags = TypeVar("Flags", bound=JobFlags)


def read_flags(kind: type[Flags], argv: Sequence[str], program: str) -> tuple[Flags, Preset, DatasetTerms | None]:
    """Parse a job's flags over the defaults that its dataset and preset give.

    Returns flags, preset, and the dataset's terms, None when there is no dataset yet.

    Raises:
        ValueError: an unknown preset, or a dataset whose terms cannot be read.
    """
    given = peek(argv, "dataset", "preset", "env")
    preset = preset_named(given["preset"] or DEFAULT_PRESET)
    terms = read_terms(open_store(dataset_uri(given["dataset"], given["env"])))
    # A preset named on the command line is meant: its windows and core are judged against the dataset's.
    default = kind.defaults(preset, None if given["preset"] else terms)
    return parse(kind, argv, default, program), preset, terms


def check_run_name(name: str) -> None:
    """Raise ValueError unless ``name`` can be a folder's on any system, and one level of it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise ValueError(f"run_name is {name!r}; allowed: letters, digits, '.' and '-'")


def dataset_uri(dataset: str | None, env: str | None) -> str:
    if dataset:
        return dataset
    game = (env or "ALE/Pong-v5").split("/")[-1].split(":")[-1]
    return f"data/{re.sub(r'-v[0-9]+$', '', game).lower()}"


def default_threads(*, for_learner: bool) -> int:
    """Half the cores each, the odd one to the learner: collector and learner share a machine by default."""
    cores = os.cpu_count() or 1
    return max(1, cores - cores // 2 if for_learner else cores // 2)


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"env_arg is {text!r}; allowed: name=value")
    try:
        return name, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return name, value
