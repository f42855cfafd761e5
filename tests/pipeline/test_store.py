import fcntl
import os
import stat
import threading

import pytest

from pipeline.store import LocalStore, open_store


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def leftovers(store):
    return [name for _, _, files in os.walk(store.root) for name in files if name.startswith((".", "_"))]


def fail(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def test_what_is_put_can_be_got_and_replaced_and_deleted(store):
    store.put("a/b/one", b"1")
    store.put("a/b/one", memoryview(b"11"))
    assert store.get("a/b/one") == b"11"
    assert store.map_path("a/b/one").read_bytes() == b"11"
    store.delete("a/b/one")
    store.delete("a/b/one")
    with pytest.raises(FileNotFoundError):
        store.get("a/b/one")


def test_listings_are_sorted_and_leave_out_what_is_no_data(store):
    for name in ("x/b", "x/a", "x/_c", "x/.d", "x/folder/e", "x/_folder/f"):
        store.put(name, b"")
    assert store.files("x") == ["a", "b"]
    assert store.folders("x") == ["folder"]
    assert store.folders() == ["x"]
    assert store.files("missing") == store.folders("x/a") == []


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../other", "a/../../b"])
def test_a_name_outside_the_store_is_refused(store, name):
    with pytest.raises(ValueError, match="allowed: a relative one"):
        store.put(name, b"")


def test_put_syncs_the_file_before_its_name_and_the_folders_after(store, monkeypatch):
    events = []
    sync, move = os.fsync, os.replace

    def record_sync(descriptor):
        events.append("folder synced" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file synced")
        sync(descriptor)

    def record_move(source, target):
        events.append("renamed")
        move(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_move)
    store.put("new/object", b"data")
    assert events == ["folder synced", "file synced", "renamed", "folder synced"]  # The first is of the new folder.
    events.clear()
    store.replace("new/object", b"data")
    assert events == ["renamed"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_put_leaves_the_older_object_and_no_temporary_file(store, monkeypatch, broken):
    store.put("object", b"old")
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        store.put("object", b"new")
    assert store.get("object") == b"old"
    assert leftovers(store) == []


def test_of_many_creators_exactly_one_wins_and_nobody_sees_half_an_object(store):
    outcomes, start = {}, threading.Barrier(8)

    def create(number):
        data = bytes([number]) * 200_000
        start.wait()
        outcomes[number] = store.create("terms", data), store.get("terms")

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number, (created, _) in outcomes.items() if created]
    assert len(winners) == 1
    assert {seen for _, seen in outcomes.values()} == {bytes(winners) * 200_000}
    assert leftovers(store) == []


def test_identity_changes_with_every_replacement_even_by_equal_contents(store):
    assert store.identity("params") is None
    seen = set()
    for _ in range(3):
        store.replace("params", b"same")
        assert store.identity("params") == store.identity("params")
        seen.add(store.identity("params"))
    assert len(seen) == 3


def test_a_store_whose_folder_was_moved_away_does_not_grow_a_second_half(tmp_path):
    root, away = tmp_path / "data", tmp_path / "away"
    store = open_store(str(root), create=True)
    store.put("shards/a", b"1")
    root.rename(away)
    with pytest.raises(FileNotFoundError, match="moved away"):
        store.put("shards/b", b"2")
    assert not root.exists()
    away.rename(root)
    store.put("shards/b", b"2")
    assert store.files("shards") == ["a", "b"]


def test_clean_leftovers_takes_what_a_killed_writer_left_and_nothing_else(store):
    store.put("folder/object", b"data")
    abandoned, working = store.root / "folder/.writing-dead", store.root / "folder/.writing-alive"
    abandoned.write_bytes(b"ha")
    with open(working, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # As a writer does while it writes.
        assert store.clean_leftovers(older_than_seconds=3600) == 0
        assert store.clean_leftovers(older_than_seconds=0) == 1
    assert not abandoned.exists()
    assert working.exists()
    assert store.get("folder/object") == b"data"


def test_a_local_store_opens_from_a_path_or_a_file_uri_only(tmp_path):
    assert open_store(str(tmp_path)).root == open_store(f"file://{tmp_path}").root == tmp_path
    assert open_store("relative/folder").root == (tmp_path.cwd() / "relative/folder")
    for uri in ("ftp://bucket/data", "file://elsewhere/data"):
        with pytest.raises(ValueError, match="allowed: a folder"):
            open_store(uri)
