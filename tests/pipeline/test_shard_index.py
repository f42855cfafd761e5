import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset import ShardName, shards_after
from pipeline.shard_cache import ShardCache
from pipeline.shard_index import ACTIVE_POLLS, QUIET_PER_POLL, ShardIndex
from pipeline.shard_reader import open_shard
from pipeline.store import LocalStore
from tests.pipeline.replay_factory import empty_dataset, make_quarry, make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

TERMS = tiny_terms()


@pytest.fixture(scope="module")
def quarry(tmp_path_factory):
    sizes = {"a": [3, 1, 8, 2, 5, 1, 4, 2], "b": [4] * 8}
    return make_quarry(tmp_path_factory.mktemp("quarry"), sizes)


@pytest.fixture
def store(tmp_path):
    return empty_dataset(tmp_path / "data")


def publish(quarry, store, collector="a", numbers=range(8)):
    for number in numbers:
        quarry.publish(quarry.shards[collector][number], store)


def held(replay):
    index = replay._held.index
    return index.identities(range(index.oldest_id, index.next_id))


def identities(quarry, collector, numbers):
    return [identity for number in numbers for identity in quarry.identities(quarry.shards[collector][number])]


def damage(store, name, offset, mask):
    path = store.map_path(name.path)
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.unlink()  # It is a link to a file that other tests use.
    path.write_bytes(data)


def offset_of(store, name, column, row):
    """Where the bytes of one value of a fixed column lie in the file."""
    path = store.map_path(name.path)
    shard = open_shard(path)
    base = np.frombuffer(shard._data, np.uint8).ctypes.data
    return shard.columns[column][row : row + 1].ctypes.data - base


# ---- following


def test_shards_are_admitted_once_in_the_order_of_their_numbers(quarry, store):
    replay = make_replay(store)
    publish(quarry, store, numbers=[0, 1])
    assert replay.poll() == (2, 4, 0)
    assert replay.poll() == (0, 0, 0)
    publish(quarry, store, numbers=[2, 3, 4])
    assert replay.poll() == (3, 15, 0)
    assert held(replay) == identities(quarry, "a", range(5))


