"""What can be wrong with one stored sequence, judged by itself: its window, its flags, what stands outside of it."""

import sys
from typing import Any

import numpy as np

from schemas.geometry import CONTINUES, CUT, ENDS_NAMES, LIFE_LOST, TERMINATED, TRUNCATED, Window
from schemas.shard import NO_ACTION
from schemas.terms import DatasetTerms

ROW_COLUMNS = (
    "sequence",
    "episode",
    "start",
    "lane",
    "first_valid",
    "num_steps",
    "num_observations",
    "ends",
    "previous_action",
    "previous_reward",
    "env_steps",
)
_FLAGS = ("terminated", "truncated", "life_lost", "greedy")
STEP_COLUMNS = ("action", "reward", *_FLAGS)


def row_fault(terms: DatasetTerms, row: dict[str, Any], steps: dict[str, np.ndarray], frames: np.ndarray) -> str | None:
    """The first thing wrong with a sequence, in one line; None when all is well.

    Args:
        row: Python values of ``ROW_COLUMNS``.
        steps: ``STEP_COLUMNS``, each ``[S]``.
        frames: its decoded ``observation`` ``[K-1+S, *shape]``.
    """
    return (
        _window_fault(terms, row)
        or _padding_fault(terms, row, steps, frames)
        or _values_fault(terms, row, steps)
        or _flags_fault(terms, row, steps)
    )


def owned_steps(terms: DatasetTerms, columns: dict[str, Any]) -> np.ndarray:
    """Steps that a row, or each row of a shard, owns: ``SequenceGeometry.owned_steps`` by column names."""
    return terms.geometry.owned_steps(*(np.asarray(columns[name]) for name in ("first_valid", "num_steps", "ends")))


def episode_steps(terms: DatasetTerms, row: dict[str, Any]) -> int:
    """Steps of the episode up to the row's last real one: all of them when the row holds the end."""
    return row["start"] - terms.geometry.burn_in + row["first_valid"] + row["num_steps"]


def _window_fault(terms: DatasetTerms, row: dict[str, Any]) -> str | None:
    geometry, start, ends = terms.geometry, row["start"], row["ends"]
    index, rest = divmod(start, geometry.stride)
    if rest or start < 0:
        return f"start is {start}; allowed: multiples of the stride {geometry.stride}"
    if not 0 <= ends < len(ENDS_NAMES) or (ends == LIFE_LOST and terms.env.life_loss != "reset"):
        return f"ends is {ends}; allowed: one of {', '.join(ENDS_NAMES)}, the last one in reset mode only"
    ended = ends != CONTINUES
    steps = episode_steps(terms, row) if ended else sys.maxsize  # With no end in sight a window is full.
    if index > geometry.last_sequence(steps):
        return f"start is {start}; allowed: none that late in an episode of {steps} steps"
    stored = Window(start, row["first_valid"], row["num_steps"], row["num_observations"], ended)
    expected = geometry.window(index, steps, ended=ended)
    return None if stored == expected else f"window is {stored}; allowed: {expected}"


def _padding_fault(
    terms: DatasetTerms, row: dict[str, Any], steps: dict[str, np.ndarray], frames: np.ndarray
) -> str | None:
    """Rows outside the window are zero, and so are frames but for the K - 1 before the first valid row's."""
    first, past_last = row["first_valid"], row["first_valid"] + row["num_steps"]
    for name, values in steps.items():
        if values[:first].any() or values[past_last:].any():
            return f"{name} is not zero outside the window"
    past_last_frame = first + terms.geometry.frame_stack - 1 + row["num_observations"]
    if frames[:first].any() or frames[past_last_frame:].any():
        return "observation is not zero outside the window and its history"
    return None


def _values_fault(terms: DatasetTerms, row: dict[str, Any], steps: dict[str, np.ndarray]) -> str | None:
    actions = terms.env.num_actions
    if steps["action"].min() < 0 or steps["action"].max() >= actions:
        return f"an action is outside 0 to {actions - 1}"
    if not np.isfinite(steps["reward"]).all():
        return "a reward is not finite"
    if any(steps[flag].max() > 1 for flag in _FLAGS):
        return "a flag is neither 0 nor 1"
    action, reward = row["previous_action"], row["previous_reward"]
    begins_episode = episode_steps(terms, row) == row["num_steps"]
    fits = (action, reward) == (NO_ACTION, 0.0) if begins_episode else 0 <= action < actions
    return None if fits else f"previous action and reward are {action} and {reward}, which do not fit the first row"


def _flags_fault(terms: DatasetTerms, row: dict[str, Any], steps: dict[str, np.ndarray]) -> str | None:
    """Only the step that ended the episode carries a flag that ends one, and ``ends`` says which."""
    last = row["first_valid"] + row["num_steps"] - 1
    ending = {"terminated": TERMINATED, "truncated": TRUNCATED}
    if terms.env.life_loss == "reset":  # Of two reasons in one step the earlier of these counts.
        ending = {"terminated": TERMINATED, "life_lost": LIFE_LOST, "truncated": TRUNCATED}
    for flag in ending:
        if steps[flag][:last].any():
            return f"{flag} before the last step"
    said = next((ends for flag, ends in ending.items() if steps[flag][last]), None)
    allowed = (CONTINUES, CUT) if said is None else (said,)
    names = " or ".join(ENDS_NAMES[ends] for ends in allowed)
    return None if row["ends"] in allowed else f"ends is {ENDS_NAMES[row['ends']]}; allowed by the flags: {names}"
