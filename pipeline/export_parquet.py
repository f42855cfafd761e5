"""Episodes as Parquet, one row a step, for readers that know nothing of sequences; and back.

Conventions, also in the files' metadata:

* Row t holds the observation, the action taken on it, and what *that action* brought: ``reward``, ``terminated``,
  ``truncated``, ``life_lost``. (Not the reward that came with the observation.)
* The final observation is a row of its own, ``step`` = E, with ``action`` = -1, reward 0 and no flag. It is there for
  every episode, however it ended: what follows a truncation or a cut is bootstrapped from it.
* ``ends`` of the whole episode: terminated, truncated, cut (the collector stopped) or life_lost.
* ``observation`` is the raw bytes of one single frame, C order, shape and dtype in the metadata; never stacked. The K-1
  frames before step 0 are zeros, but after a lost life: those are not exported.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.episodes import STEP_COLUMNS, Episode, EpisodeFacts
from schemas.geometry import ENDS_NAMES
from schemas.terms import DatasetTerms

METADATA_KEY = b"r2d2.steps"
FINAL_ACTION = -1
STEPS_PER_FILE = 100_000
FORMAT_VERSION = 1
_FACTS = ("lane", "episode_return", "version_first", "version_last", "env_steps")


def step_schema(terms: DatasetTerms) -> pa.Schema:
    """Columns of a step; the metadata says what the environment is and how to read the observations."""
    columns = [
        ("collector", pa.string()),
        ("episode", pa.int64()),
        ("step", pa.int32()),
        ("observation", pa.large_binary()),
        ("action", pa.int32()),
        ("reward", pa.float32()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("life_lost", pa.bool_()),
        ("greedy", pa.bool_()),
        ("epsilon", pa.float32()),
        ("lane", pa.int32()),
        ("ends", pa.string()),
        ("episode_return", pa.float32()),
        ("version_first", pa.int64()),
        ("version_last", pa.int64()),
        ("lineage", pa.string()),
        ("env_steps", pa.int64()),
    ]
    described = {"version": FORMAT_VERSION, "env": terms.env.to_json(), "conventions": __doc__}
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
    return schema.with_metadata({METADATA_KEY: json.dumps(described).encode()})


def write_steps(folder: Path, terms: DatasetTerms, episodes: Iterable[Episode]) -> tuple[int, int]:
    """``part-00000.parquet`` and so on, whole episodes of about 100,000 steps each; (episodes, steps) written.

    Until the last is whole all names begin with ``_``, and readers of Parquet take such files for none. Memory: one
    episode.

    Raises:
        ValueError: the folder holds something already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"out is {str(folder)!r}; allowed: a new or an empty folder")
    schema = step_schema(terms)
    count = steps = room = 0
    writer: pq.ParquetWriter | None = None
    parts: list[Path] = []
    try:
        for episode in episodes:
            if writer is None or room <= 0:
                if writer is not None:
                    writer.close()
                parts.append(folder / f"_part-{len(parts):05d}.parquet")
                writer, room = pq.ParquetWriter(parts[-1], schema, compression="zstd"), STEPS_PER_FILE
            table = episode_table(episode, schema)
            writer.write_table(table, row_group_size=len(table))
            count, steps, room = count + 1, steps + episode.facts.steps, room - episode.facts.steps
        if writer is not None:
            writer.close()
    except BaseException:
        if writer is not None:
            writer.close()
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    for part in parts:
        part.rename(part.with_name(part.name.removeprefix("_")))
    return count, steps


def episode_table(episode: Episode, schema: pa.Schema) -> pa.Table:
    """E + 1 rows, the last one for the final observation."""
    facts, rows = episode.facts, episode.facts.steps + 1
    own = episode.frames[len(episode.frames) - rows :]

    def with_final(values: np.ndarray, final: Any) -> np.ndarray:
        return np.append(values, np.array(final, values.dtype))

    columns: dict[str, Any] = {
        "collector": [facts.collector] * rows,
        "episode": np.full(rows, facts.number),
        "step": np.arange(rows, dtype=np.int32),
        "observation": [frame.tobytes() for frame in own],
        "action": with_final(episode.action, FINAL_ACTION),
        "reward": with_final(episode.reward, 0),
        **{name: with_final(getattr(episode, name), 0).astype(bool) for name in STEP_COLUMNS[2:]},
        "epsilon": with_final(episode.epsilon, episode.epsilon[-1]),
        "ends": [ENDS_NAMES[facts.ends]] * rows,
        "lineage": [facts.lineage.hex()] * rows,
        **{name: np.full(rows, getattr(facts, name)) for name in _FACTS},
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def read_steps(folder: Path) -> Iterator[Episode]:
    """The episodes of ``write_steps``, in its order, their history zeros of no length (K = 1).

    Raises:
        ValueError: a file that was not written by it, or an export that was broken off.
    """
    if any(folder.glob("_part-*")):
        raise ValueError(f"{folder} holds an export that was broken off")
    for path in sorted(folder.glob("*.parquet")):
        file = pq.ParquetFile(path)
        described = json.loads((file.schema_arrow.metadata or {}).get(METADATA_KEY, b"{}"))
        if described.get("version") != FORMAT_VERSION:
            raise ValueError(f"{path} holds no exported steps of version {FORMAT_VERSION}")
        observation = described["env"]["observation"]
        for group in range(file.num_row_groups):  # One row group per episode, however long.
            yield _episode(file.read_row_group(group), tuple(observation["shape"]), observation["dtype"])


def _episode(table: pa.Table, shape: tuple[int, ...], dtype: str) -> Episode:
    first = {name: table[name][0].as_py() for name in ("collector", "episode", "ends", "lineage", *_FACTS)}
    steps = len(table) - 1
    frames = np.frombuffer(b"".join(table["observation"].to_pylist()), dtype).reshape(steps + 1, *shape)
    stored = {"action": np.int32, "reward": np.float32}
    columns = {name: table[name].to_numpy()[:steps].astype(stored.get(name, np.uint8)) for name in STEP_COLUMNS}
    return Episode(
        facts=EpisodeFacts(
            collector=first["collector"],
            number=first["episode"],
            steps=steps,
            ends=ENDS_NAMES.index(first["ends"]),
            lineage=bytes.fromhex(first["lineage"]),
            **{name: first[name] for name in _FACTS},
        ),
        frames=frames,
        epsilon=table["epsilon"].to_numpy()[:steps],
        **columns,
    )