def publish_from_number(quarry, store, number):
    """The first six shards of "a" under numbers from ``number`` on, as if those before had been deleted."""
    for name in quarry.shards["a"][:6]:
        path = store.map_path(name._replace(number=number + name.number).path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(quarry.store.map_path(name.path), path)


def test_following_goes_on_beyond_a_folder_of_a_thousand(quarry, store):
    publish_from_number(quarry, store, 1997)
    replay = make_replay(store)
    assert replay.poll().shards == 6
    assert held(replay) == identities(quarry, "a", range(6))


def test_a_missing_number_does_not_stop_following(quarry, store):
    replay = make_replay(store)
    publish(quarry, store, numbers=[0, 1, 4])
    replay.poll()
    publish(quarry, store, numbers=[6, 7])
    replay.poll()
    assert held(replay) == identities(quarry, "a", [0, 1, 4, 6, 7])
    last = quarry.shards["a"][7]
    assert replay.progress(0).seen == {"a": quarry.first_sequence(last) + last.sequences}


def test_a_shard_that_one_listing_missed_is_not_lost(quarry, tmp_path):
    class RacingStore(LocalStore):
        """A folder being read while shards are renamed into it may show a later one and not an earlier one."""

        hidden = quarry.shards["a"][2].path

        def files(self, prefix=""):
            found = super().files(prefix)
            if self.hidden and self.hidden.startswith(prefix):
                found.remove(self.hidden.rpartition("/")[2])
                self.hidden = ""
            return found

    store = RacingStore(empty_dataset(tmp_path / "data").root)
    publish(quarry, store, numbers=range(5))
    replay = make_replay(store)
    replay.poll()
    assert held(replay) == identities(quarry, "a", range(5))


def test_only_what_comes_after_the_last_known_shard_is_listed(quarry, store):
    publish_from_number(quarry, store, 1997)
    store = CountingStore(store.root)
    replay = make_replay(store)
    replay.poll()
    store.listed = []
    replay.poll()
    assert store.listed == ["shards/a/000002"]


class CountingStore(LocalStore):
    def __init__(self, root):
        super().__init__(root)
        self.listed = []

    def files(self, prefix=""):
        self.listed.append(prefix)
        return super().files(prefix)


def test_collectors_that_have_gone_quiet_are_listed_in_turn(quarry, tmp_path):
    store = CountingStore(empty_dataset(tmp_path / "data").root)
    index = ShardIndex(store, 1000)
    for number in range(50):
        (tmp_path / f"data/shards/quiet{number}/000000").mkdir(parents=True)
    publish(quarry, store, "a", [0])
    for _ in range(ACTIVE_POLLS + 1):
        index.look()
    listed = set()
    for _ in range(4):  # 51 collectors, none of which has anything new that is admitted: "a" stays active.
        store.listed = []
        index.look()
        assert len(store.listed) == 1 + QUIET_PER_POLL
        listed |= set(store.listed)
    assert len(listed) == 51


def test_the_newest_are_taken_when_there_are_more_than_fit_and_the_others_are_not_opened(quarry, store):
    newest_first = sorted(quarry.written_seconds, key=quarry.written_seconds.__getitem__, reverse=True)
    for name in newest_first:
        quarry.publish(name, store)
    expected = []
    for position, name in enumerate(newest_first):
        if sum(each.sequences for each in newest_first[:position]) >= 20:
            path = store.map_path(name.path)
            path.unlink()
            path.write_bytes(b"would be refused if it were opened")
            os.utime(path, (quarry.written_seconds[name],) * 2)
        else:
            expected = quarry.identities(name) + expected
    replay = make_replay(store, capacity=20)
    assert replay.poll().bad_shards == 0
    assert held(replay) == expected[-20:]
    assert {collector for collector, _ in held(replay)} == {"a", "b"}
    assert replay.progress(0).seen == {"a": 26, "b": 32}


def test_the_oldest_are_evicted_and_the_first_shard_still_held_is_known(quarry, store):
    replay = make_replay(store, capacity=10)
    for number in range(8):
        publish(quarry, store, "a", [number])
        publish(quarry, store, "b", [number])
        replay.poll()
    assert held(replay) == identities(quarry, "b", [6]) + identities(quarry, "a", [7]) + identities(quarry, "b", [7])
    assert replay.progress(0).oldest == {"a": 7, "b": 6}
    assert replay.progress(0).sequences_seen == 58


# ---- files that are not what they should be


def junk(store, quarry):
    return b"no shard at all"


def half(store, quarry):
    return quarry.store.get(quarry.shards["a"][2].path)[:-300]


def another_collectors(store, quarry):
    return quarry.store.get(quarry.shards["b"][2].path)


def an_earlier_shard(store, quarry):
    """Right in every respect, but for holding sequences that are there already."""
    return quarry.store.get(quarry.shards["a"][4].path)


def other_terms(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    terms = tiny_terms(env=replace(TERMS.env, sticky=0.25))
    store = make_dataset(folder, terms, 5, per_shard=5, collector="a")
    return store.get(shards_after(store, "a", -1)[0].path)


@pytest.mark.parametrize(
    ("make", "sequences", "reason"),
    [
        (lambda *_: b"", 5, "empty file"),
        (junk, 5, "torn or foreign"),
        (half, 8, "torn or foreign"),
        (another_collectors, 4, "holds 4 sequences of b, its name says 4 of a"),
        (an_earlier_shard, 6, "holds 5 sequences of a, its name says 6 of a"),
        (an_earlier_shard, 5, "repeats sequences of a: begins with number 14"),
    ],
)
def test_a_bad_file_is_skipped_named_once_counted_and_left_alone(quarry, store, caplog, *, make, sequences, reason):
    publish(quarry, store, numbers=range(5))
    bad = ShardName("a", 5, sequences, 77)
    data = make(store, quarry)
    store.put(bad.path, data)
    replay = make_replay(store)
    assert replay.poll() == (5, 19, 1)
    for _ in range(3):
        assert replay.poll() == (0, 0, 0)
    assert replay.progress(0).seen == {"a": 19 + sequences}
    publish(quarry, store, numbers=[6, 7])
    assert replay.poll() == (2, 6, 0)
    assert held(replay) == identities(quarry, "a", [0, 1, 2, 3, 4, 6, 7])
    assert replay.progress(0).seen == {"a": 26}  # Known from the sequence numbers of what came after it.
    assert replay.metrics()["bad_shards"] == 1
    assert [record.getMessage() for record in caplog.records] == [f"{bad.path} is skipped: {caplog.records[0].args[1]}"]
    assert reason in caplog.records[0].args[1]
    assert store.get(bad.path) == data


def test_a_shard_of_other_terms_is_refused_by_the_field_that_differs(quarry, store, tmp_path, caplog):
    publish(quarry, store, numbers=[0])
    store.put(ShardName("a", 1, 5, 9).path, other_terms(tmp_path))
    assert make_replay(store).poll() == (1, 3, 1)
    assert "other terms than the dataset's: identity.sticky: 0.0 here, 0.25 there" in caplog.text


def test_a_bad_file_with_a_great_number_hides_nothing(quarry, store):
    replay = make_replay(store)
    publish(quarry, store, numbers=[0])
    store.put(ShardName("a", 123_456, 3, 1).path, b"junk")
    replay.poll()
    publish(quarry, store, numbers=[1, 2])
    replay.poll()
    assert held(replay) == identities(quarry, "a", [0, 1, 2])
    assert replay.metrics()["bad_shards"] == 1


def test_collectors_may_go_on_for_what_the_replay_could_not_take(quarry, store):
    """A bad file counts as published for its collector, so it must not count against the allowance."""
    replay = make_replay(store, batch_size=2, min_sequences=2, samples_per_insert=1.0)
    publish(quarry, store, numbers=[0])
    replay.poll()
    before = replay.progress(0)
    store.put(ShardName("a", 1, 50, 9).path, b"junk")
    replay.poll()
    after = replay.progress(0)
    assert after.sequences_seen == before.sequences_seen + 50
    assert after.sequences_allowed == before.sequences_allowed + 50


def test_shards_deleted_before_we_came_still_count_as_seen(quarry, store):
    publish(quarry, store, numbers=[5, 6, 7])
    replay = make_replay(store)
    replay.poll()
    assert replay.progress(0).seen == {"a": 26}
    assert replay.metrics()["inserted"] == 7


def test_a_bit_flipped_in_a_sequence_number_costs_that_row(quarry, store, caplog):
    publish(quarry, store, numbers=range(4))
    name = quarry.shards["a"][2]
    damage(store, name, offset_of(store, name, "sequence", 3) + 1, 0x40)
    replay = make_replay(store)
    assert replay.poll() == (4, 14, 0)
    assert replay.metrics()["corrupt_rows"] == 1
    assert [record.getMessage() for record in caplog.records] == [f"sequence 7 of a is corrupt: {name.path}, row 3"]
    assert 7 not in {i for _ in range(40) for i in replay.sample(16).ids.tolist()}
    publish(quarry, store, numbers=[4])
    assert replay.poll().sequences == 5
    assert replay.progress(0).seen == {"a": 19}


def test_a_bit_flipped_in_the_number_of_an_only_row_does_not_stop_following(quarry, store):
    publish(quarry, store, numbers=[0, 1])
    name = quarry.shards["a"][1]
    damage(store, name, offset_of(store, name, "sequence", 0) + 5, 0x10)
    replay = make_replay(store)
    replay.poll()
    assert replay.metrics()["corrupt_rows"] == 1
    assert replay.progress(0).seen == {"a": 4}
    publish(quarry, store, numbers=[2])
    assert replay.poll() == (1, 8, 0)


def test_a_bit_flipped_in_an_initial_priority_costs_that_row_when_it_is_drawn(quarry, store):
    publish(quarry, store, "b", [0, 1])
    name = quarry.shards["b"][0]
    damage(store, name, offset_of(store, name, "initial_priority", 2) + 3, 0x20)
    replay = make_replay(store)
    replay.poll()
    assert 2 not in {i for _ in range(40) for i in replay.sample(16).ids.tolist()}


# ---- open shards


@pytest.fixture
def few_descriptors():
    """64 that may be opened, on top of what other tests' libraries keep open in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max((int(name) for name in os.listdir("/dev/fd") if name.isdigit()), default=0)
    limit = highest + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def maps_of(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps as Linux shows them")
def test_many_shards_need_few_maps_and_no_descriptors_h_d3(tmp_path, few_descriptors):
    store = empty_dataset(tmp_path / "data")
    with unsynced():
        make_dataset(store.root, TERMS, 200, per_shard=1)
    replay = make_replay(store, sampler="uniform", max_open_shards=20, batch_size=50)
    replay.poll()
    assert maps_of(tmp_path) == 0  # Indexing opens one shard at a time.
    drawn = set()
    for _ in range(20):
        sample = replay.sample(50)
        drawn |= set(sample.batch.sequence.tolist())
        assert len(os.listdir("/proc/self/fd")) < few_descriptors
        assert maps_of(tmp_path) <= 20
    assert len(drawn) > 190
    assert replay.metrics()["open_shards"] == 20


def test_more_open_shards_than_the_machine_has_maps_are_refused_h_d3(store):
    with pytest.raises(
        ValueError, match=r"max_open_shards is 10000000; allowed: 1 to \d+ \(vm.max_map_count is \d+"
    ) as error:
        make_replay(store, max_open_shards=10_000_000)
    assert f"limit of open files {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" in str(error.value)
    with pytest.raises(ValueError, match="max_open_shards is 0"):
        make_replay(store, max_open_shards=0)


def test_running_out_of_descriptors_names_the_option_and_the_limits_h_d3(quarry, store, few_descriptors):
    publish(quarry, store)
    cache = ShardCache(store, TERMS, 5)
    hoarded = []
    try:
        while True:
            hoarded.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        with pytest.raises(
            OSError, match=r"max_open_shards is 5, vm.max_map_count is \d+, the limit of open files \d+"
        ):
            cache.get(quarry.shards["a"][0])
    finally:
        for descriptor in hoarded:
            os.close(descriptor)
    assert cache.get(quarry.shards["a"][0]).num_rows == 3


def test_the_least_recently_used_shard_is_closed(quarry, store):
    publish(quarry, store)
    cache, names = ShardCache(store, TERMS, 2), quarry.shards["a"]
    first = cache.get(names[0])
    cache.get(names[1])
    assert cache.get(names[0]) is first
    cache.get(names[2])
    assert cache.get(names[0]) is first
    assert len(cache) == 2
    shutil.rmtree(store.root / "shards")
    with pytest.raises(FileNotFoundError):
        cache.get(names[1])


def test_an_evicted_shard_is_closed_so_that_a_deleted_file_gives_its_space_back(quarry, store, tmp_path):
    replay = make_replay(store, capacity=5)
    publish(quarry, store, numbers=[0, 1])
    replay.poll()
    replay.sample(16)
    publish(quarry, store, numbers=[2])
    replay.poll()
    replay.sample(16)
    assert maps_of(tmp_path / "data") == 1
