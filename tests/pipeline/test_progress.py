import json
import threading
import time

import pytest

from pipeline.progress import (
    LIVE_SECONDS,
    SILENT_SECONDS,
    Progress,
    ProgressWriter,
    RunFollower,
    SeveralLiveRuns,
    progress_name,
)
from pipeline.store import LocalStore


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def clock():
    return Clock()


def record(beat=1, **values):
    defaults = {"sequences_seen": 100, "seen": {"me": 40}, "sequences_allowed": 150, "samples": 80, "updates": 5}
    return Progress(beat=beat, **(defaults | values))


def say(store, run, beat=1, **values):
    store.replace(progress_name(run), record(beat, **values).to_bytes())


# ---- the record


def test_a_record_comes_back_as_it_was():
    whole = record(oldest={"me": 3}, closed=True)
    assert Progress.from_bytes(whole.to_bytes()) == whole
    unlimited = record(sequences_allowed=None)
    assert Progress.from_bytes(unlimited.to_bytes()) == unlimited


def test_the_record_holds_what_the_design_says():
    names = {"beat", "closed", "sequences_seen", "seen", "oldest", "sequences_allowed", "samples", "updates"}
    assert set(json.loads(record().to_bytes())) == names


def test_a_later_version_may_say_more():
    values = json.loads(record().to_bytes()) | {"news": 1}
    assert Progress.from_bytes(json.dumps(values).encode()) == record()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[]", b"7", b"{}", record().to_bytes()[:-20], b'{"sequences_seen": 1}']
    + [
        json.dumps(json.loads(record().to_bytes()) | wrong).encode()
        for wrong in (
            {"beat": "x"},
            {"seen": [1]},
            {"seen": {"me": None}},
            {"samples": 1.5},
            {"sequences_allowed": "9"},
        )
    ],
)
def test_a_torn_record_is_refused(data):
    with pytest.raises(ValueError):
        Progress.from_bytes(data)


# ---- the writer


def read(store, run="run"):
    return Progress.from_bytes(store.get(progress_name(run)))


def test_the_beat_goes_on_and_a_changed_allowance_goes_out_sooner(store, clock):
    current = [record()]
    writer = ProgressWriter(store, "run", lambda: current[0], clock)
    assert writer.publish_if_due()
    assert read(store) == record(beat=1)
    clock.now += 0.3
    assert not writer.publish_if_due()
    current[0] = record(sequences_allowed=160)
    assert writer.publish_if_due()
    assert read(store).sequences_allowed == 160
    current[0] = record(sequences_allowed=170)
    clock.now += 0.1
    assert not writer.publish_if_due()  # At most five a second.
    current[0] = record(sequences_allowed=160)
    clock.now += 0.2
    assert not writer.publish_if_due()
    clock.now += 2.0
    assert writer.publish_if_due()
    assert read(store).beat == 3


def test_the_beat_goes_on_in_the_background_and_the_end_says_closed(store):
    current = [record()]
    writer = ProgressWriter(store, "run", lambda: current[0]).start()
    assert read(store).closed is False
    current[0] = record(sequences_allowed=999)
    deadline = time.monotonic() + 10
    while read(store).sequences_allowed != 999:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    beat = read(store).beat
    while read(store).beat == beat:  # Nothing changes any more.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.close()
    writer.close()
    assert read(store).closed is True
    assert read(store).sequences_allowed == 999
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_failed_does_not_say_that_it_has_closed(store):
    writer = ProgressWriter(store, "run", record).start()
    writer.close(clean=False)
    writer.close()
    assert read(store).closed is False


def test_a_later_start_goes_on_with_the_beat(store, clock):
    say(store, "run", beat=41, closed=True)
    ProgressWriter(store, "run", record, clock).publish_if_due()
    assert (read(store).beat, read(store).closed) == (42, False)


def test_a_record_that_cannot_be_written_is_counted_said_once_and_followed_by_the_next(tmp_path, clock, caplog):
    (tmp_path / "data").mkdir()
    store = LocalStore(tmp_path / "data")
    writer = ProgressWriter(store, "run", record, clock)
    writer.publish_if_due()
    (tmp_path / "data").rename(tmp_path / "away")
    for _ in range(3):
        clock.now += 2
        writer.publish_if_due()
    assert writer.failures == 3
    assert len(caplog.records) == 1
    assert not (tmp_path / "data").exists()
    (tmp_path / "away").rename(tmp_path / "data")
    clock.now += 2
    assert writer.publish_if_due()
    assert read(store).beat == 5


# ---- which run is followed


def beat_all(follower, store, clock, runs, beats):
    for beat in beats:
        clock.now += 1.0
        for run in runs:
            say(store, run, beat)
        follower.poll()


