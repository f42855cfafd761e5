"""The Q-value discrepancy: by hand, zero where states are right, and larger for each thing done wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.diagnostics import STRATEGIES, largest_q, q_discrepancy, window_discrepancies
from r2d2.networks import build_network
from schemas.geometry import TERMINATED
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import cut, join, play, sample_of


@pytest.fixture(scope="module")
def sample(make_learner):
    network = make_learner().network
    return sample_of(join([cut(play(network, 30, TERMINATED, seed), GEOMETRY)[0] for seed in range(6)]))


def test_discrepancy_by_hand():
    """A distance of 5 over a largest value of 10; the larger -20 does not count, nor does an invalid row."""
    replayed, stored = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    q = torch.tensor([[[3.0, -20.0]], [[10.0, 1.0]], [[99.0, 0.0]]])
    mask = torch.tensor([[True], [True], [False]])
    assert largest_q(q, mask).tolist() == [10.0]
    assert q_discrepancy(replayed, stored, largest_q(q, mask)).tolist() == [0.5]
    assert q_discrepancy(replayed, stored, torch.tensor([-10.0])).tolist() == [0.5]


def test_an_unchanged_network_has_no_discrepancy_in_its_own_experience(make_learner, sample):
    metrics = make_learner().step(sample).metrics
    assert metrics["dq_first"] < 1e-5
    assert metrics["dq_last"] < 1e-5


def test_the_live_metrics_are_those_of_the_full_strategy(make_learner, sample):
    learner = make_learner(seed=1)
    found = learner.discrepancies(sample)
    assert found.keys() == {f"dq_{row}/{strategy}" for row in ("first", "last") for strategy in STRATEGIES}
    metrics = learner.step(sample).metrics
    assert metrics["dq_first"] == pytest.approx(found["dq_first/both"], rel=1e-4)
    assert metrics["dq_last"] == pytest.approx(found["dq_last/both"], rel=1e-4)


def test_strategies_are_what_their_names_say(make_learner, sample):
    """With the weights that acted, a stored state is exact, zeros are not, and burn-in mends some of it."""
    found = make_learner().discrepancies(sample)
    assert found["dq_first/stored"] < 1e-6
    assert found["dq_first/both"] < 1e-5
    assert found["dq_first/zero"] > found["dq_first/burn_in"] > 1e-3
    assert found["dq_last/zero"] > 1e-5
    changed = make_learner(seed=1).discrepancies(sample)
    assert changed["dq_first/stored"] < 1e-6
    assert changed["dq_first/both"] > 1e-3


@pytest.mark.parametrize(
    "fault", ["zeroed states", "states one step late", "burn-in skipped from the first valid state"]
)
def test_wrong_states_show_in_dq_first(make_learner, sample, fault):
    learner, batch = make_learner(), sample.batch
    if fault == "zeroed states":
        batch = replace(batch, core=tuple(np.zeros_like(part) for part in batch.core))
        sees = learner.step(replace(sample, batch=batch)).metrics["dq_first"]
    elif fault == "states one step late":
        late = {row: tuple(np.roll(part, 1, axis=0) for part in getattr(batch, row)) for row in ("core", "unroll_core")}
        sees = learner.step(replace(sample, batch=replace(batch, **late))).metrics["dq_first"]
    else:
        window = learner.load(batch)
        features = learner.network.encode(window.stack(4, 12)).transpose(0, 1)
        q, _ = learner.network.unroll(features, *window.previous(4, 12), window.core)
        sees = window_discrepancies(learner.network, window, q, features[0], features[-1])[0].mean().item()
    assert sees > 1e-3


def test_the_last_row_is_measured_on_probed_sequences_alone(make_learner, sample):
    """Only sequence 2 carries a probe, and the network is not the one that acted."""
    keep = sample.batch.probes == 2
    probe = tuple(part[keep] for part in sample.batch.probe_core)
    one = replace(sample, batch=replace(sample.batch, probes=np.array([2]), probe_core=probe))
    learner = make_learner(seed=1)
    window = learner.load(one.batch)
    assert window.probes.tolist() == [2]
    only = sample_of(join([cut(play(make_learner().network, 30, TERMINATED, 0), GEOMETRY)[0]]))
    expected = learner.discrepancies(only)
    assert learner.discrepancies(one)["dq_last/both"] > 0
    everywhere = learner.load(only.batch)
    assert len(everywhere.probes) > 1
    assert expected["dq_first/both"] > 0


def test_a_shortened_unroll_ends_where_no_state_is_stored(make_learner, sample):
    used = replace(GEOMETRY, unroll=4)
    metrics = make_learner(geometry=used).step(sample).metrics
    assert "dq_last" not in metrics
    assert metrics["dq_first"] < 1e-5


def test_looking_changes_nothing(make_learner, sample):
    learner, control = make_learner(), make_learner()
    learner.discrepancies(sample)
    assert learner.step(sample).metrics == control.step(sample).metrics


def test_a_network_without_recurrence_has_none(make_learner, vector_spec):
    spec = replace(vector_spec, core=type(vector_spec.core)(kind="none"))
    network = build_network(spec, torch.Generator().manual_seed(3))
    metrics = make_learner(spec=spec).step(sample_of(cut(play(network, 20, TERMINATED, 0), GEOMETRY)[0])).metrics
    assert metrics["dq_first"] < 1e-5
