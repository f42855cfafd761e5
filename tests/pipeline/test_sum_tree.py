import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.sum_tree import FAN_OUT, SumTree


def tree_of(weights):
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), np.asarray(weights, np.float64))
    return tree


def test_root_is_exact_and_an_emptied_leaf_is_never_found_h_c1():
    tree = SumTree(8)
    for slot, weight in ((0, 1e8), (1, 1.0), (0, 0.0)):
        tree.set(np.array([slot]), np.array([weight]))
    assert tree.total == 1.0
    found = tree.find(np.random.default_rng(0).random(1000) * tree.total)
    assert set(found) == {1}


def test_root_does_not_drift_over_many_updates_h_c1():
    tree, generator = SumTree(64), np.random.default_rng(1)
    leaves = np.zeros(64)
    for _ in range(1000):
        slots, weights = generator.integers(0, 64, 100), generator.uniform(0.1, 5, 100)
        tree.set(slots, weights)
        leaves[slots] = weights
    assert abs(tree.total - leaves.sum()) <= 1e-12 * leaves.sum()
    tree.check_valid()


def test_an_empty_tree_has_nothing_to_sample_h_c1():
    tree = SumTree(5)
    with pytest.raises(ValueError, match="nothing to sample"):
        tree.find(np.zeros(1))
    tree.set(np.array([3]), np.array([2.0]))
    tree.set(np.array([3]), np.array([0.0]))
    with pytest.raises(ValueError, match="nothing to sample"):
        tree.find(np.zeros(1))


@pytest.mark.parametrize("capacity", [1, 2, FAN_OUT - 1, FAN_OUT, FAN_OUT + 1, FAN_OUT**2 + 1, 3 * FAN_OUT**2])
def test_find_is_the_first_running_sum_above_u_at_any_capacity(capacity):
    weights = np.random.default_rng(capacity).integers(0, 4, capacity).astype(np.float64)
    weights[-1] = 1.0
    tree = tree_of(weights)
    prefix_sums = np.arange(0, tree.total, 0.5)  # Small integers sum without rounding: every border is met exactly.
    np.testing.assert_array_equal(tree.find(prefix_sums), np.searchsorted(weights.cumsum(), prefix_sums, side="right"))


@given(
    capacity=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-300, 1e-12, 1.0, 1e30]),
    share=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_no_prefix_sum_finds_a_leaf_of_weight_zero(capacity, seed, scale, share):
    generator = np.random.default_rng(seed)
    weights = generator.random(capacity) ** 20 * scale * (generator.random(capacity) < share)
    tree = tree_of(weights)
    tree.check_valid()
    if tree.total == 0:
        return
    total = tree.total
    edges = np.array([0.0, np.nextafter(total, 0), total, np.nextafter(total, np.inf), 2 * total])
    found = tree.find(np.concatenate([edges, generator.random(200) * total]))
    assert (weights[found] > 0).all()


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1e30)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_set_keeps_the_last_weight_of_each_slot(writes):
    tree, leaves = SumTree(100), np.zeros(100)
    tree.set(np.array([slot for slot, _ in writes], np.int64), np.array([weight for _, weight in writes]))
    for slot, weight in writes:
        leaves[slot] = weight
    np.testing.assert_array_equal(tree.get(np.arange(100)), leaves)
    np.testing.assert_allclose(tree.total, leaves.sum(), rtol=1e-14)
    tree.check_valid()


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_a_weight_that_is_no_weight_is_refused_and_nothing_is_stored(weight):
    tree = tree_of([1.0, 2.0])
    with pytest.raises(ValueError, match="allowed: 0 or more, finite"):
        tree.set(np.array([0, 1]), np.array([5.0, weight]))
    np.testing.assert_array_equal(tree.get(np.arange(2)), [1.0, 2.0])


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_outside_is_refused(slot):
    with pytest.raises(ValueError, match="allowed: 0 to 1"):
        SumTree(2).set(np.array([slot]), np.array([1.0]))
