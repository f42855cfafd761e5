"""What a dataset holds, as small tables, from the facts of its sequences (see ``sequence_facts``).

Facts come sorted by identity and are reduced in float64 in that order, so tables do not depend on who read them in
which blocks. Every table is a dict of columns of one length.
"""

from typing import Any

import numpy as np

from schemas.geometry import CUT, ENDS_NAMES, LIFE_LOST, TERMINATED, TRUNCATED
from schemas.terms import DatasetTerms

Facts = dict[str, Any]
Table = dict[str, np.ndarray]
BINS = 20
OPEN = "open"  # No sequence with the episode's end is in the dataset.
MOST_REWARDS = 30
QUANTILES = (0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)


def dataset_tables(facts: Facts, terms: DatasetTerms, *, shard_bytes: int) -> dict[str, Table]:
    """Every table, by name. ``shard_bytes``: of the files that were read."""
    episodes = episode_table(facts)
    tables = {
        "episodes": episodes,
        "returns_by_lane": returns_by_lane(episodes),
        "returns_by_version": returns_by_version(episodes),
        "returns_over_time": returns_over_time(episodes),
        "lengths": histogram(episodes["steps"], "steps"),
        "ends": ends_table(episodes),
        "actions": action_table(facts, terms),
        "rewards": reward_table(facts),
        "versions": version_table(facts),
        "priorities": priority_table(facts),
        "coverage": coverage_table(facts, episodes, terms),
        "storage": storage_table(facts, terms, shard_bytes),
    }
    if "frame_hashes" in facts:
        tables["duplicates"] = duplicate_table(facts)
    return tables


def episode_table(facts: Facts) -> Table:
    """One row per episode, in the order of identity.

    ``reward_sum`` is what the stored steps brought; ``return`` that of the whole game where it ended, else NaN.
    ``env_steps``, ``version_last`` and ``lineage`` say when it was: its collector's steps, and the newest parameters
    (and of which network), at its end.
    ``has_all`` is False where the beginning, a part or the end is missing.
    """
    _, collector = np.unique(facts["collector"], return_inverse=True)
    _, first, index = np.unique(np.stack([collector, facts["episode"]]), axis=1, return_index=True, return_inverse=True)
    index, count = index.reshape(-1), len(first)
    last = np.zeros(count, np.int64)
    np.maximum.at(last, index, np.arange(len(index)))
    steps = np.bincount(index, facts["owned"], count)
    ended = facts["is_last"][last]
    reaches = facts["start"][last] + facts["owned"][last]
    return {
        "collector": facts["collector"][first],
        "episode": facts["episode"][first],
        "lane": facts["lane"][first],
        "steps": steps.astype(np.int64),
        "ends": np.where(ended, np.array(ENDS_NAMES)[facts["ends"][last]], OPEN),
        "reward_sum": np.bincount(index, facts["reward_sum"], count),
        "return": np.where(ended, facts["episode_return"][last].astype(np.float64), np.nan),
        "epsilon": facts["epsilon"][last].astype(np.float64),
        "version_first": facts["version_first"][first],
        "version_last": facts["version_last"][last],
        "lineage": facts["lineage"][last],
        "env_steps": facts["env_steps"][last],
        "has_all": ended & (steps == reaches),
    }


