"""Settings of every test."""

import torch

torch.set_num_threads(1)  # Small tensors: a second thread costs more than it brings, above all on a busy machine.
