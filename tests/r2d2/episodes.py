"""Made-up episodes, acted through a network and cut into sequences the slow and obvious way."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from r2d2.networks import R2D2Network, state_to_rows, zero_state
from schemas.geometry import CONTINUES, TERMINATED, SequenceGeometry
from schemas.records import ReplaySample, SequenceBatch

LINEAGE = bytes(range(16))


@dataclass(frozen=True, kw_only=True)
class Episode:
    """E steps and E+1 observations, with what the network said: core state *before* each of them, and Q-values."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    life_lost: np.ndarray
    ends: int
    core: list[np.ndarray] = field(default_factory=list)
    q_values: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.action)


def play(network: R2D2Network, steps: int, ends: int, seed: int) -> Episode:
    """One episode of random observations and actions, acted step by step."""
    rng = np.random.default_rng(seed)
    spec = network.spec
    shape = (steps + 1, *spec.observation.shape)
    if spec.observation.dtype == "uint8":
        observation = rng.integers(0, 256, shape).astype(np.uint8)
    else:
        observation = rng.random(shape).astype(np.float32)
    action = rng.integers(spec.num_actions, size=steps).astype(np.int32)
    reward = rng.normal(size=steps).astype(np.float32)
    history = np.concatenate([np.zeros_like(observation[: spec.frame_stack - 1]), observation])
    state, core, q_values = zero_state(spec.core, 1), [], []
    for t in range(steps + 1):
        core.append([rows.numpy()[0] for rows in state_to_rows(state)])
        stack = torch.from_numpy(history[None, t : t + spec.frame_stack])
        previous_action = torch.tensor([action[t - 1] if t else -1])
        previous_reward = torch.tensor([reward[t - 1] if t else 0.0])
        with torch.no_grad():
            q, state = network.step(stack, previous_action, previous_reward, state, torch.tensor([t == 0]))
        q_values.append(q.numpy()[0])
    return Episode(
        observation=observation,
        action=action,
        reward=reward,
        life_lost=(rng.random(steps) < 0.1).astype(np.uint8),
        ends=ends,
        core=[np.stack(part) for part in zip(*core, strict=True)],
        q_values=np.stack(q_values),
    )


def cut(episode: Episode, geometry: SequenceGeometry, *, version: int = 0) -> tuple[SequenceBatch, np.ndarray]:
    """All sequences of an episode as one batch, and the actor's Q-values ``[B, S, A]``, NaN without observation."""
    rows = []
    for k in range(geometry.last_sequence(episode.steps) + 1):
        window = geometry.window(k, episode.steps, ended=True)
        first_step = window.start - geometry.burn_in
        columns = {
            "first_valid": window.first_valid,
            "num_steps": window.num_steps,
            "num_observations": window.num_observations,
            "ends": episode.ends if window.holds_end else CONTINUES,
            "observation": np.zeros(
                (geometry.stored_frames, *episode.observation.shape[1:]), episode.observation.dtype
            ),
            **{name: np.zeros(geometry.stored_steps, np.float32) for name in ("action", "reward", "life_lost")},
            "q_values": np.full((geometry.stored_steps, episode.q_values.shape[1]), np.nan, np.float32),
        }
        for row in range(geometry.stored_steps):
            step = first_step + row
            if row >= window.first_valid and step < episode.steps:
                for name in ("action", "reward", "life_lost"):
                    columns[name][row] = getattr(episode, name)[step]
            if row >= window.first_valid and step <= episode.steps:
                columns["q_values"][row] = episode.q_values[step]
        for position in range(geometry.stored_frames):
            step = first_step + position - (geometry.frame_stack - 1)
            if 0 <= step <= episode.steps:
                columns["observation"][position] = episode.observation[step]
        begins = first_step + window.first_valid
        columns["previous_action"] = episode.action[begins - 1] if begins else -1
        columns["previous_reward"] = episode.reward[begins - 1] if begins else 0.0
        columns["core"] = [part[begins] for part in episode.core]
        columns["unroll_core"] = [part[window.start] for part in episode.core]
        last = window.start + geometry.unroll - 1
        columns["probe_core"] = [part[last] for part in episode.core] if last < episode.steps else []
        rows.append(columns)
    return _batch(rows, version), np.stack([columns["q_values"] for columns in rows])


