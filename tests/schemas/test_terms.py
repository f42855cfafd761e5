"""Terms and shard schemas: the same after a round trip, differences named, later versions refused."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from schemas.geometry import SequenceGeometry
from schemas.shard import TERMS_KEY, VERSION_KEY, shard_schema, terms_of
from schemas.specs import ArraySpec, CoreSpec, EnvSpec
from schemas.terms import SCHEMA_VERSION, DatasetTerms

TERMS = DatasetTerms(
    env=EnvSpec(
        env_id="ALE/Pong-v5",
        observation=ArraySpec(shape=(84, 84), dtype="uint8"),
        action_set=("NOOP", "UP"),
        frame_skip=4,
        arguments={"noop_max": 30},
    ),
    geometry=SequenceGeometry(burn_in=2, unroll=4, bootstrap=1, stride=2, frame_stack=2),
    core=CoreSpec(kind="lstm", layers=2, width=8),
)
# The columns of schema version 1, in their order. A new column is a new version.
VERSION_1 = [
    "collector",
    "sequence",
    "episode",
    "start",
    "lane",
    "first_valid",
    "num_steps",
    "num_observations",
    "ends",
    "observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "life_lost",
    "greedy",
    "previous_action",
    "previous_reward",
    "core_h",
    "core_c",
    "unroll_core_h",
    "unroll_core_c",
    "probe_core",
    "initial_priority",
    "version_first",
    "version_last",
    "lineage",
    "epsilon",
    "episode_return",
    "env_steps",
    "checksum",
]


def test_terms_are_the_same_after_a_round_trip():
    assert DatasetTerms.from_bytes(TERMS.to_bytes()) == TERMS


def test_each_differing_field_is_named_with_both_values():
    other = replace(TERMS, env=replace(TERMS.env, sticky=0.25, arguments={"noop_max": 0}))
    assert TERMS.differences(other) == [
        "identity.arguments.noop_max: 30 here, 0 there",
        "identity.sticky: 0.0 here, 0.25 there",
    ]
    assert TERMS.differences(TERMS) == []


def test_a_later_schema_version_is_refused_by_number():
    later = json.loads(TERMS.to_bytes()) | {"schema_version": SCHEMA_VERSION + 1}
    with pytest.raises(ValueError, match=f"schema_version is {SCHEMA_VERSION + 1}; allowed: at most {SCHEMA_VERSION}"):
        DatasetTerms.from_bytes(json.dumps(later).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"schema_version": 1}', b"\xff"])
def test_what_is_no_dataset_json_is_refused(data):
    with pytest.raises(ValueError):
        DatasetTerms.from_bytes(data)


def test_the_columns_of_version_1_are_fixed_and_never_null():
    schema = shard_schema(TERMS)
    assert schema.names == VERSION_1
    assert not any(field.nullable for field in schema)
    assert terms_of(schema) == TERMS


@pytest.mark.parametrize(("kind", "parts"), [("lstm", ["h", "c"]), ("gru", ["h"]), ("none", [])])
def test_the_core_decides_the_state_columns(kind, parts):
    terms = replace(TERMS, core=CoreSpec(kind=kind, layers=1, width=4))
    names = shard_schema(terms).names
    assert [n for n in names if n.startswith("core_")] == [f"core_{part}" for part in parts]
    assert [n for n in names if n.startswith("unroll_core_")] == [f"unroll_core_{part}" for part in parts]
    assert terms_of(shard_schema(terms)) == terms


def test_two_specs_of_no_core_are_equal_whatever_their_width():
    assert CoreSpec(kind="none", width=7) == CoreSpec(kind="none", width=512)


def test_a_schema_that_is_not_ours_is_refused():
    with pytest.raises(ValueError, match="names no schema version"):
        terms_of(pa.schema([("x", pa.int8())]))
    with pytest.raises(ValueError, match="schema version is 2; allowed: at most 1"):
        terms_of(shard_schema(TERMS).with_metadata({VERSION_KEY: b"2", TERMS_KEY: TERMS.to_bytes()}))
    fewer = shard_schema(TERMS).remove(4)
    with pytest.raises(ValueError, match="columns are not those"):
        terms_of(fewer)
