"""Several replay services, each with a part of a dataset, drawn from as one: real Flight servers."""

import contextlib
import logging
import time

import numpy as np
import pytest
from scipy.stats import chisquare

from pipeline import several_replays
from pipeline.dataset import shards_after
from pipeline.decode import BatchDecoder
from pipeline.flight import ServiceConnection, serve
from pipeline.parts import WHOLE, Part
from pipeline.progress import Progress, ProgressWriter, RunFollower, progress_name
from pipeline.replay import Replay
from pipeline.replay_client import RemoteReplay, describe
from pipeline.replay_service import ReplayService
from pipeline.retention import Retention, RetentionConfig
from pipeline.several_replays import SeveralReplays
from tests.pipeline.replay_factory import make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, tiny_terms

TERMS = tiny_terms()
SIZES = {"a0": 24, "a1": 8, "a2": 16, "a3": 8}  # Even ones are part 0's.
PARTS = [Part(index=0, total=2), Part(index=1, total=2)]


@pytest.fixture
def store(tmp_path):
    with unsynced():
        for seed, (name, number) in enumerate(SIZES.items()):
            store = make_dataset(tmp_path / "data", TERMS, number, collector=name, seed=seed)
    return store


def make_service(store, part, **settings) -> ReplayService:
    settings = {"alpha": 1.0, **settings}
    replay = make_replay(store, part=part, seed=part.index, **settings)
    replay.poll()
    return ReplayService(replay, TERMS, run="svc", dataset="data", largest_batch=16, part=part)


@contextlib.contextmanager
def connected(ports):
    members = []
    for port in ports:
        connection = ServiceConnection(f"grpc://127.0.0.1:{port}")
        members.append(RemoteReplay(connection, describe(connection)))
    several = SeveralReplays(members, BatchDecoder(TERMS, 1), generator=np.random.default_rng(0))
    several.poll()
    yield several
    several.close()


def identities(batch):
    return list(zip([name.decode() for name in batch.collector.tolist()], batch.sequence.tolist(), strict=True))


def sample_soon(several, seconds=30.0):
    deadline = time.monotonic() + seconds
    while (sample := several.sample(16)) is None:
        several.poll()
        assert time.monotonic() < deadline, several.waits_for()
    return sample


def test_a_part_follows_the_collectors_that_are_its_own(store):
    assert [Part.parse(f"{i}/2").owns("0acc30a52238ecef") for i in range(2)] == [False, True]
    assert WHOLE.owns("anything")
    replays = [make_replay(store, part=part) for part in PARTS]
    assert [replay.poll().sequences for replay in replays] == [40, 16]
    assert set(replays[0].progress(0).seen) == {"a0", "a2"}


@pytest.mark.parametrize("text", ["2/2", "1", "x/2", "-1/2", "0/0", "1/2/3"])
def test_a_wrong_part_is_refused(text):
    with pytest.raises(ValueError, match="allowed: I/N with I from 0 to N - 1"):
        Part.parse(text)


def test_draws_over_both_follow_the_priorities_of_all_as_do_n_and_probabilities(store):
    services = [make_service(store, part) for part in PARTS]
    priorities = {}
    for service in services:
        replay = service.replay
        assert isinstance(replay, Replay)
        ids = np.arange(len(replay._held.index))
        given = np.random.default_rng(len(ids)).uniform(0.1, 5.0, len(ids))
        replay.update_priorities(ids, given)
        priorities |= dict(zip(replay._held.index.identities(ids.tolist()), given.tolist(), strict=True))
    total, counts, rounds = sum(priorities.values()), dict.fromkeys(priorities, 0), 200
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(contextlib.closing(Server(service))).port for service in services]
        several = stack.enter_context(connected(ports))
        for _ in range(rounds):
            sample = sample_soon(several)
            assert sample.replay_sequences == 56
            for identity, probability in zip(identities(sample.batch), sample.probabilities, strict=True):
                counts[identity] += 1
                assert probability == pytest.approx(priorities[identity] / total)
    expected = np.array([priorities[each] / total for each in counts]) * rounds * 16
    # Draws within a service are stratified, which only makes the statistic smaller.
    assert chisquare(list(counts.values()), expected).pvalue > 1e-3
    shares = [sum(counts[each] for each in counts if PARTS[0].owns(each[0])), rounds * 16]
    mass = sum(value for (name, _), value in priorities.items() if PARTS[0].owns(name)) / total
    assert chisquare([shares[0], shares[1] - shares[0]], [mass * shares[1], (1 - mass) * shares[1]]).pvalue > 1e-3


