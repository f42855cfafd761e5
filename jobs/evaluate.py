"""Play whole episodes with a trained network: mean, median and spread of their returns, per episode, and a film.

python jobs/evaluate.py --checkpoint runs/NAME --episodes 100          the run's newest checkpoint
python jobs/evaluate.py --run-id ID                                    a run of MLflow: its last model
python jobs/evaluate.py --model runs:/ID/best                          a model of MLflow
python jobs/evaluate.py --checkpoint FILE --memory-steps 40            with a memory of 40 steps (the paper's figure 5)
python jobs/evaluate.py --follow live                                  each new version of a run while it trains

Results go to the MLflow run that the network comes from, else to a run of their own.
"""

import jobs.interrupt  # noqa: F401

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings
from jobs.evaluating import Evaluated, Evaluator, PlayFlags, scores_csv, show, write_film
from jobs.evaluation_source import Source, dataset_of, find_source
from jobs.flags import DatasetFlags, TrackingFlags, configuration_of, default_threads, read_flags
from jobs.following import Following, FollowLimits, FollowLog
from jobs.parameters import refuse_misfit
from jobs.presets import Preset
from jobs.run_tags import run_tags
from jobs.stopping import StopRequest
from pipeline.environments import EnvironmentConfig, EnvironmentFailure
from pipeline.mlflow_client import find_run
from pipeline.provenance import provenance
from pipeline.tracking import NONE, Tracker, TrackingConfig, ending_run, make_tracker
from r2d2.config import NetworkSpec
from schemas.specs import EnvSpec
from schemas.terms import DatasetTerms

SOURCES = "a checkpoint (--checkpoint), a run of MLflow (--run-id), a model (--model) or a run to follow (--follow)"


