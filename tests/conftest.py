"""Settings of every test."""

import torch

from tests.mlflow_session import mlflow_runs, mlflow_template
from tests.processes import start

torch.set_num_threads(1)  # Small tensors: a second thread costs more than it brings, above all on a busy machine.

__all__ = ["mlflow_runs", "mlflow_template", "start"]  # Fixtures, for every test below.
