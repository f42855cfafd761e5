"""A replay behind Arrow Flight on loopback: the same batches; lost answers, clients and services."""

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections import Counter
from dataclasses import fields
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest

from pipeline import flight as flight_module
from pipeline.dataset import shards_after
from pipeline.flight import ServiceConnection, check_address, serve
from pipeline.prefetch import Prefetcher
from pipeline.replay_client import RemoteReplay, describe
from pipeline.replay_messages import LARGEST_REQUEST_BYTES, DrawRequest, UpdateRequest, unpack_batch
from pipeline.replay_service import LEASE_SECONDS, MOST_OUTSTANDING, ReplayService
from pipeline.shard_reader import open_shard
from schemas.records import SequenceBatch
from tests.pipeline.replay_factory import make_quarry, make_replay, unsynced
from tests.pipeline.sequence_factory import make_dataset, make_sequences, tiny_terms

TERMS = tiny_terms()
PATIENCE_SECONDS = 20.0


@pytest.fixture
def store(tmp_path):
    with unsynced():
        return make_dataset(tmp_path / "data", TERMS, 40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_service(store, clock=time.monotonic, run="svc", dataset="data", terms=TERMS, **settings):
    replay = make_replay(store, **settings)
    replay.poll()
    return ReplayService(replay, terms, run=run, dataset=dataset, largest_batch=16, clock=clock)


@contextlib.contextmanager
def served(service, port=0):
    server = serve(service, "127.0.0.1", port)
    try:
        yield server.port
    finally:
        server.shutdown()


@pytest.fixture
def connect():
    """Remote replays that are closed at the end."""
    with contextlib.ExitStack() as open_replays:

        def connect_to(port, **settings) -> RemoteReplay:
            connection = ServiceConnection(f"grpc://127.0.0.1:{port}")
            remote = RemoteReplay(connection, describe(connection), **settings)
            open_replays.callback(remote.close)
            return remote

        yield connect_to


def draw(service, number, *, client="one", batch_size=8, corrupt=(), incarnation=None, **told):
    incarnation = incarnation or service.description.incarnation
    wanted = {"number": number, "batch_size": batch_size, "corrupt": corrupt, "incarnation": incarnation}
    request = DrawRequest(client=client, **wanted, **told)
    return unpack_batch(service.draw(DrawRequest.from_bytes(request.to_bytes())))


def metrics_of(service):
    return service.replay.metrics()


def sample_soon(remote):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (sample := remote.sample(8)) is None:
        assert time.monotonic() < deadline
    return sample


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_array_equal(ours.probabilities, theirs.probabilities)
    assert ours.replay_sequences == theirs.replay_sequences
    for field in fields(SequenceBatch):
        np.testing.assert_equal(getattr(ours.batch, field.name), getattr(theirs.batch, field.name))


def flip_a_bit_of_row(store, number, row):
    name = shards_after(store, "c0", -1)[number]
    path = store.map_path(name.path)
    frame, data = bytes(open_shard(path).frame(row)), bytearray(path.read_bytes())
    data[data.index(frame) + len(frame) // 2] ^= 4
    path.write_bytes(data)


# ---- the same replay


@pytest.mark.parametrize("threads", [1, 3])
def test_in_process_and_through_the_service_the_batches_are_the_same_for_one_seed(store, connect, threads):
    flip_a_bit_of_row(store, 1, 3)
    flip_a_bit_of_row(store, 4, 0)
    local, priorities = make_replay(store, seed=7), np.random.default_rng(0)
    service = make_service(store, seed=7)
    with served(service) as port, Prefetcher(local, 16, deterministic=True) as ours:
        remote = connect(port, threads=threads)
        with Prefetcher(remote, 16, deterministic=True) as theirs:
            for _ in range(30):
                sample, other = ours.next(PATIENCE_SECONDS), theirs.next(PATIENCE_SECONDS)
                assert_same(sample, other)
                new = priorities.choice([0.0, 0.1, 2.0, 30.0, np.nan, np.inf, -1.0], 16)
                assert local.update_priorities(sample.ids, new) == remote.update_priorities(other.ids, new)
            mine, theirs_metrics = local.metrics(), remote.metrics()
    assert mine["corrupt_rows"] == 2
    assert {name: theirs_metrics[name] for name in mine if name != "waiting_seconds"} == {
        name: value for name, value in mine.items() if name != "waiting_seconds"
    }


def test_batches_fetched_ahead_are_whole_and_priorities_find_their_sequences(store, connect):
    expected = {each.sequence: each for each in make_sequences(TERMS, 40)}
    service = make_service(store)
    with served(service) as port:
        remote = connect(port, threads=2)
        with Prefetcher(remote, 8, depth=2) as batches:
            for _ in range(30):
                sample = batches.next(PATIENCE_SECONDS)
                for position, number in enumerate(sample.batch.sequence.tolist()):
                    np.testing.assert_array_equal(sample.batch.observation[position], expected[number].observation)
                    np.testing.assert_array_equal(sample.batch.core[0][position], expected[number].core[0])
                counts = remote.update_priorities(sample.ids, np.where(sample.ids == 11, 1e6, 1e-6))
                assert counts == (8, 0, 0)
            drawn = np.concatenate([batches.next(PATIENCE_SECONDS).ids for _ in range(10)])
    assert np.mean(drawn[-40:] == 11) > 0.9
    assert service.updates == 30


def test_a_batch_travels_compressed_and_the_service_never_decodes(store):
    with patch("pipeline.decode.decode_into", side_effect=AssertionError):
        wire = draw(make_service(store), 0)
    shard = {i + 8 * n: (name, i) for n, name in enumerate(shards_after(store, "c0", -1)) for i in range(8)}
    for position, i in enumerate(wire.ids.tolist()):
        name, row = shard[i]
        assert bytes(wire.row(position).frame) == bytes(open_shard(store.map_path(name.path)).frame(row))


def test_waiting_is_told_in_the_words_of_the_replay_and_ends_when_shards_come(tmp_path, connect):
    with unsynced():
        store = make_dataset(tmp_path / "data", TERMS, 8)
    service = make_service(store, min_sequences=20)
    with served(service) as port:
        remote = connect(port)
        assert remote.sample(8) is None
        assert remote.waits_for() == "sequences to start with: 8 of 20 are there"
        assert service.starved.is_set()
        with unsynced():
            make_dataset(tmp_path / "data", TERMS, 16, collector="c1")
        service.replay.poll()
        assert len(remote.sample(8).ids) == 8
        assert remote.waits_for() == ""


# ---- one client: lost answers, silence


def test_a_repeated_request_gives_the_same_batch_and_counts_nothing_twice(store):
    service = make_service(store)
    first, again = draw(service, 0), draw(service, 0)
    np.testing.assert_array_equal(first.ids, again.ids)
    other = draw(service, 1)
    assert not np.array_equal(first.ids, other.ids)
    corrupt = [int(first.ids[2])]
    replaced = draw(service, 0, corrupt=corrupt)
    assert corrupt[0] not in replaced.ids
    np.testing.assert_array_equal(draw(service, 0, corrupt=corrupt).ids, replaced.ids)
    assert (metrics_of(service)["samples"], metrics_of(service)["corrupt_rows"]) == (16, 1)


def test_a_replacement_that_fails_leaves_nothing_behind(store, monkeypatch):
    clock = Clock()
    service = make_service(store, clock)
    first = draw(service, 0)

    def no_descriptors(name):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(service.replay._held.cache, "get", no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            draw(service, 0, corrupt=[int(first.ids[0])])
    assert metrics_of(service)["samples"] == 0
    draw(service, 0)
    assert metrics_of(service)["samples"] == 8
    clock.now += LEASE_SECONDS + 1
    assert service.end_silent_sessions() == 1
    assert metrics_of(service)["samples"] == 0


def test_a_batch_given_back_counts_for_nothing_and_those_around_it_do(store):
    service = make_service(store)
    for number in range(3):
        draw(service, number)
    for _ in range(2):  # The first answer was lost.
        draw(service, 3, consumed=0, given_back=[1])
        assert metrics_of(service)["samples"] == 24
    assert service.state()[1]["limiter"]["samples"] == 8


def test_a_client_that_dies_leaves_nothing_behind_what_it_consumed_stays_counted(store):
    clock = Clock()
    service = make_service(store, clock)
    for number in range(4):
        draw(service, number, client="dies", consumed=max(-1, number - 2))
    draw(service, 0, client="lives")
    clock.now += LEASE_SECONDS - 1
    draw(service, 1, client="lives", consumed=0)
    assert service.end_silent_sessions() == 0
    clock.now += 2
    assert service.end_silent_sessions() == 1
    assert service.clients == 1
    assert metrics_of(service)["samples"] == 8 * (2 + 2)  # 0 and 1 of the dead one, both of the living one.
    _, values = service.state()
    assert values["limiter"]["samples"] == 8 * (2 + 1)  # Number 1 of the living one is not consumed.


def test_a_client_that_comes_back_after_its_lease_goes_on(store, connect):
    clock = Clock()
    service = make_service(store, clock)
    with served(service) as port:
        remote = connect(port)
        sample = remote.sample(8, ahead=True)
        clock.now += LEASE_SECONDS + 1
        service.end_silent_sessions()
        remote.consumed()
        assert remote.update_priorities(sample.ids, np.ones(8)) == (8, 0, 0)
        assert len(remote.sample(8).ids) == 8


def test_leaving_takes_back_what_was_not_consumed(store, connect):
    service = make_service(store)
    with served(service) as port:
        remote = connect(port)
        for _ in range(3):
            remote.sample(8, ahead=True)
        remote.consumed()
        remote.close()
        assert service.clients == 0
        assert metrics_of(service)["samples"] == 8


def test_a_client_cannot_hoard_batches(store):
    service = make_service(store)
    for number in range(MOST_OUTSTANDING):
        draw(service, number)
    with pytest.raises(ValueError, match="allowed: consume some first"):
        draw(service, MOST_OUTSTANDING)
    draw(service, MOST_OUTSTANDING, consumed=0)


# ---- several clients


def test_while_there_is_not_enough_for_all_who_has_waited_longest_draws_first(tmp_path):
    """Each shard allows one batch; ``greedy`` asks ten times as often as the others and gets no more than they do."""
    clock = Clock()
    with unsynced():
        store = make_dataset(tmp_path / "data", TERMS, 8)
        service = make_service(
            store, clock, batch_size=8, min_sequences=8, samples_per_insert=1.0, band=9.0, capacity=1000
        )
        served_batches: Counter[str] = Counter()
        numbers = Counter()
        names = ["greedy", "b", "c", "d"]
        for round_ in range(48):
            make_dataset(tmp_path / "data", TERMS, 8, collector=f"more{round_:02d}")
            service.replay.poll()
            for client in ["greedy"] * 10 + names[1:] + ["greedy"] * 10:
                clock.now += 0.01
                got = draw(service, numbers[client], client=client, consumed=numbers[client] - 1)
                if len(got.ids):
                    numbers[client] += 1
                    served_batches[client] += 1
    assert sum(served_batches.values()) >= 48
    assert max(served_batches.values()) - min(served_batches[name] for name in names) <= 2


def test_eight_clients_at_once_get_whole_batches_while_shards_come_and_go(tmp_path, connect):
    quarry = make_quarry(tmp_path / "quarry", {"a": [5] * 30, "b": [3] * 30})
    root = tmp_path / "data"
    with unsynced():
        store = make_dataset(root, TERMS, 1, collector="zero")
    service = make_service(store, capacity=60)
    stop, faults, counts = threading.Event(), [], Counter()

    def learn(client: int, remote: RemoteReplay) -> None:
        try:
            while not stop.is_set():
                sample = remote.sample(8, ahead=True)
                if sample is None:
                    continue
                remote.consumed()
                for position, name in enumerate(sample.batch.collector.tolist()):
                    if name == b"zero":
                        continue
                    expected = quarry.sequences[name.decode(), int(sample.batch.sequence[position])]
                    np.testing.assert_array_equal(sample.batch.observation[position], expected.observation)
                    np.testing.assert_array_equal(sample.batch.action[position], expected.action)
                updated = remote.update_priorities(sample.ids, np.ones(8))
                assert updated.applied + updated.stale == 8
                counts[client] += 1
        except Exception as error:
            faults.append(error)

    with served(service) as port:
        threads = [threading.Thread(target=learn, args=(i, connect(port))) for i in range(8)]
        for thread in threads:
            thread.start()
        for shards in zip(*quarry.shards.values(), strict=True):
            for name in shards:
                quarry.publish(name, store)
            service.replay.poll()
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert not faults
        assert service.updates == sum(counts.values())
        assert metrics_of(service)["samples"] >= 8 * sum(counts.values())
        assert metrics_of(service)["inserted"] == 241
    assert min(counts.values()) > 0
    assert len(counts) == 8


# ---- the service dies, hangs, comes back


def test_a_service_that_dies_is_waited_for_said_and_taken_up_again(store, connect, caplog, monkeypatch):
    monkeypatch.setattr(flight_module, "SAY_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)
    with served(make_service(store, seed=1)) as port:
        remote = connect(port)
        before = remote.sample(8)
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        assert remote.sample(8) is None
        assert remote.update_priorities(before.ids, np.ones(8)) == (0, 8, 0)
        time.sleep(0.02)
    assert "does not answer" in remote.waits_for()
    said = [record.message for record in caplog.records]
    assert 2 <= len(said) <= 4
    assert all(f"127.0.0.1:{port}: not there" in line for line in said)
    second = make_service(store, seed=2)
    with served(second, port):
        after = sample_soon(remote)
        assert "is back" in caplog.records[-1].message
        # Ids of the two starts are the same numbers in the service, and never the same here.
        assert not np.intersect1d(before.ids, after.ids).size
        assert remote.update_priorities(before.ids, np.full(8, 100.0)) == (0, 8, 0)
        assert metrics_of(second)["max_priority"] < 100
        assert remote.update_priorities(after.ids, np.full(8, 100.0)) == (8, 0, 0)
        assert metrics_of(second)["max_priority"] == 100
        assert remote.metrics()["service_losses"] == 1


def test_a_corrupt_row_of_an_earlier_start_costs_no_other_sequence(store, connect):
    with served(make_service(store, seed=1)) as port:
        remote = connect(port)
        drawn = remote.draw(8)
        assert drawn is not None
    second = make_service(store, seed=2)
    with served(second, port):
        while remote.draw(8) is None:
            time.sleep(0.02)
        other = remote.replace(drawn, np.arange(8) > 3)
        assert other is not None
        assert not np.intersect1d(other.ids, drawn.ids).size
        metrics = metrics_of(second)
    assert (metrics["corrupt_rows"], metrics["drawable"]) == (0, 40)


def test_an_update_that_overtakes_a_restart_is_stale(store):
    service = make_service(store)
    request = UpdateRequest(client="one", incarnation="another start", ids=[0, 1], priorities=[9.0, 9.0])
    assert service.update(request) == (0, 2, 0)
    assert metrics_of(service)["max_priority"] < 9


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run": "other"}, "run of the replay service is other; allowed: svc"),
        ({"dataset": "elsewhere"}, "dataset of the replay service is elsewhere; allowed: data"),
        ({"terms": tiny_terms(life_loss="roll")}, "identity.life_loss"),
    ],
)
def test_another_service_in_the_place_of_the_first_is_refused_by_name(store, connect, change, line):
    with served(make_service(store)) as port:
        remote = connect(port)
        assert remote.sample(8) is not None
    with served(make_service(store, **change), port), pytest.raises(ValueError, match=line):
        sample_soon(remote)


def test_a_service_that_hangs_holds_a_call_only_for_a_bounded_time(store, connect, monkeypatch):
    monkeypatch.setattr(flight_module, "CALL_SECONDS", 0.3)
    service, go_on = make_service(store), threading.Event()
    with served(service) as port:
        remote = connect(port)
        monkeypatch.setattr(service, "draw", lambda request: go_on.wait(PATIENCE_SECONDS))
        started = time.monotonic()
        assert remote.sample(8) is None
        assert 0.25 < time.monotonic() - started < 3
        go_on.set()


def test_a_port_that_never_answers_holds_a_call_only_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(flight_module, "CALL_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = ServiceConnection(f"grpc://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        assert describe(connection) is None
        assert time.monotonic() - started < 3
        connection.close()


# ---- what is refused

GOOD = {"client": "one", "number": 0, "batch_size": 8}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"\xff\xfe", "message is no JSON"),
        (b"[1]", "message is no JSON object"),
        (b"{}", "request is not complete"),
        (b"[" * 100_000, "message is no JSON"),
        (b" " * (LARGEST_REQUEST_BYTES + 1), "allowed: at most 1048576"),
        ({**GOOD, "batch_size": 17}, "batch_size is 17; allowed: at most 16"),
        ({**GOOD, "batch_size": 0}, "batch_size is 0; allowed: a whole number from 1 on"),
        ({**GOOD, "batch_size": 10**30}, "batch_size is 1000"),
        ({**GOOD, "number": True}, "number is True"),
        ({**GOOD, "client": "x" * 101}, "allowed: a name of 1 to 100 characters"),
        ({**GOOD, "corrupt": [-1]}, "corrupt is no list of ids"),
        ({**GOOD, "more": 1}, "request has the field 'more'"),
    ],
)
def test_a_wrong_request_is_refused_with_one_line_and_the_service_goes_on(store, connect, body, line):
    from pyarrow import flight

    service = make_service(store)
    with served(service) as port:
        remote = connect(port)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with flight.connect(f"grpc://127.0.0.1:{port}") as client, pytest.raises(flight.FlightServerError) as refusal:
            client.do_get(flight.Ticket(data)).read_chunk()
        assert line in str(refusal.value)
        assert "Traceback" not in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert len(remote.sample(8).ids) == 8
    assert metrics_of(service)["samples"] == 8


