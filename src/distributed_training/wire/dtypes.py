"""The types of tensors that may travel, by the names torch gives them. Anything else is refused on both sides.

Quantized types (which need a scale beside the bytes) and the types below one byte that torch itself cannot compute
with are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DType(NamedTuple):
    """One type of number."""

    name: str
    code: int
    size: int
    numpy: np.dtype | None
    """The same type in NumPy, little-endian; None where NumPy has none."""


def _row(name: str, code: int, size: int, numpy: str | None) -> DType:
    return DType(name, code, size, None if numpy is None else np.dtype(numpy))


DTYPES = [
    _row("bool", 1, 1, "?"),
    _row("uint8", 2, 1, "u1"),
    _row("int8", 3, 1, "i1"),
    _row("uint16", 4, 2, "<u2"),
    _row("int16", 5, 2, "<i2"),
    _row("uint32", 6, 4, "<u4"),
    _row("int32", 7, 4, "<i4"),
    _row("uint64", 8, 8, "<u8"),
    _row("int64", 9, 8, "<i8"),
    _row("float16", 16, 2, "<f2"),
    _row("bfloat16", 17, 2, None),
    _row("float32", 18, 4, "<f4"),
    _row("float64", 19, 8, "<f8"),
    _row("complex32", 24, 4, None),
    _row("complex64", 25, 8, "<c8"),
    _row("complex128", 26, 16, "<c16"),
    _row("float8_e4m3fn", 32, 1, None),
    _row("float8_e4m3fnuz", 33, 1, None),
    _row("float8_e5m2", 34, 1, None),
    _row("float8_e5m2fnuz", 35, 1, None),
    _row("float8_e8m0fnu", 36, 1, None),
    _row("float4_e2m1fn_x2", 40, 1, None),
]
BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in DTYPES}
BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
BY_NUMPY: dict[np.dtype, DType] = {dtype.numpy: dtype for dtype in DTYPES if dtype.numpy is not None}
