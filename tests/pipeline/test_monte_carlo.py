"""Returns that followed, of datasets with damage in them and of lives that end in the middle of an episode."""

import numpy as np
import pytest

from pipeline.monte_carlo import discounted_returns
from pipeline.scan import LeftOut, list_shards
from tests.pipeline.sequence_factory import damage, make_dataset, tiny_terms

TERMS = tiny_terms()


@pytest.mark.parametrize("column", ["reward", "episode", "start", "ends"])
def test_a_corrupt_row_is_a_missing_part_whatever_is_wrong_in_it(tmp_path, column):
    store = make_dataset(tmp_path, TERMS, 40)
    expected = discounted_returns(store, TERMS, 0.9, LeftOut())
    shard, row = list_shards(store)[1], 3
    damage(store, shard, column, row)
    left_out = LeftOut()
    found = discounted_returns(store, TERMS, 0.9, left_out)
    assert left_out.corrupt_rows == {(shard.path, row)}
    assert len(expected) - 1 <= len(found) <= len(expected)
    for key, values in found.items():
        np.testing.assert_array_equal(values, expected[key])


def test_only_the_rows_of_the_episodes_asked_for_are_read(tmp_path):
    store = make_dataset(tmp_path, TERMS, 40)
    expected = discounted_returns(store, TERMS, 0.9, LeftOut())
    wanted = list(expected)[-1]
    damage(store, list_shards(store)[0], "reward", 0)
    left_out = LeftOut()
    found = discounted_returns(store, TERMS, 0.9, left_out, of={wanted})
    assert list(found) == [wanted]
    np.testing.assert_array_equal(found[wanted], expected[wanted])
    assert not left_out.corrupt_rows
