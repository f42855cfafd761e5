"""``make bench-learner``: one update of the paper's network against its bare kernels, and the data path that feeds it.

The bare kernels are the forward and backward passes that an update cannot do without, on tensors that are there
already: target network without gradient over L + T + n rows, online network without over L, with over T, without over
n. Both run in turn with the same threads, precision, memory order and number of images at a time. Times are medians;
the ratio is the median of each round's own, so that other work on the machine disturbs both alike. Memory is the peak
of a fresh process above what it held before the first tensor. Options are timed beside it, each by itself. Exit 1 when
a bound is missed.

    python -m tests.benchmarks.learner [--batch 16] [--rounds 5] [--threads N] [--device cuda] [--quick]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from jobs.flags import default_threads
from jobs.presets import paper
from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.learner import Learner
from r2d2.networks import R2D2Network, zero_state
from r2d2.tensors import WindowTensors
from r2d2.training_pass import autocast, encode_rows
from schemas.records import ReplaySample, SequenceBatch
from schemas.specs import ArraySpec
from tests.benchmarks.report import Report
from tests.benchmarks.warm_dataset import waiting_share

MOST_TIME, MOST_MEMORY, MOST_WAITING = 1.15, 1.2, 0.05
GEOMETRY = paper().geometry
SPEC = NetworkSpec(observation=ArraySpec(shape=(84, 84), dtype="uint8"), num_actions=18)
LINEAGE = bytes(range(16))
OPTIONS = {
    "channels-last off": {"channels_last": False},
    "bfloat16": {"precision": "bfloat16"},
    "torch.compile": {"compile": True},
    "tbptt 20": {"tbptt": 20},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 125 steps (default 16; the paper: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds after one to warm up (default 5)")
    parser.add_argument("--threads", type=int, default=default_threads(for_learner=True), help="of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="the plain learner alone, and nothing is written")
    parser.add_argument("--peak", choices=("bare", "learner"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak_bytes(arguments.peak, arguments.batch))
        return 0
    where = "" if arguments.device == "cpu" else f" --device {arguments.device} --batch {arguments.batch}"
    section = "The learner" if arguments.device == "cpu" else f"The learner on {torch.cuda.get_device_name()}"
    report = Report(section, f"make bench-learner{where}")
    times(report, arguments)
    if arguments.device == "cpu":
        memory(report, arguments)
    waiting(report, arguments)
    if not arguments.quick:
        report.write()
    return 1 if report.missed else 0


def times(report: Report, arguments: argparse.Namespace) -> None:
    """One row per variant; the bound is the plain learner's."""
    sample = make_sample(arguments.batch)
    plain = make_learner(LearnerConfig(), arguments.device)
    window = plain.load(sample.batch)
    steps: dict[str, Callable[[], object]] = {
        "bare kernels": lambda: bare_step(plain, window),
        "learner": lambda: plain.step(sample),
    }
    for name, options in ({} if arguments.quick else OPTIONS).items():
        learner = make_learner(LearnerConfig(**options), arguments.device)
        steps[name] = lambda learner=learner: learner.step(sample)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + arguments.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step, arguments.device))
    bare, rows, ratios = seconds["bare kernels"][1:], [], {}
    for name, own in seconds.items():
        median = statistics.median(own[1:])
        ratios[name] = statistics.median(mine / its for mine, its in zip(own[1:], bare, strict=True))
        on_gpu = [] if arguments.device == "cpu" else [f"{kernel_share(steps[name], arguments.device):.0%}"]
        rows.append([name, f"{1e3 * median:,.0f}", f"{1 / median:.2f}", f"{ratios[name]:.3f}", *on_gpu])
    report.at_most("update against the bare kernels", ratios["learner"], MOST_TIME, "x")
    title = (
        f"The paper's network, {arguments.batch} x {GEOMETRY.stored_steps} steps, {arguments.threads} torch thread(s); "
        f"medians of {arguments.rounds}, interleaved"
    )
    header = ["", "ms per update", "updates/s", "of the bare kernels", "in GPU kernels"]
    report.table(title, header[: len(rows[0])], rows)


def memory(report: Report, arguments: argparse.Namespace) -> None:
    """Medians of both, in turn, each time in a process of its own: what malloc keeps differs from one to the next."""
    peaks: dict[str, list[int]] = {"bare": [], "learner": []}
    for _ in range(arguments.rounds):
        for which, found in peaks.items():
            command = [sys.executable, "-m", "tests.benchmarks.learner", "--peak", which]
            sizes = ["--batch", str(arguments.batch), "--threads", str(arguments.threads)]
            found.append(int(subprocess.run([*command, *sizes], capture_output=True, text=True, check=True).stdout))
    median = {which: statistics.median(found) for which, found in peaks.items()}
    report.at_most("peak memory against the bare kernels'", median["learner"] / median["bare"], MOST_MEMORY, "x")
    rows = [
        [which, *(f"{f(found) / 1e6:,.0f}" for f in (min, statistics.median, max))] for which, found in peaks.items()
    ]
    title = f"Peak of resident memory over two updates, {arguments.rounds} processes each"
    report.table(title, ["", "least MB", "median MB", "most MB"], rows)


