"""``make demo-cluster``: everything that goes past one process, on this machine: an S3 server, a replay service with a
token, two collectors on Ray, a learner, MLflow. Then the doctor, and what came of it.
"""

import jobs.interrupt  # noqa: F401

import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from jobs.command_line import parse, refusing
from jobs.demo import FOLDER, Job, end_all
from jobs.doctor import show
from jobs.s3_server import s3_server
from jobs.stopping import StopRequest
from pipeline.replay_security import TOKEN_VARIABLE
from pipeline.store import open_store
from pipeline.verify import verify_dataset


@dataclass(frozen=True, kw_only=True)
class DemoClusterFlags:
    """Flags of demo_cluster.py.

    Attributes:
        env: gymnasium id to play.
        minutes: how long the jobs run together.
    """

    env: str = "ALE/Pong-v5"
    minutes: float = 3.0


def main(argv: Sequence[str]) -> int:
    with refusing():
        flags = parse(DemoClusterFlags, argv, DemoClusterFlags(), "demo_cluster.py")
    FOLDER.mkdir(exist_ok=True)
    name = next(f"cluster-{n}" for n in count(1) if not (FOLDER / f"cluster-{n}").exists())
    with s3_server(FOLDER / name) as server:
        os.environ.update(server.environment)
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
        print(f"$ rclone serve s3 --addr 127.0.0.1:{server.port} {FOLDER / name}")
        return _run(flags, f"s3://bucket/{name}")


def _run(flags: DemoClusterFlags, dataset: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tracking = f"sqlite:///{FOLDER.absolute()}/mlflow.db"
    common = ["--dataset", dataset]
    limited = ["--tracking-uri", tracking, "--max-minutes", str(flags.minutes)]
    collectors = ["--env", flags.env, "--collectors", "2", "--envs", "8"]
    stop = StopRequest().listen()
    jobs = {
        "serve": Job("serve_replay.py", [*common, "--port", str(port)]),
        "collect": Job("collect.py", [*common, *limited, *collectors]),
        "learn": Job("learn.py", [*common, *limited, "--replay", f"grpc://127.0.0.1:{port}"]),
    }
    try:
        statuses = [jobs[name].wait(stop) for name in ("collect", "learn")]
    finally:
        end_all(jobs.values(), stop)
    statuses.append(jobs["serve"].wait(stop))
    print()
    if stop:
        print(f"demo-cluster: stopped ({stop.reason}), what it made is in {FOLDER.absolute()}")
        return 1
    if any(statuses):
        print(f"demo-cluster failed: exit statuses {statuses}")
        return 1
    return _report(dataset, jobs)


def _report(dataset: str, jobs: dict[str, Job]) -> int:
    report = verify_dataset(open_store(dataset))
    show(report)
    serve, collect, learn = jobs["serve"], jobs["collect"], jobs["learn"]
    used = [int(text) for text in re.findall(r"(\d+) parameter versions", "\n".join(collect.said))]
    updates = learn.find(r"(\d+) updates")
    print(f"env steps                   {report.env_steps:,}")
    print(f"sequences                   {report.sequences:,}, each once")
    print(f"updates                     {updates}")
    sent = serve.find(r"([0-9.]+ MB) sent")
    print(f"bytes on the wire           {sent} of samples, {report.bytes / 1e6:.1f} MB of shards")
    print(f"parameter versions used     {', '.join(map(str, used))} by the collectors")
    runs = {name: jobs[name].find(r"MLflow run (\w+)") for name in ("collect", "learn")}
    print(f"MLflow runs                 {', '.join(f'{name} {run_id}' for name, run_id in runs.items())}")
    faults = list(report.faults) + [f"{path}: {reason}" for path, reason in report.bad_files]
    if report.duplicates:
        faults.append(f"{report.duplicates} sequences are there twice")
    if len(used) != 2 or min(used) < 1:
        faults.append("a collector never took up the learner's parameters")
    if not updates.isdigit() or int(updates) == 0:
        faults.append("no update")
    for fault in faults:
        print(f"fault: {fault}")
    print("demo-cluster: failed" if faults else "demo-cluster: all is well")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
