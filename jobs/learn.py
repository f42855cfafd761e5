"""Train on a dataset while it grows, or on one that has long been complete.

python jobs/learn.py                              data/pong, as collect.py writes it
python jobs/learn.py --dataset data/breakout --updates 10000
python jobs/learn.py --resume                     the newest run in this folder, from its last checkpoint
torchrun --nproc-per-node 2 jobs/learn.py         two processes that share every update
python jobs/learn.py --replay grpc://127.0.0.1:7878     from the replay that a serve_replay.py keeps
python jobs/learn.py --mix data/old=0.25          a quarter of every batch from another dataset
"""

import jobs.interrupt  # noqa: F401

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings, warn
from jobs.dataset_report import dataset_report
from jobs.flags import read_flags
from jobs.held_out import HeldOutCheck
from jobs.learn_flags import LearnFlags, check_identity, refuse_replay_settings
from jobs.offline import dataset_tags, updates_of_epochs
from jobs.parameters import read_parameters
from jobs.replays import FoundService, find_services, make_replay, replay_of
from jobs.replicas import follow, join
from jobs.run_folder import RunFolder, find_run_to_resume, new_run_name
from jobs.run_tags import describe, run_tags
from jobs.stopping import StopRequest
from jobs.training import Training
from jobs.training_report import TrainingReport
from pipeline.charts import DIAGNOSTICS, LEARNING_CURVE
from pipeline.dataset import read_terms
from pipeline.params import ParamsPublisher
from pipeline.prefetch import Prefetcher
from pipeline.progress import ProgressWriter
from pipeline.provenance import provenance
from pipeline.replay_client import RemoteReplay
from pipeline.retention import Retention
from pipeline.returns import ReturnsFollower
from pipeline.scan import dataset_digest
from pipeline.several_replays import SeveralReplays
from pipeline.store import Store
from pipeline.tracking import Tracker, TrackingConfig, ending_run, make_tracker
from r2d2.data_parallel import Replicas
from r2d2.learner import Learner
from r2d2.tensors import transfer_buffer
from schemas.terms import DatasetTerms

WAIT_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    show_warnings()
    with ExitStack() as ends:
        return _learn(argv, StopRequest().listen(), ends)


def _learn(argv: Sequence[str], stop: StopRequest, ends: ExitStack) -> int:
    with refusing(OSError), StatusLine("learn") as status:
        flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
        if flags.train.dry_run:
            dry_run({**asdict(flags), "dataset": flags.source.store().uri})
        services: list[FoundService] = []
        if flags.service.replay:
            services = find_services(flags.service, stop, status, flags.train.max_minutes)
            if not services:
                return 0
            service = services[0]
            if flags.source.dataset is None:
                argv = [*argv, "--dataset", service.description.dataset]
            flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")  # There is a dataset by now.
            service.refuse_other_dataset(terms, flags.source.store().uri)
            refuse_replay_settings(flags, LearnFlags.defaults(preset, terms))
        if terms is None:
            if not _wait_for_dataset(flags, stop, status):
                return 0
            flags, preset, terms = read_flags(LearnFlags, argv, "learn.py")
        if terms is None:
            refuse("dataset.json has gone again")
        check_identity(flags, preset, terms)
        torch.set_num_threads(flags.train.threads)
        replicas, device = join(flags.train.device, flags.limiter.batch_size)
        learner = _make_learner(flags, terms, device, replicas)
        if replicas.rank:
            return follow(learner, replicas)
        updates = flags.train.updates
        if flags.train.epochs is not None:
            store = flags.source.open_store()
            updates = updates_of_epochs(flags.train.epochs, store, terms, flags.replay, flags.limiter)
            status.say(f"learn: {flags.train.epochs:g} epochs are {updates:,} updates")
        training = _build(flags, terms, services, learner, status, stop, ends)
        learner.share_state()
    problem, failed = None, True
    try:
        with StatusLine("learn") as status:
            training.run(stop, status, updates=updates, max_minutes=flags.train.max_minutes)
        failed = False
    except (ValueError, OSError) as error:
        problem = error
    finally:
        written = training.close(stop, failed=failed)
        replicas.close(failed=failed)
        print(f"learn: stopped ({stop.reason or 'failed'}): {training.summary()}", flush=True)
    if problem is not None:
        refuse(problem)
    return 0 if written else 1


def _make_learner(flags: LearnFlags, terms: DatasetTerms, device: str, replicas: Replicas) -> Learner:
    return Learner(
        flags.network.spec(terms.env, flags.window.frame_stack),
        flags.learner,
        geometry=flags.window,
        stored=terms.geometry,
        life_loss=terms.env.life_loss,
        device=device,
        seed=flags.train.seed,
        replicas=replicas,
    )


