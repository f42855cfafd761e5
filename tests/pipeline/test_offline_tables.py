"""How episodes are grouped, from tables made by hand."""

import numpy as np

from pipeline.offline_tables import returns_by_lane


def _episodes(**columns):
    return {name: np.array(values) for name, values in columns.items()}


def test_lanes_of_several_collectors_are_one_where_they_explore_alike():
    table = returns_by_lane(
        _episodes(
            collector=["a", "a", "b", "b", "b"],
            lane=[0, 1, 0, 1, 1],
            epsilon=[0.4, 0.1, 0.1, 0.4, 0.4],
            **{"return": [1.0, 10.0, 20.0, 2.0, np.nan]},
        )
    )
    assert table["epsilon"].tolist() == [0.1, 0.4]
    assert table["lanes"].tolist() == [2, 2]
    assert table["games"].tolist() == [2, 2]
    assert table["mean"].tolist() == [15.0, 1.5]
