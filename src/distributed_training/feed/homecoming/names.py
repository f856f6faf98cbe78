"""Which files of a run may travel. A name from the network never becomes a path unless it is one of these."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distributed_training.checkpoint.files import MANIFEST_FILE, STATE_FILE
from distributed_training.runtime.errors import FeedError

CONFIG, EVENTS, LEDGER = "config.yaml", "events.jsonl", "ledger.jsonl"
GROWING = (EVENTS, LEDGER)
"""Files that only get longer: of these, what is there already need not be sent again."""
_PATH = (
    rf"{re.escape(CONFIG)}|{re.escape(EVENTS)}|{re.escape(LEDGER)}"
    rf"|checkpoints/(?P<folder>step-[0-9]{{10}})/(?:{re.escape(STATE_FILE)}|{re.escape(MANIFEST_FILE)})"
)
_IDENTITY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NAME = re.compile(rf"(?P<run>[0-9a-f]{{32}})/(?P<path>{_PATH})", re.ASCII)
_SMALL, _LARGE = 16 << 20, 1 << 30


class TransferError(FeedError):
    """A file of a run cannot be sent or taken."""


@dataclass(frozen=True)
class FileName:
    """A file of a run, as it is called on the way: `RUN/checkpoints/step-0000000100/state.safetensors`."""

    run: str
    """Identity of the run: the same for all copies of its folder."""
    path: str
    """Inside the run's folder."""
    folder: str = ""
    """Name of the checkpoint that it is a part of; empty for the files of the run itself."""

    def __str__(self) -> str:
        return f"{self.run}/{self.path}"

    @property
    def file(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def check_size(self, size: int, most: int) -> None:
        """Refuse a file that is larger than such a one may be; `most` is for a checkpoint's tensors."""
        bound = most if self.file == STATE_FILE else min(most, _SMALL if self.path == CONFIG else _LARGE)
        if size > bound:
            raise TransferError(
                f"{self.path} has {size / 2**20:,.0f} MiB, at most {bound / 2**20:,.0f} are taken; raise "
                "feed.max_checkpoint_mb if that is what it should have"
            )


def read_name(text: str) -> FileName:
    """What a peer called a file; TransferError where no such file may travel."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise TransferError(f"a file of the name {text[:100]!r} is not taken; both sides need the same release")
    return FileName(found["run"], found["path"], found["folder"] or "")


def is_identity(text: object) -> bool:
    """Whether this is the identity of a run."""
    return isinstance(text, str) and _IDENTITY.fullmatch(text) is not None
