"""Vectorised environments. The only package that imports gymnasium and ale_py.

To add an environment of your own, register it with gymnasium and name it as ``module:EnvId``.
"""

from pipeline.environments.camera import Camera, can_film
from pipeline.environments.lanes import EnvironmentConfig, Lanes, LaneStep
from pipeline.environments.make import make_lane_groups, make_lanes
from pipeline.environments.restarting import EnvironmentFailure

__all__ = [
    "Camera",
    "EnvironmentConfig",
    "EnvironmentFailure",
    "LaneStep",
    "Lanes",
    "can_film",
    "make_lane_groups",
    "make_lanes",
]
