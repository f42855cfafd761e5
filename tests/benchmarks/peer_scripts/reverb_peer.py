"""dm-reverb on the columns in the folder given: prioritised draws of 64 sequences from a table in this process.

Run by ``tests.benchmarks.peers`` in an environment of its own. Prints ``ready``; then, for each line on stdin that
holds a number of batches, one JSON line.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import reverb
import tensorflow as tf

BATCH, WORKERS = 64, 2
folder = Path(sys.argv[1])
columns = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
steps = {name: values.shape[1] if values.ndim > 1 and name in ("observation", "action", "reward", "terminated",
         "truncated", "life_lost", "greedy") else 1 for name, values in columns.items()}  # fmt: skip


def step_shape(name):
    return columns[name].shape[2:] if steps[name] > 1 else columns[name].shape[1:]


signature = {name: tf.TensorSpec((steps[name], *step_shape(name)), columns[name].dtype) for name in columns}
table = reverb.Table(
    "t",
    reverb.selectors.Prioritized(0.9),
    reverb.selectors.Fifo(),
    max_size=100_000,
    rate_limiter=reverb.rate_limiters.MinSize(1),
    signature=signature,
)
server = reverb.Server(tables=[table], port=None)
client = reverb.Client(f"localhost:{server.port}")
sequences, longest = len(columns["observation"]), max(steps.values())
with client.trajectory_writer(num_keep_alive_refs=longest) as writer:
    for index in range(sequences):
        values = {name: np.asarray(column[index]) for name, column in columns.items()}
        for step in range(longest):
            # Columns of fewer steps end with the last one; those of one value a sequence are given there.
            writer.append(
                {
                    name: values[name][step - longest + steps[name]] if steps[name] > 1 else values[name]
                    for name in columns
                    if step >= longest - steps[name]
                },
                partial_step=False,
            )
        trajectory = {name: writer.history[name][-steps[name] :] for name in columns}
        writer.create_item("t", priority=1.0, trajectory=trajectory)
        writer.end_episode()
batches = iter(
    reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{server.port}", "t", max_in_flight_samples_per_worker=2 * BATCH, num_workers_per_iterator=WORKERS
    ).batch(BATCH)
)


def draw():
    batch = next(batches)
    return {name: values.numpy() for name, values in batch.data.items()}


for _ in range(5):
    draw()
print("ready", flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    for _ in range(int(line)):
        draw()
    elapsed = time.perf_counter() - started
    print(json.dumps({"reverb": int(line) * BATCH / elapsed}), flush=True)
