"""Which action was greedy for a frame, by the frame's hash: what actors without a network act by (article 3.4).

    runs/<run>/actions.arrow     immutable, replaced atomically by the learner side, memory-mapped by its actors

A frame is the newest single one of the policy's input, all of its bytes. Two columns without nulls, ascending by hash:
``hash`` uint64, xxh3_64 of the frame; ``action`` int32. The metadata say which network's actions they are, for which
actions and observation, and the checksum of both columns.
"""

import json
import logging
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.store import Store, StoreAway
from schemas.specs import EnvSpec

TABLE_VERSION = 1
MISS = -1
_KEY = b"r2d2.action_table"
_SCHEMA = pa.schema([pa.field("hash", pa.uint64(), nullable=False), pa.field("action", pa.int32(), nullable=False)])

_log = logging.getLogger(__name__)


def table_name(run: str) -> str:
    return f"runs/{run}/actions.arrow"


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """How much the table holds, and how often it is published.

    Attributes:
        table_entries: frames in the table; those seen longest ago make room (article: 10,000).
        table_seconds: least time between two publications, in seconds (ours: 2).
    """

    table_entries: int = 10_000
    table_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.table_entries < 1:
            raise ValueError(f"table_entries is {self.table_entries}; allowed: 1 or more")
        if self.table_seconds < 0:
            raise ValueError(f"table_seconds is {self.table_seconds}; allowed: 0 or more")


class TableError(ValueError):
    """No action table of this environment: torn, foreign, or of a later version."""


def frame_hashes(frames: np.ndarray) -> np.ndarray:
    """xxh3_64 of every frame of ``[N, *shape]``, uint64 ``[N]``."""
    whole = np.ascontiguousarray(frames)
    return np.array([xxhash.xxh3_64_intdigest(frame) for frame in whole], np.uint64)


class RecentActions:
    """The newest action of each of the ``capacity`` frames seen last. One thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._actions: dict[int, int] = {}  # In the order in which the frames were last seen.

    def __len__(self) -> int:
        return len(self._actions)

    def see(self, hashes: np.ndarray, actions: np.ndarray) -> None:
        """Take frames and their greedy actions, ``[N]`` each, oldest first."""
        held = self._actions
        for key, action in zip(hashes.tolist(), actions.tolist(), strict=True):
            held.pop(key, None)
            held[key] = action
        for key in list(islice(held, max(0, len(held) - self._capacity))):
            del held[key]

    def encode(self, env: EnvSpec, version: int, lineage: bytes) -> pa.Buffer:
        """The table as an object to publish."""
        hashes = np.fromiter(self._actions.keys(), np.uint64, len(self._actions))
        actions = np.fromiter(self._actions.values(), np.int32, len(self._actions))
        order = np.argsort(hashes)
        return encode_table(hashes[order], actions[order], env, version, lineage)


def encode_table(hashes: np.ndarray, actions: np.ndarray, env: EnvSpec, version: int, lineage: bytes) -> pa.Buffer:
    """An Arrow IPC file in memory: ``hashes`` uint64 ``[N]`` ascending, ``actions`` int32 ``[N]``."""
    about = {
        "table_version": TABLE_VERSION,
        "version": version,
        "lineage": lineage.hex(),
        **_identity(env),
        "checksum": _checksum(hashes, actions),
    }
    schema = _SCHEMA.with_metadata({_KEY: json.dumps(about, sort_keys=True).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        columns = [pa.array(hashes, pa.uint64()), pa.array(actions, pa.int32())]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue()


@dataclass(frozen=True, eq=False)
class ActionTable:
    """A mapped table: ``hashes`` uint64 ``[N]`` ascending and ``actions`` int32 ``[N]`` are views of the file.

    The file may be replaced meanwhile: this table stays what it was.
    """

    hashes: np.ndarray
    actions: np.ndarray
    version: int
    lineage: bytes

    def __len__(self) -> int:
        return len(self.hashes)

    def look_up(self, frames: np.ndarray) -> np.ndarray:
        """The greedy action of each frame of ``[N, *shape]``, int64 ``[N]``; ``MISS`` where it is unknown."""
        if not len(self):
            return np.full(len(frames), MISS, np.int64)
        wanted = frame_hashes(frames)
        at = np.minimum(np.searchsorted(self.hashes, wanted), len(self) - 1)
        return np.where(self.hashes[at] == wanted, self.actions[at], MISS).astype(np.int64)


def open_table(store: Store, name: str, env: EnvSpec) -> ActionTable:
    """Memory-map the table ``name`` and check all of it (10,000 entries: 0.1 ms).

    Raises:
        TableError: in one line, what is wrong with it.
        OSError: it could not be opened at all.
    """
    if store.is_remote:  # Local copies are for what is never replaced.
        whole = pa.py_buffer(store.get(name))
    else:
        with pa.memory_map(str(store.map_path(name))) as source:
            whole = source.read_buffer()
    try:
        reader = pa.ipc.open_file(whole)
        about = json.loads((reader.schema.metadata or {})[_KEY])
        if about["table_version"] > TABLE_VERSION:
            raise TableError(f"table version is {about['table_version']}; allowed: at most {TABLE_VERSION}")
        for field, ours in _identity(env).items():
            if about[field] != ours:
                raise TableError(f"{field} is {about[field]}; allowed: {ours}, as {env.env_id} has here")
        hashes, actions = _columns(reader)
        if about["checksum"] != _checksum(hashes, actions):
            raise TableError("torn: its checksum is another")
        return ActionTable(hashes, actions, int(about["version"]), bytes.fromhex(about["lineage"]))
    except TableError:
        raise
    except Exception as error:  # Any bytes can stand in a file, so any of pyarrow's errors can come of them.
        raise TableError(f"no action table: {' '.join(str(error).split()) or type(error).__name__}") from error


class TablePoller:
    """Maps a run's table when it has been replaced since the last poll. A bad one is named once and passed over."""

    def __init__(self, store: Store, run: str, env: EnvSpec) -> None:
        self._store, self._name, self._env = store, table_name(run), env
        self._identity: str | None = None

    def poll(self) -> ActionTable | None:
        """The newest table if it is new and good, else None: whoever has an older one keeps it."""
        try:
            identity = self._store.identity(self._name)
        except StoreAway:
            return None
        if identity is None or identity == self._identity:
            return None
        self._identity = identity  # As of before the look: a replacement in between is found by the next poll.
        try:
            return open_table(self._store, self._name, self._env)
        except FileNotFoundError:
            return None
        except (TableError, OSError) as error:
            _log.warning("%s is not used, the table before it stays: %s", self._name, error)
            return None


def _columns(reader: pa.RecordBatchFileReader) -> tuple[np.ndarray, np.ndarray]:
    if not reader.schema.equals(_SCHEMA, check_metadata=False) or reader.num_record_batches != 1:
        raise TableError("its columns are not those of an action table")
    hashes, actions = (column.to_numpy(zero_copy_only=True) for column in reader.get_batch(0).columns)
    if (hashes[1:] <= hashes[:-1]).any():
        raise TableError("its hashes are not ascending")
    return hashes, actions


def _identity(env: EnvSpec) -> dict[str, Any]:
    observation = env.observation
    return {"num_actions": env.num_actions, "observation": [observation.dtype, *observation.shape]}


def _checksum(hashes: np.ndarray, actions: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(hashes.astype("<u8").tobytes() + actions.astype("<i4").tobytes())
