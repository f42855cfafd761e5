"""Datasets in an object store, against a real S3 server and one that misbehaves."""

import contextlib
import gc
import http.server
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from jobs.s3_server import s3_server
from pipeline import object_store
from pipeline.codec import row_layout
from pipeline.dataset import agree_on_terms, list_collectors, read_terms, shards_after
from pipeline.object_store import ObjectStore
from pipeline.ray_blocks import to_block
from pipeline.ray_sink import INCOMING, _datasink_class
from pipeline.ray_source import ReadPlan
from pipeline.scan import LeftOut, list_shards
from pipeline.store import StoreAway, open_store
from pipeline.verify import verify_dataset
from tests.pipeline.replay_factory import make_replay
from tests.pipeline.sequence_factory import make_dataset, make_sequences, make_writer, tiny_terms, write_shards

TERMS = tiny_terms()
CACHE_BYTES = 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def open_s3(server, tmp_path, monkeypatch, request):
    """Opens the test's own prefix; copies lie in the test's folder."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def opened(cache_bytes: int = CACHE_BYTES, part: str = "d") -> ObjectStore:
        uri = f"s3://bucket/{request.node.name.partition('[')[0][-40:]}-{os.getpid()}-{tmp_path.name}/{part}"
        return ObjectStore(uri, cache_bytes=cache_bytes, cache_root=tmp_path / "cache")

    return opened


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*.arrow")]


# ---- whole objects under names, as on a disk


def test_objects_are_put_got_listed_replaced_and_deleted(open_s3):
    store = open_s3()
    assert store.identity("a/b") is None
    assert store.modified_seconds("a/b") is None
    assert store.folders("a") == store.files("a") == store.folders() == []
    with pytest.raises(FileNotFoundError):
        store.get("a/b")
    store.put("a/b", b"one")
    before = store.identity("a/b")
    store.replace("a/b", memoryview(b"three"))
    assert store.get("a/b") == b"three"
    assert store.identity("a/b") not in (None, before)
    assert store.size_bytes("a/b") == 5
    assert abs(store.modified_seconds("a/b") - time.time()) < 60
    for name in ("a/_hidden", "a/.hidden", "a/c/d", "a/_f/d", "z"):
        store.put(name, b"")
    assert store.files("a") == ["b"]
    assert store.folders("a") == ["c"]
    assert store.folders() == ["a"]
    assert store.files() == ["z"]
    store.delete("a/b")
    store.delete("a/b")
    assert store.files("a") == []


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b"])
def test_names_outside_are_refused(open_s3, name):
    with pytest.raises(ValueError, match="allowed: a relative one inside the store"):
        open_s3().put(name, b"")


def test_a_dataset_uri_opens_the_right_kind_of_store(server):
    for scheme in ("s3", "gs"):
        store = open_store(f"{scheme}://bucket/some/data/")
        assert isinstance(store, ObjectStore)
        assert (store.uri, store.name, store.is_remote) == (f"{scheme}://bucket/some/data", "data", True)
    with pytest.raises(ValueError, match="allowed: a folder of this machine"):
        open_store("ftp://a/b")


def test_a_bucket_that_is_not_there_and_a_wrong_key_are_told_apart(server, monkeypatch, tmp_path):
    nowhere = ObjectStore("s3://no-such-bucket/d", cache_bytes=1, cache_root=tmp_path)
    assert nowhere.folders() == []
    with pytest.raises(FileNotFoundError):
        nowhere.put("a", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = ObjectStore("s3://bucket/d", cache_bytes=1, cache_root=tmp_path)
    started = time.monotonic()
    with pytest.raises(StoreAway, match=r"put a: .*403"):
        stranger.put("a", b"")
    assert time.monotonic() - started < 5


# ---- creation


def test_of_racing_creators_with_different_terms_one_wins_and_the_others_are_refused_by_name(open_s3, monkeypatch):
    """This server ignores conditions: only reading back tells."""
    monkeypatch.setattr(object_store, "SETTLE_SECONDS", 3.0)
    outcomes: Counter[str] = Counter()
    ready = threading.Barrier(4)

    def create(index: int) -> None:
        store, terms = open_s3(), tiny_terms(life_loss="roll" if index % 2 else "off")
        ready.wait()
        try:
            agree_on_terms(store, terms)
            outcomes[terms.env.life_loss] += 1
        except ValueError as error:
            outcomes["refused" if "identity.life_loss" in str(error) else str(error)] += 1

    threads = [threading.Thread(target=create, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = read_terms(open_s3()).env.life_loss
    assert outcomes == {winner: 2, "refused": 2}


@pytest.mark.parametrize(("latecomer", "agrees"), [("roll", True), ("off", False)])
def test_a_creator_that_comes_during_a_race_goes_by_its_outcome(open_s3, monkeypatch, latecomer, agrees):
    monkeypatch.setattr(object_store, "SETTLE_SECONDS", 1.0)
    store, loser, winner = open_s3(), tiny_terms(life_loss="off"), tiny_terms(life_loss="roll")
    store.put("dataset.json", loser.to_bytes())
    last_put = threading.Timer(0.3, store.put, ["dataset.json", winner.to_bytes()])
    last_put.start()
    try:
        with contextlib.nullcontext() if agrees else pytest.raises(ValueError, match="life_loss"):
            agree_on_terms(open_s3(), tiny_terms(life_loss=latecomer))
    finally:
        last_put.join()


def test_creating_again_the_same_is_no_creation(open_s3, monkeypatch):
    monkeypatch.setattr(object_store, "SETTLE_SECONDS", 0.0)
    store = open_s3()
    assert store.create("dataset.json", b"terms") is True
    assert store.create("dataset.json", b"terms") is False
    assert store.create("dataset.json", b"others") is False
    assert store.get("dataset.json") == b"terms"


# ---- shards through the replay, memory-mapped from a bounded cache


def test_sequences_written_to_the_store_are_drawn_from_it_and_every_one_is_there_once(open_s3):
    store = open_s3()
    sequences = make_sequences(TERMS, 40)
    agree_on_terms(store, TERMS)
    write_shards(store, TERMS, sequences)
    reader = open_s3()
    replay = make_replay(reader, batch_size=16)
    assert replay.poll().sequences == 40
    expected = {each.sequence: each for each in sequences}
    for _ in range(5):
        batch = replay.sample(16).batch
        for position, number in enumerate(batch.sequence.tolist()):
            np.testing.assert_array_equal(batch.observation[position], expected[number].observation)
    replay.close()
    report = verify_dataset(reader)
    assert (report.sequences, report.duplicates, report.bad_files) == (40, 0, [])


@pytest.mark.filterwarnings("ignore")  # Ray's own.
def test_a_dataset_of_ray_data_is_written_to_the_store_too(open_s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    local = make_dataset(tmp_path / "d", TERMS, 16)
    plan = ReadPlan(
        str(local.root), TERMS, ["collector", *row_layout(TERMS).dtype.names, "observation", "probe_core"], decode=False
    )
    blocks = [to_block(block) for block in plan.read(list_shards(local), LeftOut())]
    store = open_s3()
    sink = _datasink_class()(store.uri, TERMS, {}, 4)
    sink.on_write_complete(SimpleNamespace(write_returns=[sink.write(blocks, None)]))
    report = verify_dataset(store)
    assert (report.sequences, report.shards, report.faults) == (16, 4, [])
    assert store.files(INCOMING) == []


def test_the_cache_stays_within_its_bound_and_the_least_recently_used_go(open_s3, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.local_copies.KEPT", 1)
    store = open_s3()
    agree_on_terms(store, TERMS)
    write_shards(store, TERMS, make_sequences(TERMS, 80), per_shard=4)
    names = shards_after(store, "c0", -1)
    size = max(store.size_bytes(name.path) for name in names)
    reader = open_s3(cache_bytes=6 * size)
    replay = make_replay(reader, batch_size=16)
    replay.poll()
    for _ in range(20):
        replay.sample(16)
        held = sum(path.stat().st_size for path in copies(tmp_path))
        assert held <= 6 * size
    assert len(replay._held.cache) <= 7  # What is evicted is not kept mapped.
    replay.close()
    fetched = [reader.map_path(name.path) for name in names[:6]]
    reader.touch(names[0].path)
    reader.map_path(names[6].path)
    assert fetched[0].exists()
    assert not fetched[1].exists()


def test_what_an_earlier_process_fetched_is_used_again_what_it_fetched_by_half_is_not(open_s3, tmp_path):
    first = open_s3()
    first.put("shards/c/x.arrow", b"shard")
    path = first.map_path("shards/c/x.arrow")
    path.with_name(".half").write_bytes(b"sha")
    beside = open_s3()
    assert beside.map_path("shards/c/x.arrow") != path  # Each living process has a folder of its own.
    del first  # As when its process dies.
    gc.collect()
    later = open_s3()
    later._call = None  # Nothing is asked of the server.
    assert later.map_path("shards/c/x.arrow") == path
    assert not path.with_name(".half").exists()


# ---- nothing half-visible (H-d1)

WRITER = """
import sys, time
import numpy as np
from pipeline.object_store import ObjectStore
store = ObjectStore(sys.argv[1], cache_bytes=10**9)
data = np.random.default_rng(0).bytes(64_000_000)
print("ready", flush=True)
sys.stdin.readline()
store.put("shards/c0/000000/000000000-8-64.arrow", data)
print("acknowledged", flush=True)
"""


@pytest.mark.slow
def test_h_d1_a_writer_killed_in_the_middle_of_a_put_leaves_nothing_visible(open_s3):
    store, seen = open_s3(), set()
    command = [sys.executable, "-c", WRITER, store.uri]
    for seconds in (0.02, 0.05, 0.1, 0.2):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen |= sizes_of(store)
            time.sleep(0.01)
        process.kill()
        acknowledged = "acknowledged" in process.communicate()[0]
        if not acknowledged:
            time.sleep(0.3)
            seen |= sizes_of(store)
    assert seen <= {64_000_000}


def sizes_of(store: ObjectStore) -> set[int]:
    return {store.size_bytes(f"shards/c0/000000/{name}") for name in store.files("shards/c0/000000")}


def test_h_d1_a_writer_that_raises_while_it_makes_a_shard_publishes_nothing(open_s3):
    store = open_s3()
    calls = []

    def fails(batch, q_values):
        calls.append(len(q_values))
        raise RuntimeError("in the middle")

    writer = make_writer(store, TERMS, flush_sequences=4)
    writer._initial_priorities = fails
    for sequence in make_sequences(TERMS, 4):
        writer.add(sequence)
    with pytest.raises(RuntimeError):
        writer.flush()
    assert calls
    assert list_collectors(store) == []


# ---- slow, throttling, failing, resetting


class Misbehaving(http.server.BaseHTTPRequestHandler):
    """Answers each request by the next of ``script``; then 200 and an empty body."""

    script: ClassVar[list[str]]
    asked: ClassVar[list[str]]

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        self.asked.append(self.command)
        what = self.script.pop(0) if self.script else "200"
        if what == "reset":
            self.connection.close()
            return
        if what.startswith("slow"):
            time.sleep(float(what[4:]))
            what = "200"
        self.send_response(int(what))
        self.send_header("Content-Length", "0")
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 08:00:00 GMT")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = answer

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def misbehaving(monkeypatch, tmp_path):
    """(store, script, requests so far)"""
    script, asked = [], []
    handler = type("Handler", (Misbehaving,), {"script": script, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.handle_error = lambda *_: None
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setattr(object_store, "RETRY_SECONDS", 2.0)
        yield ObjectStore("s3://bucket/d", cache_bytes=1, cache_root=tmp_path), script, asked
        running.shutdown()


@pytest.mark.parametrize("trouble", ["503", "429", "500", "reset"])
def test_throttling_failing_and_reset_connections_are_tried_again(misbehaving, trouble):
    store, script, asked = misbehaving
    script += [trouble, trouble]
    store.put("a", b"data")
    assert asked == ["PUT"] * 3


def test_what_goes_on_failing_is_given_up_after_a_bounded_time_and_said(misbehaving, caplog, monkeypatch):
    store, script, asked = misbehaving
    monkeypatch.setattr(object_store, "SAY_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    script += ["503"] * 100
    started = time.monotonic()
    with pytest.raises(StoreAway, match=r"s3://bucket/d does not take part: put a: .*503"):
        store.put("a", b"data")
    assert time.monotonic() - started < 6
    assert 2 < len(asked) < 100
    assert "s3://bucket/d is away for 0 s" in caplog.text
    script.clear()
    store.put("a", b"data")
    assert caplog.records[-1].message == "s3://bucket/d is back"


def test_a_slow_store_is_said(misbehaving, caplog, monkeypatch):
    store, script, _ = misbehaving
    monkeypatch.setattr(object_store, "SLOW_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)
    script += ["slow0.4"]
    store.put("a", b"data")
    assert "is slow, or had to be asked again: put a took 0." in caplog.text


def test_while_the_server_is_killed_a_replay_waits_and_goes_on_when_it_is_back(open_s3, server, monkeypatch):
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.5)
    store = open_s3()
    agree_on_terms(store, TERMS)
    write_shards(store, TERMS, make_sequences(TERMS, 40), per_shard=2)
    replay = make_replay(open_s3(cache_bytes=1), batch_size=16)  # Next to nothing is cached.
    replay.poll()
    assert len(replay.sample(16).ids) == 16
    server.kill()
    try:
        assert replay.sample(16) is None
        assert "does not answer" in replay.waits_for()
        assert replay.poll() == (0, 0, 0)
        with pytest.raises(StoreAway):
            store.put("a", b"")
    finally:
        server.start()
    assert len(replay.sample(16).ids) == 16
    assert replay.metrics()["bad_shards"] == 0
    replay.close()
