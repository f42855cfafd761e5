"""What this machine has and how fast it is, each with what to do about it (the article's table of troubles, 5.5)."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from jobs.health import used_memory_share
from jobs.presets import laptop
from pipeline.codec import compress, decode_into
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.file_system import network_file_system
from pipeline.tracking import NONE
from r2d2.health import SpeedLimit
from r2d2.networks import build_network, zero_state

OK, WARNING, FAULT = "ok", "warning", "fault"
PACKAGES = ("torch", "numpy", "pyarrow", "zstandard", "gymnasium", "ale-py", "safetensors", "mlflow", "ray")
LANES, MEASURED_SECONDS, BATCH = 16, 1.0, 32
FRAMES = 120
HTTP_SECONDS = 5.0
LEAST_FREE_BYTES, LEAST_SHM_BYTES = 5e9, 1e9
LEAST_DISK_MB_PER_SECOND, LEAST_DECODE_MB_PER_SECOND = 20.0, 200.0
MOST_UPDATE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``verdict``: ``ok``, ``warning`` (works, but slowly or not for long) or ``fault``; ``advice`` for these two."""

    name: str
    value: str
    verdict: str = OK
    advice: str = ""


def examine(folder: Path, tracking_uri: str, env_id: str) -> Iterator[Finding]:
    """One finding after the other, as they are made: about ten seconds. Leaves nothing behind in ``folder``."""
    checks: dict[str, Callable[[], Finding]] = {
        "python and packages": versions,
        "GPU": gpu,
        "processors": processors,
        "memory": memory,
        "disk": lambda: disk(folder),
        "/dev/shm": shared_memory,
        "emulator": lambda: emulator(env_id),
        "decoding": decoding,
        "acting": acting,
        "updates": updating,
        "MLflow": lambda: mlflow(tracking_uri),
    }
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:  # Whatever a broken installation raises is what is to be told.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            yield Finding(name=name, value=reason, verdict=FAULT, advice="make setup installs what is pinned")


def versions() -> Finding:
    found, missing = [f"Python {platform.python_version()}"], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        advice = f"{', '.join(missing)} missing: make setup, or pip install -c constraints.txt -e ."
        return Finding(name="python and packages", value=", ".join(found), verdict=FAULT, advice=advice)
    return Finding(name="python and packages", value=", ".join(found))


def gpu() -> Finding:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        value = f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        advice = "another process holds the rest: nvidia-smi" if free < 0.2 * total else ""
        return Finding(name="GPU", value=value, verdict=WARNING if advice else OK, advice=advice)
    if shutil.which("nvidia-smi"):
        advice = f"torch {torch.__version__} sees none: install a CUDA build of the same version"
        return Finding(name="GPU", value="there is a driver, but torch cannot use it", verdict=WARNING, advice=advice)
    return Finding(name="GPU", value="none; the learner uses the processor (--preset laptop is made for that)")


def processors() -> Finding:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores  # macOS knows none.
    load = os.getloadavg()[0]
    value = f"{usable} usable of {cores}, load {load:.1f}, torch uses {torch.get_num_threads()} threads"
    if load > 1.5 * usable:
        advice = "other processes want more than there is: wait, or expect every speed below to be too low"
        return Finding(name="processors", value=value, verdict=WARNING, advice=advice)
    if usable < 2:
        advice = "collect and learn share one core: run them one after the other, learn.py with --offline"
        return Finding(name="processors", value=value, verdict=WARNING, advice=advice)
    return Finding(name="processors", value=value)


def memory() -> Finding:
    share = used_memory_share()
    if share is None:
        return Finding(name="memory", value="unknown on this system")
    if share > 0.9:
        advice = "lower --capacity or --envs, or end what else runs; past the limit the kernel kills a job"
        return Finding(name="memory", value=f"{share:.0%} in use", verdict=WARNING, advice=advice)
    return Finding(name="memory", value=f"{share:.0%} in use")


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    data = os.urandom(16_000_000)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        started = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        speed = len(data) / 1e6 / (time.perf_counter() - started)
    value = f"{free / 1e9:.1f} GB free in {folder}, writes {speed:.0f} MB/s"
    if kind := network_file_system(folder):
        advice = f"a network file system ({kind}): datasets are safe on local disks only"
        return Finding(name="disk", value=value, verdict=FAULT, advice=advice)
    if free < LEAST_FREE_BYTES:
        advice = "100,000 Pong sequences take 1 to 2.5 GB: --retain-gb lets the learner delete old shards"
        return Finding(name="disk", value=value, verdict=WARNING, advice=advice)
    if speed < LEAST_DISK_MB_PER_SECOND:
        advice = "checkpoints will be slow: raise --checkpoint-seconds, or use another disk"
        return Finding(name="disk", value=value, verdict=WARNING, advice=advice)
    return Finding(name="disk", value=value)


def shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(name="/dev/shm", value="not on this system; only Ray's object store would use it")
    free = shutil.disk_usage(path).free
    value = f"{free / 1e9:.2f} GB free"
    if free < LEAST_SHM_BYTES:
        advice = "Ray's object store falls back to disk: docker run --shm-size=2g"
        return Finding(name="/dev/shm", value=value, verdict=WARNING, advice=advice)
    return Finding(name="/dev/shm", value=value)


