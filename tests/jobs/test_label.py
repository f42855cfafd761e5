"""The following labeller: it finds what a recurrent actor would have stored, once, whatever kills it in between."""

import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from jobs import label as job
from jobs import labelling
from jobs.label import main, refuse_foreign
from jobs.stopping import GONE_SECONDS, StopRequest
from pipeline.action_table import open_table, table_name
from pipeline.dataset import list_collectors, read_provenance, write_provenance
from pipeline.decode import BatchDecoder
from pipeline.labelled_shards import LabelledRows, decode_rows, encode_labelled
from pipeline.lane_labels import LaneLabels
from pipeline.params import params_name
from pipeline.progress import Progress, progress_name
from pipeline.scan import list_shards, open_listed
from pipeline.store import LocalStore
from pipeline.tracking import NullTracker
from pipeline.verify import verify_dataset
from r2d2.config import LearnerConfig
from r2d2.policy import RecurrentPolicy
from r2d2.serialize import params_to_bytes
from r2d2.stateless import StatelessPolicy
from schemas.geometry import SequenceGeometry
from schemas.specs import CoreSpec
from tests.golden_replay import LINEAGE, check_all, collect_golden, read_back
from tests.jobs.test_relabel import BREAKOUT, CARTPOLE, GEOMETRY, LSTM, PONG, rows_of
from tests.pipeline.sequence_factory import make_dataset, tiny_terms
from tests.processes import start, until
from tests.raw_twin import raw_twin

__all__ = ["start"]
# What a network says; everything else stays as it was, to the bit.
LABELS = ("core", "unroll_core", "initial_priority", "probe")
LONG_BURN_IN = SequenceGeometry(burn_in=9, unroll=4, bootstrap=2, stride=2, frame_stack=1)


class Table(RecurrentPolicy):
    """Acts as an actor by table does; what the network would have said beside it is the golden answer."""

    def __init__(self, core, num_actions, epsilons, generator):
        super().__init__(core, num_actions, epsilons, generator)
        self._actor = StatelessPolicy(core, num_actions, epsilons, np.random.default_rng(1))
        self._actor.set_table(lambda frames: (frames.reshape(len(frames), -1).sum(1) % 5).astype(int) % num_actions - 1)

    def act(self, observation, previous_action, previous_reward, first):
        said = super().act(observation, previous_action, previous_reward, first)
        acted = self._actor.act(observation, previous_action, previous_reward, first)
        return replace(said, action=acted.action, greedy=acted.greedy)


def collect(root, environment=CARTPOLE, core=LSTM, geometry=GEOMETRY, **options):
    """A golden run, its raw twin, and the network in a file."""
    options = {"lanes": 3, "calls": 70, "per_shard": 7, "policy_class": Table} | options
    golden = collect_golden(root / "golden", environment=environment, geometry=geometry, core=core, **options)
    params = root / "network.safetensors"
    params.write_bytes(params_to_bytes(golden.network, 5, LINEAGE, LearnerConfig().acting_values()))
    return golden, raw_twin(golden.store, root / "raw"), params


def label(root, core=LSTM, *flags, params):
    out = root / "labelled"
    core_flags = ["--core", core.kind]
    if core.size:
        core_flags += ["--core-width", str(core.width), "--core-layers", str(core.layers)]
    command = ["--dataset", str(root / "raw"), "--out", str(out), "--once", "--tracking-uri", "none", "--threads", "1"]
    assert main([*command, "--params", str(params), *core_flags, *flags]) == 0
    return LocalStore(out)


def names(store):
    return [name.path for name in list_shards(store)]


def check_same(expected, found):
    """Rows by identity: what a network says to 1e-5, the rest to the bit."""
    assert expected.keys() == found.keys()
    for identity, old in expected.items():
        for column in old.keys() - {"checksum"}:
            new = found[identity][column]
            if column.startswith(LABELS):
                np.testing.assert_allclose(new, old[column], atol=1e-5, rtol=1e-4, err_msg=f"{column} {identity}")
            else:
                assert np.array_equal(new, old[column], equal_nan=column == "episode_return"), (identity, column)


