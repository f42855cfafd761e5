"""One evaluation: the protocol, the episodes, what is made of them, and how it is shown and logged."""

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jobs.console import table_console
from jobs.devices import refuse_device
from jobs.parameters import refuse_misfit
from pipeline.atari_scores import scores_of
from pipeline.environments import Camera, EnvironmentConfig, can_film, make_lanes
from pipeline.evaluation import PlayedEpisode, play_episodes
from pipeline.film import Film
from pipeline.rollout import Policy, Rollout
from r2d2.limited_memory import LimitedMemoryPolicy
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import Parameters, network_of

MOST_DEFAULT_LANES = 16
MAX_SEED = 2**29
# Of Atari only. "paper": Kapturowski et al. 2019, appendix. "sticky": Machado et al. 2018, section 5.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "paper": {"sticky": 0.0, "noop_max": 30, "max_num_frames_per_episode": 108_000},
    "sticky": {"sticky": 0.25, "noop_max": 0, "max_num_frames_per_episode": 108_000},
    "trained": {},
}


@dataclass(frozen=True, kw_only=True)
class PlayFlags:
    """How to play.

    Attributes:
        protocol: Atari: ``paper`` (up to 30 no-ops, 108,000 frames), ``sticky`` (actions repeat with 0.25, no no-ops)
            or ``trained`` (the environment as it was). ``--sticky`` and ``--env-arg`` change single values of it.
        episodes: whole episodes to play.
        epsilon: chance of a random action (paper: 0.001).
        envs: lanes; default: one per episode, at most 16. Each plays a share of the episodes settled beforehand.
        seed: of environments and exploration; the same seed and ``envs`` give the same score.
        memory_steps: rebuild the core's state at each step from zero and the last so many (paper, figure 5);
            default: the state is carried through the episode.
        video: Atari: film the first lane's first episode, at twice its speed (ours).
        video_seconds: longest film; the rest of the episode is left out (ours: 20).
        threads: emulator and torch threads; default: half the cores.
        device: of the network.
    """

    protocol: str = "paper"
    episodes: int = 20
    epsilon: float = 0.001
    envs: int | None = None
    seed: int = 0
    memory_steps: int | None = None
    video: bool = True
    video_seconds: float = 20.0
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        refuse_device(self.device)
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol is {self.protocol!r}; allowed: {', '.join(PROTOCOLS)}")
        for name in ("episodes", "envs", "memory_steps", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 or more")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; allowed: 0 to 1")
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to {MAX_SEED - 1}")
        if self.video_seconds <= 0:
            raise ValueError(f"video_seconds is {self.video_seconds}; allowed: above 0")

    @property
    def variant(self) -> str:
        """Empty for the plain evaluation, under the paper's protocol and with all of its memory; else what it is."""
        memory = "" if self.memory_steps is None else f"-memory{self.memory_steps}"
        plain = self.memory_steps is None and self.protocol == PlayFlags.protocol
        return "" if plain else f"{self.protocol}{memory}"

    @property
    def group(self) -> str:
        """Of its metrics: only what was played alike is one curve."""
        return f"eval/{self.variant}" if self.variant else "eval"

    @property
    def lanes(self) -> int:
        return min(self.episodes, MOST_DEFAULT_LANES if self.envs is None else self.envs)

    def under_protocol(self, environment: EnvironmentConfig) -> EnvironmentConfig:
        """The environment with the protocol's values, which are defaults: flags come on top."""
        if not can_film(environment):
            return environment
        values = dict(PROTOCOLS[self.protocol])
        sticky = values.pop("sticky", environment.sticky)
        return replace(environment, sticky=sticky, arguments={**environment.arguments, **values})


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """``film`` watched lane 0; None without a camera. ``conditions`` says in words how it was played."""

    played: list[PlayedEpisode]
    summary: dict[str, float]
    conditions: str
    film: Film | None


