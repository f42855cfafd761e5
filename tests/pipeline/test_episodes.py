"""Episodes out of sequences: owned steps tile each one, whatever the window and whatever has been lost."""

import numpy as np
import pytest

from pipeline.episode_filter import Condition
from pipeline.episodes import EpisodeFacts, EpisodeReader
from pipeline.scan import LeftOut, TooManyFaults, dataset_digest, list_shards
from pipeline.store import LocalStore, open_store
from schemas.geometry import CUT, ENDS_NAMES, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from tests.pipeline.sequence_factory import cut_sequence, make_episode, tiny_terms, write_shards

WINDOWS = {
    "overlapping": SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=2, frame_stack=2),
    "no burn-in, side by side": SequenceGeometry(burn_in=0, unroll=4, bootstrap=3, stride=4, frame_stack=1),
    "burn-in longer than the unroll": SequenceGeometry(burn_in=9, unroll=4, bootstrap=2, stride=1, frame_stack=4),
}


def written(root, terms, lengths, *, per_shard=8, lanes=1, open_last=0):
    """Episodes of these lengths, written lane by lane in turn; the last ``open_last`` sequences are left out."""
    rng, endings = np.random.default_rng(3), [TERMINATED, TRUNCATED, CUT]
    episodes = [
        make_episode(terms, rng, number=i, lane=i % lanes, steps=steps, ends=endings[i % 3])
        for i, steps in enumerate(lengths)
    ]
    queues = [[(e, k) for e in episodes[lane::lanes] for k in range(terms.geometry.last_sequence(e.steps) + 1)]
              for lane in range(lanes)]  # fmt: skip
    sequences, env_steps = [], 0
    while any(queues):
        for queue in queues:
            if queue:
                episode, k = queue.pop(0)
                is_last = k == terms.geometry.last_sequence(episode.steps)
                env_steps += episode.steps - k * terms.geometry.stride if is_last else terms.geometry.stride
                sequences.append(cut_sequence(terms, episode, k, collector="c0", sequence=len(sequences),
                                              env_steps=env_steps))  # fmt: skip
    store = open_store(str(root), create=True)
    write_shards(store, terms, sequences[: len(sequences) - open_last], per_shard=per_shard)
    return store, episodes


def read(store, terms, **options):
    options.setdefault("left_out", LeftOut())
    reader = EpisodeReader(store, terms, **options)
    found = list(reader.read("c0"))
    reader.close()
    return found, reader


@pytest.mark.parametrize("geometry", WINDOWS.values(), ids=WINDOWS.keys())
def test_every_step_comes_back_once_and_the_final_observation_with_it(tmp_path, geometry):
    terms = tiny_terms(geometry=geometry)
    store, episodes = written(tmp_path, terms, [1, 3, 4, 5, 17, 30, 8, 2], lanes=3)
    found, reader = read(store, terms)
    assert sorted(e.facts.number for e in found) == list(range(8))
    assert (reader.steps, reader.lost_steps) == (sum(e.steps for e in episodes), 0)
    for episode in found:
        acted = episodes[episode.facts.number]
        history = geometry.frame_stack - 1
        assert not episode.frames[:history].any()
        np.testing.assert_array_equal(episode.frames[history:], acted.observation)
        np.testing.assert_array_equal(episode.action, acted.action)
        np.testing.assert_array_equal(episode.reward, acted.reward)
        assert episode.facts.ends == acted.ends
        assert episode.terminated.sum() == (acted.ends == TERMINATED)
        assert episode.terminated[-1] == (acted.ends == TERMINATED)
        assert episode.facts.episode_return == pytest.approx(acted.reward.sum())


def test_an_episode_left_open_by_a_kill_ends_cut_after_its_last_owned_step(tmp_path):
    terms = tiny_terms()
    store, (acted,) = written(tmp_path, terms, [21], open_last=3)
    (episode,), reader = read(store, terms)
    owned = terms.geometry.stride * len([k for k in range(terms.geometry.last_sequence(21) + 1)][:-3])
    assert (episode.facts.ends, episode.facts.steps, reader.steps) == (CUT, owned, owned)
    np.testing.assert_array_equal(episode.frames[1:], acted.observation[: owned + 1])


