"""Which operation a rank is in, as one number that others can compare and read."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np

from mpimesh.arrays.types import HostArray

__all__ = ["EXCHANGE", "Operation", "operation_number", "operation_text"]

_FUNCTIONS = ("", "sum", "prod", "min", "max", "mean")
_CODES = np.typecodes["AllInteger"] + "?fdgFDG"
_NAMES: dict[int, str] = {np.dtype(code).num: str(np.dtype(code)) for code in _CODES}
# NumPy may have two types for one format, such as long and long long: ranks may mix them.
_NUMBERS: dict[int, int] = {np.dtype(code).num: np.dtype(np.dtype(code).str).num for code in _CODES}
_NBYTES_BITS = 40
_ROOT_BITS = 12
_DTYPE_BITS = 5
_FUNCTION_BITS = 3


class Operation(IntEnum):
    """The collectives that shared memory has."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5
    EXCHANGE_REGIONS = 6


_DIFFERENT = (Operation.ALL_TO_ALL, Operation.EXCHANGE_REGIONS)
"""Those in which the ranks' arrays have different sizes."""


def operation_number(operation: Operation, array: HostArray, op: str = "", root: int = 0) -> int:
    """Return 63 bits that hold all that must agree over the ranks."""
    return _number(operation, op, array.dtype.num, root, array.nbytes)


@lru_cache(maxsize=1024)
def _number(operation: Operation, op: str, dtype: int, root: int, nbytes: int) -> int:
    number = int(operation)
    number = number << _FUNCTION_BITS | _FUNCTIONS.index(op)
    number = number << _DTYPE_BITS | _NUMBERS.get(dtype, dtype)
    number = number << _ROOT_BITS | root & ((1 << _ROOT_BITS) - 1)
    return number << _NBYTES_BITS | nbytes & ((1 << _NBYTES_BITS) - 1)


EXCHANGE = operation_number(Operation.EXCHANGE_REGIONS, np.empty(0, np.uint8))
"""An exchange of regions: the ranks' arrays differ, and a rank may have none."""


def operation_text(number: int) -> str:
    """Return what a number stands for, for error messages; -1 for one that nobody has told."""
    if number < 0:
        return "another operation, with an array that is not in shared memory"
    number, nbytes = divmod(number, 1 << _NBYTES_BITS)
    number, root = divmod(number, 1 << _ROOT_BITS)
    number, dtype = divmod(number, 1 << _DTYPE_BITS)
    number, function = divmod(number, 1 << _FUNCTION_BITS)
    if number not in [int(one) for one in Operation]:
        return "an operation that is no more"
    operation = Operation(number)
    parts = [f"{nbytes} bytes"] if operation not in _DIFFERENT else []
    if function:
        parts += [_NAMES.get(dtype, f"dtype {dtype}"), _FUNCTIONS[function]]
    if operation is Operation.BROADCAST:
        parts.append(f"root {root}")
    return f"{operation.name.lower()}({', '.join(parts)})"
