import json
import math
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset import shards_after
from pipeline.holdings import ReplayConfig
from pipeline.shard_reader import open_shard
from tests.pipeline.replay_factory import DictionaryReplay, empty_dataset, make_quarry, make_replay
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()


@pytest.fixture(scope="module")
def quarry(tmp_path_factory):
    sizes = {"a": [3, 1, 8, 2, 5, 1, 4], "b": [1] * 8, "c": [16, 2, 30, 7]}
    return make_quarry(tmp_path_factory.mktemp("quarry"), sizes)


@pytest.fixture
def store(tmp_path):
    """A dataset of 60 sequences of one collector in shards of 8: sequence number i has id i."""
    (tmp_path / "data").mkdir()
    return make_dataset(tmp_path / "data", TERMS, 60)


def flip_bits_in_a_frame(store, name, row):
    """One flipped bit in the compressed pixels of one row."""
    path = store.map_path(name.path)
    frame = bytes(open_shard(path).frame(row))
    data = bytearray(path.read_bytes())
    assert data.count(frame) == 1
    data[data.index(frame) + len(frame) // 2] ^= 4
    path.write_bytes(data)


def shards_in(store):
    return shards_after(store, "c0", -1)


# ---- against a plain dictionary

OPERATIONS = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from("abc"), st.integers(1, 3)),
    st.tuples(st.just("poll"), st.just(0), st.just(0)),
    st.tuples(st.just("sample"), st.integers(1, 16), st.just(0)),
    st.tuples(st.just("update"), st.integers(0, 2**32 - 1), st.integers(1, 20)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


def check_sample(replay, model, batch_size):
    sample = replay.sample(batch_size)
    if not model.held:
        assert sample is None
        return
    assert sample.replay_sequences == len(model.held)
    np.testing.assert_allclose(sample.probabilities, [model.probability(i) for i in sample.ids.tolist()], rtol=1e-9)
    for position, i in enumerate(sample.ids.tolist()):
        expected = model.quarry.sequences[model.held[i].identity]
        assert sample.batch.sequence[position] == expected.sequence
        np.testing.assert_array_equal(sample.batch.observation[position], expected.observation)
        np.testing.assert_array_equal(sample.batch.reward[position], expected.reward)


def check_counts(replay, model):
    metrics = replay.metrics()
    counted = ("size", "inserted", "stale_updates", "refused_priorities", "bad_shards", "missing_sequences")
    expected = (len(model.held), model.inserted, model.stale, model.refused, 0, 0)
    assert tuple(metrics[name] for name in counted) == expected
    assert metrics["max_priority"] == model.maximum()
    progress = replay.progress(0)
    assert (progress.sequences_seen, progress.oldest) == (model.seen, model.oldest())


@given(
    operations=st.lists(OPERATIONS, min_size=10, max_size=50),
    capacity=st.integers(1, 60),
    alpha=st.sampled_from([0.5, 1]),
)
@settings(max_examples=60, deadline=None)
def test_replay_is_a_dictionary_of_the_newest_sequences(quarry, tmp_path_factory, operations, capacity, alpha):
    store = empty_dataset(tmp_path_factory.mktemp("data") / "set")
    replay, model = make_replay(store, capacity=capacity, alpha=alpha), DictionaryReplay(quarry, capacity, alpha)
    replay.poll()
    waiting = {collector: list(shards) for collector, shards in quarry.shards.items()}
    for kind, first, second in operations:
        if kind == "publish":
            for name in waiting[first][:second]:
                quarry.publish(name, store)
                model.published.append(name)
            del waiting[first][:second]
        elif kind == "poll":
            replay.poll()
            model.poll()
        elif kind == "sample":
            check_sample(replay, model, first)
        elif kind == "update":
            generator = np.random.default_rng(first)
            ids = generator.integers(-3, model.next_id + 5, second)
            priorities = generator.choice([0.0, 1e-30, 0.3, 2.5, 1e9, np.nan, np.inf, -2.0], second)
            replay.update_priorities(ids, priorities)
            model.update(ids.tolist(), priorities.tolist())
        else:
            arrays, values = replay.state()
            replay = make_replay(store, capacity=capacity, alpha=alpha)
            replay.restore(arrays, json.loads(json.dumps(values)))
            model.restart()
            replay.poll()
            model.poll()
        check_counts(replay, model)
    for _ in range(3):
        check_sample(replay, model, 16)


# ---- drawing


def test_draws_follow_priority_to_the_alpha(store):
    replay = make_replay(store, alpha=0.5)
    replay.poll()
    priorities = np.zeros(60)
    priorities[::2] = np.geomspace(1e-4, 1e4, 30)
    replay.update_priorities(np.arange(60), priorities)
    counts = np.zeros(60)
    for _ in range(400):
        drawn = replay.draw(16)
        replay.consumed()
        np.add.at(counts, drawn.ids, 1)
    expected = priorities**0.5 / (priorities**0.5).sum() * 6400
    frequent = expected >= 5
    assert not counts[1::2].any()
    # Chi-square of 19 degrees of freedom exceeds 60 once in 200,000.
    assert ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[frequent].sum() < 60
    uniform = 6400 / 60
    assert ((counts - uniform) ** 2 / uniform).sum() > 1000


def test_nothing_is_drawn_before_the_whole_dataset_has_been_indexed(store):
    replay = make_replay(store, min_sequences=5, samples_per_insert=1.0)
    assert replay.sample(4) is None
    seen = []
    replay.poll(should_stop=lambda: len(seen) >= 3 or seen.append(0))
    assert replay.metrics()["size"] == 24
    assert replay.sample(4) is None
    assert replay.waits_for() == "the dataset to be indexed"
    replay.poll()
    assert replay.sample(4) is not None
    assert replay.progress(0).sequences_allowed == 60 + (4 + 32)  # All of it is prefill: no burst of 55 samples.


def test_the_limiter_says_when_to_wait(store):
    now = [0.0]
    replay = make_replay(store, batch_size=8, min_sequences=61, samples_per_insert=2.0, clock=lambda: now[0])
    replay.poll()
    assert replay.sample(8) is None
    assert replay.waits_for() == "sequences to start with: 60 of 61 are there"
    assert replay.progress(0).sequences_allowed == 61 + 8
    now[0] = 2.5
    assert replay.metrics()["waiting_seconds"] == 2.5
    with pytest.raises(ValueError, match="batch_size is 9; allowed: at most 8"):
        replay.sample(9)


def test_a_learner_whose_collectors_have_ended_uses_the_prefill_instead_of_waiting_for_ever(store, caplog):
    now = [0.0]
    replay = make_replay(store, batch_size=8, min_sequences=10, samples_per_insert=2.0, clock=lambda: now[0])
    replay.poll()

    def draw_all():
        batches = 0
        while replay.sample(8) is not None:
            batches += 1
        return batches

    assert draw_all() == 2  # The band: all 60 are prefill.
    now[0] = 29.9
    assert draw_all() == 0
    assert replay.waits_for() == "4 new sequences (2 samples for each)"
    now[0] = 30.0
    assert draw_all() == 12  # 14 batches for the 50 beyond the minimum, with the band, less those 2.
    assert caplog.messages == ["no new sequence for 30 s: the learner is alone and uses the prefill"]
    assert replay.waits_for() == "2 new sequences (2 samples for each)"
    now[0] = 70.0
    assert draw_all() == 0
    assert replay.waits_for().endswith("; none for 40 s: does a collector run?")


def test_an_exact_number_of_samples_is_drawn_for_what_is_inserted(quarry, tmp_path):
    store = empty_dataset(tmp_path / "data")
    replay = make_replay(store, batch_size=4, min_sequences=3, samples_per_insert=1.5, capacity=20)
    for number, name in enumerate(quarry.shards["a"]):
        quarry.publish(name, store)
        replay.poll()
        while replay.sample(4) is not None:
            pass
        inserted = sum(each.sequences for each in quarry.shards["a"][: number + 1])
        assert replay.metrics()["samples"] == (1.5 * (inserted - 3) + 8) // 4 * 4
        progress = replay.progress(7)
        assert progress.sequences_allowed == 3 + math.floor((progress.samples + 8) / 1.5)
        assert (progress.sequences_seen, progress.seen, progress.updates) == (inserted, {"a": inserted}, 7)


def test_a_batch_larger_than_the_dataset_repeats_sequences(tmp_path):
    replay = make_replay(make_dataset(tmp_path, TERMS, 3))
    replay.poll()
    assert set(replay.sample(16).ids.tolist()) <= {0, 1, 2}


def test_a_given_buffer_becomes_the_observation(store):
    replay = make_replay(store)
    replay.poll()
    buffer = replay.observation_buffer(4)
    assert replay.sample(4, buffer).batch.observation is buffer


def test_sampling_allocates_nothing_in_arrow_h_d2(store):
    replay = make_replay(store, batch_size=64)
    before = pa.total_allocated_bytes()
    replay.poll()
    samples = [replay.sample(64) for _ in range(32)]
    assert pa.total_allocated_bytes() == before
    assert all(sample is not None for sample in samples)


# ---- what cannot be used


def test_a_corrupt_row_is_replaced_named_counted_and_never_drawn_again(store, caplog):
    names = shards_in(store)
    flip_bits_in_a_frame(store, names[2], 3)
    flip_bits_in_a_frame(store, names[5], 0)
    before = {name: store.get(name.path) for name in names}
    replay = make_replay(store, samples_per_insert=1.0, band=100_000)
    replay.poll()
    expected = {each.sequence: each for each in make_sequences(TERMS, 60)}
    drawn = set()
    for _ in range(60):
        sample = replay.sample(16)
        for position, i in enumerate(sample.ids.tolist()):
            np.testing.assert_array_equal(sample.batch.observation[position], expected[i].observation)
        drawn |= set(sample.ids.tolist())
    assert drawn == set(range(60)) - {19, 40}
    assert sample.replay_sequences == 58
    metrics = replay.metrics()
    assert (metrics["corrupt_rows"], metrics["bad_shards"], metrics["samples"]) == (2, 0, 60 * 16)
    named = [record.getMessage() for record in caplog.records]
    assert sorted(named) == [
        f"sequence 19 of c0 is corrupt: {names[2].path}, row 3",
        f"sequence 40 of c0 is corrupt: {names[5].path}, row 0",
    ]
    assert replay.update_priorities([19], [1e9]) == (0, 1, 0)
    assert {name: store.get(name.path) for name in names} == before
    restarted = make_replay(store, samples_per_insert=1.0, band=100_000)
    restarted.restore(*replay.state())
    restarted.poll()
    assert 19 not in {i for _ in range(40) for i in restarted.sample(16).ids.tolist()}
    assert restarted.metrics()["corrupt_rows"] == 2


def test_what_replaces_a_corrupt_row_comes_with_its_own_probability(store):
    flip_bits_in_a_frame(store, shards_in(store)[2], 3)
    replay = make_replay(store, alpha=1.0)
    replay.poll()
    replay.update_priorities(np.arange(60), np.where(np.arange(60) == 19, 1e9, 1.0))
    sample = replay.sample(16)
    np.testing.assert_allclose(sample.probabilities, 1 / 59)
    assert 19 not in sample.ids


def test_a_dataset_of_corrupt_rows_only_has_nothing_to_draw(tmp_path):
    store = make_dataset(tmp_path, TERMS, 2, per_shard=2)
    for row in (0, 1):
        flip_bits_in_a_frame(store, shards_in(store)[0], row)
    replay = make_replay(store)
    replay.poll()
    assert replay.sample(16) is None
    assert "none of the 2 held can be read" in replay.waits_for()
    assert (replay.metrics()["samples"], replay.metrics()["corrupt_rows"]) == (0, 2)


def test_a_shard_that_goes_bad_after_it_was_admitted_is_given_up_once(store, caplog):
    names = shards_in(store)
    replay = make_replay(store)
    replay.poll()
    store.delete(names[1].path)
    path = store.map_path(names[4].path)
    path.unlink()
    path.write_bytes(b"junk")
    drawn = {i for _ in range(60) for i in replay.sample(16).ids.tolist()}
    assert drawn == set(range(60)) - set(range(8, 16)) - set(range(32, 40))
    assert replay.metrics()["bad_shards"] == 2
    assert replay.metrics()["samples"] == 60 * 16
    assert sorted(record.getMessage().split(" is skipped")[0] for record in caplog.records) == [
        names[1].path,
        names[4].path,
    ]


def test_a_dataset_moved_away_and_back_loses_nothing(store, tmp_path, caplog):
    replay = make_replay(store, max_open_shards=1, samples_per_insert=1.0, band=10_000)
    replay.poll()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    replay.poll()
    results = [replay.sample(16) for _ in range(5)]
    assert results == [None] * 5
    assert "moved away" in replay.waits_for()
    (tmp_path / "elsewhere").rename(tmp_path / "data")
    assert replay.poll().sequences == 0
    assert {i for _ in range(60) for i in replay.sample(16).ids.tolist()} == set(range(60))
    metrics = replay.metrics()
    assert (metrics["samples"], metrics["bad_shards"], metrics["size"]) == (60 * 16, 0, 60)
    assert not caplog.records


def test_a_dataset_moved_away_between_listing_and_opening_loses_nothing(store, tmp_path, monkeypatch):
    replay = make_replay(store)
    look = replay._held.index.look

    def look_and_lose():
        found = look()
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(replay._held.index, "look", look_and_lose)
        assert replay.poll() == (0, 0, 0)
    (tmp_path / "elsewhere").rename(tmp_path / "data")
    assert replay.poll() == (8, 60, 0)


def test_files_that_are_no_shards_are_named_once_and_left_alone(store, caplog):
    store.put("shards/c0/000000/notes.txt", b"hello")
    replay = make_replay(store)
    for _ in range(130):
        replay.poll()
    assert [record.getMessage() for record in caplog.records] == ["shards/c0/000000/notes.txt is no shard: left alone"]
    assert replay.metrics()["unknown_files"] == 1
    assert store.get("shards/c0/000000/notes.txt") == b"hello"


# ---- state


def batches(replay, number):
    """Draws with the learner's answers; the answers depend on what was drawn."""
    found = []
    for _ in range(number):
        sample = replay.sample(8)
        replay.update_priorities(sample.ids, 1 / (1 + sample.batch.sequence % 7) + np.arange(8.0))
        found.append((sample.ids.tolist(), sample.probabilities.tolist()))
    return found


def through_json(state):
    arrays, values = state
    return arrays, json.loads(json.dumps(values))


def test_ten_batches_a_restart_and_ten_more_are_twenty_bit_for_bit(store):
    whole = make_replay(store, seed=3)
    whole.poll()
    expected = batches(whole, 20)
    first, second = make_replay(store, seed=3), make_replay(store, seed=99)
    first.poll()
    found = batches(first, 10)
    second.restore(*through_json(first.state()))
    second.poll()
    assert found + batches(second, 10) == expected
    assert second.metrics()["samples"] == whole.metrics()["samples"]


def test_batches_that_were_drawn_ahead_are_not_in_the_state(store):
    replay, twin = make_replay(store), make_replay(store, seed=1)
    replay.poll()
    drawn = [replay.sample(8, ahead=True) for _ in range(4)]
    replay.consumed()
    twin.restore(*through_json(replay.state()))
    twin.poll()
    assert twin.metrics()["samples"] == 8
    for sample in drawn[1:]:
        np.testing.assert_array_equal(twin.sample(8).ids, sample.ids)


def test_a_restart_knows_old_sequences_enters_new_ones_and_names_the_missing_once(quarry, tmp_path, caplog):
    store = empty_dataset(tmp_path / "data")
    a, b = quarry.shards["a"], quarry.shards["b"]
    for name in (*a[:4], *b[:3]):
        quarry.publish(name, store)
    first = make_replay(store, batch_size=4, min_sequences=5, samples_per_insert=1.0, band=1000)
    first.poll()
    assert first.sample(4) is not None
    held = np.arange(first.metrics()["size"], dtype=np.int64)
    first.update_priorities(held, 10.0 + held)
    before = dict(zip(identities_of(first, held), (10.0 + held).tolist(), strict=True))
    state = first.state()
    store.delete(a[0].path)
    quarry.publish(b[3], store)
    second = make_replay(store, batch_size=4, min_sequences=5, samples_per_insert=1.0, band=1000)
    line = second.restore(*through_json(state))
    assert line == "17 priorities of 17 inserted sequences, 4 samples"
    second.poll()
    second.poll()
    ids = np.arange(second.metrics()["size"], dtype=np.int64)
    after = dict(zip(identities_of(second, ids), priorities_of(second, ids), strict=True))
    new = ("b", 3)
    assert set(after) == set(before) - {("a", i) for i in range(a[0].sequences)} | {new}
    assert {key: after[key] for key in after if key != new} == {key: before[key] for key in after if key != new}
    assert after[new] == quarry.initial[new]
    assert [record.getMessage() for record in caplog.records] == [
        "3 sequences have gone from the dataset: a, numbers 0 to 2"
    ]
    assert second.metrics()["missing_sequences"] == 3
    assert second.progress(0).sequences_seen == 18
    assert second.progress(0).sequences_allowed == first.progress(0).sequences_allowed + 1  # The new one is prefill.


def test_sequences_evicted_by_newer_ones_while_nobody_ran_are_not_missing(quarry, tmp_path, caplog):
    store = empty_dataset(tmp_path / "data")
    for name in quarry.shards["a"][:3]:
        quarry.publish(name, store)
    first = make_replay(store, capacity=12)
    first.poll()
    for name in quarry.shards["a"][3:]:
        quarry.publish(name, store)
    second = make_replay(store, capacity=12)
    second.restore(*through_json(first.state()))
    second.poll()
    assert second.metrics()["missing_sequences"] == 0
    assert not caplog.records


def test_a_stop_while_the_restored_dataset_is_indexed_keeps_the_state(store):
    first = make_replay(store, seed=3)
    first.poll()
    batches(first, 5)
    state = through_json(first.state())
    second = make_replay(store)
    second.restore(*state)
    second.poll(should_stop=lambda: True)
    assert second.state() == state


def identities_of(replay, ids):
    return replay._held.index.identities(ids.tolist())


def priorities_of(replay, ids):
    return replay._held.table.values(ids).tolist()


# ---- threads


def test_two_threads_draw_while_a_third_admits_evicts_and_deletes(tmp_path):
    """One collector, polled after each shard: sequence number i has id i, so every row can be checked."""
    quarry = make_quarry(tmp_path / "quarry", {"c": [4] * 150})
    store = empty_dataset(tmp_path / "data")
    replay = make_replay(store, capacity=50, max_open_shards=5, threads=2)
    shards = quarry.shards["c"]
    for name in shards[:20]:
        quarry.publish(name, store)
        replay.poll()
    finished, problems, draws = threading.Event(), [], [0, 0]

    def learn(which):
        try:
            while not finished.is_set() or draws[which] < 50:
                sample = replay.sample(16)
                for position, i in enumerate(sample.ids.tolist()):
                    expected = quarry.sequences["c", i]
                    assert sample.batch.sequence[position] == i
                    np.testing.assert_array_equal(sample.batch.observation[position], expected.observation)
                    np.testing.assert_array_equal(sample.batch.reward[position], expected.reward)
                replay.update_priorities(sample.ids, 1.0 + sample.ids % 7)
                draws[which] += 1
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=learn, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for position, name in enumerate(shards[20:], start=20):
        quarry.publish(name, store)
        assert replay.poll().sequences == 4
        store.delete(shards[position - 15].path)
        finished.wait(0.002)
    finished.set()
    for thread in threads:
        thread.join()
    assert not problems
    metrics = replay.metrics()
    assert metrics["samples"] == 16 * sum(draws)
    assert (metrics["size"], metrics["inserted"]) == (50, 600)
    assert (metrics["corrupt_rows"], metrics["bad_shards"]) == (0, 0)
    for i, priority in zip(range(550, 600), priorities_of(replay, np.arange(550, 600)), strict=True):
        initial = quarry.initial["c", i]
        is_untouched = priority == pytest.approx(initial) if 0 < initial < math.inf else priority <= 7
        assert priority == 1.0 + i % 7 or is_untouched


# ---- configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity is 0; allowed: 1 or more"),
        ({"alpha": 1.5}, r"alpha is 1\.5; allowed: 0 to 1"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"sampler": "best"}, "sampler is 'best'; allowed: proportional, uniform"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ReplayConfig(**settings)


def test_a_capacity_below_the_minimum_is_refused(store):
    with pytest.raises(ValueError, match=r"capacity is 5; allowed: 6 \(min_sequences\)"):
        make_replay(store, capacity=5, min_sequences=6)
