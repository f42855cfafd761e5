"""Troubles as a job tells of them: one line when one appears, a counter in MLflow for as long as it lasts."""

from collections.abc import Iterable
from pathlib import Path

import torch

from jobs.console import warn
from r2d2.health import MemoryLimit, Trouble, memory_near_limit

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class HealthLog:
    """Counts reports with each trouble; warns of one when the report before was free of it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._present: set[str] = set()

    def tell(self, troubles: Iterable[Trouble]) -> None:
        """One report's troubles."""
        lines = {trouble.name: trouble.line for trouble in troubles}
        for name, line in lines.items():
            self._counts[name] += 1
            if name not in self._present:
                warn(f"health: {line}")
        self._present = set(lines)

    def metrics(self) -> dict[str, float]:
        """``health/<name>``: in how many reports the trouble was there, 0 included."""
        return {f"health/{name}": count for name, count in self._counts.items()}


def memory_troubles(limit: MemoryLimit, device: torch.device | None = None) -> list[Trouble]:
    """Of the machine, or the container this runs in, and of the GPU when ``device`` is one."""
    troubles = memory_near_limit(used_memory_share(), "the machine", limit)
    if not troubles and device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        troubles = memory_near_limit(1 - free / total, "the GPU", limit)
    return troubles


def used_memory_share(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> float | None:
    """0 to 1, without what the kernel can give back at once (page cache); None where the kernel does not say."""
    shares = [share for share in (_of_container(cgroup), _of_machine(meminfo)) if share is not None]
    return max(shares, default=None)


def _of_container(cgroup: Path) -> float | None:
    try:
        limit = int((cgroup / "memory.max").read_text())  # The word "max" where there is no limit.
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return (used - int(statistics["inactive_file"])) / limit
    except (OSError, ValueError, KeyError):
        return None


def _of_machine(meminfo: Path) -> float | None:
    try:
        kilobytes = {name: int(value.split()[0]) for name, value in _pairs(meminfo.read_text())}
        return 1 - kilobytes["MemAvailable"] / kilobytes["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (line.partition(":") for line in text.splitlines()) if value]