@pytest.mark.parametrize(
    ("kind", "body", "line"),
    [
        ("format the disk", b"", "action is 'format the disk'; allowed: describe, update, heartbeat, leave"),
        (
            "update",
            b'{"client": "a", "incarnation": "b", "ids": [1], "priorities": []}',
            "priorities are 0; allowed: 1",
        ),
        ("update", b'{"client": "a", "incarnation": "b", "ids": [1], "priorities": ["x"]}', "no list of numbers"),
        ("update", b'{"client": "a", "incarnation": "b", "ids": [1], "priorities": [1%s]}' % (b"0" * 400), "numbers"),
        ("heartbeat", b'{"client": 3}', "client is 3"),
    ],
)
def test_a_wrong_action_is_refused_with_one_line(store, kind, body, line):
    with served(make_service(store)) as port:
        connection = ServiceConnection(f"grpc://127.0.0.1:{port}")
        with pytest.raises(ValueError, match=r"the replay service at .* refuses: ") as refusal:
            connection.act(kind, body)
        connection.close()
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "http://a:1", "grpc://a", "grpc://a:x", "grpc://a:1/path"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(ValueError, match="allowed: grpc://host:port"):
        check_address(address)


def test_a_port_that_is_taken_is_refused_by_name(store):
    with served(make_service(store)) as port, pytest.raises(ValueError, match=f"port is {port}; allowed: .* in use"):
        serve(make_service(store), "127.0.0.1", port)


def test_a_batch_that_is_none_of_ours_is_refused():
    with pytest.raises(ValueError, match="not a batch of a replay service"):
        unpack_batch(pa.record_batch({"id": pa.array([1])}))


# ---- snapshot


def test_the_services_state_leaves_out_what_is_not_consumed_and_goes_on_from_there(store):
    service = make_service(store, seed=3)
    for number in range(3):
        draw(service, number, consumed=number - 1)
    service.update(UpdateRequest(client="one", incarnation=service.description.incarnation, ids=[5], priorities=[50.0]))
    third = draw(service, 2, consumed=1)  # Drawn before the update; not consumed.
    arrays, values = service.state()
    values = json.loads(json.dumps(values))
    restored = ReplayService(make_replay(store, seed=99), TERMS, run="svc", dataset="data", largest_batch=16)
    restored.restore(arrays, values)
    restored.replay.poll()
    assert restored.updates == 1
    assert metrics_of(restored)["samples"] == 16
    assert metrics_of(restored)["max_priority"] == 50
    again = draw(restored, 0)
    assert len(again.ids) == len(third.ids)
    assert metrics_of(restored)["samples"] == 24
    assert restored.description.incarnation != service.description.incarnation
