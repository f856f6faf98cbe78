"""The door of a side that listens: accepts connections and lets in those that `Door` does not turn away."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from distributed_training.feed.channel import close_in_children
from distributed_training.feed.door import Door
from distributed_training.feed.pairing import plain_address
from distributed_training.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_ENDING = 4.0  # seconds that the thread has to end


class Accepting:
    """Listens, in a thread of its own. `take` gets each socket with the address that it comes from."""

    def __init__(self, host: str, port: int, door: Door, take: Callable[[socket.socket, str], None]) -> None:
        self._door, self._take, self._closing = door, take, False
        self._listening = close_in_children(listen_at(host, port))
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"feed door {self.port}", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more."""
        self._closing = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends an accept; to close alone does not
        self._thread.join(_ENDING)
        self._listening.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing:
                    return
                logger.warning("a connection could not be accepted: %s", error)  # too many open files, for one
                time.sleep(0.1)
                continue
            host = plain_address(str(address[0]))
            if refusal := self._door.enter(host):
                sock.close()
                self._door.refuse(f"{host}:{address[1]}", refusal)
                continue
            self._take(sock, host)


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens; ConfigError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port or address") from None
    sock.settimeout(1.0)
    return sock


def own_address() -> str:
    """The address that this machine uses towards others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