def _returns(episodes: Table, groups: np.ndarray, count: int) -> Table:
    """Mean, deviation, least, greatest return per group (0 .. count-1) of the games that ended."""
    known = ~np.isnan(episodes["return"])
    group, values = groups[known], episodes["return"][known]
    number = np.bincount(group, minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(group, values, count) / number
        deviation = np.sqrt(np.bincount(group, (values - mean[group]) ** 2, count) / number)
    least, greatest = np.full(count, np.nan), np.full(count, np.nan)
    np.fmin.at(least, group, values)
    np.fmax.at(greatest, group, values)
    return {"games": number, "mean": mean, "std": deviation, "min": least, "max": greatest}


def returns_by_lane(episodes: Table) -> Table:
    """Per epsilon, by which lanes of several collectors compare: each numbers its own from 0.

    ``lanes`` is how many acted at it. Random play is there too, at epsilon 1.
    """
    epsilons, index = np.unique(episodes["epsilon"], return_inverse=True)
    _, collector = np.unique(episodes["collector"], return_inverse=True)
    acted_at = np.unique(np.stack([index, collector, episodes["lane"]]), axis=1)[0]
    lanes = np.bincount(acted_at, minlength=len(epsilons))
    return {"epsilon": epsilons, "lanes": lanes, **_returns(episodes, index, len(epsilons))}


def returns_by_version(episodes: Table) -> Table:
    """Per network and range of its versions (the newest that acted in the game); version -1 is random play."""
    parts = []
    for lineage in np.unique(episodes["lineage"]):
        here = {name: values[episodes["lineage"] == lineage] for name, values in episodes.items()}
        part = _in_bins(here, "version_last", "version", version_edges(here["version_last"]))
        parts.append({"lineage": np.full(len(part["mean"]), lineage), **part})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def returns_over_time(episodes: Table) -> Table:
    """Per range of the collectors' own env steps at the game's end."""
    return _in_bins(episodes, "env_steps", "env_steps", bin_edges(episodes["env_steps"]))


def _in_bins(episodes: Table, column: str, name: str, edges: np.ndarray) -> Table:
    values = episodes[column]
    index = np.clip(np.searchsorted(edges, values, "right") - 1, 0, len(edges) - 2)
    returns = _returns(episodes, index, len(edges) - 1)
    some = returns["games"] > 0
    table = {f"{name}_from": edges[:-1], f"{name}_to": edges[1:], **returns}
    return {key: values[some] for key, values in table.items()}


def bin_edges(values: np.ndarray) -> np.ndarray:
    """At most ``BINS`` bins over whole numbers, the last edge beyond the greatest."""
    least, greatest = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    width = max(1, -(-(greatest + 1 - least) // BINS))
    return np.arange(least, greatest + 1 + width, width)


def version_edges(versions: np.ndarray) -> np.ndarray:
    """As ``bin_edges``, but that -1, random play, has a bin of its own."""
    acted = versions[versions >= 0]
    return bin_edges(versions) if len(acted) == len(versions) else np.union1d([-1, 0], bin_edges(acted))


def histogram(values: np.ndarray, name: str) -> Table:
    edges = bin_edges(values)
    return {f"{name}_from": edges[:-1], f"{name}_to": edges[1:], "count": np.histogram(values, edges)[0]}


def ends_table(episodes: Table) -> Table:
    names = [*(ENDS_NAMES[ends] for ends in (TERMINATED, TRUNCATED, CUT, LIFE_LOST)), OPEN]
    return {"ends": np.array(names), "episodes": np.array([(episodes["ends"] == name).sum() for name in names])}


def action_table(facts: Facts, terms: DatasetTerms) -> Table:
    """Over owned steps, for every action that the environment has, those never taken included (case H-h1)."""
    count = facts["action_counts"].sum(0, dtype=np.int64)
    return {
        "action": np.arange(terms.env.num_actions),
        "name": np.array(terms.env.action_set),
        "steps": count,
        "share": count / max(1, count.sum()),
    }


def reward_table(facts: Facts) -> Table:
    """The most frequent rewards of owned steps, by value; ``steps`` of the rarer ones stand under NaN."""
    values = np.concatenate([np.asarray(part, np.float64) for part in facts["reward_values"]])
    counts = np.concatenate([np.asarray(part, np.int64) for part in facts["reward_counts"]])
    distinct, index = np.unique(values, return_inverse=True)
    steps = np.bincount(index, counts, len(distinct)).astype(np.int64)
    kept = np.sort(np.argsort(-steps, kind="stable")[:MOST_REWARDS])
    rest = steps.sum() - steps[kept].sum()
    distinct, steps = distinct[kept], steps[kept]
    if rest:
        distinct, steps = np.append(distinct, np.nan), np.append(steps, rest)
    return {"reward": distinct, "steps": steps, "share": steps / steps.sum()}


def version_table(facts: Facts) -> Table:
    """Per network and range of versions: sequences, and their mean lag behind its newest version in the dataset.

    ``spread`` is how many versions, on average, went by while one sequence was acted.
    """
    rows: list[tuple] = []
    for lineage in np.unique(facts["lineage"]):
        here = facts["lineage"] == lineage
        first, last = facts["version_first"][here], facts["version_last"][here]
        edges = version_edges(last)
        index = np.clip(np.searchsorted(edges, last, "right") - 1, 0, len(edges) - 2)
        for number in np.unique(index):
            inside = index == number
            lag, spread = last.max() - last[inside], last[inside] - first[inside]
            rows.append((lineage, edges[number], edges[number + 1], inside.sum(), lag.mean(), spread.mean()))
    names = ("lineage", "version_from", "version_to", "sequences", "lag_mean", "spread_mean")
    return {name: np.array([row[at] for row in rows]) for at, name in enumerate(names)}


def priority_table(facts: Facts) -> Table:
    """Quantiles of the initial priorities; ``without`` is the number of sequences that have none."""
    priority = facts["initial_priority"].astype(np.float64)
    known = priority[~np.isnan(priority)]
    values = np.quantile(known, QUANTILES) if len(known) else np.full(len(QUANTILES), np.nan)
    missing = np.full(len(QUANTILES), len(priority) - len(known))
    return {"quantile": np.array(QUANTILES, np.float64), "initial_priority": values, "without": missing}


def coverage_table(facts: Facts, episodes: Table, terms: DatasetTerms) -> Table:
    """Counts that say whether steps are missing, or twice there, and how often a step is trained."""
    same = (facts["collector"][1:] == facts["collector"][:-1]) & (facts["sequence"][1:] == facts["sequence"][:-1])
    next_in = facts["collector"][1:] == facts["collector"][:-1]
    missing = (np.diff(facts["sequence"]) - 1)[next_in & ~same].sum()
    burn_in, unroll = terms.geometry.burn_in, terms.geometry.unroll
    burnt_in = np.minimum(facts["start"], burn_in)  # Real rows before the first trained one.
    trained = np.minimum(facts["num_steps"] - burnt_in, unroll).sum()
    return _counts(
        env_steps=facts["owned"].sum(),
        sequences=len(facts["sequence"]),
        episodes=len(episodes["episode"]),
        complete_episodes=episodes["has_all"].sum(),
        env_steps_of_incomplete_episodes=episodes["steps"][~episodes["has_all"]].sum(),
        sequences_missing=missing,
        sequences_twice=same.sum(),
        stored_rows_per_env_step=facts["num_steps"].sum() / max(1, facts["owned"].sum()),
        trained_rows_per_env_step=trained / max(1, facts["owned"].sum()),
        greedy_share=facts["greedy_steps"].sum() / max(1, facts["owned"].sum()),
    )


def storage_table(facts: Facts, terms: DatasetTerms, shard_bytes: int) -> Table:
    observation = terms.env.observation
    frame_bytes = observation.size * np.dtype(observation.dtype).itemsize
    steps, raw = facts["owned"].sum(), len(facts["sequence"]) * terms.geometry.stored_frames * frame_bytes
    compressed = facts["frame_bytes"].sum()
    return _counts(
        shard_bytes=shard_bytes,
        compressed_pixel_bytes=compressed,
        other_bytes=shard_bytes - compressed,
        raw_pixel_bytes=raw,
        pixel_compression=raw / max(1, compressed),
        shard_bytes_per_env_step=shard_bytes / max(1, steps),
        raw_frame_bytes=frame_bytes,
    )


def duplicate_table(facts: Facts) -> Table:
    """How many of the steps' observations have been seen before, anywhere in the dataset."""
    hashes = np.concatenate([np.asarray(part, np.uint64) for part in facts["frame_hashes"]])
    _, counts = np.unique(hashes, return_counts=True)
    return _counts(
        observations=len(hashes),
        distinct=len(counts),
        duplicate_share=1 - len(counts) / max(1, len(hashes)),
        most_often_seen=counts.max(initial=0),
    )


def _counts(**values: Any) -> Table:
    return {"name": np.array(list(values)), "value": np.array([float(value) for value in values.values()])}
