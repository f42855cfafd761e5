"""``make learn-pong``: ALE/Pong-v5 from nothing, by the two jobs as two processes on this machine.

Ends when the evaluation lane's last 10 episodes average 19.5 or more, or after ``--minutes``; then 10 greedy episodes
are played from the last parameters. Everything that was measured goes to results/pong/NAME.json, runs that failed
included, and docs/pong.png is drawn from all of them. Exit 1 below 18. The same NAME again goes on where it stopped.

    python -m tests.learning.pong [--name laptop] [--minutes 120] [--learn="--batch-size 32"] [--collect="--envs 8"]
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.parameters import read_parameters
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.evaluation import play_episodes
from pipeline.provenance import provenance
from pipeline.rollout import Rollout
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import network_of
from schemas.terms import DatasetTerms
from tests.learning.pong_curves import curve_of, draw_curves, learner_settings_of

ROOT = Path(__file__).parents[2]
FOLDER, RESULTS, CHART = Path(".pong"), ROOT / "results" / "pong", ROOT / "docs" / "pong.png"
TARGET, GOOD_ENOUGH, GREEDY_EPISODES, GREEDY_SEED = 18.0, 19.5, 10, 0
LOOK_SECONDS, SAY_SECONDS, STOP_SECONDS = 5.0, 60.0, 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="laptop", help="of the run")
    parser.add_argument("--minutes", type=float, default=120.0, help="of wall-clock, those of earlier parts included")
    parser.add_argument("--learn", default="", help="further flags of learn.py")
    parser.add_argument("--collect", default="", help="further flags of collect.py")
    parser.add_argument("--attach", type=int, nargs=2, metavar="PID", help="watch a learner and a collector that run")
    parser.add_argument("--write", action="store_true", help="only measure what is there: a run that has ended")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where dataset, runs and mlflow.db lie")
    flags = parser.parse_args()
    folder = flags.folder / flags.name
    folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(folder / "parts.json")
    if not flags.write:
        pids = flags.attach or start(folder, flags.name, shlex.split(flags.learn), shlex.split(flags.collect))
        watch(pids, parts, folder, flags.name, flags.minutes)
    record = measure(folder, flags.name, parts)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{flags.name}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    draw_curves(RESULTS, CHART)
    greedy = record["greedy"]
    print(
        f"{greedy['mean']:.1f} over {GREEDY_EPISODES} greedy episodes (target {TARGET:g}) after "
        f"{record['wall_seconds'] / 60:.0f} minutes, {sum(record['cpu_seconds'].values()) / 3600:.2f} core-hours, "
        f"{record['env_steps']:,} env steps, {record['updates']:,} updates; {path}, {CHART}"
    )
    return 0 if greedy["mean"] >= TARGET else 1


class Parts:
    """Wall-clock and processor seconds of every part of a run, kept from one start to the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: list[dict[str, float]] = json.loads(path.read_text()) if path.exists() else []

    def begin(self) -> None:
        self.values.append({"wall_seconds": 0.0, "learn": 0.0, "collect": 0.0, "load": 0.0})

    def update(self, **values: float) -> None:
        self.values[-1] |= values
        self._path.write_text(json.dumps(self.values))

    def total(self, name: str) -> float:
        return sum(part[name] for part in self.values)


def start(folder: Path, name: str, learn: list[str], collect: list[str]) -> list[int]:
    tracking = ["--tracking-uri", f"sqlite:///{(folder / 'mlflow.db').absolute()}"]
    common = ["--dataset", str((folder / "data").absolute()), *tracking]
    resume = ["--resume"] if (folder / "runs" / name).exists() else []
    commands = {
        "learn": [*common, "--run-name", name, "--env", "ALE/Pong-v5", *learn, *resume],
        "collect": [*common, "--run-name", f"{name}-collect", "--env", "ALE/Pong-v5", "--eval-lanes", "1", *collect],
    }
    pids = []
    for job, arguments in commands.items():
        with open(folder / f"{job}.log", "a") as log:
            command = [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *arguments]
            pids.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT).pid)
    return pids


