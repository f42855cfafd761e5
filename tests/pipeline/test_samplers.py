import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.samplers import Draw, ProportionalSampler, UniformSampler


class OffByOneSampler(ProportionalSampler):
    """Wrong on purpose: gives the neighbour of what was drawn."""

    def draw(self, batch_size, generator):
        ids, probabilities = super().draw(batch_size, generator)
        return Draw((ids + 1) % 400, probabilities)


def fits(sampler, weights, draws=64_000, batch_size=64):
    """Do the draws follow the weights? Pearson's chi-square at about 1 in 300,000; a draw of weight 0 never fits."""
    generator = np.random.default_rng(5)
    counts = np.zeros(len(weights))
    for _ in range(draws // batch_size):
        ids, _ = sampler.draw(batch_size, generator)
        np.add.at(counts, ids, 1)
    if counts[weights == 0].any():
        return False
    expected = weights / weights.sum() * draws
    rare = expected < 5  # Too few to judge each: judged together.
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic, freedom = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum(), len(counts) - 1
    # Wilson and Hilferty's approximation of the quantile at 4.5 standard deviations.
    return statistic < freedom * (1 - 2 / (9 * freedom) + 4.5 * np.sqrt(2 / (9 * freedom))) ** 3


def mixed_weights(kind):
    weights = np.random.default_rng(3).uniform(0.5, 1.5, 400)
    if kind == "zero":
        weights[::3] = 0
    elif kind == "tiny":
        weights[::2] = 1e-12
        weights[0] = weights[-1] = 0
    elif kind == "huge":
        weights[[7, 300]] = 300.0
        weights[::5] = 1e-3
        weights[399] = 0
    return weights


@pytest.mark.parametrize("kind", ["plain", "zero", "tiny", "huge"])
def test_draws_follow_the_weights_and_the_test_can_tell(kind):
    weights = mixed_weights(kind)
    verdicts = {}
    for sampler in (ProportionalSampler(400), UniformSampler(400), OffByOneSampler(400)):
        sampler.set(np.arange(400), weights)
        verdicts[type(sampler).__name__] = fits(sampler, weights)
    assert verdicts == {"ProportionalSampler": True, "UniformSampler": False, "OffByOneSampler": False}


def test_draws_follow_the_weights_after_a_million_updates():
    sampler, generator = ProportionalSampler(400), np.random.default_rng(9)
    weights = np.zeros(400)
    for _ in range(500):
        ids = generator.integers(0, 400, 2000)
        values = generator.choice([0.0, 1e-9, 1.0, 3.0, 1e12], 2000)
        sampler.set(ids, values)
        weights[ids] = values
    last = generator.choice([0.0, 1e-9, 1.0, 3.0, 50.0], 400)
    sampler.set(np.arange(400), last)  # No trace may be left of the 1e12 that stood nearly everywhere.
    assert fits(sampler, last)
    assert not fits(sampler, np.roll(last, 1))


def test_uniform_draws_are_uniform_over_what_may_be_drawn():
    sampler = UniformSampler(400)
    weights = mixed_weights("zero")
    sampler.set(np.arange(400), weights)
    assert fits(sampler, (weights > 0).astype(float))
    assert not fits(sampler, weights)
    probabilities = sampler.draw(8, np.random.default_rng(0)).probabilities
    np.testing.assert_allclose(probabilities, 1 / np.count_nonzero(weights))


def test_a_batch_is_stratified():
    """Each id comes up about B * probability times in every single batch, which independent draws would not give."""
    sampler, weights = ProportionalSampler(5), np.array([1.0, 2.0, 4.0, 8.0, 1.0])
    sampler.set(np.arange(5), weights)
    generator = np.random.default_rng(2)
    for _ in range(200):
        ids, probabilities = sampler.draw(64, generator)
        np.testing.assert_allclose(probabilities, weights[ids] / 16)
        assert (np.abs(np.bincount(ids, minlength=5) - 64 * weights / 16) < 2).all()


def test_the_generator_decides_the_draws():
    sampler = ProportionalSampler(50)
    sampler.set(np.arange(50), np.arange(50.0))
    first = [sampler.draw(4, np.random.default_rng(7)).ids.tolist() for _ in range(2)]
    assert first[0] == first[1] != sampler.draw(4, np.random.default_rng(8)).ids.tolist()


@pytest.mark.parametrize("kind", [ProportionalSampler, UniformSampler])
def test_nothing_to_sample_is_an_error(kind):
    sampler = kind(4)
    with pytest.raises(ValueError, match="nothing to sample"):
        sampler.draw(1, np.random.default_rng(0))
    sampler.set(np.arange(2), np.zeros(2))
    with pytest.raises(ValueError, match="nothing to sample"):
        sampler.draw(1, np.random.default_rng(0))


@pytest.mark.parametrize("kind", [ProportionalSampler, UniformSampler])
@given(data=st.data(), capacity=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_a_ring_draws_only_the_newest_ids_with_the_probability_of_a_plain_dictionary(kind, data, capacity):
    sampler, model, next_id = kind(capacity), {}, 0
    for _ in range(data.draw(st.integers(1, 6))):
        added = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0, 1e20]), max_size=capacity))
        ids = np.arange(next_id, next_id + len(added))
        sampler.set(ids, np.array(added))
        model.update(zip(ids.tolist(), added, strict=True))
        next_id += len(added)
        model = {i: weight for i, weight in model.items() if i >= next_id - capacity}
        if model:
            changed = data.draw(st.lists(st.sampled_from(sorted(model)), max_size=5))
            sampler.set(np.array(changed, np.int64), np.full(len(changed), 3.0))
            model.update(dict.fromkeys(changed, 3.0))
        if kind is UniformSampler:
            chance = {i: 1.0 for i, weight in model.items() if weight > 0}
        else:
            chance = model
        if sum(chance.values()) == 0:
            continue
        ids, probabilities = sampler.draw(16, np.random.default_rng(next_id))
        assert set(ids.tolist()) <= {i for i, weight in chance.items() if weight > 0}
        np.testing.assert_allclose(probabilities, [chance[i] / sum(chance.values()) for i in ids.tolist()], rtol=1e-12)
