"""One collector's episodes to the same collector of a new dataset, under one network: the work of relabel.py."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from jobs.parameters import read_parameters
from pipeline.dataset import ShardName, read_provenance, read_terms, write_provenance
from pipeline.episode_filter import Condition
from pipeline.episodes import Episode, EpisodeFacts, EpisodeReader
from pipeline.recutting import EpisodeCutter, states_needed, with_history
from pipeline.scan import LeftOut
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import Store, open_store
from r2d2.config import LearnerConfig
from r2d2.labeller import Labeller, Labels, RecordedSteps
from r2d2.priorities import initial_priorities
from r2d2.serialize import network_of
from schemas.terms import DatasetTerms

EPISODES_AT_ONCE, STEPS_AT_ONCE = 16, 16_384  # Side by side through the network; the steps bound the memory.
Item = TypeVar("Item")
NEVER = 1e12  # Seconds: shards are cut by their size alone, so that a repeated write gives the same ones.


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What has been written, and what was not and why. They add up."""

    episodes: int = 0
    steps: int = 0
    sequences: int = 0
    filtered_episodes: int = 0
    bad_shards: int = 0
    corrupt_rows: int = 0
    lost_steps: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Relabelling:
    """Everything that a worker anywhere needs to know.

    The new shards of a collector depend on its old ones alone: a worker that is run again writes the same bytes under
    the same names. They belong to no dataset until its terms are written.

    Attributes:
        out_uri, terms: the dataset to write.
        params_path: see ``read_parameters``.
        where: conditions, all of which an episode must meet.
        origin: provenance of this job.
    """

    out_uri: str
    terms: DatasetTerms
    params_path: str
    where: Sequence[str] = ()
    max_bad_shards: int = 0
    device: str = "cpu"
    threads: int = 1
    origin: dict[str, Any] = field(default_factory=dict)

    def __call__(self, uri: str, collector: str, shards: Sequence[ShardName]) -> Counts:
        """Relabel these shards of one collector of the dataset ``uri``; durable when the call returns."""
        torch.set_num_threads(self.threads)
        return list(self.steps(uri, collector, shards))[-1]

    def steps(self, uri: str, collector: str, shards: Sequence[ShardName]) -> Iterator[Counts]:
        """The same bit by bit; yields the counts so far."""
        source, out = open_store(uri), open_store(self.out_uri)
        stored = read_terms(source)
        assert stored is not None, uri
        parameters = read_parameters(Path(self.params_path), "params")
        labeller = Labeller(network_of(parameters), self.device)
        conditions, started = [Condition.parse(text) for text in self.where], collector_start(source, collector)
        left_out = LeftOut(self.max_bad_shards)

        def keep(facts: EpisodeFacts) -> bool:
            return all(condition.holds(facts, started) for condition in conditions)

        reader = EpisodeReader(source, stored, left_out=left_out, keep=keep, threads=self.threads)
        cutter = EpisodeCutter(self.terms, collector)
        config = LearnerConfig()
        if parameters.acting is not None:
            config = config.with_acting_values(parameters.acting)
        writer = ShardWriter(
            out,
            self.terms,
            collector,
            WriterConfig(first_flush_seconds=NEVER, flush_seconds=NEVER),
            initial_priorities=lambda batch, q_values: initial_priorities(
                batch, q_values, self.terms.geometry, config, self.terms.env.life_loss
            ),
        )
        write_provenance(out, collector, {**self.origin, "collector": _provenance_of(source, collector)})

        def counts() -> Counts:
            return Counts(
                episodes=reader.episodes,
                steps=writer.env_steps,
                sequences=writer.sequences,
                filtered_episodes=reader.filtered_episodes,
                bad_shards=len(left_out.bad_shards),
                corrupt_rows=len(left_out.corrupt_rows),
                lost_steps=reader.lost_steps,
            )

        depth = self.terms.geometry.frame_stack

        def labelled() -> Generator[list[tuple[Episode, Labels]], None, None]:
            sequences = 0
            for group in self._ahead(groups(reader.read(collector, shards))):
                group = [with_history(episode, stored.geometry.frame_stack, depth) for episode in group]
                recorded = []
                for episode in group:
                    recorded.append(self._steps(episode, sequences))
                    sequences += self.terms.geometry.last_sequence(episode.facts.steps) + 1
                yield list(zip(group, labeller.label(recorded), strict=True))

        with closing(reader), closing(self._ahead(labelled())) as ready:
            for group in ready:
                for episode, label in group:
                    for sequence in cutter.cut(
                        episode,
                        q_values=label.q_values,
                        core=label.core,
                        version=parameters.version,
                        lineage=parameters.lineage,
                    ):
                        writer.add(sequence)
                        writer.maybe_flush()
                yield counts()
            writer.flush()
            yield counts()

    def _ahead(self, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """With a GPU three groups at a time: one is read, one is in the network, one is cut, compressed and written.

        On a CPU one after the other: the network's threads wait for each other, so whatever takes one of their cores
        for a moment holds up all (make bench-offline on two cores: 0.69 of the bare forward rate, in turn 0.79).
        """
        return items if torch.device(self.device).type == "cpu" else one_ahead(items)

    def _steps(self, episode: Episode, first_sequence: int) -> RecordedSteps:
        return RecordedSteps(
            frames=episode.frames,
            action=episode.action,
            reward=episode.reward,
            states_at=states_needed(self.terms.geometry, episode.facts.steps, first_sequence),
        )


def groups(episodes: Iterator[Episode]) -> Generator[list[Episode], None, None]:
    """Neighbouring episodes, as many as go through the network side by side."""
    group: list[Episode] = []
    for episode in episodes:
        steps = sum(other.facts.steps for other in group)
        if group and (len(group) == EPISODES_AT_ONCE or steps + episode.facts.steps > STEPS_AT_ONCE):
            yield group
            group = []
        group.append(episode)
    if group:
        yield group


def one_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """The same items; while the caller is busy with one, a thread makes the next. Closing it closes ``items``."""
    end = object()
    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def _provenance_of(store: Store, collector: str) -> dict[str, Any] | None:
    try:
        return read_provenance(store, collector)
    except (OSError, ValueError):
        return None


def collector_start(store: Store, collector: str) -> float:
    """When the process that collected began, Unix seconds; NaN when nobody knows."""
    origin = _provenance_of(store, collector) or {}
    while isinstance(origin.get("collector"), dict):  # A relabelled one: the steps were taken by the first of its line.
        origin = origin["collector"]
    return float(origin.get("started_unix_seconds", "nan"))