def _build(
    flags: LearnFlags, terms: DatasetTerms, services: list[FoundService], learner: Learner, status: StatusLine,
    stop: StopRequest, ends: ExitStack,
) -> Training:  # fmt: skip
    """Everything wired; ``ends`` ends the tracked run, whatever happens from here on."""
    train, store, offline = flags.train, flags.source.open_store(), flags.train.offline
    name = flags.tracking.run_name
    if train.resume:
        folder = find_run_to_resume(train.run_dir, name, store.uri).claim()
        name = folder.record["run"]
    else:
        name = name or new_run_name(store.name, train.seed)
        folder = RunFolder(train.run_dir or Path("runs") / name)
        folder.refuse_used()
        folder.claim()
    for notice in learner.notices:
        warn(notice)
    if train.init_from is not None:
        learner.start_from(read_parameters(train.init_from, "init_from"))
        status.say(f"learn: goes on from version {learner.version} in {train.init_from}")
    if learner.initializer is not None:
        status.say(f"learn: {learner.initializer_share:.2%} of the trained parameters are the State Initializer's")
    publishes_as = services[0].description.run if services else name
    if services:
        replay = replay_of(services, batch_size=flags.limiter.batch_size, threads=train.threads, seed=train.seed)
    else:
        replay = make_replay(
            store,
            terms,
            flags.replay,
            replace(flags.limiter, min_sequences=1, samples_per_insert=None) if offline else flags.limiter,
            shares=flags.mixing.shares(),
            seed=train.seed,
            threads=train.threads,
        )
    tracker = _make_tracker(flags, terms, store, folder, name, publishes_as)
    ends.enter_context(ending_run(tracker, stop.gone_by))
    progress = None
    if not offline:
        store.clean_leftovers()
    if not offline and not isinstance(
        replay, RemoteReplay | SeveralReplays
    ):  # A replay elsewhere publishes its own progress.
        progress = ProgressWriter(store, name, lambda: replay.progress(learner.updates))
    report = TrainingReport(
        learner=learner,
        replay_metrics=replay.metrics,
        env=terms.env,
        folder=folder,
        tracker=tracker,
        memory=flags.memory,
        dq_every=train.dq_every,
        held_out=HeldOutCheck(
            store, terms, share=flags.replay.held_out, gamma=flags.learner.gamma, every=train.held_out_every
        )
        if flags.replay.held_out
        else None,
        returns=None if offline else ReturnsFollower(store, terms),
        closing_tags=lambda: dataset_tags(store, "close"),
    )
    training = Training(
        learner=learner,
        replay=replay,
        prefetcher=Prefetcher(
            replay,
            flags.limiter.batch_size,
            deterministic=train.deterministic,
            make_buffer=lambda: transfer_buffer(replay.observation_buffer(flags.limiter.batch_size), learner.device),
        ),
        progress=progress,
        publisher=None if offline else ParamsPublisher(store, publishes_as, flags.publish),
        retention=None if offline else Retention(store, flags.retention),
        folder=folder,
        report=report,
        config=flags.checkpoint,
    )
    if train.resume:
        for line in training.restore():
            status.say(f"learn: {line}")
    else:
        tracker.params(
            {**asdict(flags), "terms": asdict(terms), "network": asdict(learner.spec), "provenance": provenance()}
        )
        tracker.dataset(store.name, dataset_digest(store), store.uri, "training")
        tracker.text("dataset/report.txt", dataset_report(store, terms))
    folder.write({"run": name, "dataset": store.uri})
    parameters = sum(value.numel() for value in learner.network.parameters())
    status.say(
        f"learn: {terms.env.env_id} from {store.uri} as run {name}, {parameters:,} parameters on {learner.device}"
    )
    if not terms.core.parts:
        status.say("learn: the dataset stores no core states, so this network has no recurrence; label.py can add them")
    if services:
        addresses = ", ".join(service.connection.address for service in services)
        status.say(f"learn: draws from {addresses}, publishes parameters as run {publishes_as}")
    return training


def _make_tracker(
    flags: LearnFlags, terms: DatasetTerms, store: Store, folder: RunFolder, name: str, publishes_as: str
) -> Tracker:
    """``name`` is the run's; ``publishes_as`` whose parameters it replaces in the dataset."""
    train, preset = flags.train, flags.source.preset
    config = TrackingConfig(
        uri=flags.tracking.tracking_uri,
        experiment=flags.tracking.experiment,
        run_name=name,
        tags=run_tags(
            "learn",
            terms.env,
            store=store,
            preset=preset,
            seed=train.seed,
            flags=asdict(flags),
            run=publishes_as,
            run_folder=str(folder.path.absolute()),
            **dataset_tags(store, "start"),
        ),
        description=describe("Learns", terms.env, store, preset=preset, seed=train.seed),
        run_id=folder.record.get("mlflow_run_id") if train.resume else None,
        parent_run_id=flags.tracking.parent_run_id,
        charts=(LEARNING_CURVE, DIAGNOSTICS),
        system_metrics=True,
    )
    return make_tracker(config)


def _wait_for_dataset(flags: LearnFlags, stop: StopRequest, status: StatusLine) -> bool:
    """True when there is one."""
    store = flags.source.store()
    for flag in ("offline", "resume"):
        if getattr(flags.train, flag):
            raise ValueError(f"dataset is {store.uri}; allowed with --{flag}: one that is there")
    started = time.monotonic()
    limit = None if flags.train.max_minutes is None else 60 * flags.train.max_minutes
    while read_terms(store) is None:
        status.show(waits_for=f"a dataset in {store.uri}; start one with python jobs/collect.py")
        if stop.wait(WAIT_SECONDS) or (limit is not None and time.monotonic() - started > limit):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
