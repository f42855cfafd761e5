"""Wrong core states, through real shards and a frozen network: golden Q-equality breaks, and dQ_first shows it.

Without sabotage the state that training arrives at is the one the actor had, so dQ_first is rounding alone.
"""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.environments import EnvironmentConfig
from pipeline.sequences import SequenceBuilder
from r2d2 import training_pass as training_pass_module
from r2d2.config import LearnerConfig
from r2d2.learner import Learner
from schemas.geometry import SequenceGeometry
from schemas.records import ReplaySample
from schemas.specs import CoreSpec
from tests import golden_replay
from tests.golden_replay import LINEAGE, Golden, check_all, collect_golden
from tests.test_sabotage import StateOneStepLate

GEOMETRY = SequenceGeometry(burn_in=4, unroll=8, bootstrap=3, stride=4, frame_stack=1)
ROUNDING, SHOWS = 1e-5, 1e-3


class ZeroedStates(SequenceBuilder):
    """No state is stored."""

    def _cut_window(self, lane):
        sequence = super()._cut_window(lane)
        return replace(sequence, core=tuple(np.zeros_like(part) for part in sequence.core))


def burn_in_skipped(monkeypatch):
    """The state before the first valid row is taken for that before the first trained one."""
    for module in (training_pass_module, golden_replay):
        monkeypatch.setattr(module, "burn_in", lambda network, features, window, start: start)


def golden_run(tmp_path, builder_class=SequenceBuilder) -> Golden:
    return collect_golden(
        tmp_path,
        environment=EnvironmentConfig(env_id="CartPole-v1", arguments={"max_episode_steps": 40}),
        geometry=GEOMETRY,
        core=CoreSpec(kind="lstm", layers=1, width=16),
        lanes=3,
        calls=90,
        builder_class=builder_class,
    )


def dq_first(golden: Golden) -> float:
    """What a learner with the weights that acted reports of this experience."""
    learner = Learner(golden.network.spec, LearnerConfig(), geometry=GEOMETRY, stored=GEOMETRY, lineage=LINEAGE)
    for network in (learner.network, learner.target):
        network.load_state_dict(golden.network.state_dict())
    count = len(golden.rows)
    sample = ReplaySample(
        ids=np.arange(count), probabilities=np.full(count, 1 / count), replay_sequences=count, batch=golden.batch
    )
    return learner.step(sample).metrics["dq_first"]


def test_right_states_show_nothing(tmp_path):
    golden = golden_run(tmp_path)
    check_all(golden)
    assert dq_first(golden) < ROUNDING


@pytest.mark.parametrize("builder_class", [ZeroedStates, StateOneStepLate])
def test_sabotage_of_stored_states_shows(tmp_path, builder_class):
    golden = golden_run(tmp_path, builder_class)
    with pytest.raises(AssertionError):
        check_all(golden)
    assert dq_first(golden) > SHOWS


def test_sabotage_of_the_burn_in_shows(tmp_path, monkeypatch):
    golden = golden_run(tmp_path)
    burn_in_skipped(monkeypatch)
    with pytest.raises(AssertionError):
        check_all(golden)
    assert dq_first(golden) > SHOWS
