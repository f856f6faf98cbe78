"""Keeps a tunnel up: watches it, opens it again when it has died, and says where it comes out now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from distributed_training.feed.tunnels.base import STARTING, PublicAddress, Tunnel
from distributed_training.runtime.errors import DistributedTrainingError

logger = logging.getLogger(__name__)

_LOOK = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_ENDING = 5.0


class TunnelKeeper:
    """A tunnel to one port with a thread that watches over it. The server behind it never notices that it was away."""

    def __init__(self, tunnel: Tunnel, port: int, on_address: Callable[[PublicAddress], None]) -> None:
        """Opens the tunnel; raises what that raises.

        Args:
            tunnel: what to open. It belongs to this keeper from now on.
            port: of this machine.
            on_address: called by the watching thread when the tunnel came back under another address.
        """
        self.tunnel, self.port = tunnel, port
        self._on_address = on_address
        self._ended = threading.Event()
        try:
            self.address = tunnel.start(port)
        except BaseException:
            tunnel.close()
            raise
        self._thread = self._begin()

    def watch_from_here(self) -> None:
        """Have another thread watch, begun by this one: a notebook shows what a thread says below the cell it is of."""
        self._ended.set()
        self._thread.join(STARTING + _ENDING)
        self._ended = threading.Event()
        self._thread = self._begin()

    def close(self) -> None:
        """End the tunnel. Safe to call twice."""
        self._ended.set()
        self.tunnel.close()  # it may be on its way up just now
        self._thread.join(_ENDING)
        self.tunnel.close()

    def _begin(self) -> threading.Thread:
        name = f"tunnel {self.tunnel.name}"
        thread = threading.Thread(target=self._watch, args=(self._ended,), name=name, daemon=True)
        thread.start()
        return thread

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK):
            if trouble := self.tunnel.trouble():
                logger.warning("the tunnel is down, opening it again: %s", trouble)
                self._reopen(ended)

    def _reopen(self, ended: threading.Event) -> None:
        pause = _FIRST_PAUSE
        while not ended.is_set():
            try:
                self.tunnel.close()
                address = self.tunnel.start(self.port)
            except DistributedTrainingError as error:
                if not ended.is_set():
                    logger.warning("the tunnel does not come back, next attempt in %.0f s: %s", pause, error)
            except Exception as error:  # whatever it is: the training is not to end by it
                if not ended.is_set():
                    logger.warning("the tunnel does not come back, next attempt in %.0f s", pause, exc_info=error)
            else:
                changed, self.address = address != self.address, address
                if changed:
                    self._on_address(address)
                else:
                    logger.warning("the tunnel is up again under its old address; loaders come back by themselves")
                return
            ended.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
