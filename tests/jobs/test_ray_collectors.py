"""Several collectors seen as one: their places on the ladder, their seeds, their sums. (Real Ray: tests/cluster.)"""

import logging

import pytest

from jobs import ray_collectors
from jobs.collect import CollectFlags, collect, main
from jobs.command_line import parse, refuse
from jobs.console import StatusLine, warn
from jobs.presets import laptop
from jobs.ray_collectors import CollectorActor, Collectors, Relayed, actor_argv
from pipeline.tracking import NullTracker
from tests.processes import until


def flags_of(place: int, incarnation: int, argv=()):
    own = actor_argv(argv, place, incarnation, envs=4, collectors=3, seed=100)
    return parse(CollectFlags, own, CollectFlags.defaults(laptop(), None), "collect.py").act


def test_collectors_stand_side_by_side_on_one_ladder_and_a_new_one_stands_where_the_dead_one_did():
    assert [flags_of(place, 0).ladder for place in range(3)] == ["0:12", "4:12", "8:12"]
    assert flags_of(1, 5).ladder == flags_of(1, 0).ladder


def test_no_lane_of_any_incarnation_repeats_the_seed_of_another():
    seeds = [
        flags_of(place, incarnation).seed + lane for place in range(3) for incarnation in range(4) for lane in range(4)
    ]
    assert len(set(seeds)) == len(seeds)


def test_an_actors_own_flags_win_over_those_of_the_command_line():
    act = flags_of(2, 0, ["--collectors", "3", "--seed", "100", "--ray-address", "auto"])
    assert (act.collectors, act.seed) == (1, 108)


def test_a_collector_that_is_refused_says_why():
    actor = CollectorActor(collect, ["--envs", "0"])
    until(lambda: actor.look()["outcome"] is not None, seconds=30, what="the refusal")
    code, reason = actor.look()["outcome"]
    assert code is None
    assert "envs is 0; allowed: above 0" in reason


def test_a_collector_is_told_to_stop_and_its_words_and_metrics_are_handed_over_once():
    def job(argv, stop, status, tracker) -> int:
        status.say("begun")
        status.show("nothing", env_steps=7)
        tracker.metrics({"collect/episode_return": 1.0}, 7)
        stop.wait(30)
        return 0

    actor = CollectorActor(job, [])
    until(lambda: actor.look()["values"] == {"env_steps": 7}, seconds=30, what="the first look")
    actor.stop()
    until(lambda: actor.look()["outcome"] == (0, ""), seconds=30, what="the end")
    assert actor.look()["said"] == actor.look()["metrics"] == []


def test_what_a_collector_warns_of_is_handed_over_once_and_is_no_part_of_its_refusal():
    def job(*_) -> int:
        warn("the disk is slow")
        logging.getLogger("pipeline").warning("junk is no shard")
        refuse("envs is 0")

    actor = CollectorActor(job, [])
    until(lambda: actor._outcome is not None, seconds=30, what="the end")
    answer = actor.look()
    assert answer["warnings"] == ["the disk is slow", "junk is no shard"]
    assert answer["outcome"] == (None, "envs is 0")
    assert actor.look()["warnings"] == []


def test_evaluation_lanes_of_every_collector_are_logged_by_version_and_warnings_are_named(monkeypatch, capsys):
    class Recorder(NullTracker):
        def metrics(self, values, step):
            seen.append((values, step))

    seen, tracker = [], Relayed()
    monkeypatch.setattr(ray_collectors, "ActorPool", lambda *_, **__: None)
    collectors = Collectors(2, lambda *_: (), threads=1, tracker=Recorder(), status=StatusLine("t"))
    tracker.metrics({"eval/episode_return": 4.0, "eval/env_steps": 50}, 7)
    answer = {"values": {"env_steps": 60}, "waits_for": "", "said": [], "warnings": ["slow"], "outcome": None}
    collectors._take(1, answer | {"metrics": list(tracker.waiting)})
    assert seen == [({"eval/episode_return": 4.0, "eval/env_steps": 60}, 7)]
    assert capsys.readouterr().err == "warning: collector 1: slow\n"


def test_a_ladder_of_ones_own_is_refused_beside_several_collectors(capsys):
    with pytest.raises(SystemExit):
        main(["--collectors", "2", "--ladder", "0:4"])
    assert "ladder is '0:4'; allowed: without --collectors" in capsys.readouterr().err
