"""Where the GPU side listens: one feed server for each rank, and the links of all of them as one string."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed_training.config import Config
from distributed_training.data.base import Share
from distributed_training.feed import FeedServer, Figures
from distributed_training.feed.pairing import PairingLink, addresses_of, is_loopback, parse_links
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.group import exchange
from distributed_training.runtime.world import World, read_world
from distributed_training.split.identity import identity_for
from distributed_training.split.settings import feed_settings

if TYPE_CHECKING:
    from distributed_training.wire.fields import Fact

_ANYWHERE = ("0.0.0.0", "::", "")
_calls = itertools.count()  # every rank listens as often as the others


@dataclass(frozen=True)
class Address:
    """Where to listen, and who may come."""

    host: str
    port: int
    token: bytes | None = None
    allow: str | Iterable[str] | None = None
    """The only hosts that may connect."""


@dataclass
class Listening:
    """A server that listens, and how loaders reach it and those of the other ranks."""

    server: FeedServer
    links: list[PairingLink]
    world: World
    _last: Figures | None = None

    @property
    def link(self) -> str:
        """What a loader is given: the links of all ranks as one string."""
        return ",".join(map(str, self.links))

    @property
    def figures(self) -> Figures:
        """What the feed of this rank did, or has done when it was closed."""
        return self._last or self.server.figures()

    def close(self, *, finished: bool) -> None:
        """Stop listening. Unless training is `finished`, loaders wait for this side to come back."""
        self._last = self.figures
        self.server.close(finished=finished)

    def announce(self, what: str = "loaders", command: str = "dtrain feed CONFIG --to") -> None:
        """Say on the screen how to connect. On rank 0 only, for all ranks."""
        if self.world.rank:
            return
        lines = [f"waiting for {what}: {command} '{self.link}'"]
        if any(is_loopback(link.host) for link in self.links):
            lines.append(
                "  from this machine only; network.gpu_host=ADDRESS (GPU_HOST, or host= in Python) lets others in"
            )
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def listen(
    config: Config,
    address: Address,
    *,
    again: bool = False,
    epochs: int | None = None,
    facts: Mapping[str, Fact] | None = None,
    service: Any = None,
) -> Listening:
    """Open this rank's door and tell the other ranks about it.

    Args:
        again: the run is resumed: loaders that still have its link are to know it again.
        epochs: how many will be trained, where this side says that.
        facts: settings of the plan that loaders must have.
        service: what serves validation or inference, instead of training.
    """
    world = read_world()
    port = address.port + world.local_rank if address.port else 0
    host, name = _where(address.host)
    token, certificate = address.token, None
    if not is_loopback(host):
        identity = identity_for(config.run.root, port, again=again or world.attempt > 0, token=token)
        token, certificate = identity.token, identity.certificate
    server = FeedServer(
        epochs=epochs,
        host=host,
        port=port,
        token=token,
        certificate=certificate,
        allow=address.allow,
        settings=feed_settings(config, world.size),
        service=service,
        facts=facts,
    )
    server.hub.share = Share(world.rank, world.size)
    try:
        own, topic = server.link(name), f"feed-{next(_calls)}"
        links = [PairingLink.parse(text) for text in exchange(world, config.run.deadline, topic, str(own))]
    except BaseException:
        server.close(finished=False)
        raise
    return Listening(server, links, world)


def _where(host: str) -> tuple[str, str | None]:
    """(address to listen at, name that loaders call). An address that is not ours leads here some other way."""
    if "://" in host:
        raise ConfigError(
            "network.gpu_host is a pairing link, which is for loaders; the GPU side needs the address to listen at"
        )
    if host in _ANYWHERE:
        return host or "0.0.0.0", None
    if is_loopback(host) or any(_is_ours(address) for address in addresses_of(host)):
        return host, host
    return "0.0.0.0", host


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def links_to(
    gpu_host: str | PairingLink | None, gpu_port: int | None, token: bytes | None, config: Config
) -> list[PairingLink]:
    """The GPU side that a loader was told to call: a pairing link, or host and port; left out, those of the config."""
    if isinstance(gpu_host, PairingLink):
        return [gpu_host]
    host = gpu_host or config.network.gpu_host
    if "://" in host:
        return parse_links(host)
    return [PairingLink(host, gpu_port or config.network.port, token)]
