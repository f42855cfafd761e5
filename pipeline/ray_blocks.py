"""Columns as numpy arrays and lists, to and from the Arrow tables that Ray Data moves about."""

from typing import Any

import numpy as np
import pyarrow as pa


def to_block(columns: dict[str, Any]) -> pa.Table:
    """Arrays ``[rows]`` become plain columns, ``[rows, ...]`` tensors, lists of anything what Arrow makes of them."""
    from ray.data.extensions import ArrowTensorArray

    def column(values: Any) -> pa.Array:
        if not isinstance(values, np.ndarray):
            kind = pa.large_binary() if values and isinstance(values[0], bytes) else None
            return pa.array(values, kind)
        # Copied: what goes on outlives the memory map, and Ray would copy it anyway.
        values = np.ascontiguousarray(values)
        return pa.array(values) if values.ndim == 1 else ArrowTensorArray.from_numpy(values)

    return pa.table({name: column(values) for name, values in columns.items()})


def to_arrays(block: Any) -> dict[str, Any]:
    """The inverse: arrays where values are of one size, else lists of Python values."""
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    columns: dict[str, Any] = {}
    for name in table.column_names:
        values = table[name].combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        if hasattr(values, "storage"):
            columns[name] = np.asarray(values.to_numpy(zero_copy_only=False))
        elif pa.types.is_primitive(values.type):
            columns[name] = values.to_numpy(zero_copy_only=False)
        else:
            columns[name] = values.to_pylist()
    return columns
