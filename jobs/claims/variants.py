"""What is changed in a task's settings or parts; ``ours`` changes nothing and is everybody's control."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jobs.alternating import Parts, Schedule
from jobs.claims import wrong
from jobs.presets import CoreOptions, Preset
from schemas.geometry import SequenceGeometry


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How one condition of an experiment differs from the task as it stands.

    Attributes:
        settings: the changed settings.
        parts: the changed parts.
        patched: further parts, changed while it runs.
        publish_updates: updates between two publications.
    """

    settings: Callable[[Preset], Preset] = lambda preset: preset
    parts: Parts = field(default_factory=Parts)
    patched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    publish_updates: int | None = None

    def schedule(self, schedule: Schedule) -> Schedule:
        return schedule if self.publish_updates is None else replace(schedule, publish_updates=self.publish_updates)


def learner(**changes: object) -> Callable[[Preset], Preset]:
    return lambda preset: replace(preset, learner=replace(preset.learner, **changes))


def window(**changes: int) -> Callable[[Preset], Preset]:
    return lambda preset: replace(preset, geometry=replace(preset.geometry, **changes))


def alpha(value: float) -> Callable[[Preset], Preset]:
    return lambda preset: replace(preset, replay=replace(preset.replay, alpha=value))


def both(*changes: Callable[[Preset], Preset]) -> Callable[[Preset], Preset]:
    def changed(preset: Preset) -> Preset:
        for change in changes:
            preset = change(preset)
        return preset

    return changed


def _without_memory(preset: Preset) -> Preset:
    return replace(preset, network=replace(preset.network, core=CoreOptions(core="none")))


def _unroll(steps: int) -> Callable[[Preset], Preset]:
    """Sequences of ``steps``, as many trained steps an update as before and for each env step."""

    def changed(preset: Preset) -> Preset:
        old = preset.geometry
        geometry = SequenceGeometry(
            burn_in=old.burn_in, unroll=steps, bootstrap=old.bootstrap, stride=steps // 2, frame_stack=old.frame_stack
        )
        batch = max(1, round(preset.limiter.batch_size * old.unroll / steps))
        return replace(preset, geometry=geometry, limiter=replace(preset.limiter, batch_size=batch))

    return changed


NO_BURN_IN = window(burn_in=0)
ZERO = learner(initial_state="zero")
VARIANTS = {
    "ours": Variant(),
    "segments, carried": Variant(settings=learner(tbptt=16)),
    "segments, cut": Variant(settings=learner(tbptt=16, tbptt_carry=False)),
    "initializer": Variant(settings=both(NO_BURN_IN, learner(initial_state="initializer"))),
    "linear initializer": Variant(
        settings=both(NO_BURN_IN, learner(initial_state="initializer", initializer="linear"))
    ),
    "int8 states": Variant(parts=Parts(on_sample=wrong.quantised_states)),
    "n = 1": Variant(settings=window(bootstrap=1)),
    "n = 5": Variant(settings=window(bootstrap=5)),
    "alpha 0.7": Variant(settings=alpha(0.7)),
    "alpha 0.9": Variant(settings=alpha(0.9)),
    "alpha 0.9, n = 5": Variant(settings=both(alpha(0.9), window(bootstrap=5))),
    "no forget bias": Variant(parts=Parts(on_learner=wrong.no_forget_bias)),
    "maximum priorities": Variant(settings=learner(eta=1.0)),
    "first-step priorities": Variant(patched=wrong.first_step_priorities),
    "zero states": Variant(settings=ZERO),
    "stored states alone": Variant(settings=NO_BURN_IN),
    "zero states alone": Variant(settings=both(NO_BURN_IN, ZERO)),
    "terminal step dropped": Variant(patched=wrong.terminal_step_dropped),
    "finished frame kept": Variant(parts=Parts(rollout=wrong.FinishedFrameKept)),
    "no recurrence": Variant(settings=_without_memory),
    "T = 16": Variant(settings=_unroll(16)),
    "T = 128": Variant(settings=_unroll(128)),
    "old parameters": Variant(publish_updates=200),
    "short sequences dropped": Variant(parts=Parts(builder=wrong.ShortDropped)),
    "current action fed in": Variant(patched=wrong.current_action_fed_in),
    "long burn-in": Variant(settings=window(burn_in=32)),
}
