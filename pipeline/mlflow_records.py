"""What a run is made of besides metrics, each as the calls that MLflow wants for it; mlflow is imported when called."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.charts import Chart, draw
from pipeline.mlflow_client import metric_histories
from pipeline.mlflow_models import log_model

BATCH_PARAMS = 100  # MLflow's own limit for one call.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")


def send_record(client: Any, uri: str, run_id: str, kind: str, arguments: tuple) -> None:
    """One record of a run: ``text``, ``artifact``, ``model``, ``dataset``, ``params`` or ``tags``."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

    if kind == "text":
        name, text = arguments
        client.log_text(run_id, text, name)
    elif kind == "artifact":
        path, folder = arguments
        client.log_artifact(run_id, path, folder or None)
    elif kind == "model":
        log_model(client, uri, run_id, *arguments)
    elif kind == "dataset":
        name, digest, source, context = arguments
        dataset = Dataset(name=name, digest=digest, source_type="local", source=json.dumps({"uri": source}))
        tagged = DatasetInput(dataset, [InputTag("mlflow.data.context", context)])
        client.log_inputs(run_id, datasets=[tagged])
    elif kind == "params":
        pairs = list(arguments[0].items())
        for at in range(0, len(pairs), BATCH_PARAMS):
            client.log_batch(run_id, params=[Param(*pair) for pair in pairs[at : at + BATCH_PARAMS]])
    else:
        client.log_batch(run_id, tags=[RunTag(*pair) for pair in arguments[0].items()])


def draw_charts(client: Any, run_id: str, charts: Iterable[Chart], title: str) -> None:
    """Each chart that has something to show, from what the run has logged, as ``plots/<name>.png``."""
    with tempfile.TemporaryDirectory() as folder:
        for chart in charts:
            path = Path(folder) / f"{chart.name}.png"
            if draw(chart, metric_histories(client, run_id, chart.metrics), path, title):
                client.log_artifact(run_id, str(path), "plots")


def is_hopeless(error: Exception) -> bool:
    """Another attempt would fail as well: MLflow refuses what it was given, or a file has gone."""
    return isinstance(error, FileNotFoundError | TypeError) or getattr(error, "error_code", "") in REFUSALS
