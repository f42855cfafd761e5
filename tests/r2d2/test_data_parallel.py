"""Two processes make the update of one with the whole batch."""

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from r2d2.config import LearnerConfig, NetworkSpec
from r2d2.data_parallel import Replicas, join_replicas, part_bounds, part_of
from r2d2.learner import Learner
from r2d2.networks import build_network
from r2d2.serialize import tensors_from_bytes, tensors_to_bytes
from schemas.geometry import CUT, TERMINATED, TRUNCATED
from schemas.records import ReplaySample
from schemas.specs import ArraySpec, CoreSpec
from tests.r2d2.conftest import GEOMETRY
from tests.r2d2.episodes import LINEAGE, cut, join, play, sample_of

ROOT = Path(__file__).parent.parent.parent
SPEC = NetworkSpec(
    observation=ArraySpec(shape=(10, 12), dtype="uint8"),
    num_actions=4,
    frame_stack=GEOMETRY.frame_stack,
    convolutions=((4, 4, 2), (6, 3, 1)),
    dense=(10,),
    core=CoreSpec(kind="lstm", layers=1, width=8),
    dueling_width=8,
)
# Every sum over the batch is in play: weights, masks of unequal length, own and foreign states, clipping, segments.
OPTIONS = {
    "initial_state": "initializer",
    "tbptt": 3,
    "clip_norm": 0.01,
    "target_copy_updates": 2,
    "learning_rate": 1e-3,
}


def make_learner(replicas: Replicas | None = None, seed: int = 0) -> Learner:
    return Learner(
        SPEC,
        LearnerConfig(**OPTIONS),
        geometry=GEOMETRY,
        stored=GEOMETRY,
        seed=seed,
        lineage=LINEAGE,
        replicas=replicas,
    )


def make_samples() -> list[ReplaySample]:
    """Four of seven sequences each, with different ends and probabilities; the first two of each are foreign."""
    network, samples = build_network(SPEC, torch.Generator().manual_seed(5)), []
    for seed in range(4):
        episodes = [(3, TERMINATED), (9, TRUNCATED), (19, CUT)]
        batch = join([cut(play(network, steps, ends, seed + steps), GEOMETRY)[0] for steps, ends in episodes])
        lineage = batch.lineage.copy()
        lineage[:2] = 7
        samples.append(sample_of(replace(batch, lineage=lineage, collector=np.full(len(batch), b"c")), seed=seed))
    return samples


def run_all(learner: Learner, samples: list[ReplaySample]) -> tuple[list, list]:
    outputs = [learner.step(sample) for sample in samples]
    return [output.priorities for output in outputs], [output.metrics for output in outputs]


def worker() -> None:
    """What each process of the test runs: rank 0 prints its learner's final state as hex."""
    torch.set_num_threads(1)
    replicas, _ = join_replicas(dict(os.environ), "cpu")
    if replicas.rank:
        follower = make_learner(replicas, seed=99)  # Another initialisation: the state must come from rank 0.
        follower.follow()
        replicas.close()
        print(tensors_to_bytes(*follower.state()).hex())
        return
    learner = make_learner(replicas)
    learner.share_state()
    priorities, metrics = run_all(learner, make_samples())
    replicas.close()
    tensors, values = learner.state()
    tensors |= {f"priorities.{i}": torch.from_numpy(found) for i, found in enumerate(priorities)}
    print(tensors_to_bytes(tensors, {**values, "metrics": metrics}).hex())


@pytest.fixture(scope="module")
def two_ranks():
    """(tensors, values) that rank 0 and rank 1 of a group of two ended with."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "from tests.r2d2.test_data_parallel import worker; worker()"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], [errors for _, errors in said]
    return [tensors_from_bytes(bytes.fromhex(out.splitlines()[-1])) for out, _ in said]


@pytest.fixture(scope="module")
def alone():
    learner = make_learner()
    priorities, metrics = run_all(learner, make_samples())
    return learner.state(), priorities, metrics


def test_two_ranks_make_the_update_of_one_with_the_whole_batch(two_ranks, alone):
    (tensors, values), (expected, _), metrics = two_ranks[0], alone[0], alone[2]
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, atol=1e-6, rtol=0, msg=name)
    assert values["updates"] == 4
    for found, wanted in zip(values["metrics"], metrics, strict=True):
        assert found["gradient_norm"] > OPTIONS["clip_norm"]
        for name in ("loss", "gradient_norm", "initializer_loss", "initializer_gradient_norm", "trained_steps"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_priorities_of_both_parts_return_in_the_order_of_the_sample(two_ranks, alone):
    for number, wanted in enumerate(alone[1]):
        assert len(wanted) == 7
        np.testing.assert_allclose(two_ranks[0][0][f"priorities.{number}"].numpy(), wanted, atol=1e-6)


def test_both_ranks_end_with_the_same_bits(two_ranks):
    """Rank 1 began with other random weights and was given those of rank 0."""
    first, second = two_ranks[0][0], two_ranks[1][0]
    for name, value in second.items():
        assert torch.equal(value, first[name]), name


def test_parts_cover_the_batch_and_differ_by_one_at_most():
    assert part_bounds(7, 2) == [(0, 3), (3, 7)]
    assert part_bounds(9, 4) == [(0, 2), (2, 4), (4, 6), (6, 9)]
    with pytest.raises(ValueError, match="batch_size is 2; allowed: at least one sequence for each of 3"):
        part_bounds(2, 3)
    sample = make_samples()[0]
    parts = [part_of(sample, rank, 3) for rank in range(3)]
    assert np.concatenate([part.ids for part in parts]).tolist() == sample.ids.tolist()
    joined = join([part.batch for part in parts])
    for name, value in vars(sample.batch).items():
        np.testing.assert_array_equal(getattr(joined, name), value, err_msg=name)


def test_without_torchrun_a_process_is_alone():
    replicas, device = join_replicas({}, "cpu")
    assert (replicas.rank, replicas.size, device) == (0, 1, "cpu")
    assert replicas.total(3.0) == replicas.least(3.0) == 3.0
    assert replicas.share_bytes(b"x") == b"x"
    replicas.close()
