"""The GPU side that dials: keeps as many connections open to a loader that listens as that has workers.

Who decides and who brings does not change: this side is the server of the protocol on a connection that it has opened
itself, always a WebSocket (see `answering` for the other end).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_training.feed.dialling import open_link
from distributed_training.feed.http_upgrade import SERVER_CALLS, LostError
from distributed_training.runtime.errors import DistributedTrainingError, FeedError
from distributed_training.wire import AuthenticationError

if TYPE_CHECKING:
    from distributed_training.feed.channel import Channel
    from distributed_training.feed.pairing import PairingLink
    from distributed_training.feed.session import Session

logger = logging.getLogger(__name__)

_CONNECT = 10.0  # seconds for one attempt
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_LOOK = 0.2  # seconds between two looks at how many connections are wanted
_SAY = 5.0  # seconds of vain attempts after which a person should know
_ENDING = 4.0  # seconds that the thread has to end


class Caller:
    """Dials, in a thread of its own. Also what its sessions take for a `Door`: there is no crowd to keep out."""

    def __init__(
        self,
        link: PairingLink,
        wanted: Callable[[], int],
        begin: Callable[[Channel, bytes], Session],
        stop: Callable[[DistributedTrainingError], None],
        *,
        ca_file: str = "",
    ) -> None:
        """`wanted` says how many connections there should be, `begin` starts a session, `stop` ends the training."""
        self.host, self.port = link.host, link.port
        self._link, self._wanted, self._begin, self._stop, self._ca_file = link, wanted, begin, stop, ca_file
        self._lock = threading.Lock()
        self._there = 0
        self._failures = 0  # one after the other
        self._since, self._said = 0.0, False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"feed to {link.address}", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self) -> None:
        """Dial no more."""
        self._closing.set()
        self._thread.join(_ENDING)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._there >= max(1, self._wanted()):
                self._closing.wait(_LOOK)
                continue
            if self._failures:
                pause = min(_FIRST_PAUSE * 2 ** (self._failures - 1), _LONGEST_PAUSE)
                if self._closing.wait(pause * random.uniform(0.5, 1.0)):
                    return
            try:
                channel, binding = open_link(self._link, _CONNECT, ca_file=self._ca_file, own=SERVER_CALLS)
            except LostError as error:
                self._failed(str(error))
                continue
            except DistributedTrainingError as error:
                self._stop(error)
                return
            if self._closing.is_set():
                channel.close()
                return
            with self._lock:
                self._there += 1
            self._begin(channel, binding)

    def _failed(self, why: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._failures = min(self._failures + 1, 10)
            if self._failures == 1:
                self._since, self._said = now, False
            say = not self._said and now - self._since > _SAY
            self._said = self._said or say
        if say:
            logger.warning("%s; trying again", why)

    def ended(self, session: Session) -> None:
        """A session ended; another connection takes its place."""
        if isinstance(session.failure, AuthenticationError):
            self._stop(
                FeedError(
                    f"{self._link.address}: the token is not that of the loader; take the link that it prints now"
                )
            )
        elif not session.admitted:
            self._failed(f"{self._link.address}: {session.failure}")
        with self._lock:
            self._there -= 1

    # -- as a door

    def proved(self) -> None:
        """A connection is one to the loader."""
        with self._lock:
            self._failures = 0

    def refuse(self, peer: str, why: str) -> None:
        """A connection came to nothing."""
        logger.info("no loader worker on the connection to %s: %s", peer, why)
