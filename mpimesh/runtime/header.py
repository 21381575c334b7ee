"""Shape, dtype and place of an array in a message of fixed size, for those that know none."""

from __future__ import annotations

import json

import numpy as np

from mpimesh.arrays import Array, DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import ShapeError

__all__ = ["HEADER_BYTES", "has_array", "make_header", "parse_header", "takes_device"]

HEADER_BYTES = 1024
_FLAGS_BYTES = 3
"""Whether there is an array, whether it is CuPy's, and whether its rank moves device memory."""


def make_header(data: Array | None, *, of_cupy: bool, takes_device: bool) -> HostArray:
    """Return shape, dtype and place of an array in a message of fixed size.

    Args:
        data: The array; None if this rank has none.
        of_cupy: Whether the caller gave it as one of CuPy, on a device.
        takes_device: Whether this rank can send and receive the memory of a device.

    Raises:
        ShapeError: If the description does not fit.
    """
    header = np.zeros(HEADER_BYTES, np.uint8)
    header[2] = takes_device
    if data is not None:
        text = json.dumps([data.shape, dtype_to_json(np.dtype(data.dtype))]).encode()
        if len(text) > HEADER_BYTES - _FLAGS_BYTES:
            raise ShapeError(
                f"shape and dtype take {len(text)} bytes as text, more than "
                f"{HEADER_BYTES - _FLAGS_BYTES}: shorten the field names of the structured dtype"
            )
        header[:2] = 1, of_cupy
        header[_FLAGS_BYTES : _FLAGS_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    return header


def has_array(header: HostArray) -> bool:
    """Tell whether the rank that made `header` has an array."""
    return bool(header[0])


def takes_device(header: HostArray) -> bool:
    """Tell whether the rank that made `header` can send and receive the memory of a device."""
    return bool(header[2])


def parse_header(header: HostArray) -> tuple[tuple[int, ...], DType, bool]:
    """Return shape and dtype that a header says, and whether the array is one of CuPy."""
    shape, dtype = json.loads(bytes(header[_FLAGS_BYTES:]).rstrip(b"\0"))
    return tuple(shape), dtype_from_json(dtype), bool(header[1])
