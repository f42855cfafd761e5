"""A drawn batch against the bare decompression of its frames, and against a copy of the same bytes."""

import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.codec import decode_into
from pipeline.dataset import read_terms
from pipeline.limiter import LimiterConfig
from pipeline.replay import Replay, ReplayConfig
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


def decoding_milliseconds(store: LocalStore, threads: int, rounds: int) -> dict[str, float]:
    """Medians of interleaved rounds; ``ratio`` is the median of zstd / replay within a round.

    Every round has rows of its own; all three write into the same buffer.
    """
    replay, bare = open_replay(store, threads=threads), BareDecoder(threads)
    buffer = replay.observation_buffer(BATCH)
    buffer[:] = 0
    source = np.ones_like(buffer)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work) -> None:
        started = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - started)

    for _ in range(rounds):
        drawn = replay.draw(BATCH)
        assert drawn is not None
        replay.consumed(drawn)
        frames = [holder.row(row).frame for holder, row in drawn.rows]
        timed("memcpy", lambda: np.copyto(buffer, source))  # Before each of the two, to leave both the same caches.
        timed("zstd", lambda frames=frames: bare.decode(frames, buffer))
        timed("memcpy", lambda: np.copyto(buffer, source))
        timed("replay", lambda: replay.sample(BATCH, buffer))
    replay.close()
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    pairs = zip(seconds["zstd"], seconds["replay"], strict=True)  # Neighbours in time have seen the same machine.
    return {**medians, "ratio": statistics.median(zstd / ours for zstd, ours in pairs)}
