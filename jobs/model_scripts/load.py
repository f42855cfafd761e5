"""The network in this folder, without MLflow: ``policy = load_policy()``, then ``policy.step(...)``.

Needs torch, numpy and safetensors. Runs the copy in ``code/`` beside this file, which is what the network was trained
with, unless the process has the project loaded already.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent


def load_policy():
    """An ``r2d2.PortablePolicy``: its ``step`` takes and returns numpy arrays, the core state among them."""
    sys.path.insert(0, str(HERE / "code"))
    try:
        from r2d2 import build_policy
    finally:
        sys.path.remove(str(HERE / "code"))
    description = json.loads((HERE / "spec.json").read_text())
    return build_policy(description["network"], load_file(HERE / "params.safetensors"))
