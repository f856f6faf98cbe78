"""The memory a checkpoint is copied into: kept from save to save, laid out as the file it becomes.

The loop pays for one copy into pages that are already there; the writer then has the bytes of a .safetensors file in
order and needs no copy of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distributed_training.runtime.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Staging:
    """A buffer in the host's memory that holds one checkpoint's tensors as a safetensors file image."""

    def __init__(self) -> None:
        self._layout: _Layout = ()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, Tensor] = {}
        self.header = b""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the buffer for tensors of these shapes and touch its pages. Does nothing if it is there already."""
        # Widest types first, so that every tensor starts at a multiple of its item size.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        layout = tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order)
        if layout == self._layout and self.header:
            return
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        total = 0
        places = {}
        for name, dtype, shape in layout:
            if dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name}: tensors of type {dtype} cannot be saved")
            end = total + math.prod(shape) * dtype.itemsize
            table[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [total, end]}
            places[name] = (total, end)
            total = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        pinned = any(t.is_cuda for t in tensors.values())
        self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        self._buffer.zero_()  # the first touch of a page costs more than the copy: pay for it here, once
        self._views = {
            name: self._buffer[places[name][0] : places[name][1]].view(dtype).view(shape)
            for name, dtype, shape in layout
        }
        self.header = len(text).to_bytes(8, "little") + text
        self._layout = layout

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors in. When this returns they may change again."""
        self.prepare(tensors)
        devices = set()
        for name, view in self._views.items():
            view.copy_(tensors[name], non_blocking=True)
            devices.add(tensors[name].device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def parts(self) -> list[memoryview]:
        """The bytes of the file, in order."""
        return [memoryview(self.header), self._buffer.numpy().data]
