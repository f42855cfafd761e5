"""Ray Data reads our shards as they are, a column at a time, and writes them back at once or not at all."""

import numpy as np
import pytest

from pipeline.dataset import read_terms, unknown_files
from pipeline.ray_faults import SharedFaults
from pipeline.ray_sink import INCOMING, write_sequences
from pipeline.ray_source import ReadPlan, read_sequences
from pipeline.scan import list_shards, open_listed
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms, write_shards
from tests.ray_session import ray_session

__all__ = ["ray_session"]

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of which there are many.
]
EVERYTHING = ["collector", "sequence", "observation", "probe_core"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """70 sequences of two collectors in shards of 8."""
    root, terms = tmp_path_factory.mktemp("stored"), tiny_terms()
    store = make_dataset(root, terms, 40, lanes=2)
    write_shards(store, terms, make_sequences(terms, 30, collector="c1", seed=1))
    return store, terms


def plain_rows(store, terms):
    """What is in the dataset, read without Ray."""
    rows = {}
    for name in list_shards(store):
        shard = open_listed(store, terms, name)
        for row in range(shard.num_rows):
            values = {column: view[row] for column, view in shard.columns.items()}
            rows[name.collector, int(values["sequence"])] = values | {"frame": bytes(shard.frame(row))}
    return rows


def all_columns(terms):
    from pipeline.codec import row_layout

    return ["collector", *(row_layout(terms).dtype.names or ()), "observation", "probe_core"]


def test_every_column_but_pixels_comes_in_order_when_order_is_asked_for(stored):
    store, terms = stored
    expected = plain_rows(store, terms)
    rows = read_sequences(str(store.root), ordered=True).take_all()
    assert [(row["collector"], row["sequence"]) for row in rows] == list(expected)
    assert "observation" not in rows[0]
    assert "probe_core" not in rows[0]
    for row in rows:
        values = expected[row["collector"], row["sequence"]]
        for column in row.keys() - {"collector"}:
            np.testing.assert_array_equal(row[column], values[column], err_msg=column)


def test_only_what_was_asked_for_is_read_and_its_size_is_known_beforehand(stored):
    store, terms = stored
    dataset = read_sequences(str(store.root), columns=["sequence", "reward"])
    assert dataset.schema().names == ["sequence", "reward"]
    steps = terms.geometry.stored_steps
    assert dataset.size_bytes() == 70 * (8 + 4 * steps)
    assert dataset.materialize().size_bytes() == pytest.approx(70 * (8 + 4 * steps), rel=0.5)
    assert dataset.take_batch(3)["reward"].shape == (3, steps)
    with pytest.raises(ValueError, match="columns holds 'rewards'; allowed: collector, sequence"):
        read_sequences(str(store.root), columns=["rewards"])


def test_pixels_are_decoded_in_the_read_tasks(stored):
    store, terms = stored
    geometry, shape = terms.geometry, terms.env.observation.shape
    dataset = read_sequences(str(store.root), columns=["collector", "sequence", "observation"])
    frames = {(row["collector"], row["sequence"]): row["observation"] for row in dataset.take_all()}
    for collector in ("c0", "c1"):
        number, seed, lanes = (40, 0, 2) if collector == "c0" else (30, 1, 1)
        for sequence in make_sequences(terms, number, collector=collector, seed=seed, lanes=lanes):
            np.testing.assert_array_equal(frames[collector, sequence.sequence], sequence.observation)
    assert len(frames) == 70
    plan = ReadPlan(str(store.root), terms, ["observation"], True)
    assert plan.estimated_bytes(list_shards(store)) == 70 * geometry.stored_frames * int(np.prod(shape))


def damaged(tmp_path, shards=1):
    terms = tiny_terms()
    store = make_dataset(tmp_path / "damaged", terms, 40)
    names = list_shards(store)
    for name in names[1 : 1 + shards]:
        store.map_path(name.path).write_bytes(b"junk")
    path = store.map_path(names[4].path)
    shard, data = open_listed(store, terms, names[4]), bytearray(path.read_bytes())
    frame = bytes(shard.frame(5))
    data[bytes(data).index(frame) + len(frame) // 2] ^= 1
    path.write_bytes(data)
    return store, names


def test_bad_shards_and_corrupt_rows_are_named_and_counted_over_all_tasks(tmp_path):
    store, names = damaged(tmp_path)
    faults = SharedFaults(max_bad_shards=1)
    rows = read_sequences(str(store.root), EVERYTHING, faults=faults).take_all()
    assert len(rows) == 40 - names[1].sequences - 1
    assert list(faults.bad_shards) == [names[1].path]
    assert faults.corrupt_rows == {(names[4].path, 5)}


@pytest.mark.parametrize(("shards", "limit"), [(1, 0), (2, 1)])
def test_more_bad_shards_than_allowed_fail_the_job_by_name(tmp_path, shards, limit):
    store, names = damaged(tmp_path, shards)
    bad = "|".join(f"{names[1 + each].number:09d}-8" for each in range(shards))  # Tasks may meet them in any order.
    with pytest.raises(Exception, match=rf"(?s)({bad}).*max_bad_shards {limit}"):
        read_sequences(str(store.root), ["sequence"], max_bad_shards=limit, ordered=True).take_all()


def test_a_copy_through_ray_is_the_same_dataset(stored, tmp_path):
    store, terms = stored
    whole = read_sequences(str(store.root), all_columns(terms), decode=False)
    write_sequences(whole.repartition(5), str(tmp_path / "copy"), terms, sequences_per_shard=16)
    copy = LocalStore(tmp_path / "copy")
    assert read_terms(copy) == terms
    expected, found = plain_rows(store, terms), plain_rows(copy, terms)
    assert expected.keys() == found.keys()
    for identity, values in expected.items():
        for column, value in values.items():
            np.testing.assert_array_equal(found[identity][column], value)
    assert verify_dataset(copy).faults == []
    assert unknown_files(copy) == []
    assert copy.files(INCOMING) == []


def test_a_write_that_fails_leaves_no_dataset_and_one_that_repeats_a_sequence_is_refused(stored, tmp_path):
    store, terms = stored
    whole = read_sequences(str(store.root), all_columns(terms), decode=False)

    def break_down(batch):
        if (batch["sequence"] == 20).any():
            raise RuntimeError("broken on purpose")
        return batch

    out = LocalStore(tmp_path / "failed")
    with pytest.raises(Exception, match="broken on purpose"):
        write_sequences(whole.map_batches(break_down, batch_size=4), str(out.root), terms)
    assert read_terms(out) is None
    assert list_shards(out) == []
    twice = LocalStore(tmp_path / "twice")
    with pytest.raises(Exception, match=r"sequence 0 of c0 occurs twice"):
        write_sequences(whole.union(whole), str(twice.root), terms)
    assert read_terms(twice) is None
    assert list_shards(twice) == []
