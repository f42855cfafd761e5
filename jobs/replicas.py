"""Several learner processes that share every update, as torchrun starts them.

torchrun --nproc-per-node 2 jobs/learn.py ...        each takes half of every batch; the first draws, publishes and logs
"""

import os
import signal

import torch

from jobs.command_line import refuse
from r2d2.data_parallel import Replicas, join_replicas, part_bounds
from r2d2.learner import Learner


def join(device: str | None, batch_size: int) -> tuple[Replicas, str]:
    """This process's place among the replicas, and its device (default: cuda where there is a GPU, else cpu).

    Raises:
        ValueError: more processes than sequences in a batch.
    """
    part_bounds(batch_size, int(os.environ.get("WORLD_SIZE", "1")))
    return join_replicas(dict(os.environ), device or ("cuda" if torch.cuda.is_available() else "cpu"))


def follow(learner: Learner, replicas: Replicas) -> int:
    """Do the first process's updates along with it until it stops; the exit status. Ctrl-C is its affair alone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        learner.follow()
        replicas.close()
    except RuntimeError as error:  # Whatever torch.distributed says when the first process has gone.
        refuse(f"process {replicas.rank} of {replicas.size} lost the others at update {learner.updates}: {error}")
    print(f"learn: process {replicas.rank} of {replicas.size} stopped after {learner.updates} updates", flush=True)
    return 0
