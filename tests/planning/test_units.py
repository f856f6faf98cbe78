"""Bandwidths, sizes and times as people write them."""

from __future__ import annotations

import pytest

from distributed_training.config.errors import ConfigError
from distributed_training.planning.units import (
    bandwidth_text,
    read_bandwidth,
    read_seconds,
    read_size,
    size_text,
    time_text,
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit", 25e9 / 8),
        ("25 Gbit/s", 25e9 / 8),
        ("100Gbps", 100e9 / 8),
        ("100Gb/s", 100e9 / 8),
        ("900GB/s", 900e9),
        ("1.5GiB/s", 1.5 * 2**30),
        ("400Mbit", 400e6 / 8),
        ("1TB/s", 1e12),
        ("125000000B", 125e6),
    ],
)
def test_a_bandwidth_is_bits_for_networks_and_bytes_where_it_says_so(text: str, rate: float) -> None:
    assert read_bandwidth(text, "--bandwidth") == rate


@pytest.mark.parametrize("text", ["fast", "25", "25 parsecs", "-3Gbit", "0Gbit", "Gbit", "1e999GB/s", ""])
def test_what_is_no_bandwidth_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--bandwidth") as refused:
        read_bandwidth(text, "--bandwidth")

    assert "25Gbit" in str(refused.value)


def test_sizes_and_times() -> None:
    assert read_size("80GB", "--device-memory") == 80e9
    assert read_size("141GiB", "--device-memory") == 141 * 2**30
    assert read_seconds("20us", "--latency") == pytest.approx(20e-6)
    assert read_seconds("0.5 ms", "--latency") == pytest.approx(5e-4)
    with pytest.raises(ConfigError, match="no time"):
        read_seconds("20", "--latency")
    with pytest.raises(ConfigError, match="no size"):
        read_size("lots", "--device-memory")


def test_figures_for_people() -> None:
    assert size_text(1_816e6) == "1.82 GB"
    assert size_text(340e3) == "340 kB"
    assert time_text(0.0123) == "12.3 ms"
    assert time_text(2.5) == "2.5 s"
    assert time_text(4e-5) == "40 us"
    assert bandwidth_text(25e9 / 8) == "3.12 GB/s"