class Server:
    def __init__(self, service, port=0):
        self._server = serve(service, "127.0.0.1", port)
        self.port = self._server.port

    def close(self):
        self._server.shutdown()


def test_priorities_find_their_service_and_corrupt_rows_are_replaced_from_theirs(store):
    name = shards_after(store, "a1", -1)[0]
    path = store.map_path(name.path)
    services = [make_service(store, part) for part in PARTS]
    data = bytearray(path.read_bytes())
    from pipeline.shard_reader import open_shard

    frame = bytes(open_shard(path).frame(3))
    data[data.index(frame) + len(frame) // 2] ^= 4
    path.write_bytes(data)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(contextlib.closing(Server(service))).port for service in services]
        several = stack.enter_context(connected(ports))
        for _ in range(30):
            sample = sample_soon(several)
            names = [each for each, _ in identities(sample.batch)]
            assert ("a1", 3) not in identities(sample.batch)
            wanted = np.where([each == "a2" for each in names], 50.0, 1e-3)
            assert several.update_priorities(sample.ids, wanted) == (16, 0, 0)
        assert np.mean([each == "a2" for each, _ in identities(sample_soon(several).batch)]) > 0.8
        metrics = several.metrics()
    assert metrics["corrupt_rows"] == 1
    assert metrics["size"] == 56
    assert services[1].replay.metrics()["corrupt_rows"] == 1


def test_a_lost_service_is_named_the_other_carries_on_and_a_restarted_one_is_found_again(store, caplog):
    caplog.set_level(logging.WARNING)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Server(make_service(store, PARTS[0]))))
        second = Server(make_service(store, PARTS[1]))
        several = stack.enter_context(connected([first.port, second.port]))
        while not any(name in ("a1", "a3") for name, _ in identities(sample_soon(several).batch)):
            pass
        second.close()
        alone = [sample_soon(several) for _ in range(20)][5:]
        assert f"127.0.0.1:{second.port}: not there" in caplog.text
        assert {name for sample in alone for name, _ in identities(sample.batch)} == {"a0", "a2"}
        assert {sample.replay_sequences for sample in alone} == {40}
        lost_ids = np.array([1])
        assert several.update_priorities(lost_ids, np.ones(1)) == (0, 1, 0)
        stack.enter_context(contextlib.closing(Server(make_service(store, PARTS[1]), second.port)))
        deadline = time.monotonic() + 30
        while sample_soon(several).replay_sequences != 56:
            several.poll()
            assert time.monotonic() < deadline
        assert "is back" in caplog.text


def test_one_that_has_to_wait_for_its_collectors_does_not_hold_up_the_others_for_ever(store, monkeypatch):
    monkeypatch.setattr(several_replays, "PATIENCE_SECONDS", 0.2)
    waiting = make_service(store, PARTS[1], min_sequences=16, samples_per_insert=1.0, band=33.0)
    with contextlib.ExitStack() as stack:
        services = [make_service(store, PARTS[0]), waiting]
        ports = [stack.enter_context(contextlib.closing(Server(service))).port for service in services]
        several = stack.enter_context(connected(ports))
        drawn = [sample_soon(several) for _ in range(40)]
        assert waiting.replay.metrics()["samples"] <= 33
        several.poll()
        # What was handed back because its batch was dealt out anew counts nowhere.
        assert sum(service.replay.metrics()["samples"] for service in services) == 16 * len(drawn)
    assert drawn[-1].replay_sequences == 40


# ---- collectors and retention know about parts


def test_a_collector_reads_the_record_of_the_part_that_owns_it(store):
    for part, allowed in zip(PARTS, (10, 1000), strict=True):
        record = Progress(sequences_seen=20, sequences_allowed=allowed, samples=0, updates=0, part=str(part))
        ProgressWriter(store, "svc", lambda record=record: record, part=part).start().close(clean=False)
    assert store.files("runs/svc") == ["progress-0.json", "progress-1.json"]
    for collector, allowed in (("a0", False), ("a1", True)):
        follower = RunFollower(store, collector=collector)
        follower.poll()
        assert follower.may_collect(0, collector).allowed == allowed


def test_retention_keeps_what_a_part_still_holds(store):
    for part, oldest in zip(PARTS, ({"a0": 1, "a2": 0}, {"a1": 0}), strict=True):
        record = Progress(sequences_seen=0, sequences_allowed=None, samples=0, updates=0, oldest=oldest, part=str(part))
        store.put(progress_name("svc", part), record.to_bytes())
    assert Retention(store, RetentionConfig(retain_sequences=1)).enforce() == 1
    assert [name.number for name in shards_after(store, "a0", -1)] == [1, 2]
    assert len(shards_after(store, "a1", -1)) == 1
