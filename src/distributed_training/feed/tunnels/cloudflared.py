"""Quick tunnels of Cloudflare: no account, a name of chance for as long as the program runs."""

from __future__ import annotations

import platform

from distributed_training.feed.tunnels.agent import Agent, AgentTunnel, find_program
from distributed_training.feed.tunnels.base import STARTING, PublicAddress

_PLACE = "/usr/local/bin/cloudflared"
_ADDRESS = r"\|\s+(https?://[^\s|]+)\s+\|"  # in a frame of its own; other addresses are in its messages, too
_READY = r"Registered tunnel connection|Connection \S+ registered"


class CloudflaredTunnel(AgentTunnel):
    """`cloudflared tunnel --url`, which prints the name that it was given."""

    name = "cloudflared"

    def __init__(self, program: str = "cloudflared") -> None:
        self._program = program

    def start(self, port: int) -> PublicAddress:
        """A new name at every start."""
        program = find_program(self._program, how_to_get())
        agent = self._agent = Agent([program, "tunnel", "--no-autoupdate", "--url", f"http://127.0.0.1:{port}"])
        address = PublicAddress.parse(agent.wait_for(_ADDRESS, STARTING)[1])
        agent.wait_for(_READY, STARTING)  # before that the name leads nowhere, which resolvers would remember
        return address


def how_to_get() -> str:
    """The next step where the program is missing."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    release = f"https://github.com/cloudflare/cloudflared/releases/latest/download/cloudflared-linux-{machine}"
    return f"Get it, no account is needed: curl -fsSL -o {_PLACE} {release} && chmod +x {_PLACE}"