@pytest.mark.parametrize(
    ("environment", "core", "geometry"),
    [(CARTPOLE, LSTM, GEOMETRY), (CARTPOLE, CoreSpec(kind="gru", layers=1, width=16), GEOMETRY),
     (BREAKOUT, LSTM, GEOMETRY),
     (CARTPOLE, CoreSpec(kind="lstm", layers=2, width=8), LONG_BURN_IN), (CARTPOLE, CoreSpec(kind="none"), GEOMETRY)],
    ids=["vectors", "gru", "images, lives", "long burn-in, two layers", "no core"],
)  # fmt: skip
def test_what_a_recurrent_actor_with_these_weights_would_have_stored(tmp_path, environment, core, geometry):
    calls, collectors = (260, 1) if environment is BREAKOUT else (70, 2)
    golden, raw, params = collect(tmp_path, environment, core, geometry, calls=calls, collectors=collectors)
    store = label(tmp_path, core, params=params)
    assert names(store) == names(raw)
    check_same(rows_of(golden.store), rows_of(store))
    assert any(len(row["probe"]) for row in rows_of(store).values()) == bool(core.size)
    report = verify_dataset(store)
    assert (report.faults, report.env_steps) == ([], sum(map(len, golden.acted.q.values())))
    assert read_provenance(store, list_collectors(store)[0])["collector"] == {"started_unix_seconds": 1.79e9}


def test_golden_replay_holds_for_what_was_labelled(tmp_path):
    golden, _, params = collect(tmp_path, PONG, lanes=2, calls=80)
    store = label(tmp_path, params=params)
    rows, batch = read_back(store, golden.terms)
    check_all(replace(golden, store=store, rows=rows, batch=batch))


def network_of(golden, version=5, lineage=LINEAGE):
    from jobs.labelling import labelled_by
    from r2d2.labeller import Labeller

    return labelled_by(Labeller(golden.network), version, lineage)


def test_a_labeller_that_is_started_again_before_every_shard_finds_the_same(tmp_path):
    golden, raw, _ = collect(tmp_path, PONG, lanes=3, calls=75)
    (tmp_path / "labelled").mkdir()
    out, terms = LocalStore(tmp_path / "labelled"), golden.terms
    raw_terms = replace(terms, core=CoreSpec(kind="none"))
    for name in list_shards(raw):
        shard = open_listed(raw, raw_terms, name)
        lanes = LaneLabels(terms, LabelledRows(out, terms, name.collector, BatchDecoder(terms)).find)
        labels = lanes.label(decode_rows(shard, BatchDecoder(raw_terms)), network_of(golden))
        assert lanes.lost_states == 0
        priorities = rows_of_priorities(golden, shard)
        assert out.create(name.path, encode_labelled(shard, terms, labels, priorities))
    check_same(rows_of(golden.store), rows_of(out))


def rows_of_priorities(golden, shard):
    known = {(row.collector, row.episode, row.start): row.initial_priority for row in golden.rows}
    columns = shard.columns
    return np.array(
        [known[shard.collector, int(e), int(s)] for e, s in zip(columns["episode"], columns["start"], strict=True)]
    )


def test_a_step_is_run_once_but_for_the_one_where_the_next_piece_begins(tmp_path):
    golden, raw, _ = collect(tmp_path, calls=120)
    network, observations, pieces = network_of(golden), [], []

    def count(some):
        pieces.extend(some)
        observations.extend(len(piece.action) + 1 for piece in some)
        return network.label(some)

    raw_terms = replace(golden.terms, core=CoreSpec(kind="none"))
    lanes = LaneLabels(golden.terms)
    for name in list_shards(raw):
        rows = decode_rows(open_listed(raw, raw_terms, name), BatchDecoder(raw_terms))
        lanes.label(rows, replace(network, label=count))
    seen = sum(len(steps) + 1 for steps in golden.acted.q.values())  # With the final observations.
    assert sum(observations) <= seen + len(pieces)