@dataclass(frozen=True, kw_only=True)
class SourceFlags:
    """Whose network to play; exactly one of the first four.

    Attributes:
        checkpoint: a ``params.safetensors``, a checkpoint folder, the folder of a run (its newest) or of a model.
        run_id: a run of MLflow: its model ``last``, or what it has published so far.
        model: a model of MLflow, such as ``runs:/ID/best`` or ``models:/ID``.
        follow: name of a run of ``--dataset``, or ``live`` for the only live one: play each new version as it trains.
        out: folder to write scores and film to, besides MLflow.
        dry_run: print the resolved configuration and stop.
    """

    checkpoint: Path | None = None
    run_id: str | None = None
    model: str | None = None
    follow: str | None = None
    out: Path | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("checkpoint", "run_id", "model", "follow") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]} is given; allowed: without {given[0]}, one network at a time")

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in (self.checkpoint, self.run_id, self.model, self.follow))


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Flags of evaluate.py."""

    network: SourceFlags = field(default_factory=SourceFlags)
    play: PlayFlags = field(default_factory=PlayFlags)
    following: FollowLimits = field(default_factory=FollowLimits)
    source: DatasetFlags = field(default_factory=DatasetFlags)
    tracking: TrackingFlags = field(default_factory=TrackingFlags)

    def __post_init__(self) -> None:
        if self.network.follow is None and self.following != FollowLimits():
            raise ValueError("every_seconds, updates or max_minutes is set; allowed: with --follow")

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> "EvaluateFlags":
        return cls(play=PlayFlags(threads=default_threads(for_learner=False)))


def main(argv: Sequence[str]) -> int:
    show_warnings()
    stop = StopRequest().listen()
    with refusing(OSError, EnvironmentFailure):
        argv = [*argv, *dataset_of(argv)]
        flags, preset, terms = read_flags(EvaluateFlags, argv, "evaluate.py")
        if flags.network.dry_run:
            dry_run(asdict(flags))
        if not flags.network.is_given:
            refuse(f"checkpoint is not given; allowed: {SOURCES}")
        torch.set_num_threads(flags.play.threads)
        if flags.network.follow is not None:
            return _follow(flags, stop)
        network = flags.network
        if network.out is not None and network.out.is_file():
            raise ValueError(f"out is {str(network.out)!r}, a file; allowed: a folder")
        source = find_source(network.checkpoint, network.run_id, network.model, flags.tracking.tracking_uri)
        given = flags.source.dataset is not None or flags.source.env is not None
        env = terms.env if terms is not None and (given or source.env is None) else source.env
        if env is None and flags.source.env is None:
            refuse("env is not given; allowed: an environment, or --dataset with one, for none is known here")
        base = _seen_by(source.parameters.spec, preset.environment) if env is None else configuration_of(env)
        evaluator = Evaluator(
            flags.source.over(flags.play.under_protocol(_of_the_same_game(base, flags))), flags.play, films=_logs(flags)
        )
        refuse_misfit(source.parameters.spec, evaluator.env)
        with ending_run(_make_tracker(flags, evaluator.env, source), stop.gone_by) as tracker:
            with closing(evaluator):
                evaluated = evaluator.evaluate(source.parameters, stop.__bool__)
            if evaluated is None:
                tracker.close(failed=True, gone_by=stop.gone_by)
                print(f"evaluate: stopped ({stop.reason})")
                return 1
            version = source.parameters.version
            show(evaluated, f"{evaluator.env.env_id}, parameters of update {version}, {evaluated.conditions}")
            _log(flags, evaluated, version, tracker, stop)
    return 0


def _log(flags: EvaluateFlags, evaluated: Evaluated, version: int, tracker: Tracker, stop: StopRequest) -> None:
    play = flags.play
    memory = "" if play.memory_steps is None else f"-memory{play.memory_steps}"
    name = f"{version:09d}-{play.protocol}-s{play.seed}{memory}"
    values = {f"{play.group}/{each}": value for each, value in evaluated.summary.items()}
    tracker.metrics({**values, f"{play.group}/parameter_version": version}, version)
    tracker.text(f"evaluations/{name}.csv", scores_csv(evaluated.played))
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.network.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if flags.network.out:
            (folder / f"{name}.csv").write_text(scores_csv(evaluated.played))
        if film := write_film(evaluated, folder / f"{name}.gif"):
            tracker.artifact(film, "videos")
        tracker.close(gone_by=stop.gone_by)
    if run_id := tracker.run_id():
        print(f"evaluate: logged to MLflow run {run_id}")


def _follow(flags: EvaluateFlags, stop: StopRequest) -> int:
    """Evaluate each new version of a run until it ends."""
    assert flags.network.follow is not None
    uri = flags.tracking.tracking_uri
    with StatusLine("evaluate") as status:
        following = Following(flags.source.open_store(), flags.network.follow, flags.following, stop, status)
        terms = following.find()
        if terms is None:
            print(f"evaluate: stopped ({stop.reason}), nothing was played")
            return 0
        environment = flags.source.over(flags.play.under_protocol(configuration_of(terms.env)))
        evaluator = Evaluator(environment, flags.play, films=_logs(flags))
        run_id = following.find_mlflow_run(uri, flags.tracking.experiment)
        run = find_run(uri, run_id) if run_id else None
        best = run.tags.get("best_return") if run else None
        tracker = _make_tracker(flags, evaluator.env, None, run_id)
        log = FollowLog(tracker, evaluator, flags.play, best_before=None if best is None else float(best))
        status.say(f"evaluate: follows run {following.name}, {flags.play.episodes} episodes, {evaluator.conditions()}")
        with closing(log), ending_run(tracker, stop.gone_by), closing(evaluator):
            for parameters in following.versions():
                evaluated = evaluator.evaluate(parameters, stop.__bool__)
                if evaluated is not None:
                    status.say(log.log(parameters, evaluated))
    print(
        f"evaluate: stopped ({stop.reason or 'failed'}): {log.played} versions; MLflow run {tracker.run_id()}",
        flush=True,
    )
    return 0


def _make_tracker(flags: EvaluateFlags, env: EnvSpec, source: Source | None, run_id: str | None = None) -> Tracker:
    """The run that the network comes from, when it is known; else a new one."""
    run_id = source.run_id if source is not None else run_id
    version = "follow" if source is None else str(source.parameters.version)
    tracker = make_tracker(
        TrackingConfig(
            uri=flags.tracking.tracking_uri,
            experiment=flags.tracking.experiment,
            run_name=flags.tracking.run_name or f"evaluate-{env.env_id.split('/')[-1]}-{version}",
            tags=run_tags("evaluate", env, preset=flags.source.preset, seed=flags.play.seed),
            run_id=run_id,
            joins=run_id is not None,
            parent_run_id=flags.tracking.parent_run_id,
        )
    )
    tracker.params({**asdict(flags), "env": asdict(env), "provenance": provenance(role="evaluate")})
    return tracker


def _seen_by(spec: NetworkSpec, base: EnvironmentConfig) -> EnvironmentConfig:
    """Of an environment that nobody has described, the frames have the size that the network takes."""
    if not spec.convolutions:
        return base
    height, width = spec.observation.shape[:2]
    return replace(base, arguments={**base.arguments, "img_height": height, "img_width": width})


def _of_the_same_game(base: EnvironmentConfig, flags: EvaluateFlags) -> EnvironmentConfig:
    """The protocol is the game's that is played, which ``--env`` may have changed."""
    return base if flags.source.env is None else flags.source.over(base)


def _logs(flags: EvaluateFlags) -> bool:
    return flags.network.out is not None or flags.tracking.tracking_uri != NONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
