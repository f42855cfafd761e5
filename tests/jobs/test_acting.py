"""The acting side takes over from its learner's parameters all that it needs to price sequences."""

import numpy as np
import pytest
import torch

from jobs.acting import ActingPolicy
from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.networks import build_network
from r2d2.priorities import initial_priorities
from r2d2.serialize import params_to_bytes
from schemas.geometry import TERMINATED, SequenceGeometry
from schemas.specs import ArraySpec, CoreSpec, EnvSpec
from schemas.terms import DatasetTerms
from tests.r2d2.episodes import LINEAGE, cut, play

GEOMETRY = SequenceGeometry(burn_in=2, unroll=6, bootstrap=2, stride=3, frame_stack=1)
CORE = CoreSpec(kind="lstm", width=8)
OBSERVATION = ArraySpec(shape=(3,), dtype="float32")
PRESET = LearnerConfig()
OURS = LearnerConfig(gamma=0.9, eta=0.3, rescaling=False, learning_rate=1e-5)


@pytest.fixture(scope="module")
def network():
    spec = NetworkSpec(
        observation=OBSERVATION, num_actions=3, frame_stack=1, convolutions=(), dense=(8,), core=CORE, dueling_width=8
    )
    return build_network(spec, torch.Generator().manual_seed(0))


@pytest.fixture
def policy():
    env = EnvSpec(env_id="Made-Up-v0", observation=OBSERVATION, action_set=("a", "b", "c"))
    terms = DatasetTerms(env=env, geometry=GEOMETRY, core=CORE)
    return ActingPolicy(terms, PRESET, [2], None, np.random.default_rng(0), "cpu")


def test_sequences_are_priced_as_the_learner_whose_parameters_act_would(network, policy):
    batch, q_values = cut(play(network, 17, TERMINATED, 0), GEOMETRY)
    by_preset = initial_priorities(batch, q_values, GEOMETRY, PRESET, "off")
    by_learner = initial_priorities(batch, q_values, GEOMETRY, OURS, "off")
    assert not np.allclose(by_preset, by_learner, rtol=0.01)
    np.testing.assert_allclose(policy.initial_priorities(batch, q_values), by_preset, rtol=1e-6)
    policy.use_published(params_to_bytes(network, 1, LINEAGE))  # Nobody said how: the preset's values stand.
    np.testing.assert_allclose(policy.initial_priorities(batch, q_values), by_preset, rtol=1e-6)
    policy.use_published(params_to_bytes(network, 2, LINEAGE, OURS.acting_values()))
    np.testing.assert_allclose(policy.initial_priorities(batch, q_values), by_learner, rtol=1e-6)


def test_acting_values_that_make_no_sense_are_refused_and_the_network_is_not_taken_up(network, policy):
    for values in ({"gamma": 0.9}, {**OURS.acting_values(), "gamma": 2}):
        with pytest.raises(ValueError, match="allowed"):
            policy.use_published(params_to_bytes(network, 1, LINEAGE, values))
        assert policy.version == -1
