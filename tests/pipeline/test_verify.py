import dataclasses
import shutil

import numpy as np
import pytest

from pipeline.dataset import ShardName, shards_after, write_provenance
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from schemas.geometry import CONTINUES, CUT, LIFE_LOST, TERMINATED, TRUNCATED
from schemas.shard import NO_LINEAGE
from tests.pipeline.sequence_factory import (
    LINEAGE,
    cut_sequence,
    damage,
    make_dataset,
    make_episode,
    make_sequences,
    tiny_terms,
    write_shards,
)

TERMS = tiny_terms()


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def the_only_fault(store):
    faults = verify_dataset(store).faults
    assert len(faults) == 1, faults
    return faults[0]


def episode_sequences(steps, ends, terms=TERMS):
    """All sequences of one episode; T 4, n 1, stride 2."""
    episode = make_episode(terms, np.random.default_rng(0), number=0, lane=0, steps=steps, ends=ends)
    geometry, env_steps, cut = terms.geometry, 0, []
    for index in range(geometry.last_sequence(steps) + 1):
        is_last = index == geometry.last_sequence(steps)
        env_steps = steps if is_last else env_steps + geometry.stride
        cut.append(cut_sequence(terms, episode, index, collector="c0", sequence=index, env_steps=env_steps))
    return cut


@pytest.mark.parametrize("life_loss", ["off", "reset"])
def test_a_sound_dataset_is_counted_and_has_no_faults(store, life_loss):
    terms, ends = tiny_terms(life_loss=life_loss), set()
    steps = episodes = 0
    for collector, lanes in (("c0", 1), ("c1", 5)):
        sequences = make_sequences(terms, 200, collector=collector, lanes=lanes, seed=lanes)
        write_shards(store, terms, sequences, per_shard=16)
        steps += sequences[-1].env_steps
        overs = [each for each in sequences if each.ends and each.env_steps - each.start > 0]
        ends |= {each.ends for each in overs}
        episodes += sum(1 for each in sequences if each.start == 0)
    report = verify_dataset(store, threads=2)
    assert report.faults == []
    assert (report.collectors, report.sequences, report.env_steps) == (2, 400, steps)
    assert report.shards == sum(len(shards_after(store, name, -1)) for name in ("c0", "c1"))
    names = [name for collector in ("c0", "c1") for name in shards_after(store, collector, -1)]
    assert report.bytes == sum(store.map_path(name.path).stat().st_size for name in names)
    assert episodes - 6 <= report.episodes.total() <= episodes  # Up to one episode a lane is not over.
    assert len(report.episodes) == (4 if life_loss == "reset" else 3)
    assert (report.versions, report.lineages) == ({3}, {LINEAGE.hex()})
    assert report.network_sequences == 400
    assert report.distinct_priority_share > 0.99


def test_what_a_random_policy_acted_counts_for_no_network(store):
    sequences = make_sequences(TERMS, 20)
    unknown = np.full_like(sequences[0].q_values, np.nan)
    random = {"lineage": NO_LINEAGE, "version_first": -1, "version_last": -1, "q_values": unknown}
    sequences[:5] = [dataclasses.replace(each, **random) for each in sequences[:5]]
    sequences[5] = dataclasses.replace(sequences[5], q_values=unknown)
    write_shards(store, TERMS, sequences)
    report = verify_dataset(store)
    assert report.faults == []
    assert report.versions == {-1, 3}
    assert report.network_sequences == 15
    assert report.distinct_priorities == 14  # One has none.


@pytest.mark.parametrize("published", range(1, 12))
def test_the_missing_end_of_a_killed_collectors_story_is_no_fault(store, published):
    write_shards(store, TERMS, make_sequences(TERMS, 12, lanes=3)[:published], per_shard=4)
    report = verify_dataset(store)
    assert report.faults == []
    assert report.sequences == published


def test_shards_deleted_from_the_beginning_are_no_fault_one_in_between_is_a_gap(tmp_path):
    store = make_dataset(tmp_path, TERMS, 80, per_shard=8, lanes=3)
    names = shards_after(store, "c0", -1)
    store.delete(names[0].path)
    store.delete(names[1].path)
    report = verify_dataset(store)
    assert (report.faults, report.sequences, report.missing_sequences) == ([], 64, 0)
    store.delete(names[5].path)
    store.delete(names[6].path)
    report = verify_dataset(store)
    assert report.faults == [f"{names[7].path}: gap, shards 5 to 6 are missing"]
    assert report.missing_sequences == 16


