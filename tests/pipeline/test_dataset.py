import threading

import pytest

from pipeline.dataset import (
    ShardName,
    agree_on_terms,
    list_collectors,
    new_collector_id,
    read_provenance,
    read_terms,
    shards_after,
    unknown_files,
    write_provenance,
)
from pipeline.store import LocalStore
from schemas.geometry import SequenceGeometry
from tests.pipeline.sequence_factory import tiny_terms


class CountingStore(LocalStore):
    def __init__(self, root):
        super().__init__(root)
        self.listed = []

    def files(self, prefix=""):
        self.listed.append(prefix)
        return super().files(prefix)


@pytest.fixture
def store(tmp_path):
    return CountingStore(tmp_path)


def publish(store, *numbers, collector="c0"):
    for number in numbers:
        store.put(ShardName(collector, number, 64, 2560).path, b"")


def test_a_shard_name_says_all_about_it_and_parses_back():
    name = ShardName("3fa9", 12_345, 64, 2560)
    assert name.path == "shards/3fa9/000012/000012345-64-2560.arrow"
    assert ShardName.parse(name.path) == name


@pytest.mark.parametrize(
    "path",
    [
        "shards/c0/000012/12345-64-2560.arrow",  # Another spelling of the same number would be a duplicate.
        "shards/c0/000011/000012345-64-2560.arrow",
        "shards/c0/000012/000012345-064-2560.arrow",
        "shards/c0/000012/000012345-64.arrow",
        "shards/c0/000012/.000012345-64-2560.arrow",
        "shards/_c0/000012/000012345-64-2560.arrow",
        "shards/c0/000012/000012345-64-2560.arrow.tmp",
        "dataset.json",
    ],
)
def test_no_other_text_is_a_shard_name(path):
    assert ShardName.parse(path) is None


def test_shards_after_a_number_come_in_order_across_folders(store):
    publish(store, 1000, 2, 999, 10, 1001)
    publish(store, 7, collector="other")
    assert [name.number for name in shards_after(store, "c0", -1)] == [2, 10, 999, 1000, 1001]
    assert [name.number for name in shards_after(store, "c0", 10)] == [999, 1000, 1001]
    assert shards_after(store, "c0", 1001) == shards_after(store, "nobody", -1) == []
    assert list_collectors(store) == ["c0", "other"]


def test_following_a_collector_does_not_list_its_history(store):
    publish(store, *range(500, 5000, 500))
    store.listed.clear()
    assert [name.number for name in shards_after(store, "c0", 3999)] == [4000, 4500]
    assert store.listed == ["shards/c0/000004"]


def test_files_that_are_no_shards_are_left_out_and_can_be_named(store):
    publish(store, 0)
    foreign = ["shards/c0/000000/readme.txt", "shards/c0/000000/5-1-1.arrow", "shards/c0/notes", "shards/loose"]
    for path in [*foreign, "shards/c0/000000/.writing-1", "shards/c0/000000/_half"]:
        store.put(path, b"")
    assert [name.number for name in shards_after(store, "c0", -1)] == [0]
    assert sorted(unknown_files(store)) == sorted(foreign)


def test_terms_are_written_once_and_read_back(store):
    assert read_terms(store) is None
    agree_on_terms(store, tiny_terms())
    agree_on_terms(store, tiny_terms())
    assert read_terms(store) == tiny_terms()


def test_other_terms_are_refused_by_field_and_change_nothing(store):
    agree_on_terms(store, tiny_terms())
    other = tiny_terms(life_loss="roll", geometry=SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=4))
    with pytest.raises(ValueError, match=r"identity\.life_loss: roll here, off there; .*window\.stride: 4 here, 2"):
        agree_on_terms(store, other)
    assert read_terms(store) == tiny_terms()


def test_in_a_creation_race_one_wins_and_all_others_learn_its_terms(store):
    strides, outcomes, start = [1, 2, 4] * 3, [], threading.Barrier(9)

    def create(stride):
        terms = tiny_terms(geometry=SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=stride))
        start.wait()
        try:
            agree_on_terms(store, terms)
            outcomes.append((stride, True))
        except ValueError:
            outcomes.append((stride, False))

    threads = [threading.Thread(target=create, args=(stride,)) for stride in strides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    terms = read_terms(store)
    assert terms is not None
    won = terms.geometry.stride
    assert sorted(outcomes) == sorted((stride, stride == won) for stride in strides)


def test_unreadable_terms_are_a_value_error(store):
    store.put("dataset.json", b'{"schema_version": 1}')
    with pytest.raises(ValueError, match="not the terms of a dataset"):
        read_terms(store)


def test_provenance_is_kept_beside_the_shards(store):
    write_provenance(store, "c0", {"seed": 3, "host": "box"})
    assert read_provenance(store, "c0") == {"seed": 3, "host": "box"}
    with pytest.raises(FileNotFoundError):
        read_provenance(store, "c1")


def test_every_incarnation_has_an_id_of_its_own_that_fits_a_name():
    ids = {new_collector_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(ShardName.parse(ShardName(name, 0, 1, 1).path) for name in ids)
