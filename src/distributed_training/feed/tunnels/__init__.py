"""Tunnels: a public address for a GPU side that cannot be reached from outside, such as a notebook.

`base` says what a tunnel is, `keeper` keeps one up; each file beside them is one way to make it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

from distributed_training.feed.tunnels.base import PublicAddress, Tunnel, TunnelError
from distributed_training.feed.tunnels.cloudflared import CloudflaredTunnel, how_to_get
from distributed_training.feed.tunnels.given import GivenAddress
from distributed_training.feed.tunnels.keeper import TunnelKeeper
from distributed_training.feed.tunnels.ngrok import NgrokTunnel
from distributed_training.feed.tunnels.ssh import SshTunnel
from distributed_training.runtime.errors import ConfigError

__all__ = [
    "CloudflaredTunnel",
    "GivenAddress",
    "NgrokTunnel",
    "PublicAddress",
    "SshTunnel",
    "Tunnel",
    "TunnelError",
    "TunnelKeeper",
    "make_tunnel",
]

TUNNELS: dict[str, Callable[[str, str | None], Tunnel]] = {
    "cloudflared": lambda rest, secret: CloudflaredTunnel(rest or "cloudflared"),
    "ngrok": lambda rest, secret: NgrokTunnel(rest or "http", authtoken=secret),  # type: ignore[arg-type]
    "ssh": lambda rest, secret: SshTunnel(rest),
}
"""What may stand before a colon, made from what stands after it and the authtoken of ngrok."""


def make_tunnel(text: str, authtoken: str | None = None) -> tuple[Tunnel, str]:
    """The tunnel that a word names, and a line that says which one that is and why.

    Args:
        text: auto, cloudflared, ngrok, ngrok:tcp, ssh:user@host, or the URL of a tunnel that is there already.
        authtoken: of an ngrok account, if one is known.
    """
    if text == "auto":
        return _choose(authtoken)
    if "://" in text:
        return GivenAddress(text), f"tunnel: {text}, which is to lead to this machine already"
    name, _, rest = text.partition(":")
    if name not in TUNNELS:
        known = "auto, cloudflared, ngrok, ngrok:tcp, ssh:user@host or a URL"
        raise ConfigError(f"tunnel={text!r} is none of {known}")
    return TUNNELS[name](rest, authtoken), f"tunnel: {text}"


def _choose(authtoken: str | None) -> tuple[Tunnel, str]:
    """What can be used here without another question."""
    if shutil.which("cloudflared") is not None:
        return CloudflaredTunnel(), "tunnel: cloudflared, since it is installed and needs no account"
    if importlib.util.find_spec("pyngrok") is None:
        missing = "pip install 'distributed-training[tunnel]'"
    elif authtoken is None:
        missing = "the authtoken of an account in NGROK_AUTHTOKEN"
    else:
        return NgrokTunnel(authtoken=authtoken), "tunnel: ngrok, since NGROK_AUTHTOKEN is set"
    raise TunnelError(
        f"tunnel=auto finds neither the program cloudflared nor an account of ngrok. {how_to_get()}. (Or use ngrok, "
        f"which needs {missing}; or ssh:user@host)"
    )
