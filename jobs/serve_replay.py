"""Keep the replay of a dataset for learners in other processes: they draw, decode and send priorities back.

python jobs/serve_replay.py --dataset data/pong      then: python jobs/learn.py --replay grpc://127.0.0.1:7878
python jobs/serve_replay.py --resume                 after a kill: priorities and counters of the last snapshot
"""

import jobs.interrupt  # noqa: F401

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobs.command_line import dry_run, refuse, refusing
from jobs.console import StatusLine, show_warnings, warn
from jobs.flags import DatasetFlags, check_run_name, read_flags
from jobs.presets import Preset, laptop
from jobs.replays import MixFlags, make_replay
from jobs.run_folder import RunFolder, find_run_to_resume
from jobs.stopping import StopRequest
from pipeline.dataset import read_terms
from pipeline.flight import LOOPBACK, SCHEME, TLS_SCHEME, serve
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.parts import WHOLE, Part
from pipeline.progress import ProgressWriter
from pipeline.replay_security import ServerSecurity, is_loopback, read_file, read_token
from pipeline.replay_service import ReplayService
from pipeline.snapshot import snapshot_from_bytes, snapshot_to_bytes
from schemas.terms import DatasetTerms

JOB, BLOB = "serve_replay", "replay.safetensors"
POLL_SECONDS, STARVED_POLL_SECONDS, WAIT_SECONDS = 1.0, 0.1, 0.5


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Where to listen, and what to keep.

    Attributes:
        host: address to listen on; the default is this machine only, any other needs a token.
        port: TCP port; 0 takes any free one and says which.
        token_file: file with the token that clients must bring; default: ``R2D2_REPLAY_TOKEN`` of the environment.
        tls_cert, tls_key: PEM files; with them the service is a ``grpc+tls://`` one.
        part: ``I/N``: serve only the collectors whose id modulo N is I; N services, one ``--run-name``, serve them all.
        run_name: of the service; its learner publishes parameters under ``runs/<name>`` of the dataset.
        run_dir: folder of snapshots; default ``runs/<run name>`` in the current folder.
        resume: continue the service named by ``--run-name`` or ``--run-dir``, else the newest of this dataset.
        snapshot_seconds: time between two snapshots of priorities and counters; one is always written at a clean stop.
        keep: snapshots kept, 2 or more.
        seed: of the draws.
        max_minutes: stop after this many minutes.
        dry_run: print the resolved configuration and stop.
    """

    host: str = LOOPBACK
    port: int = 7878
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    part: str = str(WHOLE)
    run_name: str | None = None
    run_dir: Path | None = None
    resume: bool = False
    snapshot_seconds: float = 30.0
    keep: int = 3
    seed: int = 0
    max_minutes: float | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; allowed: 0 to {2**16 - 1}")
        if Part.parse(self.part) != WHOLE and self.run_name is None:
            raise ValueError("run_name is None; allowed: with --part, the name that all parts share")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; allowed: 2 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; allowed: 0 or more")
        if self.run_name is not None:
            check_run_name(self.run_name)
        for name in ("snapshot_seconds", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; allowed: above 0")

    def security(self) -> ServerSecurity:
        """Raises ValueError when a file cannot be read, or the host is open to other machines without a token."""
        files = [("tls_cert", self.tls_cert), ("tls_key", self.tls_key)]
        certificate, key = (None if path is None else read_file(path, name) for name, path in files)
        security = ServerSecurity(token=read_token(self.token_file), certificate=certificate, key=key)
        security.refuse_open_host(self.host)
        if not (security.tls or is_loopback(self.host)):
            warn(f"{self.host} is reachable by others, and token and samples travel in clear: see --tls-cert")
        return security


@dataclass(frozen=True, kw_only=True)
class ServeReplayFlags:
    """Flags of serve_replay.py."""

    source: DatasetFlags = field(default_factory=DatasetFlags)
    serve: ServeFlags = field(default_factory=ServeFlags)
    mixing: MixFlags = field(default_factory=MixFlags)
    replay: ReplayConfig = field(default_factory=lambda: laptop().replay)
    limiter: LimiterConfig = field(default_factory=lambda: laptop().limiter)

    def __post_init__(self) -> None:
        self.limiter.refuse_capacity(self.replay.capacity)
        if self.mixing.mix and Part.parse(self.serve.part) != WHOLE:
            raise ValueError("mix is set; allowed: without --part")

    @classmethod
    def defaults(cls, preset: Preset, terms: DatasetTerms | None) -> "ServeReplayFlags":
        return cls(replay=preset.replay, limiter=preset.limiter)


def main(argv: Sequence[str]) -> int:
    show_warnings()
    stop = StopRequest().listen()
    with refusing(OSError), StatusLine("serve") as status:
        flags, _, terms = read_flags(ServeReplayFlags, argv, "serve_replay.py")
        store, security = flags.source.store(), flags.serve.security()
        if flags.serve.dry_run:
            dry_run({**asdict(flags), "dataset": store.uri})
        deadline = None if flags.serve.max_minutes is None else time.monotonic() + 60 * flags.serve.max_minutes
        while terms is None:
            status.show(waits_for=f"a dataset in {store.uri}; start one with python jobs/collect.py")
            if stop.wait(WAIT_SECONDS) or (deadline is not None and time.monotonic() >= deadline):
                return 0
            terms = read_terms(store)
        store.clean_leftovers()
        serving = Serving(flags, terms, security, status)
    failed = True
    try:
        with StatusLine("serve") as status:
            serving.serve(stop, status, deadline)
        failed = False
    except (ValueError, OSError) as error:
        refuse(error)
    finally:
        serving.close(clean=not failed)
        print(f"serve: stopped ({stop.reason or 'failed'}): {serving.summary()}", flush=True)
    return 0


class Serving:
    """One service, wired: the replay, its snapshots, its progress record, its ``port``, the name of its ``run``."""

    def __init__(
        self, flags: ServeReplayFlags, terms: DatasetTerms, security: ServerSecurity, status: StatusLine
    ) -> None:
        serve_flags, store, part = flags.serve, flags.source.store(), Part.parse(flags.serve.part)
        run_dir = serve_flags.run_dir
        if part != WHOLE and run_dir is None:
            run_dir = Path("runs") / f"{serve_flags.run_name}-part-{part.index}"
        if serve_flags.resume:
            self._folder = find_run_to_resume(run_dir, serve_flags.run_name, store.uri, JOB).claim()
            name = self._folder.record["run"]
        else:
            drawn_name = f"replay-{store.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            name = serve_flags.run_name or drawn_name
            self._folder = RunFolder(run_dir or Path("runs") / name)
            self._folder.refuse_used()
            self._folder.claim()
        self._replay = make_replay(
            store, terms, flags.replay, flags.limiter, shares=flags.mixing.shares(), seed=serve_flags.seed, part=part
        )
        self._service = ReplayService(
            self._replay, terms, run=name, dataset=store.uri, largest_batch=flags.limiter.batch_size, part=part
        )
        self._snapshots = self._folder.checkpoints(serve_flags.keep)
        self._snapshot_seconds = serve_flags.snapshot_seconds
        if serve_flags.resume:
            for line in self._restore():
                status.say(f"serve: {line}")
        self._server: Any = serve(self._service, serve_flags.host, serve_flags.port, security)
        self.run, self.port = name, int(self._server.port)
        self._folder.write({"run": name, "dataset": store.uri, "job": JOB})
        self._progress = ProgressWriter(store, name, self._service.progress, part=part)
        address = f"{TLS_SCHEME if security.tls else SCHEME}://{serve_flags.host}:{self.port}"
        which = "" if part == WHOLE else f", part {part}"
        status.say(f"serve: {terms.env.env_id} from {store.uri} as run {name}{which} at {address}")

    def serve(self, stop: StopRequest, status: StatusLine, deadline: float | None) -> None:
        """Follow the dataset and keep snapshots until stopped; the port's own threads serve meanwhile."""
        self._replay.poll(stop.__bool__)
        self._progress.start()
        saved_at = polled_at = time.monotonic()
        while not stop:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                stop.ask("max_minutes")
                break
            if now - polled_at >= POLL_SECONDS or self._service.starved.is_set():
                self._replay.poll(stop.__bool__)
                polled_at = now
            self._service.end_silent_sessions()
            if now - saved_at >= self._snapshot_seconds:
                self._save()
                saved_at = now
            if status.is_due:
                self._show(status)
            stop.wait(STARVED_POLL_SECONDS)

    def close(self, *, clean: bool) -> None:
        """Answer what has been asked, listen no more, write the last snapshot."""
        self._server.shutdown()
        if clean:
            self._save()
        self._progress.close(clean=clean)
        self._replay.close()
        self._folder.release()

    def summary(self) -> str:
        counts = self._replay.metrics()
        return (
            f"{counts['samples']:.0f} samples of {counts['inserted']:.0f} sequences "
            f"({counts['samples_per_insert']:.3g} samples per insert), {self._service.updates} updates, "
            f"{self._service.sent_bytes / 1e6:.1f} MB sent, "
            f"{counts['corrupt_rows']:.0f} checksum errors, {counts['bad_shards']:.0f} bad shards; "
            f"run folder {self._folder.path}"
        )

    def _restore(self) -> list[str]:
        newest, passed_over = self._snapshots.load_newest()
        if newest is None:
            return [*passed_over, f"no complete snapshot in {self._folder.path}: starting over"]
        restored = self._service.restore(*snapshot_from_bytes(newest.blobs[BLOB]))
        return [*passed_over, f"resumed run {self._folder.record['run']} from {newest.path}", restored]

    def _save(self) -> None:
        paths = self._snapshots.paths()
        number = int(paths[-1].name) + 1 if paths else 0
        try:
            self._snapshots.save(number, {BLOB: snapshot_to_bytes(*self._service.state())})
        except OSError as error:
            warn(f"snapshot could not be written, serving goes on: {error}")

    def _show(self, status: StatusLine) -> None:
        counts = self._replay.metrics()
        status.show(
            clients=self._service.clients,
            samples=int(counts["samples"]),
            sequences=int(counts["size"]),
            samples_per_insert=counts["samples_per_insert"],
            waits_for=self._replay.waits_for() if self._service.clients else "a learner",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
