"""Records for Python's logging of what the library does."""

from __future__ import annotations

import logging

__all__ = ["log"]

_LOGGER = logging.getLogger("mpimesh")
_LOGGER.addHandler(logging.NullHandler())


def log(level: int, rank: int, message: str, *values: object) -> None:
    """Make a record of what the library does on `rank`, with the attribute `rank`.

    It is made under the name ``mpimesh``; nothing is shown unless users say so.
    """
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, *values, extra={"rank": rank}, stacklevel=2)
