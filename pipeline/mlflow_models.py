"""Our models in MLflow: logged by models from code, and fetched again. Imports mlflow only when called."""

from pathlib import Path
from typing import Any

from pipeline.mlflow_client import quiet_mlflow, tracking_to
from pipeline.model_folder import ModelFolder

ARTIFACT = "network"  # The model's folder inside MLflow's.


def log_model(client: Any, uri: str, run_id: str, model: ModelFolder, name: str, step: int) -> str:
    """``model`` as the run's model ``name``; an older one of that name is deleted. Returns its ``models:/`` URI.

    MLflow calls it once with the example, in this process, before it is stored.
    """
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(arrays: Any) -> Schema:
        return Schema([TensorSpec(array.dtype, (-1, *array.shape[1:]), key) for key, array in arrays.items()])

    experiment_id = client.get_run(run_id).info.experiment_id
    older = [
        logged
        for logged in client.search_logged_models([experiment_id], filter_string=f"name = '{name}'")
        if logged.source_run_id == run_id
    ]
    created = client.create_logged_model(experiment_id, name=name, source_run_id=run_id)
    with tracking_to(uri):
        logged = Model.log(
            artifact_path=None,
            name=name,
            model_id=created.model_id,
            run_id=run_id,
            flavor=mlflow.pyfunc,
            step=step,
            python_model=str(model.script),
            artifacts={ARTIFACT: str(model.path)},
            signature=ModelSignature(schema(model.inputs), schema(model.outputs)),
            input_example=dict(model.inputs),
            pip_requirements=list(model.requirements),
        )
    for each in older:
        client.delete_logged_model(each.model_id)
    return logged.model_uri


def download_model(uri: str, model_uri: str, folder: Path) -> tuple[Path, str | None]:
    """The model's own folder below ``folder``, and the run that logged it.

    Raises:
        ValueError: there is no such model.
    """
    quiet_mlflow()
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    try:
        with tracking_to(uri):
            path = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(folder)))
        model = Model.load(str(path))
        return path / model.flavors["python_function"]["artifacts"][ARTIFACT]["path"], model.run_id
    except (MlflowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"model is {model_uri!r}; allowed: runs:/RUN/last, models:/ID, as {uri} has ({reason})"
        ) from error
