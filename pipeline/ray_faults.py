"""What read tasks on many machines had to leave out, gathered in one place, with one limit over all of them."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from pipeline.ray_start import start_ray
from pipeline.scan import LeftOut, TooManyFaults


class SharedFaults:
    """Bad shards and corrupt rows of a read; goes along into the tasks.

    Reading the counts is possible while the Ray that it was made under lives.
    """

    def __init__(self, max_bad_shards: int = 0) -> None:
        self.max_bad_shards = LeftOut(max_bad_shards).max_bad_shards
        start_ray()
        self._actor: Any = _actor_class().remote(max_bad_shards)

    def shard(self, path: str, reason: str) -> None:
        """Raises TooManyFaults past the limit, and whatever is told later raises it too."""
        import ray

        if problem := ray.get(self._actor.shard.remote(path, reason)):
            raise TooManyFaults(problem)

    def rows(self, rows: Iterable[tuple[str, int]]) -> None:
        if found := list(rows):
            self._actor.rows.remote(found)

    @property
    def bad_shards(self) -> dict[str, str]:
        """Path -> reason."""
        return self._all()[0]

    @property
    def corrupt_rows(self) -> set[tuple[str, int]]:
        return self._all()[1]

    def _all(self) -> tuple[dict[str, str], set[tuple[str, int]]]:
        import ray

        return ray.get(self._actor.all.remote())


@cache
def _actor_class():
    import ray

    @ray.remote(num_cpus=0)
    class Faults:
        """A ``LeftOut`` that several processes write to; a task that is run again names nothing twice."""

        def __init__(self, max_bad_shards: int) -> None:
            self._left_out = LeftOut(max_bad_shards)

        def shard(self, path: str, reason: str) -> str:
            try:
                self._left_out.shard(path, reason)
            except TooManyFaults as error:
                return str(error)
            return ""

        def rows(self, rows: list[tuple[str, int]]) -> None:
            self._left_out.rows(rows)

        def all(self) -> tuple[dict[str, str], set[tuple[str, int]]]:
            return self._left_out.bad_shards, self._left_out.corrupt_rows

    return Faults
