"""What a replay service and its learners say to each other: JSON requests, and a drawn batch as one Arrow record batch.

    learner                                      service
      describe ────────────────────────────────▶   who it is: run, dataset, terms, largest batch
      draw n, "consumed up to m" ──────────────▶   batch n as it rests in shards, or what it waits for
      draw n, "these rows are corrupt" ────────▶   batch n with others in their places
      update (ids, priorities) ────────────────▶   how many were applied, stale, refused
      heartbeat ───────────────────────────────▶   counters
      leave ───────────────────────────────────▶

A request may be sent again when no answer came: the same number gives the same batch, and nothing is counted twice.
"""

import json
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.codec import EncodedRow
from pipeline.drawing import DrawnBatch
from pipeline.parts import WHOLE
from schemas.terms import DatasetTerms

PROTOCOL = 3
LARGEST_REQUEST_BYTES = 1 << 20
LONGEST_NAME = 100

Request = TypeVar("Request", bound="FromClient")


@dataclass(frozen=True, kw_only=True)
class FromClient:
    """What every request says.

    ``client``: a name that the client drew for itself. ``consumed``: all its batches up to this number have reached
    the learner, -1 for none; but for those ``given_back``, which no learner will ever see.

    Raises:
        ValueError: naming the field, as do those of the requests below.
    """

    client: str
    consumed: int = -1
    given_back: Many[int] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.client, str) and 0 < len(self.client) <= LONGEST_NAME):
            raise ValueError(f"client is {self.client!r:.80}; allowed: a name of 1 to {LONGEST_NAME} characters")
        _check_whole("consumed", self.consumed, -1)
        _check_ids("given_back", self.given_back)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls: type[Request], data: bytes) -> Request:
        """Raises ValueError when ``data`` is no such request: too long, not JSON, an unknown or missing field."""
        values = _json_object(data)
        unknown = values.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(
                f"request has the field {min(unknown)!r:.80}; allowed: {', '.join(cls.__dataclass_fields__)}"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"request is not complete: {error}") from error


@dataclass(frozen=True, kw_only=True)
class DrawRequest(FromClient):
    """Batch ``number`` of this client, ``batch_size`` sequences.

    Those in ``corrupt`` are to be replaced: ids of the service that called itself ``incarnation``.
    """

    number: int
    batch_size: int
    corrupt: Many[int] = ()
    incarnation: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole("number", self.number, 0)
        _check_whole("batch_size", self.batch_size, 1)
        _check_ids("corrupt", self.corrupt)


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(FromClient):
    """``priorities`` for ``ids``, which were drawn from the service that called itself ``incarnation``."""

    incarnation: str
    ids: Many[int]
    priorities: Many[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ids("ids", self.ids)
        if not isinstance(self.priorities, list) or not all(map(_is_number, self.priorities)):
            raise ValueError("priorities are no list of numbers; allowed: one for each of ids")
        if len(self.ids) != len(self.priorities):
            raise ValueError(f"priorities are {len(self.priorities)}; allowed: {len(self.ids)}, one for each of ids")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a service says of itself.

    Attributes:
        incarnation: drawn at each start; ids mean something only together with it.
        run: under which it publishes its progress, and its learner its parameters.
        dataset: where it is, as the service sees it.
        largest_batch: sequences.
        part: ``I/N``: which of the dataset's collectors it follows.
    """

    incarnation: str
    run: str
    dataset: str
    largest_batch: int
    terms: DatasetTerms
    part: str = str(WHOLE)
    protocol: int = PROTOCOL

    def to_bytes(self) -> bytes:
        return json.dumps({**vars(self), "terms": json.loads(self.terms.to_bytes())}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Description":
        """Raises ValueError when it is none of ours, or of another protocol."""
        values = _json_object(data)
        if values.get("protocol") != PROTOCOL:
            raise ValueError(f"protocol is {values.get('protocol')!r:.80}; allowed: {PROTOCOL}: versions differ")
        try:
            return cls(**{**values, "terms": DatasetTerms.from_bytes(json.dumps(values["terms"]).encode())})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the description of a replay service: {error}") from error


class WireBatch(NamedTuple):
    """A drawn batch as it travels; ``row`` gives its rows as a shard would."""

    header: dict[str, Any]
    ids: np.ndarray
    probabilities: np.ndarray
    columns: list[tuple[memoryview, memoryview]]

    def row(self, row: int) -> EncodedRow:
        collector, fixed, frame, probe = (data[at[row] : at[row + 1]] for at, data in self.columns)
        return EncodedRow(bytes(collector), fixed, frame, probe)


_BYTES = ("collector", "fixed", "frame", "probe")
_SCHEMA = pa.schema(
    [("id", pa.int64()), ("probability", pa.float64()), *((name, pa.large_binary()) for name in _BYTES)]
)


def pack_batch(header: dict[str, Any], drawn: DrawnBatch | None) -> pa.RecordBatch:
    """``drawn`` with its rows as they rest, pixels compressed; None gives no rows, for ``header`` to say why."""
    rows = [] if drawn is None else [holder.row(row) for holder, row in drawn.rows]
    ids, probabilities = ([], []) if drawn is None else (drawn.ids, drawn.probabilities)
    columns = [pa.array(ids, pa.int64()), pa.array(probabilities, pa.float64())]
    columns += [_joined([getattr(row, name) for row in rows]) for name in _BYTES]
    schema = _SCHEMA.with_metadata({"header": json.dumps(header)})
    return pa.record_batch(columns, schema=schema)


def unpack_batch(batch: pa.RecordBatch) -> WireBatch:
    """Looks into the buffers of ``batch``; nothing is copied. Raises ValueError when it is none of ``pack_batch``'s."""
    if not batch.schema.equals(_SCHEMA):
        raise ValueError("not a batch of a replay service: its columns are others")
    batch.validate(full=True)
    header = _json_object((batch.schema.metadata or {}).get(b"header", b""))
    return WireBatch(
        header,
        batch.column("id").to_numpy(),
        batch.column("probability").to_numpy(),
        [_offsets_and_data(batch.column(name)) for name in _BYTES],
    )


def _joined(values: list) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.Array.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    )


def _offsets_and_data(column: pa.Array) -> tuple[memoryview, memoryview]:
    _, offsets, data = column.buffers()
    at = memoryview(offsets).cast("B").cast("q")[column.offset : column.offset + len(column) + 1]
    return at, memoryview(data).cast("B") if data else memoryview(b"")


def _json_object(data: bytes) -> dict[str, Any]:
    if len(data) > LARGEST_REQUEST_BYTES:
        raise ValueError(f"message is {len(data)} bytes; allowed: at most {LARGEST_REQUEST_BYTES}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"message is no JSON: {error!s:.80}") from error
    if not isinstance(values, dict):
        raise ValueError("message is no JSON object")
    return values


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**62)


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or not least <= value < 2**62:
        raise ValueError(f"{name} is {value!r:.80}; allowed: a whole number from {least} on")


def _check_ids(name: str, values: Any) -> None:
    if not isinstance(values, list | tuple) or not all(type(i) is int and 0 <= i < 2**62 for i in values):
        raise ValueError(f"{name} is no list of ids; allowed: whole numbers from 0 on")
