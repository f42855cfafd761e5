"""Columns to and from the Arrow tables that Ray Data moves about; arrays of one shape become tensors, uncopied."""

from typing import Any

import numpy as np
import pyarrow as pa


def to_block(columns: dict[str, Any]) -> pa.Table:
    """Arrays ``[rows]`` become plain columns, ``[rows, ...]`` tensors, lists of anything what Arrow makes of them."""

    def column(values: Any) -> pa.Array:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values
        if not isinstance(values, np.ndarray):
            kind = pa.large_binary() if values and isinstance(values[0], bytes) else None
            return pa.array(values, kind)
        values = np.ascontiguousarray(values)
        return tensor(pa.array(values.reshape(-1)), values.shape[1:]) if values.ndim > 1 else pa.array(values)

    return pa.table({name: column(values) for name, values in columns.items()})


def tensor(values: pa.Array, shape: tuple[int, ...]) -> pa.Array:
    """A column of arrays of ``shape`` from all their ``values`` in C order."""
    rows = pa.FixedSizeListArray.from_arrays(values, int(np.prod(shape)))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(values.type, shape), rows)


def to_arrays(block: Any) -> dict[str, Any]:
    """The inverse: arrays where values are of one size, else lists of Python values."""
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    columns: dict[str, Any] = {}
    for name in table.column_names:
        values = table[name].combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        if isinstance(values, pa.FixedShapeTensorArray):
            columns[name] = values.to_numpy_ndarray()
        elif hasattr(values, "storage"):  # Ray's own tensors: what batches of numpy arrays have become.
            columns[name] = np.asarray(values.to_numpy(zero_copy_only=False))
        elif pa.types.is_primitive(values.type):
            columns[name] = values.to_numpy(zero_copy_only=False)
        else:
            columns[name] = values.to_pylist()
    return columns