def test_what_lost_its_beginning_is_counted_and_what_lost_its_rest_is_cut(tmp_path):
    terms = tiny_terms()
    store, _ = written(tmp_path, terms, [40], per_shard=3)
    names = list_shards(store)
    bad = store.map_path(names[2].path)
    bad.write_bytes(b"no shard")
    left_out = LeftOut(max_bad_shards=1)
    (episode,), reader = read(store, terms, left_out=left_out)
    assert list(left_out.bad_shards) == [names[2].path]
    assert (episode.facts.steps, episode.facts.ends) == (12, CUT)
    assert reader.lost_steps == 40 - 12 - names[2].env_steps
    with pytest.raises(TooManyFaults, match=r"000000002-3-6\.arrow.*max_bad_shards 0"):
        read(store, terms)


def test_a_corrupt_sequence_is_named_and_costs_its_episodes_rest(tmp_path, caplog):
    terms = tiny_terms()
    store, _ = written(tmp_path, terms, [6, 30, 6], per_shard=50)
    (name,) = list_shards(store)
    path = store.map_path(name.path)
    data = bytearray(path.read_bytes())
    from pipeline.shard_reader import open_shard

    frame = open_shard(path).frame(6)
    at = bytes(data).index(bytes(frame))
    data[at + len(frame) // 2] ^= 1
    path.write_bytes(data)
    left_out = LeftOut()
    found, _ = read(store, terms, left_out=left_out)
    assert left_out.corrupt_rows == {(name.path, 6)}
    assert [(e.facts.number, ENDS_NAMES[e.facts.ends]) for e in found] == [(0, "terminated"), (1, "cut"), (2, "cut")]
    assert "row 6 is left out" in caplog.text


def test_a_filter_spares_the_pixels_of_what_it_refuses(tmp_path):
    terms = tiny_terms()
    store, _ = written(tmp_path, terms, [5, 9, 5, 12])
    found, reader = read(store, terms, keep=lambda facts: facts.steps > 8)
    assert [e.facts.number for e in found] == [1, 3]
    assert reader.filtered_episodes == 2


def test_the_digest_follows_the_list_of_shards(tmp_path):
    terms = tiny_terms()
    store, _ = written(tmp_path / "a", terms, [30], per_shard=2)
    before = dataset_digest(store)
    assert before == dataset_digest(LocalStore(store.root))
    store.delete(list_shards(store)[-1].path)
    assert dataset_digest(store) != before
    assert len(before) == 32


FACTS = EpisodeFacts(
    collector="abc", number=4, lane=2, steps=100, ends=TERMINATED, episode_return=-3.0, version_first=5, version_last=9,
    lineage=bytes(16), env_steps=4000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [("return>=-3", True), ("return > -3", False), ("steps<100", False), ("version>8", True), ("lane!=2", False),
     ("collector=abc", True), ("ends=terminated", True), ("ends=cut", False), ("env_steps<=4000", True),
     ("started>=2026-01-01", True), ("started<2026-01-01T00:00:00+00:00", False)],
)  # fmt: skip
def test_conditions(text, holds):
    assert Condition.parse(text).holds(FACTS, 1_790_000_000.0) is holds


@pytest.mark.parametrize("text", ["retrun>1", "return", "return>=ten", "ends=lost", "started>yesterday"])
def test_a_condition_that_means_nothing_is_refused_by_name(text):
    with pytest.raises(ValueError, match=f"where is '{text}'; allowed: "):
        Condition.parse(text)


def test_an_unknown_return_meets_no_condition(tmp_path):
    from dataclasses import replace

    unknown = replace(FACTS, episode_return=float("nan"), ends=LIFE_LOST)
    assert not any(Condition.parse(f"return{sign}0").holds(unknown, 0.0) for sign in (">", "<=", "="))


def test_every_sequence_finds_its_own_epsilon_again(tmp_path):
    """A lane's epsilon may change in mid-episode; a sequence records that of its last row."""
    from dataclasses import replace

    terms, steps = tiny_terms(), 23
    geometry, rng = terms.geometry, np.random.default_rng(0)
    acted = make_episode(terms, rng, number=0, lane=0, steps=steps, ends=TERMINATED)
    last_rows = [
        min(steps, k * geometry.stride + geometry.unroll + geometry.bootstrap) - 1
        for k in range(geometry.last_sequence(steps) + 1)
    ]
    sequences = [
        replace(cut_sequence(terms, acted, k, collector="c0", sequence=k, env_steps=0), epsilon=row / 100)
        for k, row in enumerate(last_rows)
    ]
    store = open_store(str(tmp_path), create=True)
    write_shards(store, terms, sequences)
    (episode,), _ = read(store, terms)
    np.testing.assert_allclose(episode.epsilon[last_rows], np.array(last_rows) / 100, rtol=1e-6)
