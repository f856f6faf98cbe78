"""Tunnels of ngrok, through pyngrok: https (WebSocket) with a free account, or tcp where the account allows it."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import IO, Any, Literal

from distributed_training.feed.tunnels.base import PublicAddress, Tunnel, TunnelError
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.imports import require

_ACCOUNT = (
    "ngrok needs the authtoken of an account (a free one will do): copy it from "
    "https://dashboard.ngrok.com/get-started/your-authtoken and set it before: export NGROK_AUTHTOKEN=..., or in a "
    'notebook os.environ["NGROK_AUTHTOKEN"] = ...'
)
_CARD = (
    "ngrok opens tcp tunnels only for accounts with a payment method (https://dashboard.ngrok.com/settings#id-verification"
    "): add one, or take tunnel='ngrok', which needs none"
)
_STARTING = 30  # seconds
_ENDING = 3.0


class NgrokTunnel(Tunnel):
    """One agent process with one tunnel. pyngrok fetches the agent itself when it is used for the first time."""

    def __init__(
        self,
        kind: Literal["http", "tcp"] = "http",
        *,
        authtoken: str | None = None,
        domain: str | None = None,
        program: str | None = None,
        config_file: str | None = None,
    ) -> None:
        """
        Args:
            kind: http for WebSockets through https, tcp for plain connections.
            authtoken: of the account; left out, the one that the agent was told by `ngrok config add-authtoken`.
            domain: a domain of the account (for tcp host:port), so that the address stays; left out, ngrok chooses.
            program: the agent; left out, the one that pyngrok fetches.
            config_file: of the agent; left out, its own place.
        """
        if kind not in ("http", "tcp"):
            raise ConfigError(f"ngrok:{kind}: tunnels of ngrok are ngrok or ngrok:tcp")
        self.name = "ngrok" if kind == "http" else "ngrok:tcp"
        self.raw = kind == "tcp"
        self._kind, self._secret, self._domain = kind, authtoken, domain
        self._program, self._config_file = program, config_file
        self._settings: Any = None
        self._agent: Any = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the agent."""
        return int(self._agent.proc.pid) if self._agent is not None else None

    def start(self, port: int) -> PublicAddress:
        """Start the agent and have it open the tunnel."""
        pyngrok = require("pyngrok.ngrok", "tunnel", "a tunnel of ngrok")
        conf = require("pyngrok.conf", "tunnel", "a tunnel of ngrok")
        errors = require("pyngrok.exception", "tunnel", "a tunnel of ngrok")
        self._settings = conf.PyngrokConfig(
            ngrok_path=self._program,
            config_path=self._config_file,
            auth_token=self._secret,
            monitor_thread=False,  # its output is read here, so that thread and pipe end with the tunnel
            start_new_session=True,  # Ctrl-C, or a notebook's stop button, is not for the tunnel
            startup_timeout=_STARTING,
            request_timeout=_STARTING,
            config_version="3",
        )
        options: dict[str, Any] = {"proto": self._kind, "inspect": False}  # to inspect is to keep a copy of all
        if self._domain is not None:
            options["url"] = f"{'https' if self._kind == 'http' else 'tcp'}://{self._domain}"
        _hide_secrets()
        try:
            self._agent = agent = pyngrok.get_ngrok_process(self._settings)
            self._reader = threading.Thread(target=_drain, args=(agent.proc.stdout,), name="ngrok output", daemon=True)
            self._reader.start()
            opened = pyngrok.connect(f"{self._kind}://127.0.0.1:{port}", pyngrok_config=self._settings, **options)
        except errors.PyngrokError as error:
            raise TunnelError(self._explain(str(error))) from None
        except OSError as error:
            raise TunnelError(f"the ngrok agent cannot be fetched or started: {error}") from None
        return PublicAddress.parse(str(opened.public_url))

    def trouble(self) -> str:
        """Whether the agent runs; it looks after its connection itself."""
        if self._agent is None:
            return "it was never started"
        code = self._agent.proc.poll()
        return f"the ngrok agent ended with code {code}" if code is not None else ""

    def close(self) -> None:
        """End the agent."""
        settings, agent, reader = self._settings, self._agent, self._reader
        self._settings = self._agent = self._reader = None
        if settings is None:
            return
        pyngrok = require("pyngrok.ngrok", "tunnel", "a tunnel of ngrok")
        with suppress(OSError):
            pyngrok.kill(settings)
        if agent is not None:
            agent.proc.wait(_ENDING)
        if reader is not None:
            reader.join(_ENDING)

    def _explain(self, text: str) -> str:
        """What ngrok says, without the secret that it may repeat, and the next step."""
        said = " ".join((text.replace(self._secret, "...") if self._secret else text).split())
        if "ERR_NGROK_8013" in said:
            return f"{_CARD}. It said: {said}"
        if "authtoken" in said.lower() or "ERR_NGROK_4018" in said:
            return f"{_ACCOUNT}. It said: {said}"
        return f"ngrok does not open the tunnel: {said}"


class _NoSecrets(logging.Filter):
    """Keeps what the agent says of authtokens out of pyngrok's log, which shows errors where nobody set it up."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "authtoken" not in record.getMessage()


def _hide_secrets() -> None:
    lines = logging.getLogger("pyngrok.process.ngrok")
    if not any(isinstance(one, _NoSecrets) for one in lines.filters):
        lines.addFilter(_NoSecrets())


def _drain(lines: IO[str]) -> None:
    """Read what the agent says, so that it never waits for a reader."""
    with suppress(OSError, ValueError), lines:
        for _ in lines:
            pass
