"""Training on a dataset as it is: what an epoch of it is, and how a run names the data it was made of."""

import math

from pipeline.held_out import HeldOutSequences
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.scan import dataset_digest, list_shards
from pipeline.store import Store
from schemas.terms import DatasetTerms


def updates_of_epochs(
    epochs: float, store: Store, terms: DatasetTerms, replay: ReplayConfig, limiter: LimiterConfig
) -> int:
    """Updates in which as many sequences are drawn as ``epochs`` times those that can be.

    Draws follow the priorities, so an epoch is a measure of work and not a pass: some sequences come often, some never.
    """
    if replay.held_out:
        sequences = HeldOutSequences(store, terms, replay.held_out).drawn_sequences
    else:
        sequences = sum(name.sequences for name in list_shards(store))
    return max(1, math.ceil(epochs * min(sequences, replay.capacity) / limiter.batch_size))


def dataset_tags(store: Store, when: str) -> dict[str, str]:
    """For a run's tags: which data it saw. ``when`` is ``start`` or ``close``: a dataset may grow between them."""
    return {"dataset_uri": store.uri, f"dataset_digest_{when}": dataset_digest(store)}
