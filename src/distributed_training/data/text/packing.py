"""Texts joined and cut into blocks of one length: no padding, so every position of a batch is trained on.

The blocks are cut from one long row of tokens, the samples in their order. They depend on nothing else: not on how
many processes tokenised, nor on how many samples went through in one go. Attention reaches over the end-of-text token
into the sample before, as is usual. What is left at the end and fills no block is dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Packer:
    """Cuts blocks from tables of token ids, and keeps the rest for the next table. For one pass in order."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._rest = np.zeros(0, dtype=np.int32)

    def __call__(self, table: Any) -> Any:
        """The blocks that are complete with the samples of this table, as a table."""
        import pyarrow

        tokens = self.add(table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False))
        offsets = np.arange(0, len(tokens) + 1, self._block, dtype=np.int32)
        return pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)})

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of all blocks that are complete with these."""
        tokens = np.concatenate([self._rest, tokens.astype(np.int32, copy=False)])
        whole = len(tokens) // self._block * self._block
        self._rest = tokens[whole:]
        return tokens[:whole]
