"""Targets by hand (case H-a1) and against a loop that follows one row at a time."""

import math

import numpy as np
import pytest
import torch

from r2d2.targets import double_q_targets

GAMMA, N = 0.9, 2
REWARD = torch.tensor([1.0, 2, 3, 4, 5, 6]).unsqueeze(1)
ONLINE = torch.tensor([[1.0, 0], [0, 1], [2, 1], [1, 3], [0, 2], [5, 4]]).unsqueeze(1)
TARGET = torch.tensor([[10.0, 20], [11, 21], [12, 22], [13, 23], [14, 24], [15, 25]]).unsqueeze(1)
GOES_ON = torch.tensor([100])


def targets(*, end=GOES_ON, continues=None, epsilon=None, online=ONLINE, target=TARGET, reward=REWARD):
    continues = torch.ones_like(reward) if continues is None else continues
    found = double_q_targets(
        online, target, reward=reward, continues=continues, end=end, n=N, gamma=GAMMA, epsilon=epsilon
    )
    return found.squeeze(1)


def test_plain_targets_of_case_h_a1():
    np.testing.assert_allclose(targets(), [12.52, 23.33, 26.04, 20.65], rtol=1e-6)


def test_rescaled_targets_of_case_h_a1():
    np.testing.assert_allclose(targets(epsilon=1e-3), [10.816752, 20.670822, 21.607109, 13.689484], atol=1e-5)


def test_a_terminated_episode_pays_what_is_left_and_nothing_after_it():
    """Step 2 ends it: y_1 = 2 + 0.9 * 3, y_2 = 3, although both look at rows behind the end."""
    continues = torch.ones_like(REWARD)
    continues[2] = 0
    found = targets(end=torch.tensor([3]), continues=continues)
    np.testing.assert_allclose(found[:3], [12.52, 2 + 0.9 * 3, 3.0], rtol=1e-6)


def test_a_truncated_episode_bootstraps_from_its_final_observation():
    """Row 3 is that observation, its greedy action 1: y_1 spans two steps, y_2 one."""
    found = targets(end=torch.tensor([3]))
    np.testing.assert_allclose(found[1:3], [2 + 0.9 * 3 + 0.81 * 23, 3 + 0.9 * 23], rtol=1e-6)


def test_a_lost_life_that_does_not_end_the_episode_cuts_the_return_there():
    """Step 3 loses it: its reward counts, what follows does not; rows behind it bootstrap as ever."""
    continues = torch.ones_like(REWARD)
    continues[3] = 0
    found = targets(continues=continues)
    np.testing.assert_allclose(found, [12.52, 23.33, 3 + 0.9 * 4, 4.0], rtol=1e-6)


def test_what_lies_behind_the_end_may_be_anything():
    spoilt = {"reward": REWARD.clone(), "online": ONLINE.clone(), "target": TARGET.clone()}
    spoilt["reward"][3:] = torch.nan
    spoilt["online"][4:], spoilt["target"][4:] = torch.nan, torch.nan
    np.testing.assert_array_equal(targets(end=torch.tensor([3]), **spoilt)[:3], targets(end=torch.tensor([3]))[:3])
    terminated = torch.ones_like(REWARD)
    terminated[2] = 0
    spoilt["target"][3], spoilt["online"][3] = torch.nan, torch.nan
    assert targets(end=torch.tensor([3]), continues=terminated, **spoilt)[:3].isfinite().all()


def test_targets_are_float32_and_without_gradient_whatever_the_networks_compute_in():
    online = ONLINE.clone().bfloat16().requires_grad_()
    found = targets(online=online, target=TARGET.bfloat16() / 7, epsilon=1e-3)
    assert torch.equal(found, targets(target=(TARGET.bfloat16() / 7).float(), epsilon=1e-3))
    assert found.dtype == torch.float32
    assert not found.requires_grad


def one_target(t, b, *, online, target, reward, continues, end, n, gamma, epsilon):
    """The definition, followed with Python floats."""
    total, discount, row = 0.0, 1.0, t
    while row < t + n and row < end[b]:
        total += discount * float(reward[row, b])
        discount *= gamma * float(continues[row, b])
        row += 1
    if discount > 0:
        y = float(target[row, b, int(online[row, b].argmax())])
        e = epsilon
        inverse = (math.sqrt(1 + 4 * e * (abs(y) + 1 + e)) - 1) / (2 * e)
        total += discount * math.copysign(inverse**2 - 1, y)
    return math.copysign(math.sqrt(abs(total) + 1) - 1, total) + epsilon * total


@pytest.mark.parametrize("n", [1, 3, 5])
def test_targets_equal_the_definition_row_by_row(n):
    rng = np.random.default_rng(n)
    unroll, batch, actions = 9, 16, 4
    rows = unroll + n
    online, target = (torch.from_numpy(rng.normal(scale=3, size=(rows, batch, actions))).float() for _ in range(2))
    reward = torch.from_numpy(rng.normal(size=(rows, batch))).float()
    end = torch.from_numpy(rng.integers(1, rows + 3, batch))
    continues = torch.from_numpy((rng.random((rows, batch)) > 0.15).astype(np.float32))
    settings = {"reward": reward, "continues": continues, "end": end, "n": n, "gamma": 0.97, "epsilon": 1e-3}
    found = double_q_targets(online, target, **settings)
    for b in range(batch):
        for t in range(min(unroll, int(end[b]))):
            wanted = one_target(t, b, online=online, target=target, **settings)
            assert found[t, b].item() == pytest.approx(wanted, abs=1e-4), (t, b)
