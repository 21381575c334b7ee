"""Times and sizes as a person writes them: ``5ms``, ``8MiB``, ``12.5GB/s``, and lists of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

__all__ = ["InputError", "read_bytes", "read_rate", "read_seconds", "read_several"]


class InputError(ValueError):
    """An input of the command line that cannot be used; the text is for the one who wrote it."""


_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s]*)\s*")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items()}


def read_seconds(text: str) -> float:
    """Read a time, such as ``5ms``; ``0`` needs no unit.

    Raises:
        InputError: If it is none.
    """
    return _read(text, _SECONDS, "a time", "5ms")


def read_bytes(text: str) -> float:
    """Read a size, such as ``8MiB`` or ``4096B``; ``0`` needs no unit.

    Raises:
        InputError: If it is none.
    """
    return _read(text, _BYTES, "a size", "8MiB")


def read_rate(text: str) -> float:
    """Read bytes per second, such as ``12.5GB/s``.

    Raises:
        InputError: If it is none, or nothing at all.
    """
    rate = _read(text, _RATES, "a bandwidth", "12.5GB/s")
    if not rate:
        raise InputError(f"a bandwidth must be above 0, got {text!r}")
    return rate


def read_several(
    option: str, text: str | None, read: Callable[[str], float]
) -> list[float] | float | None:
    """Read one quantity, or a list of them with commas between; None if there is no text.

    Raises:
        InputError: If one cannot be read; the message names the option.
    """
    if text is None:
        return None
    try:
        values = [read(part) for part in text.split(",")]
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    return values[0] if len(values) == 1 else values


def _read(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    value = float(number or "nan")
    if value == 0 and not unit:
        return 0.0
    if unit not in units or not math.isfinite(value):
        raise InputError(
            f"{text.strip()!r} is not {what}: write a number and a unit, such as {example}; "
            f"units: {', '.join(units)}"
        )
    return value * units[unit]
