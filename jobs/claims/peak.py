"""How much a backward pass makes torch keep."""

import weakref

import torch


class _Kept:
    """What autograd holds in a tensor's place: it dies with the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts, while it is entered, the bytes of the tensors that are kept for the backward pass.

    Attributes:
        most: the largest sum at any time; a storage that is kept several times counts once.
    """

    def __init__(self) -> None:
        self.most = self._now = 0
        self._uses: dict[int, int] = {}
        super().__init__(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> "SavedBytes":
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not self._uses.get(key):
            self._now += size
            self.most = max(self.most, self._now)
        self._uses[key] = self._uses.get(key, 0) + 1
        weakref.finalize(kept, self._drop, key, size)
        return kept

    def _drop(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self._now -= size
