"""torchrl on the columns in the folder given: prioritised draws of 64 sequences, once from each of two storages.

Run by ``tests.benchmarks.peers`` in an environment of its own. Prints ``ready``; then, for each line on stdin that
holds a number of batches, one JSON line.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictPrioritizedReplayBuffer

BATCH, AT_ONCE = 64, 16
folder = Path(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
columns = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
sequences = len(columns["observation"])
with tempfile.TemporaryDirectory() as scratch:
    storages = {
        "LazyMemmapStorage": LazyMemmapStorage(sequences, scratch_dir=scratch),
        "LazyTensorStorage": LazyTensorStorage(sequences),
    }
    buffers = {}
    for name, storage in storages.items():
        buffer = TensorDictPrioritizedReplayBuffer(alpha=0.9, beta=0.6, storage=storage, batch_size=BATCH)
        for start in range(0, sequences, AT_ONCE):
            rows = slice(start, min(start + AT_ONCE, sequences))
            values = {name: torch.from_numpy(np.array(column[rows])) for name, column in columns.items()}
            count = rows.stop - rows.start
            buffer.extend(TensorDict({**values, "td_error": torch.ones(count)}, batch_size=[count]))
        for _ in range(3):
            buffer.sample()
        buffers[name] = buffer
    print("ready", flush=True)
    for line in sys.stdin:
        rates = {}
        for name, buffer in buffers.items():
            started = time.perf_counter()
            for _ in range(int(line)):
                buffer.sample()
            rates[name] = int(line) * BATCH / (time.perf_counter() - started)
        print(json.dumps(rates), flush=True)
