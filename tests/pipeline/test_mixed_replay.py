"""Several datasets in one replay: exact shares, right weights, every priority to its own dataset."""

import errno
import json
from collections import Counter

import numpy as np
import pytest

from pipeline.dataset import shards_after
from pipeline.mixed_replay import MixedReplay, Share, refuse_other_terms, refuse_shares
from pipeline.prefetch import Prefetcher
from pipeline.shard_reader import open_shard
from pipeline.store import LocalStore
from tests.pipeline.replay_factory import empty_dataset, make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()
SIZES = {"main": 40, "old": 25, "rare": 10}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixed")
    with unsynced():
        return {
            name: make_dataset(root / name, TERMS, size, collector=name, seed=seed)
            for seed, (name, size) in enumerate(SIZES.items())
        }


def make_mixed(stores, *shares, seed=0, polled=True, **limiter):
    """``main`` mixed with ``shares``, as the texts of the command line."""
    parsed = [Share.parse(share) for share in shares]
    main = make_replay(stores["main"], seed=seed, **limiter)
    others = {share: make_replay(stores[share.uri], seed=seed + 1 + i) for i, share in enumerate(parsed)}
    mixed = MixedReplay(main, others, TERMS)
    if polled:
        mixed.poll()
    return mixed


def datasets_of(sample):
    """Whose each row is: collectors are named like their datasets."""
    return [name.decode() for name in sample.batch.collector.tolist()]


# ---- shares


def test_shares_are_exact_after_every_batch_not_only_on_average(stores):
    mixed, rows = make_mixed(stores, "old=0.3", "rare=0.01"), Counter()
    for batch in range(1, 301):
        rows.update(datasets_of(mixed.sample(8)))
        for name, share in (("main", 0.69), ("old", 0.3), ("rare", 0.01)):
            assert abs(rows[name] - share * 8 * batch) <= 1
    assert rows["rare"] == 24
    assert mixed.metrics()["mix2_share"] == pytest.approx(0.01)


def test_a_share_is_annealed_in_a_straight_line_and_then_stays(stores):
    mixed, rows = make_mixed(stores, "old=0.5:0.1@100"), []
    for _ in range(160):
        rows.append(datasets_of(mixed.sample(8)).count("old"))
    shares = [0.5 - 0.4 * min(1, batch / 100) for batch in range(160)]
    assert np.all(np.abs(np.cumsum(rows) - 8 * np.cumsum(shares)) <= 1)
    assert sum(rows[-50:]) == 40


def test_rows_are_whole_and_lie_where_their_dataset_says(stores):
    expected = {
        (name, each.sequence): each
        for seed, (name, size) in enumerate(SIZES.items())
        for each in make_sequences(TERMS, size, collector=name, seed=seed)
    }
    mixed = make_mixed(stores, "old=0.4", "rare=0.2")
    buffer = mixed.observation_buffer(16)
    for _ in range(10):
        sample = mixed.sample(16, buffer)
        assert sample.batch.observation is buffer
        for position, name in enumerate(datasets_of(sample)):
            sequence = expected[name, int(sample.batch.sequence[position])]
            np.testing.assert_array_equal(sample.batch.observation[position], sequence.observation)
            np.testing.assert_array_equal(sample.batch.reward[position], sequence.reward)


# ---- ids, probabilities, weights


def test_probabilities_of_all_sequences_add_up_to_one_and_weights_are_unbiased(stores):
    mixed, probability, dataset = make_mixed(stores, "old=0.3", "rare=0.1"), {}, {}
    for batch in range(600):
        sample = mixed.sample(
            4 if batch < 40 else 16
        )  # Small ones often hold none of ``rare``, which counts all the same.
        assert sample.replay_sequences == 75
        probability |= dict(zip(sample.ids.tolist(), sample.probabilities.tolist(), strict=True))
        dataset |= dict(zip(sample.ids.tolist(), datasets_of(sample), strict=True))
    assert len(probability) == 75  # No id stands for two sequences.
    for name, share in (("main", 0.6), ("old", 0.3), ("rare", 0.1)):
        assert sum(p for i, p in probability.items() if dataset[i] == name) == pytest.approx(share)
    # E[1 / (N P)] = 1 over draws from P: the weight makes up for the shares exactly.
    assert sum(p * (1 / (75 * p)) for p in probability.values()) == pytest.approx(1)


