"""Where the GPU side listens: one feed server for each rank, and the links of all of them as one string."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.config import Config
from distributed_training.data.base import Share
from distributed_training.feed import FeedServer, Figures
from distributed_training.feed.pairing import (
    WEB_PORT,
    PairingLink,
    addresses_of,
    decode_token,
    is_loopback,
    parse_links,
)
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
    behind_proxy: bool = False
    """A tunnel or proxy leads to `host`, which is this machine: a token is needed all the same."""
    encrypted: bool = False
    """Whether it passes on bytes as they are, so that the server needs a certificate of its own."""
    connect: PairingLink | None = None
    """Do not listen, but dial this loader, which does."""


@dataclass
class Listening:
    """A server that listens, and how loaders reach it and those of the other ranks."""

    server: FeedServer
    links: list[PairingLink]
    world: World
    calls: bool = False
    """Whether this side dials a loader; `links` is then the way to that."""
    told: bool = False
    """Whether the secret is one of `network.token_file`, which loaders have, too: then it is not shown."""
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
        if self.calls:
            sys.stderr.write(f"calling the loader at {self.links[0].address}\n")
            sys.stderr.flush()
            return
        shown = ",".join(link.without_token() for link in self.links) if self.told else self.link
        lines = [f"waiting for {what}: {command} '{shown}'{' network.token_file=FILE' if self.told else ''}"]
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
    settings = feed_settings(config, world.size)
    if address.connect is not None:
        server = FeedServer(epochs=epochs, settings=settings, service=service, facts=facts, call=address.connect)
        server.hub.share = Share(world.rank, world.size)
        return Listening(server, [address.connect], world, calls=True)
    port = address.port + world.local_rank if address.port else 0
    host, name = where_to_listen(address.host)
    token, certificate = address.token or known_token(config), None
    if address.behind_proxy or not is_loopback(host):
        identity = identity_for(config.run.root, port, again=again or world.attempt > 0, token=token)
        token = identity.token
        certificate = identity.certificate if address.encrypted or not is_loopback(host) else None
    server = FeedServer(
        epochs=epochs,
        host=host,
        port=port,
        token=token,
        certificate=certificate,
        allow=address.allow,
        behind_proxy=address.behind_proxy,
        settings=settings,
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
    return Listening(server, links, world, told=address.token is None and bool(config.network.token_file))


def where_to_listen(host: str, setting: str = "network.gpu_host") -> tuple[str, str | None]:
    """(address to listen at, name that others call). An address that is not ours leads here some other way."""
    if "://" in host:
        raise ConfigError(
            f"{setting} is a pairing link, which is for the other side; this one needs the address to listen at"
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


def known_token(config: Config) -> bytes | None:
    """The secret that both sides were told beforehand: that in `network.token_file`, if the config names one."""
    path = config.network.token_file
    if not path:
        return None
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"network.token_file: {path} cannot be read ({error}); it holds what "
            "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` prints, the same on both sides"
        ) from None
    try:
        return decode_token(text)
    except ConfigError:
        raise ConfigError(
            f"network.token_file: what is in {path} is no token; write what "
            "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` prints into it, the same on both sides"
        ) from None


def links_to(
    gpu_host: str | PairingLink | None, gpu_port: int | None, token: bytes | None, config: Config
) -> list[PairingLink]:
    """The GPU side that a loader was told to call: a pairing link, the address of a tunnel, or host and port; left out,
    those of the config. At port 443 there is a tunnel."""
    if isinstance(gpu_host, PairingLink):
        return [gpu_host]
    token = token or known_token(config)
    host, port = gpu_host or config.network.gpu_host, gpu_port or config.network.port
    if "://" in host:
        return parse_links(host, token)
    return [PairingLink(host, port, token, carrier="ws" if port == WEB_PORT else "tcp")]


def link_to_loader(link: str | PairingLink) -> PairingLink:
    """The link of a loader that listens, as its person has given it."""
    found = PairingLink.parse(link) if isinstance(link, str) else link
    if found.carrier != "ws":
        raise ConfigError(
            f"{found!r} is not the link of a loader that listens (dtrain+ws://...); it is printed by `dtrain feed "
            "CONFIG --listen` or CPULoader.listen_for_gpu"
        )
    return found
