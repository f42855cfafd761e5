"""Settings of every test."""

import torch

from tests.processes import start

torch.set_num_threads(1)  # Small tensors: a second thread costs more than it brings, above all on a busy machine.

__all__ = ["start"]  # A fixture, for every test below.
