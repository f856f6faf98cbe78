"""Addresses of Ray clusters: what is meant where none is given, and whether somebody is there."""

from __future__ import annotations

import os

from distributed_training.runtime.errors import ConfigError, RanksError

_HERE = 2.0  # seconds in which a cluster on this machine has to answer


def through_client(address: str | None) -> str | None:
    """The address, given or in RAY_ADDRESS, if it is that of a Ray client (ray://): outside of the cluster."""
    known = address or os.environ.get("RAY_ADDRESS")
    return known if known and known.startswith("ray://") else None


def started_here() -> str | None:
    """The cluster that `ray start` made or joined on this machine, if it answers.

    Ray's own `auto` would take any: also one that another program has made for itself, and ends with itself.
    """
    from ray._private.utils import read_ray_address

    from distributed_training.launch.local import host_and_port
    from distributed_training.runtime.group import wait_for_master

    noted = read_ray_address()
    if not noted:
        return None
    try:
        wait_for_master(host_and_port(noted, "Ray's note of its newest cluster"), _HERE)
    except (ConfigError, RanksError):  # it was not ended by `ray stop`, and so the note is still there
        return None
    return str(noted)


def is_started_here(address: str) -> bool:
    """Whether an address is that of this machine's own cluster: Ray then finds the token that it asks for."""
    from distributed_training.launch.local import host_and_port, is_here

    noted = started_here() if "://" not in address and address != "auto" else None
    if noted is None or noted == address:
        return noted == address
    (host, port), (noted_host, noted_port) = (host_and_port(place, "--address") for place in (address, noted))
    return port == noted_port and is_here(host) and is_here(noted_host)


def knock(address: str, deadline: float) -> None:
    """Ray itself waits long, and ends the process, where nobody listens."""
    from distributed_training.launch.local import host_and_port
    from distributed_training.runtime.group import wait_for_master

    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "ray"):
        raise ConfigError(f"--address {address}: give auto, HOST:PORT or ray://HOST:PORT")
    host, port = host_and_port(place, "--address")
    try:
        wait_for_master((host, port), deadline)
    except RanksError:
        raise RanksError(
            f"no Ray cluster answers at {address} within {deadline:g} s; check the address (`ray status` on its head "
            "shows it; the port is 6379 unless chosen otherwise, 10001 with ray://), the firewall, and that it runs"
        ) from None
