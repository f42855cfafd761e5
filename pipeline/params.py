"""The newest parameters of a run: one object, replaced atomically by its learner, polled cheaply by collectors.

Bytes only: what is in them is the algorithm's affair.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.store import Store, StoreAway


def params_name(run: str) -> str:
    return f"runs/{run}/params.safetensors"


@dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """How often parameters are published.

    Attributes:
        publish_updates: updates between publications (ours: 25).
        publish_seconds: least time between two of them, in seconds (ours: 2).
    """

    publish_updates: int = 25
    publish_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.publish_updates < 1:
            raise ValueError(f"publish_updates is {self.publish_updates}; allowed: 1 or more")
        if self.publish_seconds < 0:
            raise ValueError(f"publish_seconds is {self.publish_seconds}; allowed: 0 or more")


class ParamsPublisher:
    """Publishes a learner's parameters when they are due (design.md, names in a dataset)."""

    def __init__(
        self, store: Store, run: str, config: PublishConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._name, self._config, self._clock = store, params_name(run), config, clock
        self._updates: int | None = None
        self._seconds = 0.0
        self.publications = 0

    def is_due(self, updates: int) -> bool:
        if self._updates is None:
            return True
        waited = self._clock() - self._seconds >= self._config.publish_seconds
        return waited and updates - self._updates >= self._config.publish_updates

    def publish(self, data: bytes, updates: int) -> None:
        """Durable, and visible whole or not at all, when the call returns. OSError leaves the last ones in place."""
        self._store.put(self._name, data)
        self._updates, self._seconds = updates, self._clock()
        self.publications += 1


class ParamsPoller:
    """Fetches a run's parameters when they have been replaced since the last poll."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._name = store, params_name(run)
        self._identity: str | None = None

    def poll(self) -> bytes | None:
        """The newest parameters if they are new, else None (also when there are none yet)."""
        try:
            identity = self._store.identity(self._name)
            if identity is None or identity == self._identity:
                return None
            data = self._store.get(self._name)
        except (FileNotFoundError, StoreAway):
            return None
        self._identity = identity  # As of before the read: a replacement in between is fetched by the next poll.
        return data
