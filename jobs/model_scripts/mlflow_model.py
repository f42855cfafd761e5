"""What MLflow runs to load one of our networks as a pyfunc ("models from code"): no object is ever pickled."""

import importlib.util
from pathlib import Path

from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel


class Network(PythonModel):
    """``predict`` is ``r2d2.PortablePolicy.step`` with its arguments as one dictionary of arrays."""

    _skip_type_hint_validation = (
        True  # The signature says what goes in; MLflow knows no type hint for a dict of arrays.
    )

    def load_context(self, context) -> None:
        path = Path(context.artifacts["network"]) / "load.py"
        found = importlib.util.spec_from_file_location("r2d2_model_load", path)
        assert found is not None
        assert found.loader is not None
        loading = importlib.util.module_from_spec(found)
        found.loader.exec_module(loading)
        self._policy = loading.load_policy()

    def predict(self, context, model_input, params=None):  # type: ignore[override]
        return self._policy.step(**model_input)


set_model(Network())
