"""Host arrays as other libraries take them: the same memory, whatever its flags.

Inputs from a stage of another rank are read-only to NumPy, and libraries without read-only arrays
refuse such memory, or warn of it. They get a writable view, and the caller keeps it unwritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray, is_cupy
from mpimesh.arrays.dtypes import is_half
from mpimesh.errors import DTypeError, ModuleError

__all__ = ["host_array", "plain_array"]


class _Memory:
    """The memory of an array, which lives as long as this does."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: HostArray) -> None:
        interface: dict[str, Any] = dict(owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = owner


def host_array(x: Any) -> HostArray:
    """Return `x`, if it is an array of numbers in the host's memory; in the native byte order.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers.
    """
    if is_cupy(x):
        raise ModuleError(
            "modules of other libraries compute on the host's memory, got an array of CuPy: make "
            "the model with xp=numpy"
        )
    array: HostArray = np.asarray(x)
    if array.dtype.kind not in "biufc" and not is_half(array.dtype):
        raise DTypeError(f"modules of other libraries take numbers, got dtype {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def plain_array(x: Any) -> HostArray:
    """Return `x` as an array that any library takes: aligned, native, not marked as read-only.

    It is the same memory, unless that has strides or a byte order which others do not know.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers.
    """
    array = host_array(x)
    odd = any(step < 0 or step % array.itemsize for step in array.strides)
    if odd or not array.flags.aligned:
        array = array.copy()
    return array if array.flags.writeable else np.asarray(_Memory(array))
