"""Names in a dataset, and the terms that its first collector writes.

    dataset.json                                                the terms
    collectors/<collector>.json                                 provenance of one collector incarnation
    shards/<collector>/<thousands>/<number>-<sequences>-<env_steps>.arrow

What a dataset holds is derived from listing it: there is no counter file that could disagree.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.store import Store
from schemas.terms import DatasetTerms

TERMS_NAME = "dataset.json"
SHARDS_PER_FOLDER = 1000
_SHARD_PATH = re.compile(r"shards/([A-Za-z0-9][A-Za-z0-9.-]*)/\d+/(\d+)-(\d+)-(\d+)\.arrow")


class ShardName(NamedTuple):
    """What a shard's name says: whose it is, its number, its sequences, and the env steps they own.

    A tuple, because a replay looks up dozens of them for every batch.
    """

    collector: str
    number: int
    sequences: int
    env_steps: int

    @property
    def path(self) -> str:
        folder = f"shards/{self.collector}/{self.number // SHARDS_PER_FOLDER:06d}"
        return f"{folder}/{self.number:09d}-{self.sequences}-{self.env_steps}.arrow"

    @classmethod
    def parse(cls, path: str) -> "ShardName | None":
        """The inverse of ``path``; None for any other text, so that one shard has one name only."""
        match = _SHARD_PATH.fullmatch(path)
        if match is None:
            return None
        name = cls(match[1], int(match[2]), int(match[3]), int(match[4]))
        return name if name.path == path else None


def new_collector_id(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """A name for one incarnation of a collector; a restarted process takes a new one."""
    return random_bytes(8).hex()


def list_collectors(store: Store) -> list[str]:
    """Every collector that has published a shard, sorted."""
    return store.folders("shards")


def shards_after(store: Store, collector: str, number: int) -> list[ShardName]:
    """Shards with a greater number than ``number`` (-1: all) in the order of their numbers.

    Lists only the folders that can hold such numbers, so following a collector costs the same however old it is.
    Files with other names are left out.
    """
    first = (number + 1) // SHARDS_PER_FOLDER
    found = []
    for thousands in store.folders(f"shards/{collector}"):
        if thousands.isdigit() and int(thousands) >= first:
            folder = f"shards/{collector}/{thousands}"
            found += [name for file in store.files(folder) if (name := ShardName.parse(f"{folder}/{file}")) is not None]
    return sorted(name for name in found if name.number > number)


def unknown_files(store: Store) -> list[str]:
    """Paths below ``shards/`` whose names are not those of shards."""
    found = [f"shards/{file}" for file in store.files("shards")]
    for collector in list_collectors(store):
        found += [f"shards/{collector}/{file}" for file in store.files(f"shards/{collector}")]
        for thousands in store.folders(f"shards/{collector}"):
            folder = f"shards/{collector}/{thousands}"
            paths = [f"{folder}/{name}" for name in store.files(folder) + store.folders(folder)]
            found += [path for path in paths if ShardName.parse(path) is None]
    return found


def read_terms(store: Store) -> DatasetTerms | None:
    """The terms of the dataset, None while nobody has created it. Raises ValueError when they cannot be read."""
    try:
        return DatasetTerms.from_bytes(store.get(TERMS_NAME))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{store.uri}/{TERMS_NAME} cannot be used: {error}") from error


def agree_on_terms(store: Store, terms: DatasetTerms) -> None:
    """Make ``terms`` those of the dataset, or find that they are already; durable when the call returns.

    Of two collectors that start at once one creates the file, the other reads it and compares.

    Raises:
        ValueError: one line that names each differing field with both values.
    """
    if store.create(TERMS_NAME, terms.to_bytes()):
        return
    stored = DatasetTerms.from_bytes(store.get(TERMS_NAME))
    if differences := terms.differences(stored):
        raise ValueError(f"the dataset has other terms: {'; '.join(differences)}")


def write_provenance(store: Store, collector: str, values: dict[str, Any]) -> None:
    """Record seed, command, commit, versions and host of one incarnation, durably, before its first shard."""
    store.put(_provenance_name(collector), json.dumps(values, indent=1, sort_keys=True).encode() + b"\n")


def read_provenance(store: Store, collector: str) -> dict[str, Any]:
    """Raises FileNotFoundError when ``collector`` left none."""
    return json.loads(store.get(_provenance_name(collector)))


def link_run(store: Store, collector: str, run_id: str) -> None:
    """Add to a collector's provenance the MLflow run that made its sequences, durably; only its own process may.

    Raises:
        OSError: the dataset is away; nothing was written.
    """
    write_provenance(store, collector, {**read_provenance(store, collector), "mlflow_run_id": run_id})


def _provenance_name(collector: str) -> str:
    return f"collectors/{collector}.json"