def test_a_lone_run_is_followed_at_once_whatever_its_state(store, clock):
    for values in ({}, {"closed": True}):
        say(store, "alone", **values)
        follower = RunFollower(store, clock=clock)
        follower.poll()
        assert follower.run == "alone"


def test_without_a_run_the_collector_runs_free_and_follows_the_first_that_appears(store, clock):
    follower = RunFollower(store, clock=clock)
    follower.poll()
    assert follower.run is None
    assert follower.may_collect(10**6, "me") == (True, "a learner's run")
    say(store, "first")
    follower.poll()
    assert follower.run == "first"


def test_of_several_runs_the_only_live_one_is_followed(store, clock):
    for run in ("old", "crashed", "live"):
        say(store, run, beat=7, closed=run == "old")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    assert follower.run is None
    assert follower.may_collect(0, "me").allowed is False  # It would be a pity to write for the wrong run.
    beat_all(follower, store, clock, ["live"], range(8, 15))
    assert follower.run == "live"


def test_without_a_live_run_the_only_unclosed_one_is_followed(store, clock):
    say(store, "old", closed=True)
    say(store, "older", closed=True)
    say(store, "crashed")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    clock.now += LIVE_SECONDS + 0.1
    follower.poll()
    assert follower.run == "crashed"


@pytest.mark.parametrize("closed", [True, False])
def test_of_several_runs_none_of_which_is_live_none_is_followed_and_that_is_said(store, clock, closed):
    say(store, "x", closed=closed)
    say(store, "y", closed=closed)
    follower = RunFollower(store, clock=clock)
    follower.poll()
    clock.now += LIVE_SECONDS + 0.1
    follower.poll()
    assert follower.run is None
    assert follower.may_collect(10**6, "me") == (True, "--follow, to choose one of: x, y")


def test_several_live_runs_are_refused_by_name_at_the_start(store, clock):
    for run in ("one", "two", "dead"):
        say(store, run)
    follower = RunFollower(store, clock=clock)
    follower.poll()
    with pytest.raises(SeveralLiveRuns, match=r"allowed: one of the live runs, one, two$"):
        beat_all(follower, store, clock, ["one", "two"], range(2, 12))


def test_a_named_run_is_followed_among_several_live_ones(store, clock):
    follower = RunFollower(store, "two", clock=clock)
    for run in ("one", "two"):
        say(store, run)
    beat_all(follower, store, clock, ["one", "two"], range(2, 12))
    assert follower.run == "two"
    assert follower.record == record(beat=11)


def test_a_named_run_that_does_not_exist_yet_leaves_the_collector_free(store, clock):
    say(store, "other")
    follower = RunFollower(store, "mine", clock=clock)
    follower.poll()
    assert follower.may_collect(10**6, "me") == (True, "run mine has no progress record")


def test_a_live_run_stays_followed_when_another_starts(store, clock):
    say(store, "mine")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    beat_all(follower, store, clock, ["mine"], range(2, 5))
    beat_all(follower, store, clock, ["mine", "other"], range(5, 20))
    assert follower.run == "mine"


def test_a_run_that_stalls_beside_an_old_crashed_one_stays_followed(store, clock):
    say(store, "crashed")
    say(store, "mine")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    beat_all(follower, store, clock, ["mine"], range(2, 10))
    clock.now += LIVE_SECONDS + 5
    follower.poll()
    assert follower.run == "mine"


def test_a_run_that_closes_beside_an_old_crashed_one_stays_followed(store, clock):
    say(store, "crashed")
    say(store, "mine")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    beat_all(follower, store, clock, ["mine"], range(2, 10))
    say(store, "mine", 10, closed=True)
    for _ in range(20):
        clock.now += 1
        follower.poll()
    assert follower.may_collect(10**9, "me") == (True, "run mine has closed")


def test_a_dead_run_is_left_for_the_only_live_one(store, clock):
    say(store, "crashed", beat=99)
    follower = RunFollower(store, clock=clock)
    follower.poll()
    assert follower.run == "crashed"
    clock.now += 100
    say(store, "new", beat=1)
    follower.poll()
    beat_all(follower, store, clock, ["new"], range(2, 4))
    assert follower.run == "new"


def test_runs_that_become_live_later_are_not_fatal(store, clock):
    follower = RunFollower(store, clock=clock)
    follower.poll()
    say(store, "one")
    say(store, "two")
    follower.poll()
    beat_all(follower, store, clock, ["one", "two"], range(2, 12))
    assert follower.run is None
    assert follower.may_collect(0, "me") == (True, "--follow, to choose one of: one, two")


