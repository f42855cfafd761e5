"""The terms of a dataset: what every job that writes to it or reads from it must agree on (``dataset.json``)."""

import json
from dataclasses import dataclass
from typing import Any

from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec, EnvSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DatasetTerms:
    """Identity (``env``, ``schema_version``), window and core state of a dataset.

    Seeds, versions and hosts are provenance: recorded per collector, never compared.
    """

    env: EnvSpec
    geometry: SequenceGeometry
    core: CoreSpec
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        parts = {
            "schema_version": self.schema_version,
            "identity": self.env.to_json(),
            "window": self.geometry.to_json(),
            "core": self.core.to_json(),
        }
        return json.dumps(parts, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "DatasetTerms":
        """Raises ValueError naming what is wrong: not JSON, a missing field, or a later schema version."""
        try:
            value = json.loads(data)
            version = value["schema_version"]
            if version > SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version}; allowed: at most {SCHEMA_VERSION}, update the project")
            return cls(
                env=EnvSpec.from_json(value["identity"]),
                geometry=SequenceGeometry(**value["window"]),
                core=CoreSpec(**value["core"]),
                schema_version=version,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"dataset.json is not the terms of a dataset: {error!r}") from error

    def differences(self, other: "DatasetTerms") -> list[str]:
        """One line for each field that differs, as ``identity.sticky: 0.0 here, 0.25 there``; empty when equal.

        Of two datasets of different environments that alone is said: everything else differs in consequence.
        """
        if self.env.env_id != other.env.env_id:
            return [f"identity.env_id: {self.env.env_id} here, {other.env.env_id} there"]
        ours, theirs = json.loads(self.to_bytes()), json.loads(other.to_bytes())
        return list(_differences("", ours, theirs))


def _differences(path: str, ours: Any, theirs: Any):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from _differences(f"{path}.{key}" if path else key, ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield f"{path}: {ours} here, {theirs} there"
