"""A network's values on stored sequences: against the returns that followed, and by the age of the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from pipeline.dataset import ShardName
from pipeline.decode import BatchDecoder
from pipeline.monte_carlo import discounted_returns
from pipeline.offline_tables import Facts, Table, bin_edges
from pipeline.scan import LeftOut, open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import Store
from r2d2.burn_in import choose
from r2d2.calibration import replayed_values
from r2d2.config import LearnerConfig
from r2d2.diagnostics import STRATEGIES, strategy_discrepancies
from r2d2.metrics import own_lineage
from r2d2.networks import zero_state
from r2d2.serialize import Parameters, network_of
from r2d2.tensors import window_tensors
from schemas.shard import PROBE_EVERY
from schemas.terms import DatasetTerms

BATCH, CALIBRATION_BINS = 32, 12


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """Of one sequence; ``q``, ``followed``, ``error`` are ``[valid rows]``, the dQ NaN where it has no meaning."""

    age: int
    is_own: bool
    q: np.ndarray
    followed: np.ndarray
    error: np.ndarray
    dq_first: dict[str, float]
    dq_last: dict[str, float]


def value_tables(
    store: Store,
    terms: DatasetTerms,
    shards: Sequence[ShardName],
    facts: Facts,
    parameters: Parameters,
    *,
    sequences: int,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Table]:
    """Tables of at most ``sequences`` of the shards that ``facts`` are of, taken evenly over them.

    ``calibration``: Q(s, a) against the discounted return that followed, of episodes that terminated, in bins of Q.
    ``values_by_age`` and ``dq_by_age``: by how many versions older than the network the parameters were that acted;
    dQ as in Kapturowski et al. 2019, figure 1b, of sequences acted by this network's lineage. ``values``: in all.

    Raises:
        ValueError: the network is not one for this dataset.
    """
    if parameters.spec.core != terms.core:
        raise ValueError(f"core of the network is {parameters.spec.core}; allowed: {terms.core}, the dataset's")
    config = LearnerConfig()
    if parameters.acting is not None:
        config = config.with_acting_values(parameters.acting)
    left_out = LeftOut(len(shards))
    chosen = _evenly(facts, sequences)
    episodes = set(zip(facts["collector"][chosen].tolist(), facts["episode"][chosen].tolist(), strict=True))
    followed = discounted_returns(store, terms, config.gamma, left_out, of=episodes, shards=shards)
    measured: list[_Measured] = []
    run = _Run(store, terms, shards, parameters, config, device)
    for begin in range(0, len(chosen), BATCH):
        measured += run.measure(facts, chosen[begin : begin + BATCH], followed)
        progress(begin + len(chosen[begin : begin + BATCH]), len(chosen))
    run.close()
    return {
        "values": _summary(measured),
        "calibration": calibration_table(
            np.concatenate([each.q for each in measured]), np.concatenate([each.followed for each in measured])
        ),
        **_by_age(measured),
    }


def _evenly(facts: Facts, sequences: int) -> np.ndarray:
    """Indices of at most ``sequences`` of them, a quarter of those that carry a probe, without which no dQ is last."""
    every = np.arange(len(facts["sequence"]))
    probed = np.flatnonzero(facts["sequence"] % PROBE_EVERY == 0)
    shares = ((probed, max(1, sequences // 4)), (every, max(1, sequences - sequences // 4)))
    taken = [of[np.linspace(0, len(of) - 1, min(most, len(of))).astype(int)] for of, most in shares if len(of)]
    return np.unique(np.concatenate(taken))


class _Run:
    """Decodes chosen sequences and runs the network over them."""

    def __init__(
        self,
        store: Store,
        terms: DatasetTerms,
        shards: Sequence[ShardName],
        parameters: Parameters,
        config: LearnerConfig,
        device: str,
    ) -> None:
        self._store, self._terms, self._parameters, self._config = store, terms, parameters, config
        self._device = torch.device(device)
        self._network = network_of(parameters).to(self._device).eval().requires_grad_(False)
        self._decoder = BatchDecoder(terms)
        self._last: tuple[ShardName, Shard] | None = None
        self._find_rows(shards)

    def close(self) -> None:
        self._decoder.close()

    def _find_rows(self, shards: Sequence[ShardName]) -> None:
        """(collector, sequence number) -> where it lies; a shard without an intact row holds none of the facts'."""
        self._places: dict[str, tuple[np.ndarray, list[ShardName]]] = {}
        firsts: dict[str, list[tuple[int, ShardName]]] = {}
        for name in shards:
            try:
                shard = open_listed(self._store, self._terms, name)
            except ShardError:
                continue
            if (first := shard.first_sequence()) is not None:
                firsts.setdefault(name.collector, []).append((first, name))
        for collector, found in firsts.items():
            found.sort()
            self._places[collector] = np.array([first for first, _ in found]), [name for _, name in found]

    def _row(self, collector: str, sequence: int) -> tuple[Shard, int]:
        firsts, names = self._places[collector]
        at = int(np.searchsorted(firsts, sequence, "right")) - 1
        if self._last is None or self._last[0] != names[at]:
            self._last = names[at], open_listed(self._store, self._terms, names[at])
        return self._last[1], sequence - int(firsts[at])

    @torch.no_grad()
    def measure(self, facts: Facts, chosen: np.ndarray, followed: dict[tuple[str, int], np.ndarray]) -> list[_Measured]:
        rows = [self._row(str(facts["collector"][index]), int(facts["sequence"][index])) for index in chosen]
        batch, _ = self._decoder.decode(rows)
        spec, geometry = self._parameters.spec, self._terms.geometry
        used = replace(geometry, frame_stack=spec.frame_stack)
        window = window_tensors(
            batch, used, geometry, core=spec.core, num_actions=spec.num_actions,
            life_loss=self._terms.env.life_loss, device=self._device,
        )  # fmt: skip
        own = own_lineage(batch, self._parameters.lineage)
        zeros = zero_state(spec.core, len(batch), self._device)
        usable = torch.from_numpy(own).to(self._device)
        start = choose(window.core_known & usable & ~window.begins, window.core, zeros)
        values, errors = replayed_values(self._network, self._network, window, start, self._config)
        dq = strategy_discrepancies(self._network, window)
        mask = window.transitions.mask.cpu().numpy()
        probes = {int(b): at for at, b in enumerate(window.probes.tolist())}
        found = []
        for b, index in enumerate(chosen):
            valid = np.flatnonzero(mask[:, b])
            returns = followed.get((str(facts["collector"][index]), int(facts["episode"][index])))
            steps = int(facts["start"][index]) + valid
            found.append(
                _Measured(
                    age=self._parameters.version - int(batch.version_last[b]),
                    is_own=bool(own[b]),
                    q=values[valid, b].double().cpu().numpy(),
                    followed=np.full(len(valid), np.nan) if returns is None else returns[steps],
                    error=errors[valid, b].double().cpu().numpy(),
                    dq_first={name: float(dq[name][0][b]) for name in STRATEGIES},
                    dq_last={name: float(dq[name][1][probes[b]]) for name in STRATEGIES if b in probes},
                )
            )
        return found