def test_another_lineage_starts_from_zero_and_a_sequence_of_two_belongs_to_none(tmp_path):
    golden, raw, _ = collect(tmp_path, PONG, lanes=1, calls=62)
    raw_terms = replace(golden.terms, core=CoreSpec(kind="none"))
    lanes, found, starts = LaneLabels(golden.terms), [], []

    def noting(network):
        def label(pieces):
            starts.extend(any(part.any() for part in piece.core) for piece in pieces)
            return network.label(pieces)

        return replace(network, label=label)

    for name in list_shards(raw):
        rows = decode_rows(open_listed(raw, raw_terms, name), BatchDecoder(raw_terms))
        for row in range(len(rows.ok)):
            one = replace(rows, ok=np.arange(len(rows.ok)) == row)
            network = network_of(
                golden, version=5 + len(found), lineage=LINEAGE if len(found) < 3 else bytes(range(16))
            )
            found += [labels for labels in lanes.label(one, noting(network)) if labels is not None]
    assert [labels.lineage for labels in found[:3]] == [LINEAGE] * 3
    assert starts[:5] == [False, True, True, False, True], "an episode's start and another network begin at zero"
    assert found[3].lineage == bytes(16)
    assert found[-2].lineage == bytes(range(16))
    assert found[3].version_first < found[3].version_last


