"""A loader that listens and is called by the GPU side: where, through which tunnel, and what people are told of it."""

from __future__ import annotations

import sys
from dataclasses import replace

from distributed_training.config import Config
from distributed_training.config.load import secret
from distributed_training.feed.answering import HomeDoor
from distributed_training.feed.pairing import is_loopback
from distributed_training.feed.tunnels import PublicAddress, Tunnel, TunnelKeeper, make_tunnel
from distributed_training.split.identity import identity_for
from distributed_training.split.listening import known_token, where_to_listen


class HomeListening:
    """The door at which a loader's workers await the GPU side. To be closed.

    Token and certificate are those of the last time at this port, so that a GPU side that still calls finds it again.
    """

    def __init__(
        self,
        config: Config,
        host: str | None = None,
        port: int | None = None,
        token: bytes | None = None,
        tunnel: str | Tunnel | None = None,
    ) -> None:
        """With a `tunnel`, as `make_tunnel` reads it or one of your own, it listens on this machine only."""
        self._tunnel, self._why = _made(tunnel)
        self._keeper: TunnelKeeper | None = None
        address, name = where_to_listen(host or config.network.cpu_host, "network.cpu_host")
        if self._tunnel is not None:
            address, name = "127.0.0.1", None
        port, certificate = config.network.port if port is None else port, None
        if self._tunnel is not None or not is_loopback(address):
            identity = identity_for(config.run.root, port, again=True, token=token or known_token(config))
            token = identity.token
            certificate = identity.certificate if self._tunnel is None or self._tunnel.raw else None
        behind = self._tunnel is not None
        self.door = HomeDoor(address, port, token=token, certificate=certificate, behind_proxy=behind)
        self.link = self.door.link(name)

    def announce(self) -> None:
        """Open the tunnel, if there is one, and say on the screen how the GPU side connects."""
        if self._tunnel is not None:
            _say(self._why)
            self._keeper = TunnelKeeper(self._tunnel, self.door.port, self._moved)
            self._publish(self._keeper.address)
        _say(f"waiting for the GPU side: dtrain serve CONFIG --connect '{self.link}'")
        if is_loopback(self.link.host):
            _say("  from this machine only; network.cpu_host=ADDRESS (CPU_HOST, or host= in Python) lets others in")

    def close(self) -> None:
        """Listen no more, and end the tunnel."""
        if self._keeper is not None:
            self._keeper.close()
        self.door.close()

    def _publish(self, address: PublicAddress) -> None:
        own = self.door.link()
        assert own.token is not None  # behind a tunnel there always is one
        self.link = replace(address.link(own.token, own.fingerprint), carrier="ws")

    def _moved(self, address: PublicAddress) -> None:
        """Called by the thread that watches the tunnel."""
        self._publish(address)
        _say(
            "the tunnel was away and is back under another address: end the GPU side, and have it connect to the new "
            f"link, and go on (--resume auto): dtrain serve --resume auto --connect '{self.link}'"
        )


def _made(tunnel: str | Tunnel | None) -> tuple[Tunnel | None, str]:
    if tunnel is None or isinstance(tunnel, Tunnel):
        return tunnel, f"tunnel: {tunnel.name}" if tunnel is not None else ""
    return make_tunnel(tunnel, secret("NGROK_AUTHTOKEN"))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
