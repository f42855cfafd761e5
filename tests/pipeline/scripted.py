"""Environments and a policy whose every value is known beforehand, and the slow, obvious cutter of their episodes."""

from dataclasses import dataclass, field

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pipeline.environments.gym import GymLanes
from schemas.records import ActOutput
from schemas.specs import CoreSpec

CORE = CoreSpec(kind="lstm", layers=1, width=3)
NUM_ACTIONS = 3
LINEAGE = bytes(range(16))


@dataclass(frozen=True)
class Episode:
    """``steps`` long; ``lost`` are the steps at which a life goes; the last step terminates or truncates."""

    steps: int
    truncates: bool = False
    lost: frozenset[int] = frozenset()


@dataclass
class Log:
    """What really happened in one life or episode of one lane."""

    observations: list[np.ndarray] = field(default_factory=list)
    history: list[np.ndarray] = field(default_factory=list)  # Frames before the first, newest last.
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    flags: list[tuple[bool, bool, bool]] = field(default_factory=list)  # terminated, truncated, life_lost
    ends: str = "cut"


class ScriptedEnv(gymnasium.Env):
    """Plays ``script`` over and over; observations are (lane, episode, step) and so never repeat."""

    def __init__(self, lane: int, script: list[Episode]) -> None:
        self.observation_space = Box(-1e6, 1e6, (3,), np.float32)
        self.action_space = Discrete(NUM_ACTIONS)
        self._lane, self._script = lane, script
        self._episode, self._step = -1, 0
        self.logs: list[Log] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode, self._step, self._lives = self._episode + 1, 0, 9
        self.logs.append(Log(observations=[self._observe()]))
        return self._observe(), {"lives": self._lives}

    def step(self, action):
        episode = self._script[self._episode % len(self._script)]
        lost = self._step in episode.lost
        self._lives -= lost
        reward = float(self._step % 5) - 1.5 + self._lane
        self._step += 1
        at_end = self._step == episode.steps
        terminated, truncated = at_end and not episode.truncates, at_end and episode.truncates
        log = self.logs[-1]
        log.observations.append(self._observe())
        log.actions.append(int(action))
        log.rewards.append(reward)
        log.flags.append((terminated, truncated, lost))
        if at_end:
            log.ends = "terminated" if terminated else "truncated"
        return self._observe(), reward, terminated, truncated, {"lives": self._lives}

    def _observe(self):
        return np.array([self._lane + 1, self._episode, self._step], np.float32)


def scripted_lanes(scripts: list[list[Episode]], life_loss: str = "off") -> tuple[GymLanes, list[ScriptedEnv]]:
    envs = [ScriptedEnv(lane, script) for lane, script in enumerate(scripts)]
    vector = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=AutoresetMode.NEXT_STEP)
    return GymLanes(vector, "Scripted-v0", {}, life_loss), envs


def advance(core, stack, previous_action: int, previous_reward: float):
    """One step of a made-up recurrent function of one lane: (q ``[A]``, next core)."""
    h, c = core
    seen = np.float32(stack.sum() % 97) / 97 + np.float32(previous_action + 2) / 7 + np.float32(previous_reward) / 11
    next_c = (0.9 * c + seen * np.arange(1, 4, dtype=np.float32)).astype(np.float32)
    next_h = np.tanh(next_c + 0.5 * h).astype(np.float32)
    return (next_h * np.float32(1.7)).astype(np.float32), (next_h, next_c)


class ScriptedPolicy:
    """Carries ``advance`` over N lanes; action = hash of the call, sometimes the argmax."""

    def __init__(self, num_lanes: int, seed: int = 0) -> None:
        self._core = [(np.zeros(3, np.float32), np.zeros(3, np.float32)) for _ in range(num_lanes)]
        self._random = np.random.default_rng(seed)
        self.epsilons = np.linspace(0.1, 0.4, num_lanes).astype(np.float32)
        self.version = 0

    def act(self, observation, previous_action, previous_reward, first) -> ActOutput:
        n = len(self._core)
        for lane in np.flatnonzero(first):
            self._core[lane] = (np.zeros(3, np.float32), np.zeros(3, np.float32))
        before = tuple(np.stack([core[part] for core in self._core]) for part in range(2))
        outputs = [
            advance(self._core[lane], observation[lane], int(previous_action[lane]), float(previous_reward[lane]))
            for lane in range(n)
        ]
        self._core = [core for _, core in outputs]
        q_values = np.stack([q for q, _ in outputs])
        best = q_values.argmax(1)
        action = np.where(self._random.random(n) < 0.5, best, self._random.integers(0, NUM_ACTIONS, n))
        return ActOutput(
            action=action, greedy=action == best, q_values=q_values, core=before, version=self.version, lineage=LINEAGE
        )


