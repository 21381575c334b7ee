"""`cupy.fuse` without a compiler."""

from __future__ import annotations

from typing import Any

__all__ = ["fuse"]


def fuse(*args: Any, **options: Any) -> Any:
    """Return the formula: its operations one after the other.

    As CuPy's, it takes a formula alone; with options it returns what takes the formula.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return args[0]
    if options.keys() - {"kernel_name"} or len(args) + len(options) > 1:
        raise TypeError(f"fuse takes a formula, or its name, got {args} and {options}")
    return lambda formula: formula
