"""What is handed to MLflow as a model: a folder, how it is called, and one call of it with its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model that needs nothing but its folder.

    Attributes:
        path: the folder; must stay there until it has been sent.
        script: the code that MLflow runs to load it ("models from code"): no object is pickled.
        inputs, outputs: an example of one call, arrays ``[N, ...]``; the signature is theirs, with any N.
        requirements: of pip, to load and call it.
    """

    path: Path
    script: Path
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    requirements: tuple[str, ...]
