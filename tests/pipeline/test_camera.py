"""The camera's game is the filmed lane's, picture by picture."""

from dataclasses import replace

import numpy as np

from pipeline.environments import Camera, EnvironmentConfig, make_lanes
from pipeline.environments.camera import SCREEN


def test_the_camera_shows_lane_0_of_the_same_seed_at_every_step():
    config = EnvironmentConfig(env_id="ALE/Breakout-v5", sticky=0.25)
    lanes = make_lanes(replace(config, arguments=SCREEN), 2)
    first, camera, draw = lanes.reset(5), Camera(config, 5), np.random.default_rng(0)
    assert np.array_equal(camera.picture, first[0])
    for _ in range(60):
        actions = draw.integers(lanes.spec.num_actions, size=2)
        lanes.send(actions)
        step = lanes.recv()
        assert camera.follow(int(actions[0])) == step.reward[0]
        assert np.array_equal(camera.picture, step.observation[0])
    assert camera.picture.shape == (210, 160, 3)
    assert not np.array_equal(step.observation[0], step.observation[1])
    camera.close()
    lanes.close()
