"""Retention: only whole shards, only the oldest, never one that a learner still holds."""

import pytest

from pipeline.dataset import shards_after
from pipeline.progress import Progress, progress_name
from pipeline.retention import Retention, RetentionConfig
from pipeline.verify import verify_dataset
from tests.pipeline.replay_factory import empty_dataset, make_quarry, make_replay
from tests.pipeline.sequence_factory import make_dataset, tiny_terms


def numbers(store):
    return [name.number for name in shards_after(store, "c0", -1)]


def says(store, run, oldest, *, closed=False):
    record = Progress(sequences_seen=0, oldest=oldest, sequences_allowed=None, samples=0, updates=0, closed=closed)
    store.put(progress_name(run), record.to_bytes())


@pytest.fixture
def store(tmp_path):
    return make_dataset(tmp_path, tiny_terms(), 40, per_shard=4)  # Shards 0 .. 9.


def test_nothing_is_deleted_by_default(store):
    assert not RetentionConfig().deletes
    assert Retention(store, RetentionConfig()).enforce() == 0
    assert numbers(store) == list(range(10))


def test_the_oldest_go_until_the_bound_holds(store):
    assert Retention(store, RetentionConfig(retain_sequences=17)).enforce() == 6
    assert numbers(store) == [6, 7, 8, 9], "five shards would be 20 sequences"
    assert verify_dataset(store).faults == []


def test_bytes_bound_it_too(store):
    shard_bytes = store.map_path(shards_after(store, "c0", -1)[0].path).stat().st_size
    Retention(store, RetentionConfig(retain_gb=4.5 * shard_bytes / 1e9)).enforce()
    assert numbers(store) == [6, 7, 8, 9]


def test_what_a_run_holds_stays_whether_it_is_live_or_only_silent(store):
    says(store, "a", {"c0": 3})
    says(store, "b", {"c0": 2})
    says(store, "gone", {"c0": 0}, closed=True)
    assert Retention(store, RetentionConfig(retain_sequences=4)).enforce() == 2
    assert numbers(store) == list(range(2, 10))


@pytest.mark.parametrize("damage", ["garbage", "new collector"])
def test_what_nobody_can_vouch_for_stays(store, damage):
    if damage == "garbage":
        store.put(progress_name("a"), b"{")
    else:
        says(store, "a", {})
    assert Retention(store, RetentionConfig(retain_sequences=4)).enforce() == 0


def test_what_a_dead_collector_left_goes_before_what_is_newer(tmp_path):
    """Its last shard has been evicted, so the run holds nothing of it any more."""
    quarry = make_quarry(tmp_path, {"a": [4] * 6, "b": [4] * 12})
    store = empty_dataset(tmp_path / "data")
    replay = make_replay(store, capacity=16)
    for collector in ("a", "b"):
        for name in quarry.shards[collector]:
            quarry.publish(name, store)
        replay.poll()
    store.put(progress_name("run"), replay.progress(0).to_bytes())
    Retention(store, RetentionConfig(retain_sequences=20)).enforce()
    assert shards_after(store, "a", -1) == []
    assert [name.number for name in shards_after(store, "b", -1)] == list(range(7, 12))


@pytest.mark.parametrize("field", ["retain_gb", "retain_sequences"])
def test_bounds_below_zero_are_refused(field):
    with pytest.raises(ValueError, match=rf"{field} is -1; allowed: above 0"):
        RetentionConfig(**{field: -1})
