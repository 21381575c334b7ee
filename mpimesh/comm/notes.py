"""Notes of a shared window: an operation as one number, for others to compare."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.requests import Request
from mpimesh.comm.shared_window import NOT_READ, SharedWindow, WindowEntry
from mpimesh.errors import MismatchError, on_all_ranks

__all__ = ["EXCHANGE", "Operation", "enter", "mismatch", "operation_number", "operation_text"]

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


def mismatch(
    what: Sequence[int], *, ranks: Sequence[int] = (), on_all: bool = True
) -> MismatchError:
    """Return the error of ranks that are in different operations.

    Args:
        what: The operation of each rank of a node.
        ranks: Which ranks these are; all of the node if empty.
        on_all: Whether all ranks raise it alike.
    """
    rows = list(zip(ranks or range(len(what)), what, strict=True))
    each = "; ".join(f"rank {rank}: {operation_text(one)}" for rank, one in rows[:16])
    error = MismatchError(
        f"the ranks of a group started different collectives, or with different arrays: {each}"
    )
    return on_all_ranks(error) if on_all else error


def enter(
    window: SharedWindow,
    what: int,
    source_at: int = -1,
    target_at: int = NOT_READ,
    *,
    counts: Sequence[int] | None = None,
    on_all: bool = True,
) -> Generator[Request, None, WindowEntry]:
    """Publish the first of several steps, and find out where all arrays lie.

    Args:
        window: The ranks of this node.
        what: The operation's number.
        source_at: Where in this rank's arena its input lies; -1 if it is an ordinary array.
        target_at: The same for its result, if other ranks are to read or write it.
        counts: What it sends to each rank, and what it receives from each.
        on_all: Whether these are all ranks, so that a mismatch is known to all.

    Raises:
        MismatchError: If the ranks are in different operations.
    """
    yield window.waits_for_room(slot=counts is not None)
    number = window.published + 1
    if counts is not None:
        window.counts(coming=1)[window.rank][...] = counts
        window.slots.take(number)
    yield window.meet(what, source_at, target_at)
    entry = window.entry(number, with_counts=counts is not None)
    if entry.what.count(what) != window.size:
        window.acknowledge(number)
        raise mismatch(entry.what, on_all=on_all)
    return entry