def test_liveness_is_judged_by_the_watchers_clock_not_by_what_the_file_says(store, clock, tmp_path):
    """A clock that jumps, or another machine's: the file's time is never looked at."""
    import os

    say(store, "mine")
    say(store, "dead")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    for beat in range(2, 9):
        clock.now += 1
        say(store, "mine", beat)
        os.utime(tmp_path / progress_name("mine"), (0, beat))
        os.utime(tmp_path / progress_name("dead"), (4e9, 4e9 + beat))
        follower.poll()
    assert follower.run == "mine"


def test_a_run_that_was_deleted_is_no_candidate(store, clock, tmp_path):
    say(store, "x")
    say(store, "y")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    clock.now += LIVE_SECONDS + 0.1
    follower.poll()
    assert follower.run is None
    (tmp_path / progress_name("x")).unlink()
    (tmp_path / "runs/x").rmdir()
    follower.poll()
    assert follower.run == "y"


# ---- how far it lets a collector go


def following(store, clock, when_silent="wait", **values):
    say(store, "run", **values)
    follower = RunFollower(store, when_silent=when_silent, clock=clock)
    follower.poll()
    return follower


@pytest.mark.parametrize(
    ("published", "collector", "allowed"),
    [(89, "me", True), (90, "me", False), (91, "me", False), (49, "new", True), (50, "new", False)],
)
def test_a_collector_waits_when_all_allowed_sequences_are_there(store, clock, published, collector, allowed):
    """100 seen, 40 of them mine, 150 allowed: I may publish until 60 + mine reaches 150."""
    verdict = following(store, clock).may_collect(published, collector)
    assert verdict.allowed is allowed
    assert (
        "100 of 150" in verdict.reason or "150 of 150" in verdict.reason or "151 of 150" in verdict.reason
    ) is not allowed


def test_without_a_ratio_there_is_no_limit(store, clock):
    assert following(store, clock, sequences_allowed=None).may_collect(10**9, "me") == (True, "")


def test_a_closed_run_lets_everybody_go(store, clock):
    verdict = following(store, clock, closed=True).may_collect(10**9, "me")
    assert verdict == (True, "run run has closed")


def test_a_silent_run_holds_the_collector_at_its_last_allowance_or_not_as_told(store, clock):
    waiting, going = following(store, clock), following(store, clock, when_silent="collect")
    clock.now += SILENT_SECONDS - 1
    assert not waiting.may_collect(90, "me").allowed
    assert not going.may_collect(90, "me").allowed
    clock.now += 1
    assert waiting.may_collect(89, "me").allowed
    verdict = waiting.may_collect(90, "me")
    assert not verdict.allowed
    assert "silent for 30 s (--when-silent collect goes on)" in verdict.reason
    assert going.may_collect(90, "me") == (True, "run run has been silent for 30 s")
    say(store, "run", beat=2)
    going.poll()
    assert not going.may_collect(90, "me").allowed


def test_a_beat_that_stands_still_is_silence_however_often_the_file_is_replaced(store, clock):
    follower = following(store, clock, when_silent="collect")
    for _ in range(int(SILENT_SECONDS)):
        clock.now += 1
        say(store, "run", beat=1)
        follower.poll()
    assert follower.may_collect(10**9, "me").allowed


def test_a_torn_record_is_no_news_and_named_once(store, clock, caplog):
    follower = following(store, clock)
    for data in (b"{", b"\x00\x00", b"[1]"):
        store.replace(progress_name("run"), data)
        follower.poll()
    assert not follower.may_collect(90, "me").allowed
    assert len(caplog.records) == 1
    assert "runs/run/progress.json says nothing" in caplog.text
    say(store, "run", beat=2, sequences_allowed=151)
    follower.poll()
    assert follower.may_collect(90, "me").allowed
    store.replace(progress_name("run"), b"")
    follower.poll()
    assert len(caplog.records) == 2


def test_a_run_with_nothing_but_garbage_leaves_the_collector_free(store, clock, caplog):
    store.replace(progress_name("run"), b"garbage")
    follower = RunFollower(store, clock=clock)
    follower.poll()
    assert follower.may_collect(10**6, "me") == (True, "run run has no progress record")


def test_a_dataset_that_is_away_is_silence(tmp_path, clock):
    (tmp_path / "data").mkdir()
    store = LocalStore(tmp_path / "data")
    follower = following(store, clock)
    (tmp_path / "data").rename(tmp_path / "away")
    clock.now += SILENT_SECONDS
    follower.poll()
    assert follower.run == "run"
    assert "silent" in follower.may_collect(90, "me").reason


def test_a_wrong_setting_is_refused_by_name(store):
    with pytest.raises(ValueError, match="when_silent is 'panic'; allowed: wait, collect"):
        RunFollower(store, when_silent="panic")
