"""A process's rungs on the exploration ladder, split over the groups of lanes that act by themselves."""

from collections.abc import Iterator, Sequence

import numpy as np

from r2d2.exploration import epsilon_ladder


def lanes_of_groups(
    groups: Sequence[int], ladder: str | None, generator: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.random.Generator]]:
    """The epsilons ``[N]`` and the generator of each group of N lanes.

    Args:
        ladder: ``OFFSET:TOTAL``, where these lanes stand on a ladder shared by several processes; None: one of its own.

    Raises:
        ValueError: no ladder, or lanes that do not fit on it.
    """
    epsilons = epsilon_ladder(sum(groups), **_place(ladder))
    yield from zip(np.split(epsilons, np.cumsum(groups)[:-1]), generator.spawn(len(groups)), strict=True)


def _place(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    offset, colon, total = text.partition(":")
    if not colon or not offset.isdigit() or not total.isdigit():
        raise ValueError(f"ladder is {text!r}; allowed: OFFSET:TOTAL, two whole numbers")
    return {"offset": int(offset), "total": int(total)}
