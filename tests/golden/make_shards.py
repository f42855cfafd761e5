"""Writes the golden shards of the current schema version. Run once per version; a released version's are never remade.

python -m tests.golden.make_shards
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pipeline.decode import BatchDecoder
from pipeline.shard_reader import open_shard
from schemas.specs import ArraySpec, CoreSpec
from schemas.terms import SCHEMA_VERSION
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

FOLDER = Path(__file__).parent / "shards"
KINDS = {
    "lstm-image": tiny_terms(),
    "gru-vector": tiny_terms(
        core=CoreSpec(kind="gru", layers=2, width=2), observation=ArraySpec(shape=(3,), dtype="float32")
    ),
    "none-lives": tiny_terms(core=CoreSpec(kind="none"), life_loss="reset"),
}


def contents(path: Path) -> dict:
    """Every value of a shard as plain JSON, pixels included; NaN as null."""
    shard = open_shard(path)
    with BatchDecoder(shard.terms) as decoder:
        batch, ok = decoder.decode([(shard, row) for row in range(shard.num_rows)])
    assert ok.all()
    columns = {name: _plain(values) for name, values in shard.columns.items()}
    probes = [_plain(np.asarray(shard.probe(row))) for row in range(shard.num_rows)]
    return {
        "collector": shard.collector,
        "columns": columns,
        "probe_core": probes,
        "observation": _plain(batch.observation),
    }


def _plain(values: np.ndarray) -> list:
    if values.dtype.kind == "f":
        return [None if np.isnan(v) else float(v) for v in values.ravel()]
    return [int(v) for v in values.ravel()]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind, terms in KINDS.items():
        name = f"v{SCHEMA_VERSION}-{kind}"
        if (FOLDER / f"{name}.arrow").exists():
            raise SystemExit(f"{name} is there: golden shards are never remade")
        with TemporaryDirectory() as folder:
            store = make_dataset(folder, terms, 5, per_shard=5, seed=3)
            (path,) = Path(folder).rglob("*.arrow")
            (FOLDER / f"{name}.arrow").write_bytes(path.read_bytes())
        (FOLDER / f"{name}.json").write_text(json.dumps(contents(FOLDER / f"{name}.arrow")) + "\n")