def emulator(env_id: str) -> Finding:
    lanes = make_lanes(EnvironmentConfig(env_id=env_id), LANES, max(1, (os.cpu_count() or 1) // 2))
    draw, steps = np.random.default_rng(0), 0
    lanes.reset(0)
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS:
        lanes.send(draw.integers(lanes.spec.num_actions, size=LANES))
        steps += int(lanes.recv().is_transition.sum())
    lanes.close()
    rate, frames = steps / seconds, steps / seconds * lanes.spec.frame_skip
    value = f"{env_id}: {rate:,.0f} env steps/s ({frames:,.0f} frames/s) in {LANES} lanes"
    if frames < SpeedLimit().least_frames_per_second:
        advice = "below the article's 500 frames/s: fewer other processes, more --threads, a game that draws less"
        return Finding(name="emulator", value=value, verdict=WARNING, advice=advice)
    return Finding(name="emulator", value=value)


def decoding() -> Finding:
    lanes = make_lanes(EnvironmentConfig(), 1)
    frames = [lanes.reset(0)[0].copy()]
    for step in range(FRAMES - 1):
        lanes.send(np.array([step % lanes.spec.num_actions]))
        frames.append(lanes.recv().observation[0].copy())
    lanes.close()
    pixels = np.stack(frames)
    out, compressed, times = np.empty_like(pixels), compress(pixels, 3), 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS / 2:
        decode_into(compressed, out)
        times += 1
    speed = times * pixels.nbytes / 1e6 / seconds
    value = f"{speed:,.0f} MB/s of pixels a thread ({times / seconds:,.0f} sequences of {FRAMES} frames a second)"
    if speed < LEAST_DECODE_MB_PER_SECOND:
        advice = "batches will wait for pixels: give learn.py more --threads, or --frame-stack 1 and smaller batches"
        return Finding(name="decoding", value=value, verdict=WARNING, advice=advice)
    return Finding(name="decoding", value=value)


def _laptop_network():
    preset = laptop()
    lanes = make_lanes(preset.environment, 1)
    spec = preset.network.spec(lanes.spec, preset.geometry.frame_stack)
    lanes.close()
    return build_network(spec, torch.Generator().manual_seed(0)), preset.geometry


def acting() -> Finding:
    network, geometry = _laptop_network()
    stack = torch.zeros(LANES, geometry.frame_stack, *network.spec.observation.shape, dtype=torch.uint8)
    nothing, state = torch.zeros(LANES), zero_state(network.spec.core, LANES)
    times, started = 0, time.perf_counter()
    with torch.inference_mode():
        while (seconds := time.perf_counter() - started) < MEASURED_SECONDS / 2:
            network.step(stack, nothing.long(), nothing, state, nothing.bool())
            times += 1
    return Finding(name="acting", value=f"{times * LANES / seconds:,.0f} steps/s, laptop network, {LANES} lanes")


def updating() -> Finding:
    """One forward and backward pass over a batch of the laptop preset: most of an update."""
    network, geometry = _laptop_network()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device)
    rows = geometry.burn_in + geometry.unroll + geometry.bootstrap
    shape = (rows, BATCH, geometry.frame_stack, *network.spec.observation.shape)
    stack = torch.zeros(shape, dtype=torch.uint8, device=device)
    nothing = torch.zeros(rows, BATCH, device=device)
    started = time.perf_counter()
    q, _ = network.unroll(network.encode(stack), nothing.long(), nothing, zero_state(network.spec.core, BATCH, device))
    q.square().mean().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    value = f"{seconds:.2f} s for the passes of the first one on {device}, laptop preset, batch {BATCH}"
    if seconds > MOST_UPDATE_SECONDS:
        advice = "too slow to learn: a GPU, more --threads, or --batch-size 16"
        return Finding(name="updates", value=value, verdict=WARNING, advice=advice)
    return Finding(name="updates", value=value)


def mlflow(uri: str) -> Finding:
    """A server's own health page; of a database file, whether it can be written. Nothing is made."""
    if uri == NONE:
        return Finding(name="MLflow", value="off")
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=HTTP_SECONDS) as answer:
                return Finding(name="MLflow", value=f"{uri} answers {answer.status}")
        except (urllib.error.URLError, OSError) as error:
            advice = f"jobs go on and try again: mlflow server --host {parts.hostname} --port {parts.port or 5000}"
            return Finding(name="MLflow", value=f"{uri}: {error}", verdict=FAULT, advice=advice)
    if parts.scheme != "sqlite":
        return Finding(name="MLflow", value=f"{parts.scheme}: not examined")
    path = Path(uri.removeprefix("sqlite:///"))
    place = path if path.exists() else path.absolute().parent
    if not os.access(place, os.W_OK):
        advice = "runs cannot be logged: another --tracking-uri, or --tracking-uri none"
        return Finding(name="MLflow", value=f"{place} cannot be written", verdict=FAULT, advice=advice)
    return Finding(name="MLflow", value=f"{path}" + ("" if path.exists() else ", to be made by the first job"))
