"""Networks and learner state as bytes: safetensors with one JSON entry in its metadata. No pickle."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from r2d2.config import NetworkSpec
from r2d2.networks import R2D2Network, empty_network

ENTRY = "r2d2"  # One entry, because safetensors writes several in an order that changes from run to run.


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """A network at one version of one lineage (16 bytes); ``tensors`` are named as in its state dict, on the CPU.

    ``acting``: its learner's ``LearnerConfig.acting_values``; None when nobody said.
    """

    spec: NetworkSpec
    tensors: dict[str, Tensor]
    version: int
    lineage: bytes
    acting: dict[str, Any] | None = None


def network_of(parameters: Parameters) -> R2D2Network:
    """A network of its own with these parameters, on the CPU.

    Raises:
        ValueError: the tensors are not those of the description.
    """
    network = empty_network(parameters.spec)
    load_tensors(network, parameters.tensors, "parameters")
    return network


def params_to_bytes(network: R2D2Network, version: int, lineage: bytes, acting: dict[str, Any] | None = None) -> bytes:
    """Parameters and all that is needed to act with them; equal inputs give equal bytes."""
    values = {"spec": network.spec.to_json(), "version": version, "lineage": lineage.hex(), "acting": acting}
    return tensors_to_bytes(network.state_dict(), values)


def params_from_bytes(data: bytes) -> Parameters:
    """The inverse of ``params_to_bytes``; of a learner's whole saved state, its online network.

    Raises:
        ValueError: naming what is wrong with ``data``.
    """
    tensors, values = tensors_from_bytes(data)
    try:
        return Parameters(
            spec=NetworkSpec.from_json(values["spec"]),
            tensors=tensors_under("network", tensors) or tensors,
            version=int(values["version"]),
            lineage=bytes.fromhex(values["lineage"]),
            acting=values.get("acting"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no parameters of a network: {error!r}") from error


def tensors_to_bytes(tensors: dict[str, Tensor], values: dict[str, Any]) -> bytes:
    """Named tensors, from any device, and JSON values."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(on_cpu, metadata={ENTRY: json.dumps(values, sort_keys=True)})


def tensors_from_bytes(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of ``tensors_to_bytes``; tensors on the CPU.

    Raises:
        ValueError: naming what is wrong with ``data``.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"{len(data)} bytes are no complete safetensors object: {error}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = header.get("__metadata__", {}).get(ENTRY)
    if entry is None:
        raise ValueError(f"a safetensors object without the entry {ENTRY!r}: not written by this project")
    try:
        return tensors, json.loads(entry)
    except json.JSONDecodeError as error:
        raise ValueError(f"the entry {ENTRY!r} is no JSON: {error}") from error


def tensors_under(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named ``part.something``, as ``something``."""
    return {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}


def load_tensors(module: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Copy ``tensors`` into all of ``module``'s parameters.

    Raises:
        ValueError: naming the first one that is missing, unknown or of another shape; nothing is copied.
    """
    own = module.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors:
            raise ValueError(f"{what}: {name} is {'unknown' if name not in own else 'missing'}")
        if own[name].shape != tensors[name].shape:
            wanted, found = tuple(own[name].shape), tuple(tensors[name].shape)
            raise ValueError(f"{what}: {name} has shape {found}; allowed: {wanted}")
    with torch.no_grad():
        module.load_state_dict(tensors)
