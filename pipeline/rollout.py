"""Acting: one policy and N lanes, step by step. Writes nothing, logs nothing, knows nothing of sequences."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.environments import Lanes
from schemas.records import ActOutput
from schemas.shard import NO_ACTION


class Policy(Protocol):
    """Chooses actions and carries the core state of N lanes from call to call."""

    @property
    def epsilons(self) -> np.ndarray:
        """Float32 ``[N]``: the probability with which each lane acts at random now."""
        ...

    def act(
        self, observation: np.ndarray, previous_action: np.ndarray, previous_reward: np.ndarray, first: np.ndarray
    ) -> ActOutput:
        """Consume one stack ``[N, K, *shape]`` per lane. Lanes with ``first`` start from the zero core state.

        ``previous_action`` int ``[N]`` is -1 where there is none; ``previous_reward`` is float32 ``[N]``.
        """
        ...


@dataclass(frozen=True)
class VectorStep:
    """One call of the environment: what each lane saw, did, and what that brought.

    Attributes:
        stack: ``[N, K, *shape]``, the observation acted on is its last frame.
        first: bool ``[N]``, the observation starts an episode (or, in ``reset`` mode, a life).
        act: what the policy said; for lanes that were only reset its action was ignored, its q_values are those of
            the final observation.
        epsilons: float32 ``[N]``, as of this action.
        reward, terminated, truncated, life_lost, is_transition: ``[N]``, see ``LaneStep``.
    """

    stack: np.ndarray
    first: np.ndarray
    act: ActOutput
    epsilons: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    life_lost: np.ndarray
    is_transition: np.ndarray


class Rollout:
    """Steps lanes with a policy, keeping each lane's frame stack and its previous action and reward.

    At a real reset the stack is zero before the first frame. At a lost life in ``reset`` mode the core, previous
    action and previous reward start anew but the frames stay.
    """

    def __init__(self, lanes: Lanes, policy: Policy, frame_stack: int, seed: int) -> None:
        self._lanes, self._policy, self.num_lanes = lanes, policy, lanes.num_lanes
        self._resets_at_life_loss = lanes.spec.life_loss == "reset"
        n, observation = lanes.num_lanes, lanes.reset(seed)
        self._stack = np.zeros((n, frame_stack, *lanes.spec.observation.shape), lanes.spec.observation.dtype)
        self._stack[:, -1] = observation
        self._first = np.ones(n, bool)
        self._previous_action = np.full(n, NO_ACTION)
        self._previous_reward = np.zeros(n, np.float32)
        self._sent: tuple[ActOutput, np.ndarray] | None = None

    @property
    def in_flight(self) -> bool:
        """``act`` has been called and ``observe`` has not."""
        return self._sent is not None

    def step(self) -> VectorStep:
        """Act once in every lane and return what came of it."""
        self.act()
        return self.observe()

    def act(self) -> None:
        """Choose actions and hand them to the environment, whose threads may run until ``observe``."""
        act = self._act()
        self._lanes.send(act.action)
        self._sent = act, self._policy.epsilons.copy()

    def observe(self) -> VectorStep:
        """Wait for what came of the last ``act``."""
        assert self._sent is not None, "observe without act"
        (act, epsilons), self._sent = self._sent, None
        stack, first = self._stack, self._first
        result = self._lanes.recv()
        was_reset = ~result.is_transition
        # A new array each time: the one that goes out stays as it was.
        self._stack = np.empty_like(stack)
        self._stack[:, :-1] = stack[:, 1:]
        self._stack[was_reset, :-1] = 0
        self._stack[:, -1] = result.observation
        self._first = was_reset.copy()
        if self._resets_at_life_loss:
            self._first |= result.life_lost & ~(result.terminated | result.truncated)
        self._previous_action = np.where(self._first, NO_ACTION, act.action)
        self._previous_reward = np.where(self._first, 0, result.reward).astype(np.float32)
        return VectorStep(
            stack=stack,
            first=first,
            act=act,
            epsilons=epsilons,
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            life_lost=result.life_lost,
            is_transition=result.is_transition,
        )

    def look(self) -> tuple[np.ndarray, ActOutput]:
        """The observations not yet acted on and the policy's view of them, for cutting open episodes at a stop.

        Ends the rollout: the policy has consumed an observation that was never acted on.
        """
        return self._stack[:, -1], self._act()

    def _act(self) -> ActOutput:
        return self._policy.act(self._stack, self._previous_action, self._previous_reward, self._first)
