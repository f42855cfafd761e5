import numpy as np
import pytest

from pipeline.priority_table import TINY_PRIORITY, PriorityTable


def table_of(priorities, *, alpha=1.0, sampler="proportional", capacity=None):
    table = PriorityTable(capacity or len(priorities), alpha, sampler)
    table.enter(np.arange(len(priorities)), np.asarray(priorities, np.float32))
    return table


def update(table, ids, priorities):
    ids = np.asarray(ids)
    return table.update(ids, np.asarray(priorities, np.float64), np.ones(len(ids), bool))


def test_priorities_that_are_none_are_refused_and_zero_stays_drawable_h_c2():
    table = table_of([2.0] * 5, capacity=6)
    assert update(table, range(5), [1.0, np.nan, np.inf, 0.0, -0.5]) == (2, 0, 3)
    np.testing.assert_allclose(table.values(np.arange(5)), [1, 2, 2, 0, 2], atol=1e-6)
    assert 0 < table.values(np.array([3]))[0] <= 1e-6
    ids, probabilities = table.draw(700, np.random.default_rng(0))
    np.testing.assert_allclose(probabilities, table.values(ids) / 7.0, rtol=1e-5)  # The root is 7.
    assert np.isfinite((5 * probabilities) ** -0.6).all()
    table.enter(np.array([5]), np.array([np.nan]))  # Acted by the random policy: no initial priority.
    assert table.values(np.array([5]))[0] == 2.0


def test_the_first_sequence_without_a_priority_gets_one():
    assert table_of([np.nan]).values(np.array([0]))[0] == 1.0


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, -1e-9])
def test_an_initial_priority_that_is_none_is_refused_and_the_sequence_enters_at_the_maximum(wrong):
    table = table_of([3.0, 0.5], capacity=3)
    assert table.enter(np.array([2]), np.array([wrong])) == 1
    assert table.values(np.array([2]))[0] == 3.0


def test_a_priority_beyond_float32_is_as_infinite():
    table = table_of([1.0])
    assert update(table, [0], [1e39]).refused == 1
    assert update(table, [0], [3e38]).applied == 1
    assert table.draw(1, np.random.default_rng(0)).probabilities[0] == 1.0


def test_an_update_of_what_is_not_held_or_was_removed_is_stale_and_changes_nothing():
    table = table_of([1.0, 2.0, 3.0])
    table.remove(np.array([1]))
    counts = table.update(np.array([0, 1, 2]), np.full(3, 9.0), np.array([False, True, True]))
    assert counts == (1, 2, 0)
    np.testing.assert_array_equal(table.values(np.arange(3)), [1.0, 0.0, 9.0])
    assert table.drawable == 2


@pytest.mark.parametrize("sampler", ["proportional", "uniform"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_what_was_removed_is_never_drawn_under_any_alpha(sampler, alpha):
    table = table_of([1.0, 5.0, 2.0], alpha=alpha, sampler=sampler)
    table.remove(np.array([1]))
    ids, probabilities = table.draw(300, np.random.default_rng(0))
    assert set(ids.tolist()) == {0, 2}
    expected = np.array([1.0, 0.0, 2.0]) ** alpha * [1, 0, 1] if sampler == "proportional" else np.array([1.0, 0, 1])
    np.testing.assert_allclose(probabilities, (expected / expected.sum())[ids])


def test_the_maximum_is_that_of_the_held_ones():
    table = table_of([8.0, 1.0], capacity=2)
    assert table.maximum == 8.0
    table.enter(np.array([2]), np.array([2.0]))  # Rests where the 8 was.
    assert table.maximum == 2.0


def test_more_new_ids_than_there_is_room_leave_the_newest():
    table = PriorityTable(3, 1.0, "proportional")
    table.enter(np.arange(8), np.arange(1.0, 9.0))
    np.testing.assert_array_equal(table.values(np.arange(5, 8)), [6.0, 7.0, 8.0])
    assert table.drawable == 3
    assert set(table.draw(100, np.random.default_rng(0)).ids.tolist()) == {5, 6, 7}


def test_of_an_id_that_is_updated_twice_the_last_priority_counts():
    table = table_of([1.0, 1.0])
    assert update(table, [0, 1, 0], [5.0, 6.0, 7.0]).applied == 3
    np.testing.assert_array_equal(table.values(np.arange(2)), [7.0, 6.0])
    assert table.drawable == 2
    assert TINY_PRIORITY <= 1e-6
