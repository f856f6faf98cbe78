"""Formulas of collective operations, against values worked out by hand."""

from __future__ import annotations

import pytest

from distributed_training.planning.cluster import Cluster, Links
from distributed_training.planning.communication import Network, interpolate
from distributed_training.strategies.formulas import bytes_sent

GB = 1e9


def test_ring_inside_a_machine() -> None:
    network = Network(Cluster(per_node=8, intra_bandwidth=100 * GB, intra_latency=1e-6))

    # 2 * 7 messages, and 2 * 7/8 of the bytes through each link
    assert network.all_reduce(GB, 8) == pytest.approx(14e-6 + 2 * 7 / 8 / 100)
    assert network.seconds("all_gather", GB, 8) == pytest.approx(7e-6 + 7 / 8 / 100)
    assert network.seconds("reduce_scatter", GB, 8) == pytest.approx(7e-6 + 7 / 8 / 100)
    assert network.seconds("broadcast", GB, 8) == pytest.approx(3e-6 + 1 / 100)
    assert network.all_reduce(GB, 1) == 0.0


def test_between_machines_the_slower_link_decides_and_latencies_add_up() -> None:
    cluster = Cluster(per_node=8, intra_bandwidth=100 * GB, intra_latency=1e-6, bandwidth=GB, latency=1e-5)
    network = Network(cluster)

    assert network.all_reduce(GB, 64) == pytest.approx(14e-6 + 14e-5 + 2 * 63 / 64)


def test_small_tensors_go_by_tree_on_many_machines() -> None:
    network = Network(Cluster(per_node=1, bandwidth=GB, latency=1e-5))

    assert network.all_reduce(1000, 1024) == pytest.approx(2 * 10 * 1e-5 + 2 * 1000 / GB)
    assert network.all_reduce(1000, 1024) < 2 * 1023 * 1e-5


def test_what_was_measured_counts_and_other_numbers_of_ranks_follow_its_bandwidth() -> None:
    times = {"all_reduce": [(1e3, 1e-4), (1e6, 1e-3 + 1e-4)]}
    network = Network(Cluster(per_node=8, links={"gloo": Links(2, times)}), "gloo")

    assert network.all_reduce(1e6, 2) == pytest.approx(1.1e-3)
    # Six times the messages of two ranks in a ring, 2 * 3/4 of the bytes in place of 2 * 1/2.
    assert network.all_reduce(1e6, 4) == pytest.approx(3e-4 + 1.5e-3)


def test_bytes_that_a_rank_sends_are_those_of_the_strategies_page() -> None:
    assert bytes_sent("all_reduce", 4e9, 4) == pytest.approx(2 * 4e9 * 3 / 4)
    assert bytes_sent("all_gather", 4e9, 4) == pytest.approx(4e9 * 3 / 4)
    assert bytes_sent("all_reduce", 4e9, 1) == 0.0


def test_lines_between_points() -> None:
    points = [(1.0, 10.0), (2.0, 20.0), (4.0, 30.0)]

    assert interpolate(points, 1.5) == 15.0
    assert interpolate(points, 3.0) == 25.0
    assert interpolate(points, 8.0) == 50.0, "beyond the last: by its slope"
    assert interpolate(points, 0.5) == 10.0, "below the first: a step is never shorter than the shortest measured"
