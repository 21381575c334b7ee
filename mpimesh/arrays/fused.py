"""Formulas that CuPy runs as one kernel instead of one for each operation.

A kernel reads its operands once and writes its results once; a formula of ten operations on an
array that fills a device otherwise reads and writes the device's memory ten times. NumPy has
no such thing: there the callers compute in place, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Formula", "fused"]

Formula = Callable[..., Any]
"""A function of arrays and numbers, elementwise."""

_kernels: dict[tuple[int, Callable[[ModuleType], Formula]], tuple[ModuleType, Formula]] = {}


def fused(xp: ModuleType, make: Callable[[ModuleType], Formula]) -> Formula:
    """Return the formula that `make` writes in the functions of `xp`, as one kernel. Local.

    The formula takes arrays that are broadcast together, and numbers; it may have several
    results, and may change arrays in place. It is compiled with its first call for each set of
    dtypes.

    Args:
        xp: CuPy.
        make: Returns the formula; a function of a module, as it is what the kernel is kept by.
    """
    key = (id(xp), make)
    found = _kernels.get(key)
    if found is None:
        # Given together with a name, a formula is not taken: it must come second.
        kernel: Formula = xp.fuse(kernel_name=make.__name__.strip("_"))(make(xp))
        # The library itself is kept, too, so that no other one gets its id.
        found = _kernels[key] = (xp, kernel)
    return found[1]
