"""Who may come in, and how many: what keeps a flood outside before a thread or a byte is spent on it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable

from distributed_training.feed.pairing import addresses_of
from distributed_training.feed.settings import FeedSettings

logger = logging.getLogger(__name__)

_SAY_EVERY = 5.0  # seconds between two lines about connections that are turned away
_SAY_AT_ONCE = 5  # lines that may come together


class Door:
    """Counts who is inside. Any thread may call it."""

    def __init__(self, settings: FeedSettings, allow: str | Iterable[str] | None, *, one_address: bool = False) -> None:
        """`one_address`: all come from the proxy's address, so that it tells nothing."""
        self._per_address = settings.connections if one_address else settings.per_address
        self._settings, self._allowed = settings, _allowed(allow)
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()
        self._half_open = 0
        self._since, self._said, self._unsaid = 0.0, 0, 0
        self.refused = 0
        """Connections that were not let in."""

    def enter(self, host: str) -> str:
        """Count a new connection, or say why it may not come in."""
        settings = self._settings
        with self._lock:
            if self._allowed is not None and host not in self._allowed:
                return f"only {', '.join(sorted(self._allowed))} may connect to this run"
            if self._half_open >= 2 * settings.half_open:  # those that were told to go have not gone yet
                return f"{self._half_open} connections have not proved yet who they are"
            if self._inside[host] >= self._per_address:
                return f"{self._inside[host]} connections come from this address already"
            if sum(self._inside.values()) >= settings.connections:
                return f"there are {settings.connections} connections already"
            self._inside[host] += 1
            self._half_open += 1
            return ""

    @property
    def crowded(self) -> bool:
        """Whether more have not proved yet who they are than may: the oldest of them has to go.

        Who belongs here proves it in a moment; to refuse the newest instead would let a flood keep loaders out.
        """
        return self._half_open > self._settings.half_open

    def proved(self) -> None:
        """A connection is no longer half open."""
        with self._lock:
            self._half_open -= 1

    def leave(self, host: str, *, proved: bool) -> None:
        """A connection ended."""
        with self._lock:
            self._inside[host] -= 1
            if not self._inside[host]:
                del self._inside[host]
            if not proved:
                self._half_open -= 1

    def refuse(self, peer: str, why: str) -> None:
        """Log a refusal and count it; of a flood only some lines now and then are logged."""
        with self._lock:
            now = time.monotonic()
            if now - self._since > _SAY_EVERY:
                self._since, self._said = now, 0
            self._said += 1
            say = self._said <= _SAY_AT_ONCE
            unsaid, self._unsaid = self._unsaid, 0 if say else self._unsaid + 1
        if say:
            more = f" (and {unsaid} others before)" if unsaid else ""
            logger.warning("refused a connection from %s: %s%s", peer, why, more)
        with self._lock:
            self.refused += 1


def _allowed(allow: str | Iterable[str] | None) -> set[str] | None:
    if allow is None:
        return None
    names = [allow] if isinstance(allow, str) else list(allow)
    return {address for name in names for address in addresses_of(name)}
