"""Tiny networks and learners."""

import numpy as np
import pytest
import torch

from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.learner import Learner
from schemas.geometry import SequenceGeometry
from schemas.specs import ArraySpec, CoreSpec
from tests.r2d2.episodes import LINEAGE

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=2)


@pytest.fixture(scope="session")
def vector_spec() -> NetworkSpec:
    return NetworkSpec(
        observation=ArraySpec(shape=(3,), dtype="float32"),
        num_actions=3,
        frame_stack=GEOMETRY.frame_stack,
        convolutions=(),
        dense=(8,),
        core=CoreSpec(kind="lstm", layers=1, width=8),
        dueling_width=8,
    )


@pytest.fixture(scope="session")
def image_spec() -> NetworkSpec:
    return NetworkSpec(
        observation=ArraySpec(shape=(10, 12), dtype="uint8"),
        num_actions=4,
        frame_stack=GEOMETRY.frame_stack,
        convolutions=((4, 4, 2), (6, 3, 1)),
        dense=(10,),
        core=CoreSpec(kind="lstm", layers=1, width=8),
        dueling_width=8,
    )


@pytest.fixture(scope="session")
def make_learner(vector_spec):
    """A learner on CPU; keyword arguments are its own, or fields of its configuration."""

    def make(
        *, spec=vector_spec, geometry=GEOMETRY, stored=GEOMETRY, life_loss="off", seed=0, lineage=LINEAGE, **config
    ):
        return Learner(
            spec,
            LearnerConfig(**config),
            geometry=geometry,
            stored=stored,
            life_loss=life_loss,
            seed=seed,
            lineage=lineage,
        )

    return make


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
