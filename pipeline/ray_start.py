"""Joining or starting Ray, with what commonly keeps it from starting found out before any of its processes runs."""

import logging
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORE_BYTES = 500_000_000
LEAST_STORE_BYTES = 80 * 2**20  # Ray's own minimum is 75 MiB.
LONGEST_FOLDER = 43  # Bytes: Ray's sockets lie 64 bytes deeper, and the kernel takes 107.
SHARED_MEMORY = Path("/dev/shm")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RayPlan:
    """How to start a Ray of this machine's own.

    Attributes:
        folder: for its sockets and logs; None: its default is short enough.
        store_bytes: of its object store.
        warnings: what is other than usual, a line each.
    """

    folder: str | None
    store_bytes: int
    warnings: tuple[str, ...]


def plan_ray(temporary: str | None = None, shared_bytes: int | None = None) -> RayPlan:
    """Sizes and places that work here.

    Args:
        temporary: the folder that Ray would choose; default: as it chooses.
        shared_bytes: free in /dev/shm; default: as it is. Nothing of ours needs much: sequences never pass through Ray.
    """
    warnings, folder = [], None
    temporary = temporary if temporary is not None else _rays_choice()
    length = len(os.fsencode(temporary))
    if length > LONGEST_FOLDER:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        warnings.append(
            f"TMPDIR makes Ray's folder {length} bytes long, its sockets allow {LONGEST_FOLDER}: it uses {folder}"
        )
    if shared_bytes is None:
        shared_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else STORE_BYTES * 2
    store_bytes = min(STORE_BYTES, shared_bytes // 2)
    if store_bytes < LEAST_STORE_BYTES:
        store_bytes = LEAST_STORE_BYTES
        if shared_bytes < LEAST_STORE_BYTES:
            warnings.append(
                f"{SHARED_MEMORY} has {shared_bytes / 2**20:.0f} MiB free: Ray keeps its object store of "
                f"{store_bytes / 2**20:.0f} MiB on the disk, which is slower (containers: --shm-size)"
            )
    return RayPlan(folder=folder, store_bytes=store_bytes, warnings=tuple(warnings))


def start_ray(address: str | None = None, *, cpus: int | None = None) -> None:
    """Join the Ray at ``address`` or one that has been started or RAY_ADDRESS names; else start a small one here.

    Args:
        address: ``auto`` or ``host:port``; there must be one then.
        cpus: of a Ray that is started here; default: the machine's.

    Raises:
        ValueError: there is none at ``address``.
    """
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address is not None or os.environ.get("RAY_ADDRESS"):
        try:
            _init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())[:200]
            raise ValueError(f"ray_address is {address!r}; allowed: a Ray that can be reached ({line})") from error
        return
    plan = plan_ray()
    for warning in plan.warnings:
        _log.warning(warning)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's is 15: beside a learner its workers would hardly run.
    if plan.folder is not None:
        quiet["_temp_dir"] = plan.folder
    _init(address="local", num_cpus=cpus, object_store_memory=plan.store_bytes, include_dashboard=False, **quiet)


def _init(**how: Any) -> None:
    """``ray.init``, which answers SIGTERM by leaving; here, and from then on, the job's own answer holds."""
    import ray

    answer = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**how)
    except SystemExit:
        if callable(answer):
            answer(signal.SIGTERM, None)
        raise
    finally:
        if answer is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


def _rays_choice() -> str:
    return os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")
