"""Networks and state as bytes, and what damaged bytes are called."""

import numpy as np
import pytest
import torch
from safetensors.torch import save

from r2d2.networks import build_network
from r2d2.serialize import network_of, params_from_bytes, params_to_bytes, tensors_from_bytes, tensors_to_bytes

LINEAGE = bytes(range(16))


@pytest.fixture
def network(image_spec, generator):
    return build_network(image_spec, generator).to(memory_format=torch.channels_last)


def test_parameters_come_back_bit_equal_with_all_that_acting_needs(network):
    parameters = params_from_bytes(params_to_bytes(network, 12, LINEAGE))
    assert (parameters.version, parameters.lineage, parameters.spec) == (12, LINEAGE, network.spec)
    again = network_of(parameters)
    for name, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_equal_networks_give_equal_bytes(network):
    assert params_to_bytes(network, 1, LINEAGE) == params_to_bytes(network, 1, LINEAGE)


def test_tensors_of_any_shape_and_plain_values_come_back():
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "steps": torch.arange(4)}
    again, values = tensors_from_bytes(tensors_to_bytes(tensors, {"updates": 7, "name": "x"}))
    assert values == {"updates": 7, "name": "x"}
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_torn_bytes_are_a_value_error_at_any_length(network, keep):
    with pytest.raises(ValueError, match="no complete safetensors object"):
        params_from_bytes(params_to_bytes(network, 1, LINEAGE)[:keep])


def test_foreign_safetensors_are_refused():
    with pytest.raises(ValueError, match="not written by this project"):
        params_from_bytes(save({"x": torch.zeros(2)}))
    with pytest.raises(ValueError, match="no JSON"):
        params_from_bytes(save({"x": torch.zeros(2)}, metadata={"r2d2": "{"}))
    with pytest.raises(ValueError, match=r"no parameters of a network.*spec"):
        params_from_bytes(tensors_to_bytes({"x": torch.zeros(2)}, {"version": 1}))


def test_tensors_that_do_not_fit_their_description_are_named(network):
    tensors, values = tensors_from_bytes(params_to_bytes(network, 1, LINEAGE))
    for change, message in (
        ({"value.bias": torch.zeros(2)}, r"value.bias has shape \(2,\); allowed: \(1,\)"),
        ({"extra": torch.zeros(1)}, "extra is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            network_of(params_from_bytes(tensors_to_bytes({**tensors, **change}, values)))
    del tensors["value.bias"]
    with pytest.raises(ValueError, match=r"value\.bias is missing"):
        network_of(params_from_bytes(tensors_to_bytes(tensors, values)))
