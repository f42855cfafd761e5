"""``make bench-offline``: reading with Ray Data and relabelling, against the bare parts; fixed costs printed apart.

Without pixels: the marginal rate between a small and a large dataset in 256-sequence shards, at least a quarter of a
plain pyarrow loop's. With pixels: the marginal rate at least 60 % of the in-process decoder's; the small dataset takes
more than the second that Ray Data needs to hear of the machine's cores (until then it runs one task at a time), which
would else stand in the rate. Relabelling: the marginal rate, over several groups of episodes, at least 80 % of the
network's bare forward rate. Rounds in turn; the fastest of each part counts, for whatever else runs on the machine
only ever slows one down. Exit 1 when a bound is missed.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from jobs.presets import Preset, preset_named
from jobs.relabelling import Relabelling
from pipeline.codec import row_layout
from pipeline.dataset import ShardName, agree_on_terms, shards_after, write_provenance
from pipeline.decode import BatchDecoder
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.ray_source import read_sequences
from pipeline.ray_start import start_ray
from pipeline.rollout import Rollout
from pipeline.scan import list_shards
from pipeline.sequences import SequenceBuilder
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from r2d2.networks import R2D2Network, build_network, zero_state
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import params_to_bytes
from schemas.geometry import SequenceGeometry
from schemas.terms import DatasetTerms

LEAST_PLAIN, LEAST_PIXELS, LEAST_RELABEL = 0.25, 0.6, 0.8
PER_SHARD = 256
NICENESS = "RAY_worker_niceness"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", type=int, default=100_000, help="sequences, without pixels")
    parser.add_argument("--large", type=int, default=400_000)
    parser.add_argument("--small-pixels", type=int, default=20_480, help="sequences, with pixels")
    parser.add_argument("--large-pixels", type=int, default=61_440)
    parser.add_argument("--small-steps", type=int, default=20_000, help="env steps to relabel")
    parser.add_argument("--large-steps", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; best of {flags.rounds} rounds", flush=True)
        template = record(root / "template", small_windows(), sequences=PER_SHARD)
        started = time.perf_counter()
        os.environ[NICENESS] = "0"  # Ray's is 15: what else runs here would stand in the comparison.
        start_ray()
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.WARNING)

        ray.data.DataContext.get_current().enable_progress_bars = False
        print(f"  Ray started in {time.perf_counter() - started:.1f} s", flush=True)
        held = [
            without_pixels(root, template, flags),
            with_pixels(root, template, flags),
            relabelling(root, flags),
        ]
    return 0 if all(held) else 1


def small_windows() -> Preset:
    """66 frames of 84x84 a sequence."""
    geometry = SequenceGeometry(burn_in=20, unroll=40, bootstrap=5, stride=20, frame_stack=2)
    return replace(preset_named("laptop"), environment=EnvironmentConfig(), geometry=geometry)


def record(root: Path, settings: Preset, *, sequences: int, steps: int | None = None) -> LocalStore:
    """Random play of Pong in one shard of ``sequences``, or as many as ``steps`` env steps give."""
    root.mkdir()
    store = LocalStore(root)
    lanes = make_lanes(settings.environment, 8)
    terms = DatasetTerms(env=lanes.spec, geometry=settings.geometry, core=settings.network.core.spec())
    agree_on_terms(store, terms)
    write_provenance(store, "c0", {})
    policy = RecurrentPolicy(terms.core, terms.env.num_actions, np.ones(8), np.random.default_rng(0))
    rollout, builder = Rollout(lanes, policy, terms.geometry.frame_stack, 0), SequenceBuilder(terms, "c0", 8)
    writer = ShardWriter(
        store, terms, "c0", WriterConfig(flush_sequences=sequences, first_flush_seconds=1e9, flush_seconds=1e9),
        initial_priorities=lambda batch, q: np.ones(len(batch), np.float32),
    )  # fmt: skip
    taken = 0
    while writer.shards == 0 if steps is None else taken < steps:
        for sequence in builder.record(rollout.step()):
            writer.add(sequence)
        if steps is None:
            writer.maybe_flush()
        taken += 8
    if steps is not None:
        observation, act = rollout.look()
        for sequence in builder.cut(observation, act.q_values):
            writer.add(sequence)
        writer.flush()
    lanes.close()
    return store


def repeated(root: Path, template: LocalStore, sequences: int) -> LocalStore:
    """A dataset of one shard under many names: as many files to open, and always a warm page cache."""
    root.mkdir()
    store = LocalStore(root)
    store.put("dataset.json", template.get("dataset.json"))
    (shard,) = list_shards(template)
    for number in range(sequences // PER_SHARD):
        path = store.map_path(ShardName("c0", number, shard.sequences, shard.env_steps).path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(template.map_path(shard.path), path)
    return store


def in_turn(rounds: int, parts: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least that each part returned: seconds."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            found[name].append(part())
    return {name: min(values) for name, values in found.items()}


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def without_pixels(root: Path, template: LocalStore, flags: argparse.Namespace) -> bool:
    small, large = (repeated(root / f"n{n}", template, n) for n in (flags.small, flags.large))
    names = row_layout(template_terms(template)).dtype.names or ()
    columns = ["collector", *(name for name in names if "core" not in name)]

    def reward_sum(table: pa.Table) -> dict[str, np.ndarray]:
        parts = table["reward"].chunks
        return {"total": np.array([sum(part.storage.flatten().to_numpy().sum(dtype=np.float64) for part in parts)])}

    def plain(store: LocalStore) -> None:
        rows = total = 0
        for name in list_shards(store):
            with pa.memory_map(str(store.map_path(name.path))) as source:
                table = pa.ipc.open_file(source).read_all().select(columns)
            rows += len(table)
            total += table["reward"].combine_chunks().flatten().to_numpy().sum()

    def on_ray(store: LocalStore) -> None:
        dataset = read_sequences(str(store.root), columns)
        sums = dataset.map_batches(reward_sum, batch_size=None, batch_format="pyarrow")
        assert sum(row["total"] for row in sums.take_all()) is not None

    on_ray(small)  # Workers start and import.
    seconds = in_turn(
        flags.rounds,
        {f"{how.__name__} {size}": lambda how=how, store=store: timed(lambda: how(store))
         for how in (plain, on_ray) for size, store in (("small", small), ("large", large))},
    )  # fmt: skip
    more = flags.large - flags.small
    rates = {how: more / (seconds[f"{how} large"] - seconds[f"{how} small"]) for how in ("plain", "on_ray")}
    fixed = seconds["on_ray small"] - flags.small / rates["on_ray"]
    print(
        f"without pixels, {flags.small:,} to {flags.large:,} sequences in shards of {PER_SHARD}, {len(columns)} columns"
    )
    print(f"  plain pyarrow loop       {rates['plain']:12,.0f} sequences/s")
    print(f"  Ray Data, marginal       {rates['on_ray']:12,.0f} sequences/s (fixed {fixed:.1f} s)")
    return bound("  Ray Data / plain", rates["on_ray"] / rates["plain"], LEAST_PLAIN)


def template_terms(store: LocalStore) -> DatasetTerms:
    return DatasetTerms.from_bytes(store.get("dataset.json"))


def with_pixels(root: Path, template: LocalStore, flags: argparse.Namespace) -> bool:
    counts = flags.small_pixels, flags.large_pixels
    small, large = (repeated(root / f"p{n}", template, n) for n in counts)
    terms = template_terms(template)

    def in_process(store: LocalStore) -> None:
        with BatchDecoder(terms, flags.threads) as decoder:
            buffer = decoder.observation_buffer(64)
            for name in list_shards(store):
                shard = open_shard(store.map_path(name.path), name)
                for begin in range(0, shard.num_rows, 64):
                    batch, ok = decoder.decode([(shard, row) for row in range(begin, begin + 64)], buffer)
                    assert ok.all()
                    batch.observation[:, 0].sum()

    def on_ray(store: LocalStore) -> None:
        dataset = read_sequences(str(store.root), ["observation"])
        sums = dataset.map_batches(lambda batch: {"total": [batch["observation"][:, 0].sum()]}, batch_size=None)
        assert len(sums.take_all()) > 0

    on_ray(small)
    seconds = in_turn(
        flags.rounds,
        {f"{how.__name__} {size}": lambda how=how, store=store: timed(lambda: how(store))
         for how in (in_process, on_ray) for size, store in (("small", small), ("large", large))},
    )  # fmt: skip
    more = counts[1] - counts[0]
    rates = {how: more / (seconds[f"{how} large"] - seconds[f"{how} small"]) for how in ("in_process", "on_ray")}
    fixed = seconds["on_ray small"] - counts[0] / rates["on_ray"]
    print(f"with pixels, {terms.geometry.stored_frames} frames of {list(terms.env.observation.shape)} a sequence")
    print(f"  decoder in process       {rates['in_process']:12,.0f} sequences/s, {flags.threads} threads")
    print(f"  Ray Data, marginal       {rates['on_ray']:12,.0f} sequences/s (fixed {fixed:.1f} s)")
    return bound("  Ray Data / in process", rates["on_ray"] / rates["in_process"], LEAST_PIXELS)


def relabelling(root: Path, flags: argparse.Namespace) -> bool:
    paper, outputs = preset_named("paper"), iter(range(1000))
    stores = {
        size: record(root / f"paper-{size}", paper, sequences=64, steps=steps)
        for size, steps in (("small", flags.small_steps), ("large", flags.large_steps))
    }
    terms = template_terms(stores["small"])
    network = build_network(paper.network.spec(terms.env, terms.geometry.frame_stack), torch.Generator().manual_seed(0))
    params = root / "params.safetensors"
    params.write_bytes(params_to_bytes(network, 1, bytes(range(16))))
    steps = {size: sum(name.env_steps for name in shards_after(store, "c0", -1)) for size, store in stores.items()}
    frames = np.random.default_rng(0).integers(0, 256, (steps["small"], *terms.env.observation.shape), np.uint8)

    def bare() -> float:
        return timed(lambda: forward(network, frames, terms.geometry.frame_stack))

    def relabel(size: str) -> float:
        out = root / f"out{next(outputs)}"
        out.mkdir()
        work = Relabelling(out_uri=str(out), terms=terms, params_path=str(params), threads=flags.threads)
        return timed(lambda: work(str(stores[size].root), "c0", shards_after(stores[size], "c0", -1)))

    bare()
    parts = {"small": lambda: relabel("small"), "bare": bare, "large": lambda: relabel("large")}
    seconds = in_turn(flags.rounds, parts)
    rates = {
        "bare": steps["small"] / seconds["bare"],
        "relabel": (steps["large"] - steps["small"]) / (seconds["large"] - seconds["small"]),
    }
    fixed = seconds["small"] - steps["small"] / rates["relabel"]
    print(f"relabelling, {steps['small']:,} to {steps['large']:,} env steps with the paper's network")
    print(f"  forward pass alone       {rates['bare']:12,.0f} env steps/s")
    print(f"  relabelling, marginal    {rates['relabel']:12,.0f} env steps/s (fixed {fixed:.1f} s)")
    return bound("  relabelling / forward", rates["relabel"] / rates["bare"], LEAST_RELABEL)


@torch.inference_mode()
def forward(network: R2D2Network, frames: np.ndarray, depth: int, lanes: int = 8, images: int = 128) -> None:
    """Encoder, fused core and heads over as many steps, in ``lanes`` lanes: nothing but the network."""
    stacks = torch.from_numpy(frames).unfold(0, depth, 1).movedim(-1, 1)
    features = torch.cat([network.encode(stacks[at : at + images]) for at in range(0, len(stacks), images)])
    features = features[: len(features) // lanes * lanes].unflatten(0, (-1, lanes))
    steps = features.shape[:2]
    network.unroll(
        features, torch.zeros(steps, dtype=torch.int64), torch.zeros(steps), zero_state(network.spec.core, lanes)
    )


def bound(what: str, value: float, least: float) -> bool:
    print(f"{what:26s} {value:12.2f} (at least {least}){'' if value >= least else '  MISSED'}", flush=True)
    return value >= least


if __name__ == "__main__":
    sys.exit(main())
