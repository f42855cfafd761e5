"""Which runs count as tries of one thing."""

from dataclasses import asdict, replace

from jobs.learn_flags import LearnFlags
from jobs.presets import DEFAULT_PRESET, preset_named
from jobs.run_tags import run_tags
from schemas.specs import ArraySpec, EnvSpec

ENV = EnvSpec(env_id="ALE/Pong-v5", observation=ArraySpec(shape=(84, 84), dtype="uint8"), action_set=("a", "b"))
FLAGS = LearnFlags.defaults(preset_named(DEFAULT_PRESET), None)


def _settings(spec: EnvSpec, **source) -> str:
    flags = asdict(FLAGS)
    flags["source"] |= source
    return run_tags("learn", spec, flags=flags)["settings"]


def test_learners_of_different_games_have_different_settings():
    other = replace(ENV, env_id="ALE/Breakout-v5")
    assert _settings(ENV, dataset="data/pong") != _settings(other, dataset="data/breakout")
    assert _settings(ENV) != _settings(replace(ENV, life_loss="roll"))


def test_an_environment_that_is_named_is_the_one_that_the_dataset_names():
    named = {"env": "ALE/Pong-v5", "sticky": 0.0, "life_loss": "off", "env_arg": ("noop_max=30",)}
    assert _settings(ENV, **named) == _settings(ENV)
