"""For the tests of files that go home: runs with checkpoints on disk, and who receives them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from distributed_training.checkpoint import CheckpointStore
from distributed_training.config import CheckpointConfig, Config
from distributed_training.feed.homecoming.home import Home
from distributed_training.feed.homecoming.parcels import Parcel
from distributed_training.feed.homecoming.receiver import Receiver
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.wire import Chunk
from distributed_training.wire.messages import BlobDone, BlobOffer, BlobPull, Credit, Message

RUN = "0123456789abcdef" * 2
Pack = Callable[[list[Parcel]], list[Parcel]]
KEEP = CheckpointConfig(background=False)
PATTERN = np.arange(64, dtype=np.uint8).tobytes()


def write_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.checkpoints.mkdir(parents=True)
    Config().save(run.config_file)
    run.events_file.write_text('{"event": "start"}\n')
    run.ledger_file.write_text('{"epoch": 0}\n{"epoch":')  # the last line is being written
    return run


def save(run: RunDirectory, step: int, value: float = 1.0, megabytes: int = 1) -> Path:
    """A checkpoint whose tensors are full of a pattern that can be found on the wire."""
    pattern = torch.frombuffer(bytearray(PATTERN), dtype=torch.uint8).repeat(megabytes * 2**20 // 64)
    store = CheckpointStore(run.checkpoints, KEEP)
    store.save({"model": {"w": pattern, "b": torch.tensor([value])}}, step=step, epoch=0, metrics={"val_loss": value})
    return run.checkpoints / f"step-{step:010d}"


class Inbox:
    """A receiver as a worker has it, without the connection."""

    def __init__(self, root: Path, limit: int = 1 << 30) -> None:
        self.home = Home(root, "copy", KEEP, limit=limit)
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.receiver = Receiver(self.home, None)
        self.receiver.start(self.said.put, lambda: None)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.receiver.close()
        self.home.close()

    def answer(self) -> BlobPull | BlobDone:
        """What it says to an offer or a chunk, but for credit."""
        while isinstance(message := self.said.get(timeout=30), Credit):
            pass
        assert isinstance(message, BlobPull | BlobDone)
        return message

    def send(self, parcel: Parcel, change: int | None = None) -> BlobDone:
        """Offer and send a file, with one byte changed; what is said in the end."""
        self.receiver.hear(BlobOffer(7, str(parcel.name), parcel.size, parcel.digest))
        pull = self.answer()
        if isinstance(pull, BlobDone):
            return pull
        data = bytearray(parcel.read(pull.position, parcel.size))
        if change is not None:
            data[change] ^= 1
        half = len(data) // 2
        for start, part in ((0, data[:half]), (half, data[half:])):
            self.receiver.hear(Chunk(7, pull.position + start, memoryview(bytes(part)), None))
        done = self.answer()
        assert isinstance(done, BlobDone)
        return done
