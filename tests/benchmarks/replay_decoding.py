"""A drawn batch against the bare decompression of its frames, and against a copy of the same bytes."""

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.codec import decode_into
from pipeline.dataset import read_terms
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.replay import Replay
from pipeline.store import LocalStore

BATCH = 64


def open_replay(store: LocalStore, *, threads: int, capacity: int = 100_000, batch_size: int = BATCH) -> Replay:
    """An indexed replay without ratio."""
    terms = read_terms(store)
    assert terms is not None
    limiter = LimiterConfig(batch_size=batch_size, min_sequences=1, samples_per_insert=None)
    generator = np.random.default_rng(0)
    replay = Replay(store, terms, ReplayConfig(capacity=capacity), limiter, generator=generator, threads=threads)
    replay.poll()
    return replay


def page_faults() -> int:
    """Of this process so far, those that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class BareDecoder:
    """Nothing but zstd: each thread takes the next frame and decodes it into its place; the caller is one of them."""

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers))

    def decode(self, frames: list, out: np.ndarray) -> None:
        remaining = iter(range(len(frames)))

        def work() -> None:
            for index in remaining:
                decode_into(frames[index], out[index])

        futures = [self._pool.submit(work) for _ in range(self._helpers)]
        work()
        for future in futures:
            future.result()


def decoding_milliseconds(store: LocalStore, threads: int, rounds: int, batches: int = 8) -> dict[str, float]:
    """Medians over interleaved rounds, for one batch; ``ratio`` is the median of zstd / replay within a round.

    ``page_faults`` are those of the replay's batches.

    Every batch has rows of its own, whose frames nobody has read in a while; all are written into the same buffer.
    Each round's first batch finds the processor's caches as the others left them.
    """
    replay, bare = open_replay(store, threads=threads), BareDecoder(threads)
    buffer = replay.observation_buffer(BATCH)
    buffer[:] = 0
    source = np.ones_like(buffer)

    def drawn_frames() -> list:
        drawn = replay.draw(BATCH)
        assert drawn is not None
        replay.consumed(drawn)
        return [holder.row(row).frame for holder, row in drawn.rows]

    def milliseconds(work: Callable[[int], object]) -> float:
        started = time.perf_counter()
        for index in range(batches):
            work(index)
        return 1e3 * (time.perf_counter() - started) / batches

    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        frames = [drawn_frames() for _ in range(batches)]
        found["zstd"].append(milliseconds(lambda index, frames=frames: bare.decode(frames[index], buffer)))
        faults = page_faults()
        found["replay"].append(milliseconds(lambda _: replay.sample(BATCH, buffer)))
        found["page_faults"].append((page_faults() - faults) / batches)
        found["memcpy"].append(milliseconds(lambda _: np.copyto(buffer, source)))
    replay.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    pairs = zip(found["zstd"], found["replay"], strict=True)  # Neighbours in time have seen the same machine.
    return {**medians, "ratio": statistics.median(zstd / ours for zstd, ours in pairs)}
