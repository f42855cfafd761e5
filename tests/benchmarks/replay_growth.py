"""What an index of so many sequences costs: a process of its own opens a dataset, draws from it and measures itself.

python -m tests.benchmarks.replay_growth .bench/small-10000-by-64 10000
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store import LocalStore
from tests.benchmarks.replay_decoding import BATCH, open_replay

DRAWS = 1000


def measure(root: Path, sequences: int) -> dict[str, float]:
    """In a process of its own. Memory is measured when every shard that may stay open has been drawn from."""
    gc.collect()
    before = anonymous_bytes()
    started = time.perf_counter()
    replay = open_replay(LocalStore(root), threads=1, capacity=sequences)
    rebuilt = time.perf_counter()
    replay.sample(BATCH)
    first_batch = time.perf_counter()
    generator, table = np.random.default_rng(1), replay._held.table
    drawing, updating = [], []
    for _ in range(DRAWS):
        started_cpu = time.thread_time()
        drawn = table.draw(BATCH, generator)
        drawing.append(time.thread_time() - started_cpu)
        priorities = generator.random(BATCH)
        started_cpu = time.thread_time()
        replay.update_priorities(drawn.ids, priorities)
        updating.append(time.thread_time() - started_cpu)
    for name in replay._held.index._shards[-replay._held.cache.max_open_shards :]:
        replay._held.cache.get(name).row(0)
    gc.collect()
    return {
        "sequences": replay.metrics()["size"],
        "rebuild_seconds": rebuilt - started,
        "first_batch_seconds": first_batch - rebuilt,
        "draw_milliseconds": 1e3 * statistics.median(drawing),
        "update_milliseconds": 1e3 * statistics.median(updating),
        "anonymous_bytes": anonymous_bytes() - before,
    }


def measured(store: LocalStore, sequences: int) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.replay_growth", str(store.root), str(sequences)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def anonymous_bytes() -> int:
    """Of this process: memory that is not backed by a file, which is what a replay may not grow in."""
    status = Path("/proc/self/status")
    if not status.exists():
        import psutil

        return psutil.Process().memory_full_info().uss
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
