"""The networks of this machine: its addresses, and which of them leads to another machine."""

from __future__ import annotations

import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_FAR = "192.0.2.1"  # an address for documentation: nobody has it, and the way there is the way to the world


def choose_interface(master: str) -> list[str]:
    """Let Gloo and NCCL use the network that leads to the master: a host's name may stand for another one.

    A user's own choice is kept. Gives the names of the variables that were set.
    """
    address = address_towards(master)
    if address is None:
        return []
    name = _interface_of(address)
    wanted = ["GLOO_SOCKET_IFNAME"] if name == "lo" else ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    chosen = [variable for variable in wanted if name is not None and variable not in os.environ]
    for variable in chosen:
        os.environ[variable] = name or ""
    return chosen


def address_towards(host: str) -> str | None:
    """This machine's address on the network that leads to another; None if there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: only the way is looked up
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_addresses() -> list[str]:
    """The IPv4 addresses under which other machines may see this one, the one that leads to the world first."""
    found = [address for address in _addresses().values() if not address.startswith("127.")]
    main = address_towards(_FAR)
    return sorted(found, key=lambda address: address != main)


def _interface_of(address: str) -> str | None:
    return next((name for name, own in _addresses().items() if own == address), None)


def _addresses() -> dict[str, str]:
    """Interfaces by name, with their IPv4 addresses."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover (not Linux)
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
