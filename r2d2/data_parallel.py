"""One update shared by several processes: each takes a part of the batch, and all take the same step.

    rank 0     draws a sample ─▶ keeps its part ─▶ gradient ─┐  sum   ┌─▶ same step ─▶ priorities of all parts ─▶ replay
    rank 1..   wait ───────────▶ get their part ─▶ gradient ─┴────────┴─▶ same step ─▶ priorities of theirs

Gradients are summed once per update, by hand: truncated backpropagation goes backward segment by segment, where DDP's
hooks would exchange (and expect) every parameter each time. What travels is plain arrays with a JSON header.

Source: the update is that of one process with the whole batch; issue 5 asks for it to 1e-6.
"""

import itertools
import json
from dataclasses import fields, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from schemas.records import ReplaySample, SequenceBatch

PATIENCE = timedelta(days=7)  # A learner may wait long for data, and the others for it.
SAMPLE_ARRAYS = ("ids", "probabilities")


class Replicas:
    """This process among those that share every update. Alone unless ``join_replicas`` says otherwise.

    Attributes:
        rank: 0 for the one that draws, publishes and logs.
        size: number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self._device = rank, size, torch.device(device)

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace each tensor (float32, on the device) by its sum over all ranks; one exchange for all of them."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def total(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM)

    def least(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        if self.size == 1:
            return value
        cell = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(cell, how)
        return float(cell)

    def share_out(self, sample: ReplaySample) -> ReplaySample:
        """Rank 0 gives every rank its part of ``sample``; returns its own. The others meet this in ``receive``.

        Raises:
            ValueError: fewer sequences than ranks.
        """
        if self.size == 1:
            return sample
        parts = [part_of(sample, rank, self.size) for rank in range(self.size)]
        for rank in range(1, self.size):
            self._send(rank, {"sequences": len(sample.ids), "replay_sequences": sample.replay_sequences}, parts[rank])
        self._sequences = len(sample.ids)
        return parts[0]

    def receive(self) -> ReplaySample | None:
        """This rank's part of the next sample; None when there will be no more."""
        header = json.loads(self._receive_bytes().tobytes())
        if not header:
            return None
        self._sequences = header["sequences"]
        arrays = {name: self._receive_array(dtype, shape) for name, dtype, shape in header["arrays"]}
        ids, probabilities = (arrays.pop(name) for name in SAMPLE_ARRAYS)
        columns: dict = {}
        for name, array in arrays.items():
            column, _, part = name.partition("/")
            columns[column] = (*columns.get(column, ()), array) if part else array
        batch = SequenceBatch(**{name: columns.get(name, ()) for name in header["columns"]})
        return ReplaySample(
            ids=ids, probabilities=probabilities, replay_sequences=header["replay_sequences"], batch=batch
        )

    def gather(self, values: np.ndarray) -> np.ndarray:
        """``values`` float64 ``[own part]`` of all ranks in the order of the sample, float64 ``[B]``, on every rank."""
        if self.size == 1:
            return values
        bounds = part_bounds(self._sequences, self.size)
        pieces = [torch.zeros(stop - first, dtype=torch.float64, device=self._device) for first, stop in bounds]
        pieces[self.rank].copy_(torch.from_numpy(np.ascontiguousarray(values)))
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, rank)
        return torch.cat(pieces).cpu().numpy()

    def share_bytes(self, data: bytes | None) -> bytes:
        """What rank 0 gives (the others give None), on every rank."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor(len(data) if data is not None else 0)
        dist.broadcast(length, 0)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data is not None else None
        buffer = torch.empty(int(length), dtype=torch.uint8) if buffer is None else buffer
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def close(self, *, failed: bool = False) -> None:
        """Rank 0 tells the others that there will be no more samples; then everyone leaves.

        After a failure it leaves without a word: the others may be anywhere in an update, and fail in turn.
        """
        if self.size == 1:
            return
        if self.rank == 0 and not failed:
            for rank in range(1, self.size):
                self._send_bytes(rank, b"{}")
        dist.destroy_process_group()

    def _send(self, rank: int, header: dict, part: ReplaySample) -> None:
        arrays = {name: getattr(part, name) for name in SAMPLE_ARRAYS}
        for column, value in vars(part.batch).items():
            arrays |= (
                {f"{column}/{i}": array for i, array in enumerate(value)}
                if isinstance(value, tuple)
                else {column: value}
            )
        described = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        columns = [field.name for field in fields(part.batch)]
        self._send_bytes(rank, json.dumps({**header, "arrays": described, "columns": columns}).encode())
        for array in arrays.values():
            if array.size:
                dist.send(_as_bytes(array), rank)

    def _receive_array(self, dtype: str, shape: list[int]) -> np.ndarray:
        array = np.empty(shape, dtype)
        if array.size:
            dist.recv(_as_bytes(array), 0)
        return array

    def _send_bytes(self, rank: int, data: bytes) -> None:
        dist.send(torch.tensor(len(data)), rank)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)

    def _receive_bytes(self) -> np.ndarray:
        length = torch.tensor(0)
        dist.recv(length, 0)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(buffer, 0)
        return buffer.numpy()


def join_replicas(environment: dict[str, str], device_type: str) -> tuple[Replicas, str]:
    """This process's place among those that torchrun started, and its device; alone without torchrun.

    ``environment`` are the process's variables: RANK, WORLD_SIZE and LOCAL_RANK are looked at, and torch reads
    MASTER_ADDR and MASTER_PORT. Gradients travel by nccl between GPUs and by gloo between CPUs.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return Replicas(), device_type
    device = f"cuda:{environment['LOCAL_RANK']}" if device_type == "cuda" else device_type
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    return Replicas(int(environment["RANK"]), size, device), device


def part_bounds(sequences: int, size: int) -> list[tuple[int, int]]:
    """``(first, stop)`` of each rank's part, sizes differing by one at most.

    Raises:
        ValueError: fewer sequences than ranks.
    """
    if sequences < size:
        raise ValueError(f"batch_size is {sequences}; allowed: at least one sequence for each of {size} processes")
    edges = [rank * sequences // size for rank in range(size + 1)]
    return list(itertools.pairwise(edges))


def part_of(sample: ReplaySample, rank: int, size: int) -> ReplaySample:
    """The sequences of ``sample`` that ``rank`` works on."""
    start, stop = part_bounds(len(sample.ids), size)[rank]
    return replace(
        sample,
        ids=sample.ids[start:stop],
        probabilities=sample.probabilities[start:stop],
        batch=sample.batch.part(start, stop),
    )


def _as_bytes(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8)) if array.flags.c_contiguous else _as_bytes(array.copy())
