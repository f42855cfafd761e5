"""A real ``mlflow server`` and a real PostgreSQL, on loopback, for as long as a test needs them."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_SECONDS = 120.0
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def mlflow_server(folder: Path, backend: str) -> Iterator[str]:
    """Its address; artifacts go through it, into ``folder``."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend, "--host", "127.0.0.1",
               "--artifacts-destination", str(folder / "artifacts"), "--port", str(port), "--workers", "2"]  # fmt: skip
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until(lambda: _answers(f"{address}/health"), server, folder / "server.log")
        yield address
    finally:
        _end(server)


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URI of an empty database below ``folder``. Skips where PostgreSQL is not installed."""
    if not BINARIES:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    data, port = folder / "postgres", free_port()
    data.mkdir()
    prefix: list[str] = []
    if os.getuid() == 0:  # PostgreSQL refuses to run as root.
        prefix = ["runuser", "-u", "postgres", "--"]
        shutil.chown(data, "postgres", "postgres")
        for parent in (data, *data.parents):
            if parent.owner() == "root" and parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o011)
    run = [*prefix, str(BINARIES[-1] / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync"]
    subprocess.run(run, check=True, capture_output=True, cwd="/", timeout=120)
    command = [*prefix, str(BINARIES[-1] / "postgres"), "-D", str(data), "-p", str(port), "-k", str(data),
               "-c", "listen_addresses=127.0.0.1"]  # fmt: skip
    with open(folder / "postgres.log", "w") as log:
        server = subprocess.Popen(command, cwd="/", stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until(lambda: _listens(port), server, folder / "postgres.log")
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        _end(server)


def _wait_until(condition, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"not up after {START_SECONDS:.0f} s: {log.read_text()}"
        time.sleep(0.2)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _end(server: subprocess.Popen) -> None:
    """The server and its workers: a session of their own, which this test started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, 15)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, 9)
        server.wait(20)
