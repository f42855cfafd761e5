"""The presets are what their sources say (algorithm.md section 5)."""

from jobs.presets import preset_named


def test_the_papers_and_the_articles_settings_are_theirs():
    found = {}
    for name in ("paper", "article"):
        preset = preset_named(name)
        geometry, learner, limiter = preset.geometry, preset.learner, preset.limiter
        found[name] = {
            "burn-in, unroll, stride": (geometry.burn_in, geometry.unroll, geometry.stride),
            "n-step": geometry.bootstrap,
            "gamma": learner.gamma,
            "batch": limiter.batch_size,
            "learning rate, clip": (learner.learning_rate, learner.clip_norm),
            "alpha, beta, eta": (preset.replay.alpha, learner.beta, learner.eta),
            "target copy": learner.target_copy_updates,
            "actor refresh": preset.refresh_env_steps,
            "replay": preset.replay.capacity,
            "samples per insert, minimum": (limiter.samples_per_insert, limiter.min_sequences),
            "dense, LSTM": (preset.network.dense, preset.network.core.core_width),
            "previous action, reward": (preset.network.use_previous_action, preset.network.use_previous_reward),
            "TBPTT segment, carried": (learner.tbptt, learner.tbptt_carry),
            "initial state": learner.initial_state,
            "all actions": preset.environment.arguments.get("full_action_space", False),
        }
    assert found == {
        "paper": {
            "burn-in, unroll, stride": (40, 80, 40),
            "n-step": 5,
            "gamma": 0.997,
            "batch": 64,
            "learning rate, clip": (1e-4, 40.0),
            "alpha, beta, eta": (0.9, 0.6, 0.9),
            "target copy": 2500,
            "actor refresh": 400,
            "replay": 100_000,
            "samples per insert, minimum": (0.8, 5000),
            "dense, LSTM": ((512,), 512),
            "previous action, reward": (True, True),
            "TBPTT segment, carried": (0, True),
            "initial state": "stored",
            "all actions": True,
        },
        "article": {
            "burn-in, unroll, stride": (0, 80, 80),
            "n-step": 3,
            "gamma": 0.997,
            "batch": 32,
            "learning rate, clip": (6.25e-5, 40.0),
            "alpha, beta, eta": (0.5, 0.6, 1.0),
            "target copy": 1000,
            "actor refresh": 80,  # Every submission of a lane.
            "replay": 100_000,
            "samples per insert, minimum": (0.8, 1000),
            "dense, LSTM": ((), 512),
            "previous action, reward": (True, False),
            "TBPTT segment, carried": (20, True),
            "initial state": "stored",
            "all actions": False,
        },
    }
