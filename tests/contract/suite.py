"""The list of all checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.contract import (
    algorithms,
    barriers,
    closing,
    groups,
    handles,
    meshes_made,
    messages,
    mismatches,
    movement_errors,
    movements,
    no_arrays,
    persistent,
    reductions,
    scatters,
)

__all__ = ["CHECKS", "cases", "cases_of_checks"]

_PREFIX = "check_"
_DATA = (reductions, movements, scatters, messages, persistent, algorithms)
_OTHERS = (movement_errors, handles, no_arrays, barriers, groups, closing)
_LAST = (meshes_made, mismatches)

CHECKS: dict[str, Callable[[Any], None]] = {
    f"{module.__name__.rsplit('.', 1)[-1]}: {name.removeprefix(_PREFIX).replace('_', ' ')}": value
    for module in (*_DATA, *_OTHERS, *_LAST)
    for name, value in vars(module).items()
    if name.startswith(_PREFIX)
}

_DATA_NAMES = tuple(f"{module.__name__.rsplit('.', 1)[-1]}: " for module in _DATA)


def cases(
    *modes: str, data_modes: tuple[str, ...] = (), checked: bool = True
) -> list[tuple[str, str]]:
    """Pair every check with `modes`, and those that compare moved values with `data_modes`, too.

    Args:
        modes: Names of modes for all checks.
        data_modes: Names of modes for reductions, movements, messages and persistent ones only.
        checked: Whether these modes have ``MPIMESH_CHECKS`` on; some checks are about that.
    """
    return [
        (name, mode)
        for name, check in CHECKS.items()
        if checked or not getattr(check, "needs_checks", False)
        for mode in (*modes, *(data_modes if name.startswith(_DATA_NAMES) else ()))
    ]


def cases_of_checks(mode: str) -> list[tuple[str, str]]:
    """Pair with `mode`, which has ``MPIMESH_CHECKS`` on, the checks that are about that."""
    return [(name, mode) for name, check in CHECKS.items() if getattr(check, "needs_checks", False)]
