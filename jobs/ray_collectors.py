"""Several collectors as Ray actors on one exploration ladder, seen and tracked as one."""

import contextlib
import io
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jobs.console import WARNING, StatusLine, show_warnings, warn
from jobs.stopping import StopRequest
from pipeline.ray_actors import ActorPool
from pipeline.tracking import NullTracker, Tracker

LOOK_SECONDS = 0.5
METRICS_SECONDS = 10.0
STOP_SECONDS = 9.0
SHOWN_SECONDS = 1.0
SUMS = ("env_steps", "steps_per_second", "episodes", "sequences")
KEPT_METRICS = 10_000


class Shown:
    """Takes what a job would show on a ``StatusLine``, for somebody else to show."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.waits_for = ""
        self.said: deque[str] = deque(maxlen=100)
        self._shown_at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._shown_at >= SHOWN_SECONDS

    def show(self, waits_for: str = "", **values: Any) -> None:
        self._shown_at, self.waits_for, self.values = time.monotonic(), waits_for, values

    def say(self, line: str) -> None:
        self.said.append(line)


class Relayed(NullTracker):
    """Keeps metrics for whoever has the tracked run."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[dict[str, float], int]] = deque(maxlen=KEPT_METRICS)

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.waiting.append((values, step))


class Complaints(io.StringIO):
    """What a job says on stderr: warnings as they come, and why it was refused."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0

    def take_warnings(self) -> list[str]:
        """Those of which nobody has heard yet."""
        said = self.getvalue()
        start, self._taken = self._taken, said.rfind("\n") + 1
        return [
            line.removeprefix(WARNING) for line in said[start : self._taken].splitlines() if line.startswith(WARNING)
        ]

    def refusal(self) -> str:
        lines = [line for line in self.getvalue().splitlines() if not line.startswith(WARNING)]
        return " ".join(lines).removeprefix("error: ")


class CollectorActor:
    """One collector in a Ray actor: ``collect`` with ``argv`` runs in a thread, so that it can be looked at."""

    def __init__(self, collect: Callable[..., int], argv: Sequence[str]) -> None:
        self._collect, self._argv = collect, list(argv)
        self._stop, self._status, self._tracker = StopRequest(), Shown(), Relayed()
        self._complaints = Complaints()
        self._outcome: tuple[int | None, str] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def look(self) -> dict[str, Any]:
        """``outcome`` is (exit status, "") or (None, why it failed) when it is over."""
        outcome = self._outcome  # Before the rest, so that its last words are in it.
        return {
            "outcome": outcome,
            "values": self._status.values,
            "waits_for": self._status.waits_for,
            "said": [self._status.said.popleft() for _ in range(len(self._status.said))],
            "warnings": self._complaints.take_warnings(),
            "metrics": [self._tracker.waiting.popleft() for _ in range(len(self._tracker.waiting))],
        }

    def stop(self) -> None:
        self._stop.ask("told to")

    def _run(self) -> None:
        try:
            with contextlib.redirect_stderr(self._complaints):
                show_warnings()
                self._outcome = self._collect(self._argv, self._stop, self._status, self._tracker), ""
        except SystemExit:
            self._outcome = None, self._complaints.refusal()
        except Exception as error:
            self._outcome = None, f"{type(error).__name__}: {error}"


class Collectors:
    """``run`` until stopped, or until a collector cannot go on.

    Args:
        arguments: of ``CollectorActor``, given place and incarnation.
    """

    def __init__(
        self,
        number: int,
        arguments: Callable[[int, int], tuple],
        *,
        threads: int,
        tracker: Tracker,
        status: StatusLine,
    ) -> None:
        self._pool = ActorPool(CollectorActor, number, arguments, cpus=threads, what="collector")
        self._number, self._tracker, self._status = number, tracker, status
        self._latest: dict[int, dict[str, Any]] = {}
        self._waits: dict[int, str] = {}
        self._before: dict[str, float] = dict.fromkeys(SUMS, 0)  # Of those who have died.
        self._returns: deque[float] = deque(maxlen=100)
        self._over: dict[int, int] = {}
        self._reported_at = time.monotonic()

    def run(self, stop: StopRequest, *, env_steps: int | None, max_minutes: float | None) -> int:
        """Exit status: 0 unless sequences were lost. Raises ValueError with the reason of the first that fails."""
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        try:
            while not stop and len(self._over) < self._number:
                self._look(LOOK_SECONDS)
                if env_steps is not None and self.total("env_steps") >= env_steps:
                    stop.ask(f"{env_steps} env steps")
                if deadline is not None and time.monotonic() >= deadline:
                    stop.ask(f"{max_minutes} minutes")
            self._wind_up()
        finally:
            self._pool.close()
        missing = self._number - len(self._over)
        if missing:
            warn(f"{missing} collectors did not end in time: what they had not published is lost")
        return 1 if missing or any(self._over.values()) else 0

    def total(self, name: str) -> float:
        """Over all collectors, dead ones included."""
        return self._before[name] + sum(values.get(name) or 0 for values in self._latest.values())

    def summary(self) -> str:
        return (
            f"{self.total('env_steps'):,.0f} env steps, {self.total('episodes'):,.0f} episodes, "
            f"{self.total('sequences'):,.0f} sequences by {self._number} collectors, {self._pool.deaths} deaths"
        )

    def _wind_up(self) -> None:
        self._pool.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while len(self._over) < self._number and time.monotonic() < deadline:
            self._look(LOOK_SECONDS)

    def _look(self, seconds: float) -> None:
        started, deaths = time.monotonic(), self._pool.deaths
        answers = self._pool.look(seconds)
        for place, answer in answers.items():
            self._take(place, answer)
        if self._pool.deaths > deaths:
            self._count_the_dead()
        self._show()
        time.sleep(max(0.0, seconds - (time.monotonic() - started)))

    def _take(self, place: int, answer: dict[str, Any]) -> None:
        if answer["values"].get("env_steps", 0) < self._latest.get(place, {}).get("env_steps", 0):
            self._bury(place)  # Another incarnation by now.
        self._latest[place], self._waits[place] = answer["values"], answer["waits_for"]
        for line in answer["said"]:
            self._status.say(f"collector {place}: {line}")
        for line in answer["warnings"]:
            warn(f"collector {place}: {line}")
        for values, step in answer["metrics"]:
            if (episode_return := values.get("collect/episode_return")) is not None:
                self._returns.append(episode_return)
                own = {f"collect/episode_return/collector_{place:02d}": episode_return}
                self._tracker.metrics({**own, "collect/episode_return": episode_return}, int(self.total("env_steps")))
            if evaluated := {name: value for name, value in values.items() if name.startswith("eval/")}:
                self._tracker.metrics({**evaluated, "eval/env_steps": self.total("env_steps")}, step)
        if answer["outcome"] is not None and place not in self._over:
            code, reason = answer["outcome"]
            if code is None:
                raise ValueError(f"collector {place}: {reason}")
            self._over[place] = code
            self._pool.retire(place)

    def _count_the_dead(self) -> None:
        for place in list(self._latest):
            if self._pool.is_dead(place):
                self._bury(place)

    def _bury(self, place: int) -> None:
        values = self._latest.pop(place, {})
        for name in SUMS:
            if name != "steps_per_second":
                self._before[name] += values.get(name) or 0

    def _show(self) -> None:
        values = {name: self.total(name) for name in SUMS}
        versions = [each["version"] for each in self._latest.values() if each.get("version") is not None]
        mean_return = sum(self._returns) / len(self._returns) if self._returns else None
        waits = [text for text in self._waits.values() if text]
        self._status.show(
            waits[0] if waits else "",
            collectors=f"{len(self._latest)} of {self._number}",
            **{name: int(value) for name, value in values.items()},
            mean_return=mean_return,
            version=f"{min(versions)} to {max(versions)}" if versions else None,
            deaths=self._pool.deaths or None,
        )
        if time.monotonic() - self._reported_at >= METRICS_SECONDS:
            self._reported_at = time.monotonic()
            metrics = {f"collect/{name}": float(value) for name, value in values.items()}
            metrics |= {"collect/collectors": len(self._latest), "collect/deaths": self._pool.deaths}
            self._tracker.metrics(metrics, int(values["env_steps"]))


def actor_argv(
    argv: Sequence[str], place: int, incarnation: int, *, envs: int, collectors: int, seed: int
) -> list[str]:
    """The command line of one collector: its own lanes of the common ladder, its own seed. Later flags win."""
    first_seed = seed + (incarnation * collectors + place) * envs
    own = {"collectors": 1, "ladder": f"{place * envs}:{collectors * envs}", "seed": first_seed, "tracking-uri": "none"}
    return [*argv, *(text for name, value in own.items() for text in (f"--{name}", str(value)))]


def drawn_seed(most: int) -> int:
    """Leaves room for the seeds of many incarnations."""
    return secrets.randbelow(most // 2)
