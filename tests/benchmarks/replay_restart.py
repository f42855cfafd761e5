"""``make bench-replay-restart``: a learner on 1e5 Pong sequences is killed with -9, starts again, says what it found.

The sequences are really played, some hundred of them, and repeated under new identities: playing 1e5 would take more
than an hour. The network is smaller and the windows shorter than the paper's, for the sake of time on a CPU; sequences,
capacity and state are the paper's. Exit 1 when a priority or a sample is missing after the restart.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks.fill_replay import BENCH, play, repeat, shard_bytes

ROOT = Path(__file__).parent.parent.parent
LOOK_SECONDS = 0.05
BATCH = 8
LEARN = [
    "--offline", "--capacity", "100000", "--batch-size", str(BATCH), "--burn-in", "0", "--unroll", "40",
    "--bootstrap", "3",
    "--image-encoder", "small", "--dense", "64", "--dueling-width", "64", "--tracking-uri", "none", "--keep", "2",
    "--checkpoint-seconds", "1", "--run-dir", "run", "--run-name", "restart", "--threads", "2",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=100)
    flags = parser.parse_args()
    played = play("ALE/Pong-v5", 8000)
    print(f"{flags.sequences:,} sequences of really played Pong, repeated under new identities", flush=True)
    store = repeat(played, BENCH / f"pong-{flags.sequences}", flags.sequences)
    print(f"{shard_bytes(store) / 1e9:.2f} GB in {store.root}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*LEARN, "--dataset", str(Path(store.root).absolute())]
        first = Learner(Path(folder), arguments)
        while newest_checkpoint(folder) < flags.updates:
            first.refuse_to_be_dead()
            time.sleep(LOOK_SECONDS)
        first.process.kill()
        first.process.wait()
        saved = newest_checkpoint(folder)
        print(f"killed with -9; the newest checkpoint is of update {saved}", flush=True)
        second = Learner(Path(folder), [*arguments, "--resume", "--updates", str(saved + 20)])
        status = second.process.wait()
        second.reader.join()
    print(f"peak anonymous memory before the kill: {first.peak}")
    print(f"peak anonymous memory after the restart: {second.peak}")
    restored = re.search(r"(\d+) priorities of (\d+) inserted sequences, (\d+) samples", second.said)
    complete = restored is not None and [int(value) for value in restored.groups()] == [
        flags.sequences,
        flags.sequences,
        BATCH * saved,
    ]
    missing = "have gone from the dataset" in second.said
    print("all priorities and samples were restored" if complete and not missing else "something is missing")
    return 0 if status == 0 and complete and not missing else 1


def newest_checkpoint(folder: str) -> int:
    return max((int(path.name) for path in Path(folder).glob("run/checkpoints/0*")), default=-1)


class Learner:
    """A learn.py whose lines are passed on, and whose memory is watched."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-u", str(ROOT / "jobs" / "learn.py"), *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said, self._most, self._built = "", 0, 0
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def peak(self) -> str:
        return f"{self._most / 1e6:.0f} MB, of them {self._built / 1e6:.0f} MB network and libraries before the index"

    def refuse_to_be_dead(self) -> None:
        if self.process.poll() is not None:
            sys.exit(f"the learner has ended with {self.process.returncode}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            print(f"  {line}", end="", flush=True)

    def _watch(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.poll() is None and status.exists():
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            anonymous = 1024 * int(found[1]) if found else 0
            self._most = max(self._most, anonymous)
            if "parameters on" not in self.said:
                self._built = max(self._built, anonymous)
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
