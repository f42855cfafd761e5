"""Small valid terms, episodes, sequences and shards for tests, cut by slow and obvious loops."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from pipeline.dataset import ShardName, agree_on_terms, shards_after, write_provenance
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore, open_store
from schemas.geometry import CONTINUES, CUT, LIFE_LOST, TERMINATED, TRUNCATED, SequenceGeometry
from schemas.records import Sequence, SequenceBatch
from schemas.shard import NO_ACTION, PROBE_EVERY
from schemas.specs import ArraySpec, CoreSpec, EnvSpec
from schemas.terms import DatasetTerms

LINEAGE = bytes(range(16))


def tiny_terms(**changes: Any) -> DatasetTerms:
    """L 2, T 4, n 1, stride 2, K 2, frames of 6x5 uint8, 3 actions, an LSTM of width 3.

    ``geometry``, ``core``, ``env`` replace whole parts; ``observation`` only the environment's spec.
    """
    observation = changes.pop("observation", ArraySpec(shape=(6, 5), dtype="uint8"))
    life_loss = changes.pop("life_loss", "off")
    parts: dict[str, Any] = {
        "env": EnvSpec(
            env_id="Tiny-v0", observation=observation, action_set=("noop", "left", "right"), life_loss=life_loss
        ),
        "geometry": SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=2, frame_stack=2),
        "core": CoreSpec(kind="lstm", layers=1, width=3),
    }
    return DatasetTerms(**(parts | changes))


@dataclass
class Episode:
    """E steps of one episode: ``observation`` ``[E + 1, *shape]`` with the final one, ``core`` before each of them."""

    number: int
    lane: int
    ends: int
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    q_values: np.ndarray
    core: list[np.ndarray]

    @property
    def steps(self) -> int:
        return len(self.action)


def make_episode(
    terms: DatasetTerms, rng: np.random.Generator, *, number: int, lane: int, steps: int, ends: int
) -> Episode:
    """A random episode under a pretended network (parameter version 3, lineage ``LINEAGE``)."""
    shape, dtype = terms.env.observation.shape, np.dtype(terms.env.observation.dtype)
    pixels = rng.integers(0, 256, (steps + 1, *shape))
    core = [rng.standard_normal((steps + 1, terms.core.size)).astype(np.float32) for _ in terms.core.parts]
    for part in core:
        part[0] = 0
    return Episode(
        number=number,
        lane=lane,
        ends=ends,
        observation=pixels.astype(dtype),
        action=rng.integers(0, terms.env.num_actions, steps).astype(np.int32),
        reward=rng.standard_normal(steps).astype(np.float32),
        q_values=rng.standard_normal((steps + 1, terms.env.num_actions)).astype(np.float32),
        core=core,
    )


def cut_sequence(
    terms: DatasetTerms, episode: Episode, index: int, *, collector: str, sequence: int, env_steps: int
) -> Sequence:
    """Sequence ``index`` of a finished episode, row by row."""
    geometry, shape = terms.geometry, terms.env.observation.shape
    rows, history = geometry.stored_steps, geometry.frame_stack - 1
    window = geometry.window(index, episode.steps, ended=True)
    first_row_step = window.start - geometry.burn_in
    observation = np.zeros((history + rows, *shape), episode.observation.dtype)
    q_values = np.full((rows, terms.env.num_actions), np.nan, np.float32)
    action, reward = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    terminated, truncated, life_lost, greedy = (np.zeros(rows, np.uint8) for _ in range(4))
    first_step, past_last = first_row_step + window.first_valid, first_row_step + window.first_valid + window.num_steps
    for step in range(max(0, first_step - history), first_step + window.num_observations):
        observation[history + step - first_row_step] = episode.observation[step]
    for step in range(first_step, first_step + window.num_observations):
        q_values[step - first_row_step] = episode.q_values[step]
    for step in range(first_step, past_last):
        row = step - first_row_step
        action[row], reward[row] = episode.action[step], episode.reward[step]
        greedy[row] = episode.action[step] == np.argmax(episode.q_values[step])
        if step == episode.steps - 1:
            terminated[row] = episode.ends == TERMINATED
            truncated[row] = episode.ends == TRUNCATED
            life_lost[row] = episode.ends == LIFE_LOST
    probe_step = window.start + geometry.unroll - 1
    has_probe = sequence % PROBE_EVERY == 0 and probe_step < past_last
    return Sequence(
        collector=collector,
        sequence=sequence,
        episode=episode.number,
        start=window.start,
        lane=episode.lane,
        first_valid=window.first_valid,
        num_steps=window.num_steps,
        num_observations=window.num_observations,
        ends=episode.ends if window.holds_end else CONTINUES,
        observation=observation,
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        life_lost=life_lost,
        greedy=greedy,
        previous_action=int(episode.action[first_step - 1]) if first_step else NO_ACTION,
        previous_reward=float(episode.reward[first_step - 1]) if first_step else 0.0,
        core=tuple(part[first_step] for part in episode.core),
        unroll_core=tuple(part[window.start] for part in episode.core),
        probe_core=tuple(part[probe_step] for part in episode.core) if has_probe else (),
        version_first=3,
        version_last=3,
        lineage=LINEAGE,
        epsilon=0.25,
        episode_return=float(episode.reward.sum()),
        env_steps=env_steps,
        q_values=q_values,
    )


def sequences_of(terms: DatasetTerms, *, collector: str = "c0", seed: int = 0, lanes: int = 1) -> Iterator[Sequence]:
    """An endless, valid stream of one collector: whole random episodes, those of different lanes interleaved.

    Lengths run from one step to several windows and every way to end occurs (a lost life only where it ends episodes).
    """
    rng = np.random.default_rng(seed)
    endings = [TERMINATED, TRUNCATED, CUT] + [LIFE_LOST] * (terms.env.life_loss == "reset")
    episode_numbers, sequences, env_steps = count(), count(), 0
    longest = 3 * terms.geometry.unroll + terms.geometry.bootstrap

    def lane_stream(lane: int) -> Iterator[tuple[Episode, int]]:
        while True:
            steps, ends = int(rng.integers(1, longest + 1)), int(rng.choice(endings))
            episode = make_episode(terms, rng, number=next(episode_numbers), lane=lane, steps=steps, ends=ends)
            for index in range(terms.geometry.last_sequence(steps) + 1):
                yield episode, index

    streams = [lane_stream(lane) for lane in range(lanes)]
    while True:
        for stream in streams:
            episode, index = next(stream)
            is_last = index == terms.geometry.last_sequence(episode.steps)
            env_steps += episode.steps - index * terms.geometry.stride if is_last else terms.geometry.stride
            yield cut_sequence(
                terms, episode, index, collector=collector, sequence=next(sequences), env_steps=env_steps
            )


def make_sequences(terms: DatasetTerms, number: int, **stream: Any) -> list[Sequence]:
    """The first ``number`` sequences of ``sequences_of``."""
    return list(islice(sequences_of(terms, **stream), number))


def q_spread(batch: SequenceBatch, q_values: np.ndarray) -> np.ndarray:
    """A stand-in for the real initial priorities: another for every sequence, NaN without a network."""
    known = [values[~np.isnan(values)] for values in q_values]
    return np.array([values.std() if values.size else np.nan for values in known], np.float32)


def make_writer(store: LocalStore, terms: DatasetTerms, collector: str = "c0", **settings: Any) -> ShardWriter:
    """A writer with ``q_spread``; ``clock`` and the fields of ``WriterConfig`` as keywords."""
    clock = {"clock": settings.pop("clock")} if "clock" in settings else {}
    return ShardWriter(store, terms, collector, WriterConfig(**settings), initial_priorities=q_spread, **clock)


def write_shards(
    store: LocalStore, terms: DatasetTerms, sequences: Iterable[Sequence], *, per_shard: int = 8
) -> list[ShardName]:
    """Publish the sequences of one collector from its first on, terms and provenance included; the shards' names."""
    sequences = list(sequences)
    collector = sequences[0].collector
    agree_on_terms(store, terms)
    write_provenance(store, collector, {"seed": 0})
    writer = make_writer(store, terms, collector, flush_sequences=per_shard)
    for sequence in sequences:
        writer.add(sequence)
    writer.flush()
    return shards_after(store, collector, -1)


def make_dataset(root: Any, terms: DatasetTerms, number: int, *, per_shard: int = 8, **stream: Any) -> LocalStore:
    """A store in ``root``, made if need be, that holds ``number`` sequences of one collector."""
    store = open_store(str(root), create=True)
    write_shards(store, terms, make_sequences(terms, number, **stream), per_shard=per_shard)
    return store


def damage(store: LocalStore, name: ShardName, column: str, row: int, *, bit: int = 1) -> None:
    """Flip a bit in the first byte of what a stored row holds under ``column``, a fixed one."""
    path = store.map_path(name.path)
    shard = open_shard(path)
    rest = np.frombuffer(shard._data, np.uint8)
    at = shard.columns[column][row:].ctypes.data - rest.ctypes.data
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)
