"""Settings for a section of a test that virtual ranks, which are threads, run together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

__all__ = ["setting"]

_lock = Lock()
_inside: Counter[str] = Counter()
_before: dict[str, str | None] = {}


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """Have a variable set to `value` from the first thread that enters to the last that leaves."""
    with _lock:
        if not _inside[name]:
            _before[name] = os.environ.get(name)
        _inside[name] += 1
        os.environ[name] = value
    try:
        yield
    finally:
        with _lock:
            _inside[name] -= 1
            before = _before[name]
            if not _inside[name] and before is None:
                del os.environ[name]
            elif not _inside[name] and before is not None:
                os.environ[name] = before