class Evaluator:
    """Plays networks, one after the other, in the same lanes from the same seed."""

    def __init__(self, environment: EnvironmentConfig, flags: PlayFlags, *, films: bool) -> None:
        self._environment, self._flags = environment, flags
        self._lanes = make_lanes(environment, flags.lanes, flags.threads)
        self._films = films and flags.video and can_film(environment)
        self.env = self._lanes.spec

    def evaluate(self, parameters: Parameters, stop: Callable[[], bool] = lambda: False) -> Evaluated | None:
        """None when ``stop`` came to hold before all was played.

        Raises:
            ValueError: a network for another environment.
        """
        flags = self._flags
        refuse_misfit(parameters.spec, self.env)
        rollout = Rollout(self._lanes, make_policy(parameters, flags), parameters.spec.frame_stack, flags.seed)
        film = None
        if self._films:
            title = f"{self.env.env_id.split('/')[-1]}, update {parameters.version}"
            film = Film(Camera(self._environment, flags.seed), title, flags.video_seconds)
        played = play_episodes(rollout, flags.episodes, watch=film.watch if film else None, stop=stop)
        if film:
            film.close()
        if len(played) < flags.episodes:
            return None
        return Evaluated(
            played=played, summary=summarise(played, self.env.env_id), conditions=self.conditions(), film=film
        )

    def conditions(self) -> str:
        flags, arguments = self._flags, self.env.arguments
        parts = [f"epsilon {flags.epsilon:g}", f"seed {flags.seed}"]
        if can_film(self._environment):
            parts.append(f"protocol {flags.protocol}: up to {arguments['noop_max']} no-ops")
            parts.append(f"{arguments['max_num_frames_per_episode']:,} frames")
            parts.append(f"sticky {self.env.sticky:g}")
        memory = flags.memory_steps
        return ", ".join([*parts, "unlimited memory" if memory is None else f"memory of {memory} steps"])

    def close(self) -> None:
        self._lanes.close()


def make_policy(parameters: Parameters, flags: PlayFlags) -> Policy:
    """The policy to be evaluated, in lanes of one and the same small epsilon."""
    epsilons, generator = np.full(flags.lanes, flags.epsilon), np.random.default_rng(flags.seed)
    network, spec = network_of(parameters), parameters.spec
    if flags.memory_steps is not None:
        return LimitedMemoryPolicy(network, flags.memory_steps, epsilons, generator, flags.device)
    policy = RecurrentPolicy(spec.core, spec.num_actions, epsilons, generator, flags.device)
    policy.set_network(network, parameters.version, parameters.lineage)
    return policy


def summarise(played: list[PlayedEpisode], env_id: str) -> dict[str, float]:
    """``return_std`` is that of the episodes (n - 1), ``return_error`` that of their mean; 0 for one episode.

    ``human_normalised_percent``, of the mean, only for games whose human score is known.
    """
    returns = np.array([episode.episode_return for episode in played])
    spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    summary = {
        "episodes": len(returns),
        "return_mean": float(returns.mean()),
        "return_median": float(np.median(returns)),
        "return_std": spread,
        "return_error": spread / len(returns) ** 0.5,
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "steps_mean": float(np.mean([episode.steps for episode in played])),
        "truncated": sum(episode.truncated for episode in played),
    }
    if (scores := scores_of(env_id)) is not None:
        summary["human_normalised_percent"] = scores.human_normalised(summary["return_mean"])
    return summary


def show(evaluated: Evaluated, title: str) -> None:
    """A row per episode, then the summary."""
    played, summary = evaluated.played, evaluated.summary
    table = Table("episode", "lane", "return", "steps", "ended by", title=title, title_justify="left")
    for number, episode in enumerate(played):
        ended = "truncation" if episode.truncated else "the game"
        table.add_row(str(number), str(episode.lane), f"{episode.episode_return:g}", str(episode.steps), ended)
    console = table_console()
    console.print(table)
    console.print(one_line(summary), soft_wrap=True)


def one_line(summary: dict[str, float]) -> str:
    human = summary.get("human_normalised_percent")
    return (
        f"mean return {summary['return_mean']:.3f} +- {summary['return_error']:.3f} (standard error), "
        f"median {summary['return_median']:g}, standard deviation {summary['return_std']:.3f}, "
        f"{summary['return_min']:g} to {summary['return_max']:g}, {summary['episodes']:.0f} episodes"
        + (f"; human-normalised {human:.1f} % (0: random play, 100: a human)" if human is not None else "")
    )


def scores_csv(played: list[PlayedEpisode]) -> str:
    """A row per episode; MLflow shows it as a table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["episode", *PlayedEpisode.__dataclass_fields__], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"episode": number, **asdict(episode)} for number, episode in enumerate(played))
    return text.getvalue()


def write_film(evaluated: Evaluated, path: Path) -> Path | None:
    if evaluated.film is None:
        return None
    evaluated.film.write(path)
    return path
