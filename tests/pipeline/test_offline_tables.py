"""How episodes are grouped, from tables made by hand."""

import numpy as np

from pipeline.offline_tables import returns_by_lane, returns_by_version, version_edges


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


def test_random_play_shares_its_bin_with_no_version():
    for versions in ([-1, 5, 30], [-1, 0, 400], [-1, -1], [3, 90]):
        edges = version_edges(np.array(versions))
        bins = np.searchsorted(edges, versions, "right")
        assert len(np.unique(bins)) == len(np.unique(versions))
        assert edges[0] == min(versions)
        assert len(edges) <= 23
        assert -1 not in versions or edges[1] == 0


def test_versions_of_different_networks_are_in_different_rows():
    none, first, second = "0" * 32, "a" * 32, "b" * 32
    table = returns_by_version(
        _episodes(
            lineage=[none, first, second, second], version_last=[-1, 5, 5, 100], **{"return": [0.0, 1.0, 2.0, 3.0]}
        )
    )
    assert table["lineage"].tolist() == [none, first, second, second]
    assert table["mean"].tolist() == [0, 1, 2, 3]
    assert (table["version_from"][0], table["version_to"][0]) == (-1, 0)
