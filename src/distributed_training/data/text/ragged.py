"""A column of lists of different length, as NumPy sees it in Arrow's memory."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_WHOLE = 16 * 2**20  # columns up to this many bytes are hashed whole, of larger ones evenly spread samples
_SAMPLES = 1024


class Ragged:
    """Lists of numbers by sample. Where they lie is known for each; the numbers stay where they are."""

    def __init__(self, table: Any, name: str) -> None:
        values, begins, lengths = [], [], []
        chunks = table.data.column(name).chunks
        for chunk in chunks:
            offsets = chunk.offsets.to_numpy()  # absolute: a slice of an array has those of the whole
            begins.append(offsets[:-1])
            lengths.append(np.diff(offsets))
            values.append(chunk.values.to_numpy(zero_copy_only=False))
        self._values = values
        self._chunk = np.repeat(np.arange(len(chunks), dtype=np.int32), [len(part) for part in lengths])
        self._begin = np.concatenate(begins).astype(np.int64) if begins else np.zeros(0, np.int64)
        self.lengths: np.ndarray = np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, np.int64)
        """Numbers in each list."""
        if table._indices is not None:  # rows were selected or shuffled: which of those in memory, in which order
            rows = table._indices.column(0).to_numpy().astype(np.int64)
            self._chunk, self._begin, self.lengths = self._chunk[rows], self._begin[rows], self.lengths[rows]

    @staticmethod
    def is_list(table: Any, name: str) -> bool:
        """Whether a column holds lists."""
        return hasattr(table.data.column(name).type, "value_type")

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """The numbers of these samples, one list behind the other."""
        if not len(ids):
            return np.zeros(0, dtype=np.int64)
        begins = self._begin[ids]
        ends = (begins + self.lengths[ids]).tolist()
        values = self._values
        if len(values) == 1:
            one = values[0]
            return np.concatenate([one[begin:end] for begin, end in zip(begins.tolist(), ends)])
        chunks = self._chunk[ids].tolist()
        return np.concatenate([values[at][begin:end] for at, begin, end in zip(chunks, begins.tolist(), ends)])

    def digest(self) -> bytes:
        """A hash of the numbers: of all, or of evenly spread samples where there are very many."""
        count = len(self.lengths)
        if count == 0:
            return b""
        everything = int(self.lengths.sum()) * 8 <= _WHOLE
        ids = np.arange(count) if everything else np.unique(np.linspace(0, count - 1, _SAMPLES).astype(np.int64))
        return hashlib.sha256(np.ascontiguousarray(self.gather(ids), dtype=np.int64).tobytes()).digest()