@pytest.mark.parametrize("is_torn", [False, True])
def test_what_is_corrupt_at_the_beginning_of_what_retention_left_makes_nothing_missing(tmp_path, is_torn):
    store = make_dataset(tmp_path, TERMS, 80, per_shard=8)
    names = shards_after(store, "c0", -1)
    for name in names[:5]:
        store.delete(name.path)
    if is_torn:
        store.put(names[5].path, b"torn")
    else:
        damage(store, names[5], "reward", 0)
    report = verify_dataset(store)
    assert (len(report.faults), report.missing_sequences, report.duplicates) == (1, 0, 0)


def test_a_torn_file_and_a_foreign_one_are_named_left_in_place_and_cost_only_themselves(tmp_path):
    store = make_dataset(tmp_path, TERMS, 80, per_shard=8, lanes=3)
    torn = shards_after(store, "c0", -1)[4].path
    store.put(torn, store.get(torn)[:-100])
    foreign = "shards/c0/000000/notes.txt"
    store.put(foreign, b"hello")
    report = verify_dataset(store)
    assert {path for path, _ in report.bad_files} == {torn, foreign}
    assert len(report.faults) == 2
    assert (report.sequences, report.duplicates, report.missing_sequences) == (72, 0, 0)
    assert store.get(foreign) == b"hello"


def test_a_flipped_bit_is_one_corrupt_row_and_nothing_else(tmp_path):
    store = make_dataset(tmp_path, TERMS, 40, per_shard=8)
    path = shards_after(store, "c0", -1)[2].path
    damaged = bytearray(store.get(path))
    damaged[len(damaged) // 2] ^= 1
    store.put(path, damaged)
    report = verify_dataset(store)
    assert report.corrupt_rows == len(report.faults) == 1
    assert report.faults[0].startswith(path)
    assert report.faults[0].endswith("checksum or pixels wrong")


def test_a_shard_that_is_there_twice_is_a_duplicate(tmp_path):
    store = make_dataset(tmp_path, TERMS, 24, per_shard=8)
    last = shards_after(store, "c0", -1)[-1]
    again = ShardName("c0", 3, last.sequences, last.env_steps)
    shutil.copy(store.map_path(last.path), store.map_path(again.path))
    report = verify_dataset(store)
    assert report.duplicates == 8
    assert "sequence 16 occurs twice" in report.faults[0]
    store.delete(again.path)
    same_number = ShardName("c0", 2, last.sequences, last.env_steps + 1)
    shutil.copy(store.map_path(last.path), store.map_path(same_number.path))
    assert "shard 2 occurs twice" in the_only_fault(store)


def test_a_name_that_counts_other_env_steps_is_a_fault(tmp_path):
    store = make_dataset(tmp_path, TERMS, 8, per_shard=8)
    (name,) = shards_after(store, "c0", -1)
    wrong = ShardName("c0", 0, 8, name.env_steps + 1)
    store.map_path(name.path).rename(store.map_path(wrong.path))
    assert f"owns {name.env_steps} env steps, its name says {name.env_steps + 1}" in the_only_fault(store)


def test_shards_of_other_terms_and_without_provenance_are_faults(tmp_path):
    store = make_dataset(tmp_path / "here", TERMS, 8, per_shard=8)
    there = make_dataset(tmp_path / "there", tiny_terms(life_loss="roll"), 8, per_shard=8, collector="c1")
    (name,) = shards_after(there, "c1", -1)
    store.put(name.path, there.get(name.path))
    faults = verify_dataset(store).faults
    assert len(faults) == 2
    assert faults[0] == "collectors/c1.json: missing or unreadable"
    assert "identity.life_loss: off here, roll there" in faults[1]
    write_provenance(store, "c1", {})
    assert len(verify_dataset(store).faults) == 1


def test_a_store_without_terms_is_no_dataset(store):
    with pytest.raises(ValueError, match=r"dataset\.json is missing"):
        verify_dataset(store)


def only(row, value, dtype):
    array = np.zeros(7, dtype)
    array[row] = value
    return array


# An episode of 9 steps that terminates: sequences 0, 1, 2 at steps 0, 2, 4 (L 2, T 4, n 1, S 7), the last with a final
# observation, and step 8 in row 6 of it; then 3, at step 6, owns steps 6 to 8.
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, {"start": 3}, "start is 3; allowed: multiples of the stride 2"),
        (1, {"first_valid": 1, "num_steps": 6}, "window is"),
        (1, {"num_steps": 6}, "window is"),
        (3, {"num_observations": 5}, "window is"),
        (3, {"ends": CONTINUES}, "window is"),
        (3, {"ends": 9}, "ends is 9; allowed"),
        (3, {"ends": LIFE_LOST}, "in reset mode only"),
        (3, {"ends": TRUNCATED}, "ends is truncated; allowed by the flags: terminated"),
        (3, {"terminated": np.zeros(7, np.uint8)}, "ends is terminated; allowed by the flags: continues or cut"),
        (1, {"ends": CUT}, "episode 0 has two ends"),
        (1, {"terminated": only(3, 1, np.uint8)}, "terminated before the last step"),
        (1, {"truncated": only(6, 1, np.uint8)}, "ends is continues; allowed by the flags: truncated"),
        (0, {"greedy": only(0, 1, np.uint8)}, "greedy is not zero outside the window"),
        (0, {"reward": only(1, 1, np.float32)}, "reward is not zero outside the window"),
        (1, {"reward": only(1, np.inf, np.float32)}, "a reward is not finite"),
        (1, {"action": only(2, 3, np.int32)}, "an action is outside 0 to 2"),
        (1, {"life_lost": only(2, 2, np.uint8)}, "a flag is neither 0 nor 1"),
        (0, {"previous_action": 0}, "previous action and reward are 0 and 0.0"),
        (0, {"previous_reward": 1.0}, "previous action and reward are -1 and 1.0"),
        (2, {"previous_action": -1}, "previous action and reward are -1"),
        (1, {"env_steps": 5}, "env_steps is 5; allowed: 4"),
        (1, {"version_first": 4}, "parameter versions do not fit"),
        (1, {"episode": 1}, "episode 0 is left without an end"),
    ],
)
def test_a_wrong_row_is_named_with_what_is_wrong(store, index, change, message):
    sequences = episode_sequences(9, TERMINATED)
    assert [each.ends for each in sequences] == [CONTINUES, CONTINUES, TERMINATED, TERMINATED]
    assert verify_dataset_of(store, sequences) == []
    sequences[index] = dataclasses.replace(sequences[index], **change)
    shutil.rmtree(store.root / "shards")
    faults = verify_dataset_of(store, sequences)
    assert any(message in fault for fault in faults), faults


