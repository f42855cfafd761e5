"""A ready MLflow database: making one takes seconds, copying it none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory) -> Path:
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_runs(tmp_path, mlflow_template) -> Callable[[], tuple]:
    """Puts an empty ``mlflow.db`` into ``tmp_path``; call it for a client and the runs that were logged there since."""
    database = tmp_path / "mlflow.db"
    shutil.copy(mlflow_template, database)

    def runs() -> tuple:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{database}")
        return client, client.search_runs([client.get_experiment_by_name("r2d2").experiment_id])

    return runs
