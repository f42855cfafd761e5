"""Cuts the steps of N lanes into overlapping sequences (algorithm.md section 1; the paper's section 2.3).

Every step of every episode is in the unroll of at least one sequence: heads are front-padded, tails and short episodes
are emitted too, and ``cut`` closes the open ones when a collector stops in mid-episode.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.frame_buffers import FrameBuffers
from pipeline.rollout import VectorStep
from schemas.geometry import CONTINUES, CUT, LIFE_LOST, TERMINATED, TRUNCATED, Window
from schemas.records import Sequence
from schemas.shard import NO_ACTION, NO_LINEAGE, PROBE_EVERY
from schemas.terms import DatasetTerms


class SequenceBuilder:
    """Vector steps in, finished sequences out, numbered 0, 1, 2, ... over all lanes.

    Each lane keeps a ring of its last K + S steps, just enough for the oldest window that is still open.

    Args:
        terms: windows, observation and core of the dataset.
        collector: the incarnation's id, stamped on each sequence.
        num_lanes: N.
        buffers: memory for the frames of sequences, each of which is given back by whoever is done with it; None: new
            memory for each.

    Attributes:
        cutting_seconds: spent so far on copying complete windows out.
    """

    def __init__(
        self, terms: DatasetTerms, collector: str, num_lanes: int, buffers: FrameBuffers | None = None
    ) -> None:
        self._geometry, self._core, self._collector = terms.geometry, terms.core, collector
        self._buffers, self.cutting_seconds = buffers, 0.0
        self._resets_at_life_loss = terms.env.life_loss == "reset"
        n, ring = num_lanes, terms.geometry.frame_stack + terms.geometry.stored_steps
        self._ring = ring
        self._frames = np.zeros((n, ring, *terms.env.observation.shape), terms.env.observation.dtype)
        self._q_values = np.full((n, ring, terms.env.num_actions), np.nan, np.float32)
        self._states = tuple(np.zeros((n, ring, terms.core.size), np.float32) for _ in terms.core.parts)
        self._rows = {
            "action": np.zeros((n, ring), np.int32),
            "reward": np.zeros((n, ring), np.float32),
            **{name: np.zeros((n, ring), np.uint8) for name in ("terminated", "truncated", "life_lost", "greedy")},
        }
        self._epsilons = np.zeros((n, ring), np.float32)
        self._versions = np.zeros((n, ring), np.int64)
        self._lineages = np.zeros((n, ring), np.int64)  # Positions in _known_lineages.
        self._known_lineages = [NO_LINEAGE]

        self._steps = np.zeros(n, np.int64)  # Steps of the open episode; 0 = none is open.
        self._ends = np.zeros(n, np.int8)  # How it ended, once it has; its final observation comes one step later.
        self._next = np.zeros(n, np.int64)  # Its next sequence.
        self._episode = np.zeros(n, np.int64)
        self._game_return = np.zeros(n, np.float64)  # Over all lives of a game.
        self._game_over = np.zeros(n, bool)  # By the last step: not only a life was lost.
        self._episodes_begun = 0
        self._sequences = 0
        self._env_steps = 0

    def record(self, step: VectorStep, first_lane: int = 0) -> list[Sequence]:
        """Take one vector step of the lanes from ``first_lane`` on; returns the sequences that it completed."""
        emitted: list[Sequence] = []
        failed = self._cut_failed_lanes(step, first_lane)
        for row in np.flatnonzero(self._ends[first_lane : first_lane + len(step.reward)]):
            emitted += self._finish(first_lane + row, step.stack[row, -1], step.act.q_values[row])
        self._game_return[failed] = 0.0
        (rows,) = np.nonzero(step.is_transition)
        lanes = first_lane + rows
        for row in rows[step.first[rows]]:
            self._begin(first_lane + row, step.stack[row, :-1])
        self._write(step, rows, (lanes, self._steps[lanes] % self._ring))
        self._steps[lanes] += 1
        self._game_return[lanes] += step.reward[rows]
        self._ends[lanes] = self._how_it_ended(step)[rows]
        self._game_over[lanes] = (step.terminated | step.truncated)[rows]
        past_last_row = self._next * self._geometry.stride + self._geometry.unroll + self._geometry.bootstrap
        for lane in lanes[self._steps[lanes] >= past_last_row[lanes]]:
            emitted.append(self._cut_window(lane))
        return emitted

    def record_episode(self, episode: VectorStep, lane: int = 0) -> Iterator[Sequence]:
        """An episode that was recorded before, up to its last step; yields the sequences as they are complete.

        The rows of ``episode`` are its consecutive steps, not lanes at one moment; ``cut`` gives what is left. Like one
        ``record`` for each step, but written in runs from one complete window to the next.
        """
        self._begin(lane, episode.stack[0, :-1])
        ends = self._how_it_ended(episode)
        while (first := int(self._steps[lane])) < len(episode.reward):
            past_last_row = self._next[lane] * self._geometry.stride + self._geometry.unroll + self._geometry.bootstrap
            stop = min(len(episode.reward), int(past_last_row))
            around = min(stop, first + self._ring - first % self._ring)  # Where the ring begins anew.
            for begin, end in ((first, around), (around, stop)):
                at = begin % self._ring
                self._write(episode, slice(begin, end), (lane, slice(at, at + end - begin)))
            self._steps[lane] = stop
            self._game_return[lane] += episode.reward[first:stop].sum(dtype=np.float64)
            self._ends[lane] = ends[stop - 1]
            self._game_over[lane] = episode.terminated[stop - 1] | episode.truncated[stop - 1]
            if self._steps[lane] == past_last_row:
                yield self._cut_window(lane)

    def cut(self, observation: np.ndarray, q_values: np.ndarray, first_lane: int = 0) -> list[Sequence]:
        """Close the open episodes of lanes at a stop; returns their sequences, which bootstrap from ``observation``.

        Args:
            observation: ``[N, *shape]`` of the lanes from ``first_lane`` on, seen but not acted on.
            q_values: ``[N, A]`` of it.
        """
        lanes = np.arange(first_lane, first_lane + len(observation))
        self._ends[lanes[(self._steps[lanes] > 0) & (self._ends[lanes] == CONTINUES)]] = CUT
        return [
            sequence
            for lane in lanes[self._ends[lanes] != CONTINUES]
            for sequence in self._finish(lane, observation[lane - first_lane], q_values[lane - first_lane])
        ]

    def _cut_failed_lanes(self, step: VectorStep, first_lane: int) -> np.ndarray:
        """Lanes that were reset in mid-episode: their environments raised. What was seen of these is kept as cut."""
        lanes = first_lane + np.flatnonzero(~step.is_transition)
        self._ends[lanes[(self._steps[lanes] > 0) & (self._ends[lanes] == CONTINUES)]] = CUT
        return lanes

    def _begin(self, lane: int | np.intp, history: np.ndarray) -> None:
        before_first = np.arange(-(self._geometry.frame_stack - 1), 0)
        self._frames[lane, before_first % self._ring] = history
        self._steps[lane] = self._next[lane] = 0
        self._episode[lane] = self._episodes_begun
        self._episodes_begun += 1

    def _write(self, step: VectorStep, rows: np.ndarray | slice, at: tuple[Any, Any]) -> None:
        """``rows`` of the step to the places ``at`` (lane, position in its ring)."""
        self._frames[at] = step.stack[rows, -1]
        self._q_values[at] = step.act.q_values[rows]
        for state, now in zip(self._states, step.act.core, strict=True):
            state[at] = now[rows]
        brought = {
            "action": step.act.action,
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "life_lost": step.life_lost,
            "greedy": step.act.greedy,
        }
        for name, values in brought.items():
            self._rows[name][at] = values[rows]
        self._epsilons[at] = step.epsilons[rows]
        self._versions[at] = step.act.version
        if step.act.lineage not in self._known_lineages:
            self._known_lineages.append(step.act.lineage)
        self._lineages[at] = self._known_lineages.index(step.act.lineage)

    def _how_it_ended(self, step: VectorStep) -> np.ndarray:
        ends = np.where(step.truncated, TRUNCATED, CONTINUES)
        if self._resets_at_life_loss:
            ends = np.where(step.life_lost, LIFE_LOST, ends)
        return np.where(step.terminated, TERMINATED, ends)

    def _finish(self, lane: int | np.intp, observation: np.ndarray, q_values: np.ndarray) -> list[Sequence]:
        """Emit what is left of an ended episode, now that its final observation is known."""
        at = self._steps[lane] % self._ring
        self._frames[lane, at] = observation
        self._q_values[lane, at] = q_values
        last = self._geometry.last_sequence(int(self._steps[lane]))
        emitted = [self._cut_window(lane) for _ in range(self._next[lane], last + 1)]
        if self._ends[lane] != LIFE_LOST or self._game_over[lane]:
            self._game_return[lane] = 0.0
        self._steps[lane] = 0
        self._ends[lane] = CONTINUES
        return emitted

    def _cut_window(self, lane: int | np.intp) -> Sequence:
        """Copy the lane's next window out of its ring."""
        started = time.perf_counter()
        geometry, ring, ends = self._geometry, self._ring, int(self._ends[lane])
        steps = int(self._steps[lane])
        window = geometry.window(int(self._next[lane]), steps, ended=ends != CONTINUES)
        stored_ends = ends if window.holds_end else CONTINUES
        first_step = window.start - geometry.burn_in + window.first_valid
        acted = np.arange(first_step, first_step + window.num_steps) % ring
        seen = np.arange(first_step, first_step + window.num_observations) % ring

        def rows(source: np.ndarray, taken: np.ndarray, fill: float = 0) -> np.ndarray:
            out = np.full((geometry.stored_steps, *source.shape[2:]), fill, source.dtype)
            out[window.first_valid : window.first_valid + len(taken)] = source[lane, taken]
            return out

        def states_before(step: int) -> tuple[np.ndarray, ...]:
            return tuple(state[lane, step % ring].copy() for state in self._states)

        has_previous, before = first_step > 0, (first_step - 1) % ring
        probed = window.start + geometry.unroll - 1
        has_probe = self._sequences % PROBE_EVERY == 0 and probed < steps
        lineages = self._lineages[lane, acted]
        self._env_steps += int(geometry.owned_steps(*np.array([window.first_valid, window.num_steps, stored_ends])))
        sequence = Sequence(
            collector=self._collector,
            sequence=self._sequences,
            episode=int(self._episode[lane]),
            start=window.start,
            lane=int(lane),
            first_valid=window.first_valid,
            num_steps=window.num_steps,
            num_observations=window.num_observations,
            ends=stored_ends,
            observation=self._frames_of(lane, first_step, window),
            **{name: rows(source, acted) for name, source in self._rows.items()},
            previous_action=int(self._rows["action"][lane, before]) if has_previous else NO_ACTION,
            previous_reward=float(self._rows["reward"][lane, before]) if has_previous else 0.0,
            core=states_before(first_step),
            unroll_core=states_before(window.start),
            probe_core=states_before(probed) if has_probe else (),
            version_first=int(self._versions[lane, acted].min()),
            version_last=int(self._versions[lane, acted].max()),
            # A state made by two networks belongs to none.
            lineage=self._known_lineages[lineages[0]] if (lineages == lineages[0]).all() else NO_LINEAGE,
            epsilon=float(self._epsilons[lane, acted[-1]]),
            episode_return=float(self._game_return[lane]) if self._game_over[lane] else float("nan"),
            env_steps=self._env_steps,
            q_values=rows(self._q_values, seen, fill=np.nan),
        )
        self._sequences += 1
        self._next[lane] += 1
        self.cutting_seconds += time.perf_counter() - started
        return sequence

    def _frames_of(self, lane: int | np.intp, first_step: int, window: Window) -> np.ndarray:
        """``[K-1+S, *shape]``: out of the ring in one or two runs, zero before and behind."""
        source, history, at = self._frames[lane], self._geometry.frame_stack - 1, window.first_valid
        if self._buffers is None:
            frames = np.empty((self._geometry.stored_frames, *source.shape[1:]), source.dtype)
        else:
            frames = self._buffers.take()
        begin, count = (first_step - history) % self._ring, history + window.num_observations
        unbroken = min(count, self._ring - begin)
        frames[:at] = frames[at + count :] = 0
        frames[at : at + unbroken] = source[begin : begin + unbroken]
        frames[at + unbroken : at + count] = source[: count - unbroken]
        return frames