def test_a_priority_finds_its_own_sequence_and_no_other_with_the_same_number(stores):
    mixed = make_mixed(stores, "old=0.5")
    seen = {}
    for _ in range(200):
        sample = mixed.sample(16)
        seen |= {
            (d, int(n)): int(i) for d, n, i in zip(datasets_of(sample), sample.batch.sequence, sample.ids, strict=True)
        }
    counts = mixed.update_priorities(np.array([seen["old", 7], seen["main", 9], 10**9]), np.array([1e9, 1e8, 1.0]))
    assert counts == (2, 1, 0)
    drawn = Counter()
    for _ in range(20):
        sample = mixed.sample(16)
        drawn.update(zip(datasets_of(sample), sample.batch.sequence.tolist(), strict=True))
    assert drawn["old", 7] == drawn["main", 9] == 160
    metrics = mixed.metrics()
    assert (metrics["max_priority"], metrics["mix1_max_priority"]) == (1e8, 1e9)
    assert (metrics["stale_updates"], metrics["mix1_stale_updates"]) in ((1, 0), (0, 1))


# ---- ratio control


def test_the_limiter_counts_only_the_growing_dataset(tmp_path, stores):
    growing = {**stores, "main": make_dataset(tmp_path / "main", TERMS, 20, collector="main")}
    mixed = make_mixed(growing, "old=0.5", min_sequences=20, samples_per_insert=1.0, batch_size=16, band=17.0)
    batches = 0
    while mixed.sample(16) is not None:
        batches += 1
    assert batches == 2  # 17 samples of the main dataset may be drawn, 8 are in each batch.
    assert mixed.waits_for() == "7 new sequences (1 samples for each)"
    before = {name: value for name, value in mixed.metrics().items() if name.endswith("samples")}
    assert mixed.sample(16) is None
    assert before == {name: value for name, value in mixed.metrics().items() if name.endswith("samples")}
    assert before["mix1_samples"] == 16
    progress = mixed.progress(5)
    assert (progress.sequences_seen, progress.samples, progress.updates) == (20, 16, 5)
    assert list(progress.seen) == ["main"]
    with unsynced():
        make_dataset(tmp_path / "main", TERMS, 10, collector="more")
    mixed.poll()
    assert mixed.sample(16) is not None


def test_a_further_dataset_that_has_nothing_is_waited_for_and_named(tmp_path, stores):
    mixed = make_mixed({**stores, "empty": empty_dataset(tmp_path / "empty")}, "empty=0.5")
    for _ in range(3):
        assert mixed.sample(16) is None
    assert mixed.waits_for() == "sequences to start with: 0 of 1 are there (of empty)"
    assert mixed.metrics()["samples"] == 0
    with unsynced():
        make_dataset(tmp_path / "empty", TERMS, 5)
    mixed.poll()
    never_waited = make_mixed({**stores, "empty": LocalStore(tmp_path / "empty")}, "empty=0.5")
    np.testing.assert_array_equal(mixed.sample(16).ids, never_waited.sample(16).ids)


# ---- corrupt rows


