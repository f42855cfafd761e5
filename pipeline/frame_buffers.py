"""Where a collector's sequences lie between being cut and being compressed: memory that is used again and again."""

from collections import deque

import numpy as np

from schemas.terms import DatasetTerms


class FrameBuffers:
    """Two preallocated buffers of ``sequences`` each: the loop fills one while the writer's thread empties the other.

    Fresh memory costs more in page faults than the copy into it. Where the writer is behind (a slow store), sequences
    get memory of their own, so that nobody waits here; the spool's limit bounds that.

    Any thread may ``take`` and ``give_back``; neither waits.

    Attributes:
        overflows: sequences that got memory of their own.
    """

    def __init__(self, terms: DatasetTerms, sequences: int) -> None:
        observation = terms.env.observation
        self._shape, self._dtype = (terms.geometry.stored_frames, *observation.shape), observation.dtype
        memory = np.zeros(
            (2 * sequences, *self._shape), self._dtype
        )  # Not empty: each page is touched before it counts.
        memory[:] = 0
        self._ours = {array.ctypes.data for array in memory}
        self._free = deque(memory)
        self.overflows = 0

    def take(self) -> np.ndarray:
        """``[K-1+S, *shape]`` for one sequence's frames, holding anything; the caller's alone until given back."""
        try:
            return self._free.popleft()
        except IndexError:
            self.overflows += 1
            return np.empty(self._shape, self._dtype)

    def give_back(self, frames: np.ndarray) -> None:
        """Nobody reads ``frames`` any more."""
        if frames.ctypes.data in self._ours:
            self._free.append(frames)
