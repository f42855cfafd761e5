"""``make bench-actors``: what actors cost with a network, by table and at random, and what a table can know.

Every collector is a process of its own; those that run together begin together. Writes docs/performance.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from jobs.presets import preset_named
from pipeline.action_table import RecentActions, frame_hashes, table_name
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.params import params_name
from pipeline.store import LocalStore
from r2d2.networks import build_network
from r2d2.serialize import params_to_bytes
from tests.benchmarks.report import Report

POLICIES, COLLECTORS = ("recurrent", "table", "random"), (1, 2, 4)
GAMES = ("Pong", "Breakout", "MsPacman", "Seaquest", "MontezumaRevenge")
RUN, LINEAGE, PREFIX_BYTES, LANES = "bench", bytes(range(16)), 100, 16
CLAIMED_US, CLAIMED_SAVING, CLAIMED_COLLISIONS = 120.0, 0.60, 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of acting per measurement")
    parser.add_argument("--presets", nargs="+", default=["laptop", "paper"])
    parser.add_argument("--frames", type=int, default=10_000, help="of each game, for hashes")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("bench-actors", "make bench-actors")
    streams = {game: frames_of(game, flags.frames) for game in GAMES}
    for preset in flags.presets:
        measure_actors(report, preset, flags.seconds, streams["Pong"][0])
    measure_hashes(report, streams)
    report.write()
    return 0  # The bounds are the article's claims: that one does not hold is a finding, not a fault.


def measure_actors(report: Report, preset: str, seconds: float, pong: np.ndarray) -> None:
    rows, cpu_us, memory, blocked = [], {}, {}, {}
    for policy in POLICIES:
        for count in COLLECTORS:
            with tempfile.TemporaryDirectory() as folder:
                publish(Path(folder), preset, pong)
                found = run_together(policy, preset, count, folder, seconds)
            steps = sum(each["steps"] for each in found)
            rate = sum(each["steps"] / each["seconds"] for each in found)
            cpu_us[policy, count] = 1e6 * sum(each["cpu_seconds"] for each in found) / steps
            memory[policy] = statistics.median(each["peak_memory_bytes"] for each in found)
            blocked[policy, count] = 1e6 * np.concatenate([each["blocked_seconds"] for each in found])
            hits = [each["table_hit_rate"] for each in found if "table_hit_rate" in each]
            us = blocked[policy, count]
            rows.append([
                policy, count, f"{rate:,.0f}", f"{cpu_us[policy, count]:.0f}", f"{memory[policy] / 1e6:.0f}",
                f"{np.median(us):.0f}", f"{np.percentile(us, 99):,.0f}", f"{(us <= CLAIMED_US).mean():.0%}",
                f"{statistics.mean(hits):.1%}" if hits else "",
            ])  # fmt: skip
    report.table(
        f"Pong, {preset} preset, {LANES} lanes a collector, one thread each",
        ["policy", "collectors", "env steps/s in all", "CPU µs a step", "peak MB each",
         "blocked per sequence, median µs", "p99 µs", "within 120 µs", "table hits, first seconds of play"],
        rows,
    )  # fmt: skip
    saving = 1 - cpu_us["table", 1] / cpu_us["recurrent", 1]
    report.at_least(f"C2, {preset}: CPU saved per step by a table instead of a network", saving, CLAIMED_SAVING)
    report.at_most(f"C10, {preset}: blocked per sequence, median", np.median(blocked["table", 1]), CLAIMED_US, " µs")
    p99 = np.percentile(blocked["table", 1], 99)
    report.at_most(f"C10, {preset}: blocked per sequence, 99th percentile", p99, CLAIMED_US, " µs")


def publish(folder: Path, preset_name: str, frames: np.ndarray) -> None:
    """What a learner and its labeller would publish: parameters, and a full table, here of random actions."""
    store, preset = LocalStore(folder), preset_named(preset_name)
    lanes = make_lanes(EnvironmentConfig(env_id="ALE/Pong-v5"), 1, 1)
    env = lanes.spec
    lanes.close()
    spec = preset.network.spec(env, preset.geometry.frame_stack)
    network = build_network(spec, torch.Generator().manual_seed(0))
    store.put(params_name(RUN), params_to_bytes(network, 1, LINEAGE, preset.learner.acting_values()))
    recent = RecentActions(10_000)
    recent.see(frames, np.random.default_rng(0).integers(0, env.num_actions, len(frames)))
    store.put(table_name(RUN), recent.encode(env, 1, LINEAGE))


def run_together(policy: str, preset: str, count: int, folder: str, seconds: float) -> list[dict]:
    command = [sys.executable, "-m", "tests.benchmarks.actor", "--policy", policy, "--preset", preset,
               "--dataset", folder, "--envs", str(LANES), "--seconds", str(seconds)]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, "--seed", str(100 * number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(count)
    ]
    for process in processes:
        line = process.stdout.readline()
        if line.strip() != "ready":
            raise RuntimeError(f"a collector ended early: {line}")
    found = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=seconds + 60)
        found.append(json.loads(output.splitlines()[-1]))
    return found


def frames_of(game: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes, in the order seen, of ``count`` frames of lanes that act at random: of all of it, of its beginning."""
    lanes = make_lanes(EnvironmentConfig(env_id=f"ALE/{game}-v5"), LANES, 1)
    random, whole, beginning = np.random.default_rng(0), [], []
    observation = lanes.reset(0)
    for _ in range(count // LANES):
        whole.append(frame_hashes(observation))
        beginning.append(frame_hashes(observation.reshape(LANES, -1)[:, :PREFIX_BYTES]))
        lanes.send(random.integers(0, lanes.spec.num_actions, LANES))
        observation = lanes.recv().observation
    lanes.close()
    return np.concatenate(whole), np.concatenate(beginning)


def measure_hashes(report: Report, streams: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    rows, worst = [], 0.0
    for game, (whole, beginning) in streams.items():
        distinct = np.unique(np.stack([whole, beginning], 1), axis=0)
        _, groups = np.unique(distinct[:, 1], return_inverse=True)
        collided = (np.bincount(groups)[groups] > 1).mean()
        worst = max(worst, float(collided))
        seen_before = len(whole) - len(np.unique(whole))
        rows.append([game, f"{len(whole):,}", f"{len(distinct):,}", f"{len(np.unique(beginning)):,}", f"{collided:.2%}",
                     f"{seen_before / len(whole):.1%}", f"{hit_rate(whole, 10_000, 0):.1%}",
                     f"{hit_rate(whole, 10_000, 1000):.1%}"])  # fmt: skip
    report.table(
        f"Real frames, {LANES} lanes acting at random: hashes of {PREFIX_BYTES} bytes (C9), and what a table can know",
        ["game", "frames", "distinct (whole frame)", "distinct (first 100 bytes)", "distinct frames that collide",
         "frames seen before", "hit by 10,000 entries", "the same, 1,000 steps late"],
        rows,
    )  # fmt: skip
    report.at_most("C9: share of distinct frames that collide, worst of five games", worst, CLAIMED_COLLISIONS)


def hit_rate(stream: np.ndarray, entries: int, late: int) -> float:
    """Share of frames that a table of the ``entries`` frames seen last knows, ``late`` frames after they were seen."""
    held: dict[int, None] = {}
    hits = 0
    keys = stream.tolist()
    for position, key in enumerate(keys):
        if position >= late:
            arrived = keys[position - late] if late else None
            if arrived is not None:
                held.pop(arrived, None)
                held[arrived] = None
        hits += key in held
        if not late:
            held.pop(key, None)
            held[key] = None
        if len(held) > entries:
            del held[next(iter(held))]
    return hits / len(keys)


if __name__ == "__main__":
    sys.exit(main())
