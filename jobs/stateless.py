"""The acting side without a network: ``--policy table`` and ``--policy random``."""

import time
from collections.abc import Sequence as Many

import numpy as np

from jobs.ladder import lanes_of_groups
from pipeline.action_table import ActionTable
from r2d2.stateless import StatelessPolicy
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms


class StatelessActing:
    """Acts at random, or by the newest table of greedy actions that the followed run has published.

    Args:
        groups: lanes of each group that acts by itself; together they span the ladder.
        ladder: ``OFFSET:TOTAL``, or None for a ladder of these lanes alone.
        uses_table: False acts at random throughout.

    Attributes:
        policies: one per group, for its ``Rollout``.
        version: of the network whose actions the table holds, -1 while there is none.
    """

    def __init__(
        self,
        terms: DatasetTerms,
        groups: Many[int],
        ladder: str | None,
        generator: np.random.Generator,
        *,
        uses_table: bool,
    ) -> None:
        self.terms, self.version = terms, -1
        self._uses_table, self._table, self._taken_up_at = uses_table, None, 0.0
        self.policies = [
            StatelessPolicy(terms.core, terms.env.num_actions, rungs, own_generator)
            for rungs, own_generator in lanes_of_groups(groups, ladder, generator)
        ]
        self._reported_lookups = self._reported_hits = 0

    @property
    def waits_for(self) -> str:
        if not self._uses_table or self._table is not None:
            return ""
        return "an action table, which label.py publishes; acts at random meanwhile"

    def use_table(self, table: ActionTable) -> None:
        """Act by ``table`` from the next step on."""
        self._table, self._taken_up_at, self.version = table, time.monotonic(), table.version
        for policy in self.policies:
            policy.set_table(table.look_up)

    def metrics(self) -> dict[str, float]:
        """Of the table: ``hit_rate`` since the last report, ``size`` in entries, ``age_seconds`` since taken up."""
        if self._table is None:
            return {}
        lookups, hits = (sum(getattr(policy, name) for policy in self.policies) for name in ("lookups", "hits"))
        new_lookups, new_hits = lookups - self._reported_lookups, hits - self._reported_hits
        self._reported_lookups, self._reported_hits = lookups, hits
        return {
            "collect/table_hit_rate": new_hits / max(new_lookups, 1),
            "collect/table_entries": len(self._table),
            "collect/table_age_seconds": time.monotonic() - self._taken_up_at,
            "collect/table_version": self.version,
        }

    def initial_priorities(self, batch: SequenceBatch, q_values: np.ndarray) -> np.ndarray:
        """For a ``ShardWriter``: none, float32 ``[B]`` of NaN; who labels the sequences prices them."""
        return np.full(len(batch), np.nan, np.float32)
