"""One Ray for the whole test run: started by the first test that asks for it, gone with the process."""

import os
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NICENESS = "RAY_worker_niceness"


@pytest.fixture(scope="session")
def ray_session():
    """Import this where it is needed; however many modules do, Ray starts once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        import ray.data

        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            os.environ[NICENESS] = "0"  # Ray's is 15: on a busy machine the tests would take minutes.
            ray.init(
                num_cpus=2,
                object_store_memory=500_000_000,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            )
        ray.data.DataContext.get_current().enable_progress_bars = False
    return ray
