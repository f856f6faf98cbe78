"""A GPU side that is reached through a tunnel: what leads there, and what people are told about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from distributed_training.config.load import secret
from distributed_training.feed.pairing import PairingLink, encode_token
from distributed_training.feed.tunnels import PublicAddress, Tunnel, TunnelKeeper, make_tunnel
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import read_world
from distributed_training.split.listening import Address, Listening
from distributed_training.training.notebook import in_notebook


class Tunnelling:
    """The tunnel to a GPU side. To be closed.

    It is opened when there is a server to lead to, and outlives it: a training that was interrupted and starts again at
    the same port is found under the same address.
    """

    def __init__(self, tunnel: str | Tunnel) -> None:
        """`tunnel` is as `make_tunnel` reads it, or a tunnel of your own."""
        if isinstance(tunnel, Tunnel):
            self._tunnel, self._why = tunnel, f"tunnel: {tunnel.name}"
        else:
            self._tunnel, self._why = make_tunnel(tunnel, secret("NGROK_AUTHTOKEN"))
        self._keeper: TunnelKeeper | None = None
        self._listening: Listening | None = None
        self._what, self._command = "loaders", "dtrain feed CONFIG --to"

    def address(self, port: int, token: bytes | None = None, allow: str | Iterable[str] | None = None) -> Address:
        """Where the GPU side is to listen: at this machine only, where the tunnel comes out."""
        if read_world().size > 1:
            raise ConfigError(
                "a tunnel leads to one process, and this job has several; run it with one, or take an address of this "
                "machine that loaders can reach"
            )
        if allow is not None:
            raise ConfigError(
                "behind a tunnel all connections come from this machine, so that nobody can be told by an address; "
                "leave cpu_host (--allow) out: who has not the link is refused"
            )
        return Address("127.0.0.1", port, token, behind_proxy=True, encrypted=self._tunnel.raw)

    def lead_to(self, listening: Listening, what: str = "loaders", command: str = "dtrain feed CONFIG --to") -> None:
        """Open the tunnel, unless it leads to this port already, and say on the screen how to come."""
        self._listening, self._what, self._command = listening, what, command
        port = listening.server.port
        if self._keeper is not None and self._keeper.port != port:
            self.close()
        if self._keeper is None:
            _say([self._why])
            self._keeper = TunnelKeeper(self._tunnel, port, self._moved)
        else:
            self._keeper.watch_from_here()
        link = self._publish(self._keeper.address)
        _say([f"waiting for {what}: {command} '{link}'", *self._details(link)])

    def close(self) -> None:
        """End the tunnel. Safe to call twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def _moved(self, address: PublicAddress) -> None:
        """Called by the thread that watches the tunnel."""
        link = self._publish(address)
        news = (
            f"the tunnel was away and is back under another address: end the {self._what} that call the old one, and "
            "start the same command with the new link. Nothing is lost: this side waits, and goes on"
        )
        _say([news, f"waiting for {self._what}: {self._command} '{link}'", *self._details(link)])

    def _publish(self, address: PublicAddress) -> PairingLink:
        assert self._listening is not None
        own = self._listening.server.link()
        assert own.token is not None  # a server behind a tunnel always has one
        link = address.link(own.token, own.fingerprint)
        self._listening.links = [link]
        return link

    def _details(self, link: PairingLink) -> list[str]:
        assert link.token is not None
        lines = [f"  or, one by one: host {link.host}, port {link.port}, token {encode_token(link.token)}"]
        return [*lines, f"  {self._tunnel.hint}"] if self._tunnel.hint else lines


def _say(lines: list[str]) -> None:
    """In a notebook what goes to standard error looks like an error."""
    screen = sys.stdout if in_notebook() else sys.stderr
    screen.write("\n".join(lines) + "\n")
    screen.flush()
