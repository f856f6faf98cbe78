"""An address that leads to this machine already: a reverse proxy, a tunnel started by hand, a forwarded port."""

from __future__ import annotations

from distributed_training.feed.tunnels.base import PublicAddress, Tunnel


class GivenAddress(Tunnel):
    """Nothing is started: whoever gave the address looks after it."""

    name = "URL"

    def __init__(self, url: str) -> None:
        self._address = PublicAddress.parse(url)
        self.raw = self._address.raw

    def start(self, port: int) -> PublicAddress:
        """The address as it was given."""
        return self._address

    def trouble(self) -> str:
        """Nothing is known about it here."""
        return ""

    def close(self) -> None:
        """There is nothing of ours."""