def verify_dataset_of(store, sequences):
    write_shards(store, TERMS, sequences, per_shard=16)
    return verify_dataset(store).faults


@pytest.mark.parametrize(("index", "position"), [(0, 1), (0, 0), (3, 7)])
def test_pixels_outside_the_window_and_its_history_are_a_fault(store, index, position):
    """K 2: position p is the frame of row p - 1; sequence 0 begins with row 2, sequence 3's final frame is row 5's."""
    sequences = episode_sequences(9, TERMINATED)
    observation = sequences[index].observation.copy()
    observation[position, 0, 0] = 255
    sequences[index] = dataclasses.replace(sequences[index], observation=observation)
    write_shards(store, TERMS, sequences, per_shard=16)
    assert "observation is not zero outside the window" in the_only_fault(store)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_episode_that_is_not_covered_by_owned_steps_is_a_fault(store, missing):
    """The sequences are renumbered, so that only the steps they own tell that one is missing."""
    sequences = episode_sequences(9, TERMINATED)
    del sequences[missing]
    sequences = [dataclasses.replace(each, sequence=number) for number, each in enumerate(sequences)]
    write_shards(store, TERMS, sequences, per_shard=16)
    faults = verify_dataset(store).faults
    assert any("begins at step 2" in fault or "goes on at step" in fault for fault in faults)


def test_a_sequence_that_begins_too_late_for_its_episode_is_a_fault(store):
    episode = make_episode(TERMS, np.random.default_rng(0), number=0, lane=0, steps=9, ends=TERMINATED)
    late = cut_sequence(TERMS, episode, 4, collector="c0", sequence=4, env_steps=10)
    write_shards(store, TERMS, [*episode_sequences(9, TERMINATED), late], per_shard=16)
    assert "start is 8; allowed: none that late in an episode of 9 steps" in the_only_fault(store)


def test_episodes_of_a_lane_in_another_order_are_a_fault(store):
    sequences = episode_sequences(9, TERMINATED)
    second = dataclasses.replace(episode_sequences(3, CUT)[0], sequence=4, env_steps=12, episode=-1)
    write_shards(store, TERMS, [*sequences, second], per_shard=16)
    assert "episode -1 comes after episode 0 in lane 0" in the_only_fault(store)


def test_an_episode_that_goes_on_after_its_end_is_a_fault(store):
    sequences = episode_sequences(9, TERMINATED)
    again = dataclasses.replace(sequences[-1], sequence=4, env_steps=12)
    write_shards(store, TERMS, [*sequences, again], per_shard=16)
    assert "episode 0 goes on after its end" in the_only_fault(store)