def test_a_corrupt_row_is_replaced_from_its_own_dataset(tmp_path, stores):
    with unsynced():
        own = make_dataset(tmp_path / "old", TERMS, 16, collector="old")
    (name, _) = shards_after(own, "old", -1)
    path = own.map_path(name.path)
    data, frame = bytearray(path.read_bytes()), bytes(open_shard(path).frame(5))
    data[data.index(frame) + len(frame) // 2] ^= 1
    path.write_bytes(data)
    mixed, rows, mixed_ids = make_mixed({**stores, "old": own}, "old=0.5"), Counter(), {}
    for batch in range(1, 31):
        sample = mixed.sample(16)
        sequences = list(zip(datasets_of(sample), sample.batch.sequence.tolist(), strict=True))
        rows.update(sequences)
        assert sum(count for (dataset, _), count in rows.items() if dataset == "old") == 8 * batch
        assert [mixed_ids.setdefault(each, i) for each, i in zip(sequences, sample.ids.tolist(), strict=True)] == [
            *sample.ids.tolist()
        ]
    assert not rows["old", 5]
    assert (mixed.metrics()["mix1_corrupt_rows"], mixed.metrics()["corrupt_rows"]) == (1, 0)


def test_a_replacement_that_fails_takes_the_whole_batch_back(stores, monkeypatch):
    mixed = make_mixed(stores, "old=0.5")
    drawn = mixed.draw(16)
    assert drawn is not None

    def no_descriptors(name):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(mixed._members[1]._held.cache, "get", no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            mixed.replace(drawn, np.arange(16) < 15)
    assert (mixed.metrics()["samples"], mixed.metrics()["mix1_samples"]) == (0, 0)
    assert mixed.sample(16) is not None
    assert (mixed.metrics()["samples"], mixed.metrics()["mix1_samples"]) == (8, 8)


# ---- state


def run_batches(mixed, number, learn=True):
    ids = []
    for _ in range(number):
        sample = mixed.sample(16)
        ids.append(sample.ids.tolist())
        if learn:
            mixed.update_priorities(sample.ids, sample.ids % 5 + 0.5)
    return ids


def test_restored_it_goes_on_with_the_same_draws_shares_and_annealing(stores):
    shares = ("old=0.31:0.07@40", "rare=0.03")
    first = make_mixed(stores, *shares)
    run_batches(first, 13)
    first.sample(16, ahead=True)  # Drawn and never consumed: drawn again after the restart.
    arrays, values = first.state()
    values = json.loads(json.dumps(values))
    whole = make_mixed(stores, *shares)
    run_batches(whole, 13)
    expected = run_batches(whole, 30)
    second = make_mixed(stores, *shares, seed=50, polled=False)
    line = second.restore(arrays, values)
    second.poll()
    assert run_batches(second, 30) == expected
    assert "old: " in line
    assert "rare: " in line


def test_a_run_goes_on_with_another_mix_or_with_none(stores):
    mixed = make_mixed(stores, "old=0.5")
    run_batches(mixed, 5)
    state = mixed.state()
    other = make_mixed(stores, "rare=0.2", "old=0.25", polled=False)
    line = other.restore(*state)
    other.poll()
    assert "rare is new to this run" in line
    rows = Counter()
    for _ in range(40):
        rows.update(datasets_of(other.sample(16)))
    assert abs(rows["rare"] - 128) <= 1
    assert abs(rows["old"] - 160) <= 1
    assert other.metrics()["mix2_max_priority"] == mixed.metrics()["mix1_max_priority"]
    alone = make_replay(stores["main"])
    alone.restore(*state)
    alone.poll()
    assert alone.metrics()["max_priority"] == mixed.metrics()["max_priority"]
    assert alone.metrics()["samples"] == mixed.metrics()["samples"]
    back = make_mixed(stores, "old=0.5", polled=False)
    back.restore(*alone.state())
    back.poll()
    assert len(back.sample(16).ids) == 16


def test_batches_drawn_ahead_are_those_drawn_on_demand(stores):
    with Prefetcher(make_mixed(stores, "old=0.3", polled=False), 16, deterministic=True) as batches:
        expected = [batches.next(20).ids.tolist() for _ in range(8)]
    with Prefetcher(make_mixed(stores, "old=0.3", polled=False), 16, depth=2) as batches:
        assert [batches.next(20).ids.tolist() for _ in range(8)] == expected


# ---- the flag


def test_the_flag_says_share_annealing_and_a_uri_that_holds_an_equals_sign():
    assert Share.parse("data/old=0.25") == Share(uri="data/old", first=0.25, last=0.25)
    assert Share.parse("s3://b/x=1=0.5:0.1@100000") == Share(uri="s3://b/x=1", first=0.5, last=0.1, batches=100_000)


@pytest.mark.parametrize("text", ["old", "old=", "=0.5", "old=x", "old=0.5:0.1", "old=1", "old=-0.1", "old=0.5:0.1@0"])
def test_a_wrong_share_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"mix is .*; allowed: "):
        Share.parse(text)


def test_shares_that_leave_nothing_or_name_a_dataset_twice_are_refused():
    with pytest.raises(ValueError, match="mix is 1 in all"):
        refuse_shares([Share.parse("a=0.5"), Share.parse("b=0.1:0.5@10")])
    with pytest.raises(ValueError, match=r"mix is 1.7\d+ in all"):  # Only while one has risen and the other not fallen.
        refuse_shares([Share.parse("a=0.9:0.05@100"), Share.parse("b=0.05:0.9@10")])
    with pytest.raises(ValueError, match="mix is given a twice"):
        refuse_shares([Share.parse("a=0.1"), Share.parse("a=0.2")])


def test_a_dataset_of_other_terms_is_refused_by_the_field():
    with pytest.raises(ValueError, match=r"mix is old; allowed: .*identity.life_loss: off here, roll there"):
        refuse_other_terms("old", tiny_terms(life_loss="roll"), TERMS)
    with pytest.raises(ValueError, match="mix is old; allowed: a folder with a dataset, and there is none"):
        refuse_other_terms("old", None, TERMS)
