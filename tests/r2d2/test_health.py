"""Each trouble is made on purpose and named; a learner that is well is left in peace."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from r2d2.health import (
    LEARNER_TROUBLES,
    MACHINE_TROUBLES,
    STALE_UPDATES,
    TELLING_UPDATES,
    LearnerWatch,
    MemoryLimit,
    SpeedLimit,
    memory_near_limit,
    never_copied,
    slow_collector,
    value_bound,
)
from schemas.geometry import TERMINATED
from schemas.shard import NO_LINEAGE
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import cut, join, play, sample_of

MANY = TELLING_UPDATES


@pytest.fixture(scope="module")
def samples(make_learner):
    """Experience of the learner's own network, in several versions."""
    network, found = make_learner().network, []
    for seed in range(3):
        batches = [cut(play(network, 14, TERMINATED, 9 * seed + v), GEOMETRY, version=v)[0] for v in range(3)]
        found.append(sample_of(join(batches), seed=seed))
    return found


@pytest.fixture(scope="module")
def outputs(make_learner, samples):
    learner = make_learner()
    return [learner.step(sample) for sample in samples]


@pytest.fixture
def learner(make_learner):
    return make_learner()


@pytest.fixture
def report(samples, outputs):
    """Names of the troubles after a few updates, which ``change`` may spoil: (sample, output, applied) to the same.

    The updates were done beforehand by a twin, unless ``learns``.
    """

    def report(learner, updates=MANY, change=lambda *update: update, learns=False) -> set[str]:
        watch = LearnerWatch(learner)
        for number in range(updates):
            sample, output = samples[number % len(samples)], outputs[number % len(samples)]
            if learns:
                output = learner.step(sample)
            watch.saw(*change(sample, output, len(output.priorities)))
        troubles = watch.report()
        assert all(trouble.line.count("\n") == 0 and ":" in trouble.line for trouble in troubles)
        assert watch.report() == []
        return {trouble.name for trouble in troubles}

    return report


def changed_batch(**columns):
    return lambda sample, output, applied: (
        replace(sample, batch=replace(sample.batch, **{name: make(sample.batch) for name, make in columns.items()})),
        output,
        applied,
    )


def lineage_of(lineage: bytes):
    return lambda batch: np.tile(np.frombuffer(lineage, np.uint8), (len(batch), 1))


def test_a_learner_that_is_well_is_left_in_peace(learner, report):
    assert report(learner, learns=True) == set()
    assert report(learner, updates=2) == set()


def test_a_loss_that_is_not_finite(learner, report):
    def change(sample, output, applied):
        return sample, replace(output, updated=False, metrics={**output.metrics, "loss": np.nan}), 0

    assert "not_finite" in report(learner, updates=1, change=change)


def test_a_constant_loss(learner, report):
    def change(sample, output, applied):
        return sample, replace(output, metrics={**output.metrics, "loss": 0.25}), applied

    assert report(learner, change=change) == {"loss_constant"}
    assert report(learner, updates=MANY - 1, change=change) == set()


def test_priorities_that_are_equal_or_never_arrive(learner, report):
    def equal(sample, output, applied):
        return sample, replace(output, priorities=np.ones(len(output.priorities))), applied

    assert report(learner, change=equal) == {"priorities_equal"}
    assert report(learner, change=lambda sample, output, _: (sample, output, 0)) == {"priorities_frozen"}


def test_a_target_network_that_is_never_copied(make_learner, report, monkeypatch):
    well = make_learner(target_copy_updates=7, learning_rate=1e-3)
    assert report(well, learns=True) == set()
    broken = make_learner(target_copy_updates=7, learning_rate=1e-3)
    monkeypatch.setattr(broken, "_copy_target", lambda: None)
    assert report(broken, learns=True) == {"target_not_copied"}


def test_a_run_too_short_for_a_single_copy():
    assert [trouble.name for trouble in never_copied(200, 0, 1000)] == ["target_not_copied"]
    assert never_copied(200, 0, 200) == never_copied(None, 0, 1000) == never_copied(1100, 950, 1000) == []
    assert len(never_copied(1900, 1050, 1000)) == 1


def test_experience_of_one_old_version_only(learner, report):
    learner.updates = STALE_UPDATES + 2
    one = changed_batch(version_last=lambda batch: np.full(len(batch), 2))
    assert report(learner, change=one) == {"one_version"}
    assert report(learner) == set()
    learner.updates = STALE_UPDATES + 1  # Not old enough yet.
    assert report(learner, change=one) == set()


def test_experience_acted_at_random_once_the_start_is_over(learner, report):
    random = changed_batch(lineage=lineage_of(NO_LINEAGE))
    assert report(learner, change=random) == set()
    learner.updates = STALE_UPDATES
    assert report(learner, change=random) == {"mostly_random"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"mostly_foreign"}), ({"initial_state": "zero"}, set()), ({"trust_stored_state": True}, set())],
    ids=str,
)
def test_states_of_other_networks_where_states_are_used(make_learner, report, options, expected):
    foreign = changed_batch(lineage=lineage_of(bytes([7] * 16)))
    assert report(make_learner(**options), change=foreign) == expected

    def a_few(batch):
        lineage = batch.lineage.copy()
        lineage[: len(batch) // 3] = 7
        return lineage

    assert report(make_learner(**options), change=changed_batch(lineage=a_few)) == set()


def test_values_no_return_can_reach(learner, report):
    """With rewards up to 1 and gamma 0.997 no return exceeds 333.3, which is 17.6 in h-space; here some reach 3."""
    assert value_bound(1.0, 0.997, 1e-3) == pytest.approx(17.618, abs=1e-3)
    assert value_bound(2.0, 0.75, None) == 8.0
    assert value_bound(1.0, 1.0, None) == np.inf
    with torch.no_grad():
        learner.network.value.bias += 15
    assert "q_runs_away" not in report(learner, updates=1, learns=True)
    with torch.no_grad():
        learner.network.value.bias += 60
    assert "q_runs_away" in report(learner, updates=1, learns=True)


def test_the_machine():
    assert [trouble.name for trouble in slow_collector(499, SpeedLimit())] == ["slow_collector"]
    assert slow_collector(500, SpeedLimit()) == slow_collector(3, SpeedLimit(least_frames_per_second=0)) == []
    limit = MemoryLimit(most_memory_share=0.9)
    (trouble,) = memory_near_limit(0.95, "the machine", limit)
    assert trouble.name == "memory_near_limit"
    assert "95% of the machine's memory" in trouble.line
    assert memory_near_limit(0.9, "the machine", limit) == memory_near_limit(None, "the GPU", limit) == []
    for share in (0, 1.1):
        with pytest.raises(ValueError, match=f"most_memory_share is {share}; allowed"):
            MemoryLimit(most_memory_share=share)
    with pytest.raises(ValueError, match="least_frames_per_second is -1; allowed"):
        SpeedLimit(least_frames_per_second=-1)


def test_every_trouble_has_a_counter_of_its_own():
    names = LEARNER_TROUBLES + MACHINE_TROUBLES
    assert len(set(names)) == len(names) == 11
