"""Shards of every released schema version are read for ever, value by value."""

import json

import pyarrow as pa
import pytest

from pipeline.shard_reader import ShardError, open_shard
from schemas.shard import VERSION_KEY
from tests.golden.make_shards import FOLDER, contents

SHARDS = sorted(FOLDER.glob("*.arrow"))


def test_there_are_golden_shards_of_every_version():
    assert {path.name.split("-")[0] for path in SHARDS} == {"v1"}


@pytest.mark.parametrize("path", SHARDS, ids=[path.stem for path in SHARDS])
def test_a_released_version_reads_as_it_was_written(path):
    assert contents(path) == json.loads(path.with_suffix(".json").read_text())


def test_a_later_version_is_refused_by_number(tmp_path):
    batch = pa.ipc.open_file(SHARDS[0]).get_batch(0)
    path = tmp_path / "later.arrow"
    later = batch.replace_schema_metadata({**(batch.schema.metadata or {}), VERSION_KEY: b"2"})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, later.schema) as writer:
        writer.write(later)
    with pytest.raises(ShardError, match="version is 2; allowed: at most 1"):
        open_shard(path)
