"""How many samples may be drawn for each inserted sequence, and how many sequences the collectors may publish.

    samples
      |          / learner waits above       samples + B > samples_per_insert * (inserted - prefill) + band
      |        / /
      |      / /   between them both run
      |    / /
      |__/_/___ collectors wait below        samples < samples_per_insert * (inserted - prefill) - band
        prefill          inserted

Both sides keep to it from their own processes: the learner before each draw, collectors by ``sequences_allowed``.
A learner left alone, because its collectors have ended, may use up the prefill too: else it would wait for ever.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LimiterConfig:
    """Ratio control of one replay.

    Attributes:
        batch_size: B, the largest batch that will be asked for, in sequences.
        min_sequences: sequences that must have been inserted before the first draw.
        samples_per_insert: samples for each sequence inserted after the prefill, in the long run; None: no ratio is
            kept (``--offline``).
        band: samples by which either side may run ahead of the other; default two batches.

    Raises:
        ValueError: a value out of its range, or settings under which learner and collectors could wait for each other.
    """

    batch_size: int
    min_sequences: int
    samples_per_insert: float | None
    band: float | None = None

    def __post_init__(self) -> None:
        for field in ("batch_size", "min_sequences"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 1 or more")
        if self.samples_per_insert is None:
            return
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ValueError(f"samples_per_insert is {self.samples_per_insert}; allowed: above 0, finite")
        # At this width a learner one batch short always leaves room for one more sequence, and the other way round.
        least = self.batch_size + self.samples_per_insert
        if not least <= self.band_samples < math.inf:
            raise ValueError(
                f"band is {self.band_samples:g}; allowed: {least:g} (batch_size + samples_per_insert) or more, finite: "
                "in a narrower one the learner and the collectors can wait for each other for ever"
            )

    @property
    def band_samples(self) -> float:
        return 2.0 * self.batch_size if self.band is None else self.band

    def refuse_capacity(self, capacity: int) -> None:
        """Raise ValueError when a replay of ``capacity`` sequences could never start to draw."""
        if capacity < self.min_sequences:
            raise ValueError(
                f"capacity is {capacity}; allowed: {self.min_sequences} (min_sequences) or more: the replay would "
                "evict sequences without ever holding enough to start"
            )


class RateLimiter:
    """Counts insertions and samples of one replay, over all its starts. Not thread-safe.

    Attributes:
        inserted: sequences that have entered, evicted ones included.
        samples: sequences drawn.
        prefill: sequences that earn no samples: ``min_sequences`` at first; at the first draw ever, all that has been
            inserted; after a restart, what was found beyond the restored snapshot is added, so that it brings no burst.
            While nobody collects (``leave_alone``) it is ``min_sequences`` again.
    """

    def __init__(self, config: LimiterConfig) -> None:
        self.config = config
        self.inserted = 0
        self.samples = 0
        self.prefill = config.min_sequences
        self._has_drawn = self._is_alone = False

    def insert(self, sequences: int) -> None:
        self.prefill, self._is_alone = self._prefill_beside_collectors(), False
        self.inserted += sequences

    def leave_alone(self) -> bool:
        """Nobody collects any more: until the next insertion the prefill earns samples like every other sequence.

        Returns whether that changes anything.
        """
        if self.config.samples_per_insert is None or not self._has_drawn or self.prefill <= self.config.min_sequences:
            return False
        self.prefill, self._is_alone = self.config.min_sequences, True
        return True

    def _prefill_beside_collectors(self) -> int:
        """What a learner left alone has not used up is prefill again: neither side has to catch up with the other."""
        if not self._is_alone or self.config.samples_per_insert is None:
            return self.prefill
        return max(self.prefill, self.inserted - math.floor(self.samples / self.config.samples_per_insert))

    def insert_before_start(self, sequences: int) -> None:
        """Count what was found in the dataset when this start began: it entered while nobody could draw."""
        self.inserted += sequences
        if self._has_drawn:
            self.prefill += sequences

    def waits_for(self, batch_size: int) -> str:
        """Empty when a batch may be drawn now, else what is missing, in words.

        Raises:
            ValueError: a batch too large for the band, which could wait for ever.
        """
        config = self.config
        if batch_size > config.batch_size:
            raise ValueError(f"batch_size is {batch_size}; allowed: at most {config.batch_size}, as configured")
        if not self._has_drawn:
            if self.inserted < config.min_sequences:
                return f"sequences to start with: {self.inserted} of {config.min_sequences} are there"
            return ""
        ratio = config.samples_per_insert
        if ratio is None:
            return ""
        missing_samples = self.samples + batch_size - (ratio * (self.inserted - self.prefill) + config.band_samples)
        if missing_samples <= 0:
            return ""
        return f"{math.ceil(missing_samples / ratio)} new sequences ({ratio:g} samples for each)"

    def count_draw(self, batch_size: int) -> None:
        """Count a batch that ``waits_for`` let pass."""
        if not self._has_drawn:
            self._has_drawn = True
            self.prefill = self.inserted
        self.samples += batch_size

    def take_back_draw(self, batch_size: int) -> None:
        """Uncount a batch that could not be delivered; without it there may have been no draw yet."""
        self.samples -= batch_size
        if self.samples == 0:
            self._has_drawn, self.prefill = False, self.config.min_sequences

    @property
    def sequences_allowed(self) -> int | None:
        """Insertions up to which collectors may go on; None: without limit."""
        if self.config.samples_per_insert is None:
            return None
        ahead = math.floor((self.samples + self.config.band_samples) / self.config.samples_per_insert)
        # A resumed run may have been given a larger minimum than it had: the collectors must be able to reach it.
        return max(self.prefill + ahead, self.config.min_sequences)

    @property
    def samples_per_insert(self) -> float:
        """Samples for each sequence inserted after the prefill; 0 before there is one."""
        return self.samples / (self.inserted - self.prefill) if self.inserted > self.prefill else 0.0

    def state(self, unconsumed: int = 0) -> dict[str, Any]:
        """JSON-able counters, as if the last ``unconsumed`` samples had not been drawn."""
        has_drawn = self.samples > unconsumed
        return {
            "inserted": self.inserted,
            "samples": self.samples - unconsumed,
            "prefill": self._prefill_beside_collectors() if has_drawn else self.config.min_sequences,
            "has_drawn": has_drawn,
            "samples_per_insert": self.config.samples_per_insert,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Under another ratio than the saved one its distance to the band is kept."""
        self.inserted, self.samples, self.prefill = state["inserted"], state["samples"], state["prefill"]
        self._has_drawn = state["has_drawn"]
        saved, ours = state["samples_per_insert"], self.config.samples_per_insert
        if ours is not None and saved != ours and self._has_drawn:
            owed = 0.0 if saved is None else saved * (self.inserted - self.prefill) - self.samples
            self.prefill = self.inserted - math.floor((self.samples + owed) / ours)