def _batch(rows: list[dict], version: int) -> SequenceBatch:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.stack([row[name] for row in rows]).astype(dtype)

    def parts(name: str) -> tuple[np.ndarray, ...]:
        return tuple(np.stack(part).astype(np.float32) for part in zip(*(row[name] for row in rows), strict=True))

    steps = column("action", np.int32)
    at_end = np.arange(steps.shape[1]) == (column("first_valid", int) + column("num_steps", int) - 1)[:, None]
    ends = column("ends", np.int32)
    return SequenceBatch(
        sequence=np.arange(len(rows)),
        first_valid=column("first_valid", np.int32),
        num_steps=column("num_steps", np.int32),
        num_observations=column("num_observations", np.int32),
        ends=ends,
        observation=np.stack([row["observation"] for row in rows]),
        action=steps,
        reward=column("reward", np.float32),
        terminated=(at_end & (ends == TERMINATED)[:, None]).astype(np.uint8),
        truncated=np.zeros_like(steps, np.uint8),
        life_lost=column("life_lost", np.uint8),
        greedy=np.zeros_like(steps, np.uint8),
        previous_action=column("previous_action", np.int32),
        previous_reward=column("previous_reward", np.float32),
        core=parts("core"),
        unroll_core=parts("unroll_core"),
        probes=np.flatnonzero([len(row["probe_core"]) > 0 for row in rows]),
        probe_core=tuple(
            np.array([row["probe_core"][part] for row in rows if row["probe_core"]], np.float32).reshape(-1, len(state))
            for part, state in enumerate(rows[0]["core"])
        ),
        version_first=np.full(len(rows), version),
        version_last=np.full(len(rows), version),
        lineage=np.tile(np.frombuffer(LINEAGE, np.uint8), (len(rows), 1)),
        epsilon=np.zeros(len(rows), np.float32),
    )


def join(batches: list[SequenceBatch]) -> SequenceBatch:
    """One batch of several."""

    def joined(name: str):
        values = [getattr(batch, name) for batch in batches]
        if isinstance(values[0], tuple):
            return tuple(np.concatenate(part) for part in zip(*values, strict=True))
        return np.concatenate(values)

    before = np.cumsum([0, *map(len, batches)])
    probes = np.concatenate([start + batch.probes for start, batch in zip(before, batches, strict=False)])
    return SequenceBatch(**{name: joined(name) for name in vars(batches[0])} | {"probes": probes})


def sample_of(batch: SequenceBatch, seed: int = 0) -> ReplaySample:
    """The batch as drawn with uneven probabilities out of a replay of 1000."""
    probabilities = np.random.default_rng(seed).uniform(1e-4, 1e-2, len(batch))
    return ReplaySample(ids=np.arange(len(batch)), probabilities=probabilities, replay_sequences=1000, batch=batch)


def with_garbage(batch: SequenceBatch, geometry: SequenceGeometry) -> SequenceBatch:
    """The batch with NaN, huge numbers and impossible actions in everything that is not real."""
    row = np.arange(geometry.stored_steps)
    first, actions = batch.first_valid[:, None], batch.num_steps[:, None]
    no_action = (row < first) | (row >= first + actions)
    position = np.arange(geometry.stored_frames)
    past = first + batch.num_observations[:, None] + geometry.frame_stack - 1
    no_frame = (position < first) | (position >= past)
    observation = batch.observation.copy()
    observation[no_frame] = 255 if observation.dtype == np.uint8 else np.nan
    return replace(
        batch,
        observation=observation,
        action=np.where(no_action, 999, batch.action).astype(np.int32),
        reward=np.where(no_action, np.nan, batch.reward).astype(np.float32),
        life_lost=np.where(no_action, 1, batch.life_lost).astype(np.uint8),
        terminated=np.where(no_action, 1, batch.terminated).astype(np.uint8),
    )