def waiting(report: Report, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        share = waiting_share(
            Path(folder), batch_size=arguments.batch, threads=arguments.threads, device=arguments.device
        )
    report.at_most("waiting for data on a warm dataset", 100 * share, 100 * MOST_WAITING, " % of the time")


def make_sample(sequences: int) -> ReplaySample:
    return ReplaySample(
        ids=np.arange(sequences),
        probabilities=np.full(sequences, 1e-3),
        replay_sequences=1000,
        batch=make_batch(sequences),
    )


def make_learner(config: LearnerConfig, device: str = "cpu") -> Learner:
    return Learner(SPEC, config, geometry=GEOMETRY, stored=GEOMETRY, device=device, lineage=LINEAGE)


def make_batch(sequences: int) -> SequenceBatch:
    """Sequences from the middle of long episodes: all rows real, one core state each, random pixels."""
    random = np.random.default_rng(0)
    steps, size = GEOMETRY.stored_steps, SPEC.core.size

    def columns(dtype, value=0) -> np.ndarray:
        return np.full((sequences, steps), value, dtype)

    def states() -> tuple[np.ndarray, ...]:
        return tuple(0.1 * random.standard_normal((sequences, size)).astype(np.float32) for _ in SPEC.core.parts)

    return SequenceBatch(
        sequence=np.arange(sequences),
        first_valid=np.zeros(sequences, np.int32),
        num_steps=np.full(sequences, steps, np.int32),
        num_observations=np.full(sequences, steps, np.int32),
        ends=np.zeros(sequences, np.int8),
        observation=random.integers(0, 256, (sequences, GEOMETRY.stored_frames, 84, 84)).astype(np.uint8),
        action=random.integers(SPEC.num_actions, size=(sequences, steps)).astype(np.int32),
        reward=random.standard_normal((sequences, steps)).astype(np.float32),
        terminated=columns(np.uint8),
        truncated=columns(np.uint8),
        life_lost=columns(np.uint8),
        greedy=columns(np.uint8),
        previous_action=np.zeros(sequences, np.int32),
        previous_reward=np.zeros(sequences, np.float32),
        core=states(),
        unroll_core=states(),
        probes=np.arange(sequences),
        probe_core=states(),
        version_first=np.zeros(sequences, np.int64),
        version_last=np.zeros(sequences, np.int64),
        lineage=np.tile(np.frombuffer(LINEAGE, np.uint8), (sequences, 1)),
        epsilon=np.zeros(sequences, np.float32),
    )


def bare_step(learner: Learner, window: WindowTensors) -> None:
    """The passes alone: no targets, no priorities, no metrics, no optimiser."""
    online, target = learner.network, learner.target
    first, stop = GEOMETRY.burn_in, GEOMETRY.burn_in + GEOMETRY.unroll
    zero = zero_state(SPEC.core, len(window.frames), window.frames.device)
    for parameter in online.parameters():
        parameter.grad = None
    with autocast(learner.config, window.frames.device):
        with torch.no_grad():
            unroll(target, window, 0, GEOMETRY.stored_steps, zero)
            _, state = online.recur(encode_rows(online, window, 0, first), *window.previous(0, first), zero)
        q, state = unroll(online, window, first, stop, state)
        with torch.no_grad():
            unroll(online, window, stop, GEOMETRY.stored_steps, state)
    q.float().square().mean().backward()


def unroll(network: R2D2Network, window: WindowTensors, first: int, stop: int, state):
    return network.unroll(encode_rows(network, window, first, stop), *window.previous(first, stop), state)


def timed(step: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def kernel_share(step: Callable[[], object], device: str) -> float:
    """Share of a step's wall-clock during which the GPU works on it (0 to 1; above 1 where kernels overlap)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = timed(step, device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / seconds


def peak_bytes(which: str, sequences: int) -> int:
    """Largest resident memory over two steps, above what the process held before (Linux)."""
    sample = make_sample(sequences)
    before = status("VmRSS") - sample.batch.observation.nbytes
    learner = make_learner(LearnerConfig())
    window = learner.load(sample.batch)
    for _ in range(2):
        if which == "bare":
            bare_step(learner, window)
        else:
            learner.update(window, sample)
    return status("VmHWM") - before


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
