"""Play whole episodes with a trained network: mean, median and spread of their returns.

python jobs/evaluate.py --checkpoint runs/NAME --episodes 100          the run's newest checkpoint
python jobs/evaluate.py --checkpoint data/pong/runs/NAME               what it published last
python jobs/evaluate.py --checkpoint FILE --memory-steps 40            with a memory of 40 steps (the paper's figure 5)
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from jobs.command_line import dry_run, peek, refuse, refusing
from jobs.console import show_warnings
from jobs.flags import DatasetFlags, TrackingFlags, default_threads, read_flags
from jobs.parameters import read_parameters, refuse_misfit
from jobs.presets import Preset
from jobs.run_folder import RunFolder
from pipeline.environments import make_lanes
from pipeline.evaluation import PlayedEpisode, play_episodes
from pipeline.provenance import provenance
from pipeline.rollout import Policy, Rollout
from pipeline.tracking import TrackingConfig, make_tracker
from r2d2.limited_memory import LimitedMemoryPolicy
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import Parameters, network_of
from schemas.terms import DatasetTerms

MOST_DEFAULT_LANES = 16
MAX_SEED = 2**29


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """What to play, and how.

    Attributes:
        checkpoint: a ``params.safetensors``, a checkpoint folder, or the folder of a run (its newest checkpoint).
        episodes: whole episodes to play.
        epsilon: chance of a random action (paper: 0.001).
        envs: lanes; default: one per episode, at most 16. Each plays a share of the episodes settled beforehand.
        seed: of environments and exploration; the same seed and ``envs`` give the same score.
        memory_steps: rebuild the core's state at each step from zero and the last so many (paper, figure 5);
            default: the state is carried through the episode.
        threads: emulator and torch threads; default: half the cores.
        device: of the network.
        dry_run: print the resolved configuration and stop.
    """

    checkpoint: Path | None = None
    episodes: int = 20
    epsilon: float = 0.001
    envs: int | None = None
    seed: int = 0
    memory_steps: int | None = None
    threads: int = 1
    device: str = "cpu"
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("episodes", "envs", "memory_steps", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 or more")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; allowed: 0 to 1")
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to {MAX_SEED - 1}")

    @property
    def lanes(self) -> int:
        return min(self.episodes, MOST_DEFAULT_LANES if self.envs is None else self.envs)


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Flags of evaluate.py."""

    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    source: DatasetFlags = field(default_factory=DatasetFlags)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> "EvaluateFlags":
        return cls(evaluation=EvaluationFlags(threads=default_threads(for_learner=False)))


def main(argv: Sequence[str]) -> int:
    show_warnings()
    with refusing(OSError):
        argv = [*argv, *_dataset_of_the_run(argv)]
        flags, preset, terms = read_flags(EvaluateFlags, argv, "evaluate.py")
        chosen = flags.evaluation
        if chosen.dry_run:
            dry_run(asdict(flags))
        if chosen.checkpoint is None:
            refuse("checkpoint is not given; allowed: a params.safetensors, a checkpoint folder, the folder of a run")
        if terms is None and flags.source.env is None:
            refuse("env is not given; allowed: an environment, or --dataset with one, for none is known here")
        parameters = read_parameters(chosen.checkpoint, "checkpoint")
        torch.set_num_threads(chosen.threads)
        environment = flags.source.environment(preset, terms)
        lanes = make_lanes(environment, chosen.lanes, chosen.threads)
        refuse_misfit(parameters.spec, lanes.spec)
        policy = make_policy(parameters, chosen)
        rollout = Rollout(lanes, policy, parameters.spec.frame_stack, chosen.seed)
    game = lanes.spec.env_id
    tracker = make_tracker(
        TrackingConfig(
            uri=flags.tracking.tracking_uri,
            experiment=flags.tracking.experiment,
            run_name=flags.tracking.run_name or f"evaluate-{game.split('/')[-1]}-{parameters.version}",
            tags={"role": "evaluate", "game": game, "lineage": parameters.lineage.hex()},
        )
    )
    tracker.params({**asdict(flags), "env": asdict(lanes.spec), "provenance": provenance()})
    played = play_episodes(rollout, chosen.episodes)
    lanes.close()
    summary = summarise(played)
    tracker.metrics({f"evaluate/{name}": value for name, value in summary.items()}, parameters.version)
    for number, episode in enumerate(played):
        tracker.metrics({"evaluate/episode_return": episode.episode_return}, number)
    show(played, summary, f"{game}, parameters of update {parameters.version}, epsilon {chosen.epsilon:g}, "
         f"seed {chosen.seed}, {_memory(chosen)}")  # fmt: skip
    tracker.close()
    return 0


def make_policy(parameters: Parameters, chosen: EvaluationFlags) -> Policy:
    """The policy to be evaluated, in lanes of one and the same small epsilon."""
    epsilons, generator = np.full(chosen.lanes, chosen.epsilon), np.random.default_rng(chosen.seed)
    network, spec = network_of(parameters), parameters.spec
    if chosen.memory_steps is not None:
        return LimitedMemoryPolicy(network, chosen.memory_steps, epsilons, generator, chosen.device)
    policy = RecurrentPolicy(spec.core, spec.num_actions, epsilons, generator, chosen.device)
    policy.set_network(network, parameters.version, parameters.lineage)
    return policy


def summarise(played: list[PlayedEpisode]) -> dict[str, float]:
    """``return_std`` is that of the episodes (n - 1), ``return_error`` that of their mean; 0 for one episode."""
    returns = np.array([episode.episode_return for episode in played])
    spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    return {
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


def show(played: list[PlayedEpisode], summary: dict[str, float], title: str) -> None:
    """A row per episode, then the summary."""
    table = Table("episode", "lane", "return", "steps", "ended by", title=title, title_justify="left")
    for number, episode in enumerate(played):
        ended = "truncation" if episode.truncated else "the game"
        table.add_row(str(number), str(episode.lane), f"{episode.episode_return:g}", str(episode.steps), ended)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"mean return {summary['return_mean']:.3f} +- {summary['return_error']:.3f} (standard error), "
        f"median {summary['return_median']:g}, standard deviation {summary['return_std']:.3f}, "
        f"{summary['return_min']:g} to {summary['return_max']:g}, {len(played)} episodes",
        soft_wrap=True,
    )


def _dataset_of_the_run(argv: Sequence[str]) -> list[str]:
    """``--dataset`` as the run's own record has it, for a run's folder and nothing said about the environment."""
    given = peek(argv, "checkpoint", "dataset", "env")
    if given["checkpoint"] is None or given["dataset"] or given["env"]:
        return []
    for folder in (path := Path(given["checkpoint"])), *path.parents:
        if (dataset := RunFolder(folder).record.get("dataset")) is not None:
            return ["--dataset", dataset]
        if (folder / "dataset.json").is_file():
            return ["--dataset", str(folder)]
    return []


def _memory(chosen: EvaluationFlags) -> str:
    return "unlimited memory" if chosen.memory_steps is None else f"memory of {chosen.memory_steps} steps"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
