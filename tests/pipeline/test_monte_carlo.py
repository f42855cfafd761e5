"""Returns that followed, of datasets with damage in them and of lives that end in the middle of an episode."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.monte_carlo import discounted_returns
from pipeline.scan import LeftOut, list_shards
from pipeline.store import LocalStore
from schemas.geometry import TERMINATED
from tests.pipeline.sequence_factory import cut_sequence, damage, make_dataset, make_episode, tiny_terms, write_shards

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


@pytest.mark.parametrize("life_loss", ["off", "roll"])
def test_returns_end_at_a_lost_life_where_the_targets_of_the_learner_do(tmp_path, life_loss):
    terms = tiny_terms(life_loss=life_loss)
    episode = make_episode(terms, np.random.default_rng(0), number=0, lane=0, steps=9, ends=TERMINATED)
    lives = np.isin(np.arange(9), (3, 6))
    cut = []
    for index in range(terms.geometry.last_sequence(9) + 1):
        sequence = cut_sequence(terms, episode, index, collector="c0", sequence=index, env_steps=index + 1)
        step = np.arange(terms.geometry.stored_steps) + sequence.start - terms.geometry.burn_in
        cut.append(replace(sequence, life_lost=np.isin(step, np.flatnonzero(lives)).astype(np.uint8)))
    store = LocalStore(tmp_path)
    write_shards(store, terms, cut)
    (found,) = discounted_returns(store, terms, 0.9, LeftOut()).values()
    continues = [life_loss == "off" or not lost for lost in lives]
    weights = [[0.9 ** (k - t) * all(continues[t:k]) for k in range(t, 9)] for t in range(9)]
    np.testing.assert_allclose(found, [np.dot(w, episode.reward[t:]) for t, w in enumerate(weights)], rtol=1e-6)
