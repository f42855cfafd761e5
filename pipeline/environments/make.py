"""From a configuration to lanes, with every wrong input refused in one line."""

import gymnasium

from pipeline.environments.atari import AtariLanes, is_atari
from pipeline.environments.gym import make_gym_lanes
from pipeline.environments.lanes import EnvironmentConfig, Lanes


def make_lane_groups(config: EnvironmentConfig, num_lanes: int, threads: int = 1) -> list[Lanes]:
    """N lanes as the groups that a collector lets take turns.

    Two for Atari, whose emulator works in threads of its own between ``send`` and ``recv``; one for environments that
    step in the caller's thread.
    """
    if not is_atari(config.env_id) or num_lanes < 2:
        return [make_lanes(config, num_lanes, threads)]
    half = num_lanes // 2
    return [make_lanes(config, lanes, threads) for lanes in (num_lanes - half, half)]


def make_lanes(config: EnvironmentConfig, num_lanes: int, threads: int = 1) -> Lanes:
    """Make N lanes. ``threads`` is the number of emulator threads (Atari).

    Raises:
        ValueError: one line naming the field, its value and what is allowed.
    """
    for field, value in (("envs", num_lanes), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{field} is {value}; allowed: 1 or more")
    try:
        if is_atari(config.env_id):
            return AtariLanes(config, num_lanes, threads)
        return make_gym_lanes(config, num_lanes)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"env is {config.env_id!r}; allowed: a gymnasium id or module:EnvId. {reason}") from error
    except TypeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"env_arg is {config.arguments}; allowed: what {config.env_id} takes. {reason}") from error
