"""Where something came from: command, commit, versions, host. Recorded, never compared."""

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "pyarrow", "gymnasium", "ale-py", "zstandard")


def provenance(**more: Any) -> dict[str, Any]:
    """What to know later about this process; ``more`` (seed, role, ...) is added to it."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: _version(name) for name in PACKAGES},
        "started_unix_seconds": time.time(),
        **more,
    }


@cache
def commit() -> str:
    """The project's commit, with ``+changes`` when the tree differs from it; ``unknown`` outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD").strip()
        return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    ).stdout


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
