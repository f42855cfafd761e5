"""Returns as shards bring them: every episode that ended counts once, whatever the overlap of its sequences."""

import numpy as np

from pipeline.returns import ReturnsFollower
from pipeline.scan import list_shards
from pipeline.shard_reader import open_shard
from pipeline.store import LocalStore
from tests.pipeline.sequence_factory import make_sequences, tiny_terms, write_shards


def rows_of(store: LocalStore) -> list[dict]:
    rows = []
    for name in list_shards(store):
        shard = open_shard(store.map_path(name.path), name)
        columns = shard.columns
        names = ("episode", "ends", "episode_return", "epsilon", "env_steps")
        rows += [
            {"collector": name.collector, **{each: columns[each][row].item() for each in names}}
            for row in range(shard.num_rows)
        ]
    return rows


def test_each_episode_that_ended_counts_once_and_steps_are_the_collectors_own(tmp_path):
    terms, store = tiny_terms(), LocalStore(tmp_path)
    follower = ReturnsFollower(store, terms)
    follower.poll()
    assert (follower.env_steps, follower.episodes, follower.take()) == (0, 0, {})
    for collector, seed in (("c0", 0), ("c1", 1)):
        write_shards(store, terms, make_sequences(terms, 40, collector=collector, seed=seed))
        follower.poll()
    follower.poll()
    rows = rows_of(store)
    ended = {
        (row["collector"], row["episode"]): (row["episode_return"], row["epsilon"])
        for row in rows
        if row["ends"] in (1, 2) and np.isfinite(row["episode_return"])
    }
    assert follower.episodes == len(ended) > 4
    taken = follower.take()
    returns, epsilons = np.array(list(ended.values())).T
    assert taken["return_mean"] == np.mean(returns)
    low = epsilons <= np.quantile(epsilons, 0.25)
    assert taken["return_low_epsilon_mean"] == np.mean(returns[low])
    assert follower.take() == {}
    newest = {row["collector"]: 0 for row in rows}
    for row in rows:
        newest[row["collector"]] = max(newest[row["collector"]], row["env_steps"])
    assert follower.env_steps == sum(newest.values())


def test_what_was_there_before_is_counted_in_steps_only_and_deleted_shards_stay_counted(tmp_path):
    terms, store = tiny_terms(), LocalStore(tmp_path)
    write_shards(store, terms, make_sequences(terms, 40, collector="c0"))
    follower = ReturnsFollower(store, terms)
    follower.poll()
    steps = max(row["env_steps"] for row in rows_of(store))
    assert (follower.env_steps, follower.episodes) == (steps, 0)
    for name in list_shards(store):
        store.delete(name.path)
    follower.poll()
    assert follower.env_steps == steps