def split_lives(log: Log, frame_stack: int, *, reset_mode: bool) -> list[Log]:
    """One game's log as the lives that ``reset`` mode makes of it; one piece otherwise."""
    zeros = [np.zeros(3, np.float32)] * (frame_stack - 1)
    if not reset_mode:
        return [Log(log.observations, zeros, log.actions, log.rewards, log.flags, log.ends)]
    pieces, start = [], 0
    for step, (terminated, truncated, lost) in enumerate(log.flags):
        last = step == len(log.flags) - 1
        if not (lost or last):
            continue
        ends = "terminated" if terminated else "life_lost" if lost else "truncated" if truncated else "cut"
        pieces.append(_piece(log, start, step + 1, zeros, frame_stack, ends))
        start = step + 1
    return pieces


def _piece(log: Log, start: int, stop: int, zeros, frame_stack: int, ends: str) -> Log:
    history = (zeros + log.observations[:start])[-(frame_stack - 1) :] if frame_stack > 1 else []
    return Log(
        log.observations[start : stop + 1], history, log.actions[start:stop], log.rewards[start:stop],
        log.flags[start:stop], ends,
    )  # fmt: skip


def expected_sequences(log: Log, geometry, frame_stack: int) -> list[dict]:
    """Every sequence that one episode must give, row by row from the definition (algorithm.md section 1)."""
    steps, length, stride = len(log.actions), geometry.stored_steps, geometry.stride
    frame_of = {i - len(log.history): frame for i, frame in enumerate(log.history)}
    frame_of |= dict(enumerate(log.observations))
    cores, q_values = [(np.zeros(3, np.float32), np.zeros(3, np.float32))], []
    for step in range(steps + 1):
        stack = np.stack([frame_of[step - frame_stack + 1 + i] for i in range(frame_stack)])
        previous = (log.actions[step - 1], log.rewards[step - 1]) if step else (-1, 0.0)
        q, core = advance(cores[-1], stack, *previous)
        q_values.append(q)
        cores.append(core)
    sequences, k = [], 0
    while True:
        first_row = k * stride - geometry.burn_in
        real = [row for row in range(length) if 0 <= first_row + row < steps]
        seen = [row for row in range(length) if 0 <= first_row + row <= steps]
        first_step = first_row + real[0]
        # A window that is just full when the collector stops has been emitted already, before anything was cut.
        holds_end = first_row + length > steps - (log.ends != "cut")
        want = {
            "start": k * stride,
            "first_valid": real[0],
            "num_steps": len(real),
            "num_observations": len(seen),
            "ends": log.ends if holds_end else "continues",
            "core": cores[first_step],
            "unroll_core": cores[k * stride],
            "previous_action": log.actions[first_step - 1] if first_step else -1,
            "previous_reward": log.rewards[first_step - 1] if first_step else 0.0,
            "observation": np.zeros((frame_stack - 1 + length, 3), np.float32),
            "action": np.zeros(length, np.int32),
            "reward": np.zeros(length, np.float32),
            "flags": np.zeros((3, length), np.uint8),
            "q_values": np.full((length, NUM_ACTIONS), np.nan, np.float32),
            "trained": [s for s in range(k * stride, k * stride + geometry.unroll) if s < steps],
        }
        for row in seen:
            want["q_values"][row] = q_values[first_row + row]
            for back in range(frame_stack):
                want["observation"][row + frame_stack - 1 - back] = frame_of[first_row + row - back]
        for row in real:
            want["action"][row] = log.actions[first_row + row]
            want["reward"][row] = log.rewards[first_row + row]
            want["flags"][:, row] = log.flags[first_row + row]
        sequences.append(want)
        if k * stride + geometry.unroll >= steps:
            return sequences
        k += 1