def calibration_table(q: np.ndarray, followed: np.ndarray) -> Table:
    """Means of Q and of the returns that followed, in bins of equal numbers of steps by Q."""
    known = np.isfinite(followed) & np.isfinite(q)
    q, followed = q[known], followed[known]
    parts = [part for part in np.array_split(np.argsort(q, kind="stable"), CALIBRATION_BINS) if len(part)]
    return {
        "q_mean": np.array([q[part].mean() for part in parts]),
        "return_mean": np.array([followed[part].mean() for part in parts]),
        "return_std": np.array([followed[part].std() for part in parts]),
        "steps": np.array([len(part) for part in parts]),
    }


def _summary(measured: list[_Measured]) -> Table:
    q = np.concatenate([each.q for each in measured])
    followed, error = (np.concatenate([getattr(each, name) for each in measured]) for name in ("followed", "error"))
    known = np.isfinite(followed)
    varies = known.sum() > 1 and q[known].std() > 0 and followed[known].std() > 0
    values = {
        "replayed_sequences": len(measured),
        "replayed_sequences_of_this_network": sum(each.is_own for each in measured),
        "replayed_steps": len(q),
        "replayed_steps_with_known_return": int(known.sum()),
        "td_error_abs_mean": float(np.abs(error).mean()) if len(error) else np.nan,
        "q_mean": float(q[known].mean()) if known.any() else np.nan,
        "discounted_return_mean": float(followed[known].mean()) if known.any() else np.nan,
        "overestimation": float((q - followed)[known].mean()) if known.any() else np.nan,
        "q_return_correlation": float(np.corrcoef(q[known], followed[known])[0, 1]) if varies else np.nan,
    }
    return {"name": np.array(list(values)), "value": np.array(list(values.values()), np.float64)}


def _by_age(measured: list[_Measured]) -> dict[str, Table]:
    own = [each for each in measured if each.is_own]
    ages = np.array([each.age for each in own], np.int64)
    edges = bin_edges(ages)
    values: dict[str, list[float]] = {}
    dq: dict[str, list[float | str]] = {}
    for low, high in pairwise(edges):
        inside = [each for each in own if low <= each.age < high]
        if not inside:
            continue
        error = np.abs(np.concatenate([each.error for each in inside]))
        row = {"age_from": low, "age_to": high, "sequences": len(inside), "td_error_abs_mean": error.mean()}
        for name, value in row.items():
            values.setdefault(name, []).append(value)
        for strategy in STRATEGIES:
            last = [each.dq_last[strategy] for each in inside if strategy in each.dq_last]
            row = {
                "age_from": low,
                "age_to": high,
                "strategy": strategy,
                "dq_first": np.mean([each.dq_first[strategy] for each in inside]),
                "dq_last": np.mean(last) if last else np.nan,
                "sequences": len(inside),
                "probes": len(last),
            }
            for name, value in row.items():
                dq.setdefault(name, []).append(value)
    tables = {"values_by_age": values, "dq_by_age": dq}
    return {name: {key: np.array(column) for key, column in table.items()} for name, table in tables.items() if table}