def test_a_bad_shard_is_named_a_corrupt_row_stays_one_and_the_others_are_labelled(tmp_path, capsys):
    golden, raw, params = collect(tmp_path, PONG, lanes=2, calls=100)
    shards = list_shards(raw)
    raw.map_path(shards[1].path).write_bytes(b"torn")
    damaged = bytearray(raw.get(shards[3].path))
    damaged[len(damaged) // 2] ^= 255
    raw.map_path(shards[3].path).write_bytes(damaged)
    store = label(tmp_path, params=params)
    said = capsys.readouterr()
    assert f"{shards[1].path} is not labelled: torn" in said.err
    assert "1 bad shards, 1 corrupt sequences" in said.out
    assert names(store) == [name.path for name in shards if name != shards[1]]
    sound = []
    for name in list_shards(store):
        shard = open_listed(store, golden.terms, name)
        sound += decode_rows(shard, BatchDecoder(golden.terms)).ok.tolist()
    assert sound.count(False) == 1
    assert verify_dataset(store).duplicates == 0


def test_killed_and_started_again_nothing_is_lost_or_doubled(tmp_path, start):
    golden, raw, params = collect(tmp_path, calls=300, per_shard=2)
    command = ["--dataset", "raw", "--out", "labelled", "--params", str(params), "--core-width", "16",
               "--threads", "1", "--tracking-uri", "none"]  # fmt: skip
    out = LocalStore(tmp_path / "labelled")
    job = start("label.py", *command)
    until(lambda: len(names(out)) > 20, what="labelled shards")
    job.process.kill()
    job.process.wait()
    before = {path: out.get(path) for path in names(out)}
    assert len(before) < len(names(raw))
    store = label(tmp_path, params=params)
    assert names(store) == names(raw)
    assert {path: out.get(path) for path in before} == before
    check_same(rows_of(golden.store), rows_of(store))
    assert verify_dataset(store).faults == []


def test_the_learners_words_reach_the_raw_collectors_and_the_table_knows_what_was_seen(tmp_path):
    golden, raw, params = collect(tmp_path, PONG, lanes=2, calls=60)
    out = LocalStore(tmp_path / "labelled")
    out.root.mkdir()
    record = Progress(sequences_seen=3, seen={"c": 3}, sequences_allowed=9, samples=0, updates=0, beat=4)
    out.put(progress_name("r"), record.to_bytes())
    out.put(params_name("r"), params.read_bytes())
    main(["--dataset", str(raw.root), "--out", str(out.root), "--once", "--core-width", "16",
          "--tracking-uri", "none", "--table-entries", "40"])  # fmt: skip
    for name in (progress_name("r"), params_name("r"), table_name("r")):
        assert raw.get(name) == out.get(name)
    table = open_table(raw, table_name("r"), golden.terms.env)
    assert (len(table), table.version, table.lineage) == (40, 5, LINEAGE)
    check_same(rows_of(golden.store), rows_of(out))
    # What was seen last is in it, with the network's own greedy action.
    row, batch = golden.rows[-1], golden.batch
    newest = golden.terms.geometry.frame_stack - 1 + int(batch.first_valid[-1] + batch.num_steps[-1]) - 1
    logged = golden.acted.q[row.collector, row.episode][-1]
    assert table.look_up(batch.observation[-1][newest : newest + 1]) == [logged.argmax()]


def test_a_network_for_another_core_is_refused_in_one_line(tmp_path, capsys):
    _, _, params = collect(tmp_path, calls=20)
    with pytest.raises(SystemExit) as stopped:
        label(tmp_path, CoreSpec(kind="lstm", width=8), params=params)
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "core of the network is" in line


def test_labelled_sequences_are_not_mixed_into_a_dataset_of_somebody_else(tmp_path):
    store = make_dataset(tmp_path, tiny_terms(), 4)
    for origin in (None, {"role": "collect"}):
        if origin is not None:
            write_provenance(store, "c0", origin)
        with pytest.raises(ValueError, match=r"allowed: a new folder or one of label\.py's, and c0 is neither"):
            refuse_foreign(store)
    write_provenance(store, "c0", {"role": "label"})
    refuse_foreign(store)


def test_a_labeller_that_a_signal_ends_waits_for_no_tracking_server_longer_than_others(tmp_path, monkeypatch):
    class Recorder(NullTracker):
        def close(self, *, gone_by, **_):
            ended.append(gone_by())
            return 0

    ended, stop = [], StopRequest()
    stop._on_signal(signal.SIGTERM, None)
    _, _, params = collect(tmp_path, calls=20)
    monkeypatch.setattr(job, "make_tracker", lambda config: Recorder())
    monkeypatch.setattr(StopRequest, "listen", lambda _: stop)
    label(tmp_path, params=params)
    assert ended[0] <= time.monotonic() + GONE_SECONDS


@pytest.mark.parametrize("refusals", [2, 99])
def test_once_labels_what_can_not_be_opened_at_first_or_fails(tmp_path, monkeypatch, capsys, refusals):
    def open_at_last(*arguments):
        refused.append(arguments)
        if len(refused) <= refusals:
            raise OSError(24, "Too many open files")
        return open_listed(*arguments)

    refused = []
    _, raw, params = collect(tmp_path, calls=20)
    monkeypatch.setattr(labelling, "open_listed", open_at_last)
    monkeypatch.setattr(labelling, "ONCE_TRIES", 4)
    monkeypatch.setattr(labelling, "RETRY_SECONDS", 0.01)
    if refusals == 2:
        assert names(label(tmp_path, params=params)) == names(raw)
        return
    with pytest.raises(SystemExit) as stopped:
        label(tmp_path, params=params)
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert "stopped (failed)" in said.out
    assert "cannot be labelled: it cannot be opened" in said.err


def test_the_labellers_run_is_a_part_of_the_sweep_that_is_named(tmp_path, monkeypatch):
    made = []
    _, _, params = collect(tmp_path, calls=20)
    monkeypatch.setattr(job, "make_tracker", lambda config: made.append(config) or NullTracker())
    label(tmp_path, LSTM, "--parent-run-id", "p", params=params)
    assert [config.parent_run_id for config in made] == ["p"]
