"""A fixed number of places, each with a Ray actor at work; one that dies is put in its place anew."""

import logging
import time
from collections.abc import Callable
from typing import Any

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
WELL_SECONDS = 60.0  # Who has lived so long may die again without a longer pause.

_log = logging.getLogger(__name__)


class ActorPool:
    """Actors of one class. It has a method ``look``, which answers at once, and ``stop``, after which it winds up.

    Args:
        kind: the class; importable wherever Ray runs.
        arguments: of its constructor, given (place, incarnation): the n-th actor in this place.
        cpus: that each one takes.

    Attributes:
        deaths: how many have died.
    """

    def __init__(
        self, kind: type, places: int, arguments: Callable[[int, int], tuple], *, cpus: float, what: str = "actor"
    ) -> None:
        import ray

        self._ray, self._arguments, self._what = ray, arguments, what
        self._remote = ray.remote(num_cpus=cpus, max_restarts=0, scheduling_strategy="SPREAD")(kind)
        self._incarnations = [0] * places
        self._actors: list[Any] = [self._remote.remote(*arguments(place, 0)) for place in range(places)]
        self._looks: list[Any] = [None] * places
        self._born_at = [time.monotonic()] * places
        self._pauses, self._again_at = [FIRST_PAUSE_SECONDS] * places, [0.0] * places
        self.deaths = 0

    def look(self, seconds: float) -> dict[int, Any]:
        """What the places answered within ``seconds``; who is dead, starting or busy says nothing."""
        self._replace_dead()
        for place, actor in enumerate(self._actors):
            if actor is not None and self._looks[place] is None:
                self._looks[place] = actor.look.remote()
        asked = {look: place for place, look in enumerate(self._looks) if look is not None}
        if not asked:
            time.sleep(seconds)
            return {}
        done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        answers = {}
        for look in done:
            place = asked[look]
            self._looks[place] = None
            try:
                answers[place] = self._ray.get(look)
            except self._ray.exceptions.RayActorError as error:
                self._note_death(place, error)
        return answers

    def is_dead(self, place: int) -> bool:
        return self._actors[place] is None

    def retire(self, place: int) -> None:
        """The actor in this place is done; nobody follows it."""
        self._ray.kill(self._actors[place])
        self._actors[place], self._again_at[place] = None, float("inf")

    def stop(self) -> None:
        """Tell all to wind up; ``look`` says when they have. Dead ones are not replaced any more."""
        self._again_at = [float("inf")] * len(self._actors)
        for actor in self._actors:
            if actor is not None:
                actor.stop.remote()

    def close(self) -> None:
        """End whoever is left at once."""
        for place, actor in enumerate(self._actors):
            if actor is not None:
                self.retire(place)

    def _note_death(self, place: int, error: Exception) -> None:
        now = time.monotonic()
        self.deaths += 1
        if now - self._born_at[place] >= WELL_SECONDS:
            self._pauses[place] = FIRST_PAUSE_SECONDS
        self._actors[place] = None
        self._again_at[place] = max(self._again_at[place], now + self._pauses[place])
        reason = str(error).strip().splitlines()[0]
        _log.warning("%s %d has died: %.160s; another takes its place", self._what, place, reason)
        self._pauses[place] = min(2 * self._pauses[place], LONGEST_PAUSE_SECONDS)

    def _replace_dead(self) -> None:
        now = time.monotonic()
        for place, actor in enumerate(self._actors):
            if actor is None and now >= self._again_at[place]:
                self._incarnations[place] += 1
                self._born_at[place] = now
                self._actors[place] = self._remote.remote(*self._arguments(place, self._incarnations[place]))