def watch(pids: list[int], parts: Parts, folder: Path, name: str, minutes: float) -> None:
    """Until it is good enough, time is up, or one of the two is gone; then both are asked to stop."""
    parts.begin()
    began, said = time.monotonic() - age_seconds(pids[0]), -np.inf
    cpu = {"learn": 0.0, "collect": 0.0}
    try:
        while all(is_alive(pid) for pid in pids) and parts.total("wall_seconds") < 60 * minutes:
            cpu = {job: cpu_seconds(pid) for job, pid in zip(cpu, pids, strict=True)}
            parts.update(wall_seconds=time.monotonic() - began, load=os.getloadavg()[0], **cpu)
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                curve = curve_of(folder, name)
                recent = [point[2] for point in curve[-10:]]
                print(
                    f"{parts.total('wall_seconds') / 60:4.0f} minutes, {(curve or [[0, 0, 0]])[-1][1]:,} env steps, "
                    f"last {len(recent)} evaluation episodes {np.mean(recent or [np.nan]):.1f}",
                    flush=True,
                )
                if len(recent) == 10 and np.mean(recent) >= GOOD_ENOUGH:
                    break
            time.sleep(LOOK_SECONDS)
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.2)


def measure(folder: Path, name: str, parts: Parts) -> dict[str, Any]:
    """What the run was and what came of it."""
    terms = DatasetTerms.from_bytes((folder / "data" / "dataset.json").read_bytes())
    progress = json.loads((folder / "data" / "runs" / name / "progress.json").read_bytes())
    parameters = read_parameters(folder / "data" / "runs" / name, "parameters")
    curve = curve_of(folder, name)
    returns = greedy_returns(terms, parameters)
    return {
        "name": name,
        "terms": asdict(terms),
        "network": parameters.spec.to_json(),
        "learner": learner_settings_of(folder),
        "wall_seconds": parts.total("wall_seconds"),
        "cpu_seconds": {job: parts.total(job) for job in ("learn", "collect")},
        "parts": parts.values,
        "env_steps": curve[-1][1] if curve else 0,
        "frames": (curve[-1][1] if curve else 0) * terms.env.frame_skip,
        "updates": parameters.version,
        "samples": progress["samples"],
        "sequences": progress["sequences_seen"],
        "curve": curve,
        "greedy": {"returns": returns, "mean": float(np.mean(returns)), "seed": GREEDY_SEED, "epsilon": 0.0},
        "provenance": where_from(),
    }


def where_from() -> dict[str, Any]:
    """Of the measuring process, without what means nothing elsewhere."""
    values = provenance(role="learn-pong", command=shlex.join(["python", "-m", "tests.learning.pong", *sys.argv[1:]]))
    return {name: value for name, value in values.items() if name not in ("host", "pid")}


def greedy_returns(terms: DatasetTerms, parameters: Any) -> list[float]:
    torch.set_num_threads(1)
    env = terms.env
    config = EnvironmentConfig(
        env_id=env.env_id, arguments=dict(env.arguments), sticky=env.sticky, life_loss=env.life_loss
    )
    lanes = make_lanes(config, GREEDY_EPISODES)
    spec = parameters.spec
    policy = RecurrentPolicy(spec.core, spec.num_actions, np.zeros(GREEDY_EPISODES), np.random.default_rng(GREEDY_SEED))
    policy.set_network(network_of(parameters), 0, parameters.lineage)
    played = play_episodes(Rollout(lanes, policy, spec.frame_stack, GREEDY_SEED), GREEDY_EPISODES)
    lanes.close()
    return [episode.episode_return for episode in played]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def age_seconds(pid: int) -> float:
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / TICKS
    return float(Path("/proc/uptime").read_text().split()[0]) - started


if __name__ == "__main__":
    sys.exit(main())
