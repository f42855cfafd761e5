"""Collecting without a network: what is written says so, and the table of the followed run decides known frames."""

import numpy as np
import pytest

from jobs.collect import main
from pipeline.action_table import RecentActions, frame_hashes, table_name
from pipeline.dataset import read_terms
from pipeline.environments import EnvironmentConfig, make_lanes
from pipeline.store import LocalStore
from pipeline.verify import verify_dataset
from schemas.shard import NO_LINEAGE
from tests.jobs.test_relabel import rows_of

SMALL = {"img_height": 42, "img_width": 42, "noop_max": 0}
FLAGS = ["--envs", "2", "--threads", "1", "--burn-in", "2", "--unroll", "4", "--bootstrap", "1", "--stride", "4",
         "--seed", "3", "--tracking-uri", "none"]  # fmt: skip


def collect(root, *flags, steps=60):
    arguments = [word for name, value in SMALL.items() for word in ("--env-arg", f"{name}={value}")]
    assert main(["--dataset", str(root), "--env-steps", str(steps), *arguments, *FLAGS, *flags]) == 0
    return rows_of(LocalStore(root))


def test_random_actors_store_no_states_no_network_and_no_price(tmp_path):
    rows = collect(tmp_path / "d", "--policy", "random")
    assert read_terms(LocalStore(tmp_path / "d")).core.parts == ()
    for row in rows.values():
        assert row["lineage"].tobytes() == NO_LINEAGE
        assert (row["version_first"], row["version_last"], row["epsilon"]) == (-1, -1, 1)
        assert np.isnan(row["initial_priority"])
        assert not row["greedy"].any()
    assert verify_dataset(LocalStore(tmp_path / "d")).faults == []


def test_actors_by_table_take_its_action_where_it_knows_the_frame(tmp_path):
    lanes = make_lanes(EnvironmentConfig(env_id="ALE/Pong-v5", arguments=SMALL), 1)
    first_frames, env = lanes.reset(0), lanes.spec
    lanes.close()
    store = LocalStore(tmp_path / "d")
    store.root.mkdir()
    recent = RecentActions(10)
    recent.see(frame_hashes(first_frames), np.array([3]))
    store.put(table_name("r"), recent.encode(env, 9, bytes(range(16))))
    rows = collect(store.root, "--policy", "table", "--follow", "r")
    almost_greedy = [row for (_, _, start), row in rows.items() if start == 0 and row["lane"] == 1]
    assert [(row["action"][2], row["greedy"][2]) for row in almost_greedy] == [(3, 1)]
    assert {row["epsilon"].item() for row in rows.values()} == {np.float32(0.4).item(), np.float32(0.4**8).item()}
    shares = [row["greedy"].mean() for row in rows.values()]
    assert np.mean(shares) < 0.3, "unknown frames are acted on at random, whatever the lane's epsilon"


def test_a_dataset_that_has_a_core_gets_zero_states_and_one_may_be_named(tmp_path):
    collect(tmp_path / "d", "--policy", "random", "--core", "lstm", "--core-width", "4")
    rows = collect(tmp_path / "d", "--policy", "table")
    assert len({collector for collector, _, _ in rows}) == 2
    assert all(row["core_h"].shape == (4,) and not row["core_h"].any() for row in rows.values())


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--policy", "greedy"], "policy is greedy; allowed: recurrent, table, random"),
     (["--policy", "table", "--eval-lanes", "1"], "eval_lanes is 1; allowed: with --policy recurrent"),
     (["--policy", "random", "--params", "x"], "params is x; allowed: with --policy recurrent")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path, capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        main(["--dataset", str(tmp_path / "d"), *flags])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.replace("'", "")
