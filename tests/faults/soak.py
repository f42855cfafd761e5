"""``make soak MINUTES=20``: collector and learner with kills of both at random moments; then every shard is read.

Prints sequences, duplicates, gaps, corrupt rows, resumes, updates, samples per insert against the setting, and the
slopes of anonymous memory and descriptors over the last half. Exit 1 when something was lost, doubled, or grows.
"""

import argparse
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from tests.processes import COLLECT, LEARN, Job, all_shards, progress_of, until, updates_of

SAMPLES_PER_INSERT = 2.0
MOST_MEGABYTES_A_MINUTE = 2.0  # Of a process that has found its size; allocators drift by less.
MOST_DESCRIPTORS_A_MINUTE = 0.5


class Watch:
    """Anonymous memory and open descriptors of the processes that were left alone, sampled every second."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, float, int]]] = {}

    def look(self, jobs: dict[str, Job]) -> None:
        for name, job in jobs.items():
            try:
                process = psutil.Process(job.process.pid)
                memory, descriptors = process.memory_full_info().uss / 1e6, process.num_fds()
            except psutil.Error:
                continue
            samples = self.samples.setdefault((name, job.process.pid), [])
            samples.append((time.monotonic() / 60, memory, descriptors))

    def slopes(self) -> dict[str, tuple[float, float, float]]:
        """Per role, of the longest-lived process: minutes watched, MB and descriptors a minute over its last half."""
        found = {}
        for role in {name for name, _ in self.samples}:
            samples = max((s for (name, _), s in self.samples.items() if name == role), key=len)
            half = np.array(samples[len(samples) // 2 :])
            memory, descriptors = (np.polyfit(half[:, 0], half[:, column], 1)[0] for column in (1, 2))
            found[role] = float(half[-1, 0] - half[0, 0]), float(memory), float(descriptors)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    moments = random.Random(flags.seed)
    watch, kills, resumes = Watch(), {"collect": 0, "learn": 0}, 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        store = LocalStore(folder / "data" / "pong")
        # A replay that is soon full: what it holds then stays the same, so what still grows is a leak.
        learn = [*LEARN, "--checkpoint-seconds", "5", "--capacity", "1000"]
        begin = {
            "collect": lambda: Job(folder, "collect.py", *COLLECT),
            "learn": lambda: Job(folder, "learn.py", *learn, "--run-name", "soak"),
        }
        again = {
            "collect": begin["collect"],
            "learn": lambda: Job(folder, "learn.py", *learn, "--resume"),
        }
        jobs = {role: start() for role, start in begin.items()}
        until(lambda: updates_of(store) > 20, 120, "the first updates")
        ends_at = time.monotonic() + 60 * flags.minutes
        # Kills in the first half; the second is left alone, so that slopes can be seen.
        kill_until = time.monotonic() + 30 * flags.minutes
        acknowledged = set()
        while time.monotonic() < ends_at:
            pause = time.monotonic() + moments.uniform(5, 40)
            while time.monotonic() < min(pause, ends_at):
                watch.look(jobs)
                time.sleep(1)
            acknowledged |= all_shards(store)
            if time.monotonic() < kill_until:
                for role in moments.choice([["collect"], ["learn"], ["collect", "learn"]]):
                    jobs[role].process.kill()
                    jobs[role].wait()
                    kills[role] += 1
                    jobs[role] = again[role]()
        statuses = {role: job.stop() for role, job in jobs.items()}
        said = "\n".join(path.read_text() for path in folder.glob("*.log"))
        resumes = said.count("resumed run soak at update")
        report, record = verify_dataset(store), progress_of(store)
        lost = acknowledged - all_shards(store)
        left = [str(path) for path in folder.rglob("*") if path.name.startswith((".writing", "_0"))]
        ratio = float(re.findall(r"\(([0-9.e+-]+) samples per insert\)", jobs["learn"].said)[-1])
    orphans = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False).stdout.split()
    slopes = watch.slopes()
    rows = {
        "minutes": flags.minutes,
        "kills of collector, learner": f"{kills['collect']}, {kills['learn']}",
        "resumes": resumes,
        "exit statuses": statuses,
        "sequences": report.sequences,
        "env steps": report.env_steps,
        "updates": record["updates"],
        "samples per insert": f"{ratio} (setting {SAMPLES_PER_INSERT})",
        "acknowledged shards lost": len(lost),
        "duplicates": report.duplicates,
        "gaps": report.missing_sequences,
        "corrupt": report.corrupt_rows,
        "faults": report.faults[:5],
        "temporary files, orphans": f"{left}, {orphans}",
        **{
            f"{role}: MB, descriptors a minute": f"{memory:+.2f}, {descriptors:+.2f} over {minutes:.1f} min"
            for role, (minutes, memory, descriptors) in slopes.items()
        },
    }
    for label, value in rows.items():
        print(f"{label:36s} {value}")
    problems = [*report.faults, *map(str, lost), *left, *orphans]
    problems += [f"{role} exited {status}" for role, status in statuses.items() if status]
    problems += [f"{role} grows" for role, (_, memory, descriptors) in slopes.items()
                 if memory > MOST_MEGABYTES_A_MINUTE or descriptors > MOST_DESCRIPTORS_A_MINUTE]  # fmt: skip
    if abs(ratio - SAMPLES_PER_INSERT) > 0.02 * SAMPLES_PER_INSERT + 2 * 16 / max(report.sequences, 1):
        problems.append(f"samples per insert {ratio}")
    print("soak: all is well" if not problems else f"soak: {problems}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
