"""A port of a host of one's own that leads here: `ssh -R`."""

from __future__ import annotations

import re
import shlex

from distributed_training.feed.tunnels.agent import Agent, AgentTunnel, find_program
from distributed_training.feed.tunnels.base import STARTING, PublicAddress, TunnelError
from distributed_training.runtime.errors import ConfigError

_OPTIONS = (
    "BatchMode=yes",  # never ask for a password: nobody is there to type it
    "StrictHostKeyChecking=accept-new",  # a fresh notebook knows no host; what passes has TLS of its own
    "ExitOnForwardFailure=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a connection of its own, that ends with it
    "ControlPath=none",
    "LogLevel=DEBUG1",  # else it does not say when a port that was asked for by number is open
)
_CHOSEN = r"Allocated port (\d+) for remote forward"
_READY = r"remote forward success"
_NOISE = r"debug1:|OpenSSH_"


class SshTunnel(AgentTunnel):
    """Bytes as they are, to a port that the host's sshd chooses, and keeps when the connection comes back."""

    name = "ssh"
    raw = True

    def __init__(self, destination: str, ssh: str = "ssh") -> None:
        """
        Args:
            destination: `user@host` or `user@host:2222`, or a name from ~/.ssh/config.
            ssh: the command, with options of your own: "ssh -i key".
        """
        found = re.fullmatch(r"([^\s:@-][^\s:@]*@)?([^\s:@-][^\s:@]*)(:\d{1,5})?", destination)
        if found is None:
            raise ConfigError(f"ssh:{destination}: a tunnel over ssh is written ssh:user@host or ssh:user@host:22")
        self._host, self._user, self._port = found[2], found[1] or "", (found[3] or "")[1:]
        self._ssh = shlex.split(ssh)
        self._wanted = 0  # the host's choice the first time

    @property
    def pid(self) -> int | None:
        """Process id of ssh."""
        return self._agent.pid if self._agent is not None else None

    @property
    def hint(self) -> str:
        """Who can reach the port is for the host's sshd to say."""
        return (
            f"on {self._host} itself put 127.0.0.1 in place of {self._host}; other machines reach the port only where "
            f"its sshd_config says `GatewayPorts clientspecified`"
        )

    def start(self, port: int) -> PublicAddress:
        """The port that loaders know already, if the host still has it free; else another one."""
        program = find_program(self._ssh[0], "Install it: apt-get install -y openssh-client")
        if self._wanted:
            try:
                return self._open(program, self._wanted, port)
            except TunnelError:
                self.close()  # the host has not noticed yet that the old connection is gone, and holds the port
        return self._open(program, 0, port)

    def _open(self, program: str, wanted: int, port: int) -> PublicAddress:
        options = [word for option in _OPTIONS for word in ("-o", option)]
        there = [*(("-p", self._port) if self._port else ()), f"{self._user}{self._host}"]
        forward = f"*:{wanted}:127.0.0.1:{port}"
        agent = self._agent = Agent(
            [program, *self._ssh[1:], "-T", "-N", *options, "-R", forward, *there], noise=_NOISE
        )
        try:
            agent.wait_for(_READY, STARTING)
            self._wanted = wanted or int(agent.wait_for(_CHOSEN, STARTING)[1])
        except TunnelError as error:
            raise TunnelError(
                f"{error}. `{shlex.join([*self._ssh, *there])} true` must work without a password, and the host must "
                "allow forwarding (AllowTcpForwarding in its sshd_config)"
            ) from None
        return PublicAddress(self._host, self._wanted, raw=True)
