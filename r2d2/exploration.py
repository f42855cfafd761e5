"""Who explores how much (Kapturowski et al. 2019, section 2.3; Horgan et al. 2018)."""

import numpy as np

BASE, EXPONENT = 0.4, 7.0


def epsilon_ladder(lanes: int, *, offset: int = 0, total: int | None = None) -> np.ndarray:
    """``0.4 ** (1 + 7 i / (N - 1))`` for rungs i = offset .. offset+lanes-1 of N = total; 0.4 where N is 1.

    float64 ``[lanes]``. ``total`` defaults to ``lanes``: one process spans the whole ladder.

    Raises:
        ValueError: when the lanes do not fit on the ladder.
    """
    total = lanes if total is None else total
    if lanes < 1 or offset < 0 or offset + lanes > total:
        raise ValueError(f"ladder is {offset}:{total} for {lanes} lanes; allowed: 0 <= OFFSET, OFFSET + lanes <= TOTAL")
    rung = np.arange(offset, offset + lanes, dtype=np.float64)
    return BASE ** (1 + EXPONENT * rung / max(total - 1, 1))


def epsilon_greedy(
    q_values: np.ndarray, epsilons: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Actions int64 ``[N]``, and bool ``[N]`` whether each is the argmax of ``q_values`` ``[N, A]``.

    A random draw that hits the argmax counts as greedy. Every call takes the same number of random values, so that
    streams under one seed stay aligned whatever the network says.
    """
    lanes, num_actions = q_values.shape
    explores = generator.random(lanes) < epsilons
    random_actions = generator.integers(num_actions, size=lanes)
    best = q_values.argmax(1)
    actions = np.where(explores, random_actions, best)
    return actions, actions == best
