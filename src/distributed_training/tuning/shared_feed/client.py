"""A trial's side of the shared feed: a dataset whose samples lie in the memory of the service of this machine."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from distributed_training.config import Config
from distributed_training.data.base import Dataset, KeyedDataset, Share, Splits
from distributed_training.data.nested import map_tensors
from distributed_training.data.plan import Plan
from distributed_training.data.torch_dataset import fetch
from distributed_training.feed.columns import Unkept, put_together, take_apart
from distributed_training.runtime.errors import FeedError
from distributed_training.training.job import load_data
from distributed_training.tuning.shared_feed.messages import (
    MOST_BYTES,
    MOST_IDS,
    Message,
    address_of,
    data_identity,
    decode,
    encode,
    is_own,
    make_socket,
    numbers,
)
from distributed_training.tuning.shared_feed.rows import RowStore

logger = logging.getLogger(__name__)

_AGAIN = 10.0  # seconds after which a service that was gone is looked for again
_GREETING = 30.0  # seconds that a service has for its first answer


class SharedData:
    """The data of a trial, from the feed of its search where there is one on this machine.

    with SharedData(feed.name, config) as data, build_job(config, data=data.splits) as job:
        job.train()
    """

    def __init__(self, name: str | None, config: Config, load: Callable[[], Splits] | None = None) -> None:
        """
        Args:
            name: that of the feed; None where trials load for themselves.
            config: the trial's.
            load: how the trial loads its data for itself; left out, as the config says.
        """
        self.splits: Splits | None = None
        """The data; None where this trial has to load it for itself."""
        self._link: _Link | None = None
        if name is None:
            return
        self._link = _Link(name, data_identity(config), config.run.deadline)
        facts = self._link.facts()
        if facts is None:
            return
        own = _Own(load or functools.partial(load_data, config))
        parts = {part: SharedDataset(self._link, part, facts[part], own) for part in facts}
        self.splits = Splits(parts["train"], parts.get("validation"))

    def close(self) -> None:
        """Let go of the service. Safe to call twice."""
        if self._link is not None:
            self._link.close()

    def __enter__(self) -> SharedData:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Own:
    """The datasets themselves, loaded when a sample of them is first needed."""

    def __init__(self, load: Callable[[], Splits]) -> None:
        self._load = load
        self._splits: Splits | None = None

    def __call__(self, part: str) -> Dataset:
        if self._splits is None:
            self._splits = self._load()
        found = self._splits.train if part == "train" else self._splits.validation
        assert found is not None
        return found


class _Link:
    """The way to the service: a connection of its own for every process that reads, one request at a time on each."""

    def __init__(self, name: str, identity: str, deadline: float) -> None:
        self._name, self._identity, self._deadline = name, identity, deadline
        self._trial = secrets.token_hex(8)
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pid, self._not_before, self._warned = os.getpid(), 0.0, False
        self._socket: socket.socket | None = None
        self._rows: dict[str, RowStore] = {}
        self._facts: dict[str, Message] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_name", "_identity", "_deadline", "_trial")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def facts(self) -> dict[str, Message] | None:
        """What the service says of each part of the data; None where it is not there, or has other data."""
        self._connected()
        return self._facts

    def slots(self, part: str, ids: np.ndarray, key: int) -> tuple[np.ndarray, RowStore] | None:
        """Where these samples lie, negative for those that are not there; None where there is no service.

        They lie there until the next message of this process: the lock is the caller's.
        """
        peer = self._connected()
        if peer is None:
            return None
        try:
            peer.send(encode({"kind": "fetch", "part": part, "key": key, "ids": ids.tobytes()}))
            found = numbers(decode(self._receive(peer))["slots"], np.int32)
        except (OSError, FeedError, KeyError) as error:
            self._lost(error)
            return None
        return found, self._rows[part]

    def expect(self, part: str, plan: Plan, share: Share, epoch: int, start: int) -> None:
        """Tell what will be read next."""
        with self.lock:
            peer = self._connected()
            if peer is None:
                return
            message = {"kind": "expect", "part": part, "epoch": epoch, "start": start}
            message["plan"] = [plan.batch_size, plan.seed, plan.shuffle, plan.drop_last]
            message["share"] = [share.rank, share.ranks]
            try:
                peer.send(encode(message))
            except OSError as error:
                self._lost(error)

    @property
    def lock(self) -> threading.Lock:
        """Held while samples are asked for and read."""
        if self._pid != os.getpid():  # forked: the connection is the parent's, and so may the lock be
            self._forget()
        return self._lock

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for rows in self._rows.values():
            rows.close()
        self._rows = {}

    def _connected(self) -> socket.socket | None:
        if self._socket is None and time.monotonic() >= self._not_before:
            peer = make_socket()
            try:
                peer.settimeout(_GREETING)
                peer.connect(address_of(self._name))
                self._greet(peer)
                self._socket = peer
            except (OSError, FeedError, KeyError, Unkept) as error:
                peer.close()
                self._lost(error)
        return self._socket

    def _greet(self, peer: socket.socket) -> None:
        if not is_own(peer):
            raise FeedError("it belongs to another user")
        peer.send(encode({"kind": "hello", "trial": self._trial, "identity": self._identity}))
        packet, fds, _, _ = socket.recv_fds(peer, MOST_BYTES, 8)
        try:
            answer = decode(packet)
            if "refused" in answer:
                raise FeedError(str(answer["refused"]))
            parts = answer["parts"]
            for (part, facts), fd in zip(parts.items(), list(fds), strict=True):
                self._rows[part] = RowStore(facts["shape"], facts["slots"], fd)
                fds.remove(fd)
        finally:
            for fd in fds:
                os.close(fd)
        peer.settimeout(self._deadline)
        self._facts = parts

    def _receive(self, peer: socket.socket) -> bytes:
        packet = peer.recv(MOST_BYTES)
        if not packet:
            raise FeedError("it has ended")
        return packet

    def _lost(self, error: Exception) -> None:
        self.close()
        self._not_before = time.monotonic() + _AGAIN
        why = f"no answer within {self._deadline:g} s" if isinstance(error, TimeoutError) else str(error)
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "no shared feed here (%s): this trial loads its samples for itself, the same ones", why)
        self._warned = True


class SharedDataset(KeyedDataset):
    """One part of the data. What the service does not have is loaded here, from the dataset itself."""

    alone = True

    def __init__(self, link: _Link, part: str, facts: Message, own: _Own) -> None:
        self._link, self._part, self._own = link, part, own
        self._length, self._fingerprint = int(facts["samples"]), str(facts["fingerprint"])
        self.num_classes, self.classes = facts["num_classes"], facts["classes"]
        self.input_shape = tuple(facts["input_shape"]) if facts["input_shape"] is not None else None
        self.loaded_here = 0
        """Samples that had to be loaded by this process."""

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> str:
        return self._fingerprint

    def expect(self, plan: Plan, share: Share, epoch: int, start: int) -> None:
        self._link.expect(self._part, plan, share, epoch, start)

    def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
        ids = np.ascontiguousarray(ids, np.int64)
        if not len(ids):
            return map_tensors(lambda t: t[:0], self.fetch_keyed(np.zeros(1, np.int64), key))
        pieces = []
        for at in range(0, len(ids), MOST_IDS):
            try:
                piece = self._gather(ids[at : at + MOST_IDS], key)
            except Unkept:  # its shape is another one beside these samples: the dataset's own way to batch them decides
                piece = None
            if piece is None:
                return self._fetch_here(ids, key)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else _joined(pieces, ids)

    def _gather(self, ids: np.ndarray, key: int) -> Any:
        with self._link.lock:
            answer = self._link.slots(self._part, ids, key)
            if answer is None:
                return None
            slots, rows = answer
            missing = np.flatnonzero(slots < 0)
            if len(missing) == len(ids):
                return None
            here = self._fetch_here(ids[missing], key) if len(missing) else None
            return rows.take(np.maximum(slots, 0).astype(np.int64), missing, here)

    def _fetch_here(self, ids: np.ndarray, key: int) -> Any:
        self.loaded_here += len(ids)
        return fetch(self._own(self._part), ids, key)


def _joined(pieces: list[Any], ids: np.ndarray) -> Any:
    """One batch of several."""
    sizes = [min(MOST_IDS, len(ids) - at) for at in range(0, len(ids), MOST_IDS)]
    apart = [take_apart(piece, size) for piece, size in zip(pieces, sizes)]
    leaves = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)
        for parts in zip(*(leaves for _, leaves in apart))
    ]
    return put_together(apart[0][0], iter(leaves))
