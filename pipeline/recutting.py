"""Episodes to sequences again: steps that were recorded once, cut by the same builder that cuts while acting."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeline.episodes import Episode
from pipeline.rollout import VectorStep
from pipeline.sequences import SequenceBuilder
from schemas.geometry import SequenceGeometry
from schemas.records import ActOutput, Sequence
from schemas.shard import PROBE_EVERY
from schemas.terms import DatasetTerms


class EpisodeCutter:
    """Cuts one collector's episodes, numbering their sequences 0, 1, 2, ... in the order of the episodes.

    Episode number, lane, actions, what they brought, ``greedy`` and ``epsilon`` stay: they say how the episode was
    acted. ``episode_return`` is given to all sequences of an episode, for it is known by now.

    Args:
        terms: of the dataset to write; its window may be any, its frame stack as long as the episodes' frames or less.
    """

    def __init__(self, terms: DatasetTerms, collector: str) -> None:
        self._depth = terms.geometry.frame_stack
        self._builder = SequenceBuilder(terms, collector, 1)

    def cut(
        self, episode: Episode, *, q_values: np.ndarray, core: tuple[np.ndarray, ...], version: int, lineage: bytes
    ) -> Iterator[Sequence]:
        """Its sequences, with states and Q-values of the network that labelled it.

        Args:
            q_values: float32 ``[E+1, A]``, the last of the final observation.
            core: one float32 ``[E+1, D]`` per part, the state before each step, at least before ``states_needed``.
        """
        facts = episode.facts
        for sequence in self._sequences(episode, q_values, core, version, lineage):
            yield replace(sequence, episode=facts.number, lane=facts.lane, episode_return=float(facts.episode_return))

    def _sequences(
        self, episode: Episode, q_values: np.ndarray, core: tuple[np.ndarray, ...], version: int, lineage: bytes
    ) -> Iterator[Sequence]:
        steps = episode.facts.steps
        # Older history than this window wants is passed over.
        frames = episode.frames[len(episode.frames) - steps - self._depth :]
        stacks = np.moveaxis(np.lib.stride_tricks.sliding_window_view(frames[:-1], self._depth, 0), -1, 1)
        act = ActOutput(
            action=episode.action,
            greedy=episode.greedy.astype(bool),
            q_values=q_values[:-1],
            core=tuple(part[:-1] for part in core),
            version=version,
            lineage=lineage,
        )
        whole = VectorStep(
            stack=stacks,
            first=np.arange(steps) == 0,
            act=act,
            epsilons=episode.epsilon,
            reward=episode.reward,
            terminated=episode.terminated.astype(bool),
            truncated=episode.truncated.astype(bool),
            life_lost=episode.life_lost.astype(bool),
            is_transition=np.ones(steps, bool),
        )
        yield from self._builder.record_episode(whole)
        # Closes ended episodes too: all that is left of them is their final observation.
        yield from self._builder.cut(episode.frames[-1:], q_values[-1:])


def states_needed(geometry: SequenceGeometry, steps: int, first_sequence: int) -> np.ndarray:
    """Ascending steps of an episode before which some sequence stores the core state, int64.

    ``first_sequence``: the number of its first one, which says where there are probes.
    """
    needed = set()
    for sequence in range(geometry.last_sequence(steps) + 1):
        window = geometry.window(sequence, steps, ended=True)
        first_step = window.start - geometry.burn_in + window.first_valid
        needed |= {first_step, window.start}
        if (first_sequence + sequence) % PROBE_EVERY == 0:
            needed.add(window.start + geometry.unroll - 1)
    return np.array(sorted(step for step in needed if step < steps), np.int64)


def with_history(episode: Episode, stored_depth: int, depth: int) -> Episode:
    """The same episode with frames for a longer stack: nothing was seen before an episode's first frame but zeros."""
    if depth <= stored_depth:
        return episode
    older = np.zeros((depth - stored_depth, *episode.frames.shape[1:]), episode.frames.dtype)
    return replace(episode, frames=np.concatenate([older, episode.frames]))
