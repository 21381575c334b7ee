"""Checks of what an error or a printed text names; its sentences may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

__all__ = ["names", "raises"]

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises(error: type[E] | tuple[type[E], ...], *values: Any) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an exception of class `error` whose message and notes name all of `values`."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    notes = getattr(caught.value, "__notes__", ())
    names("\n".join([str(caught.value), *notes]), *values)


def names(text: str, *values: Any) -> None:
    """Fail unless each of `values`, as `str` writes it, is a word, or some words, of `text`."""
    __tracebackhide__ = True
    missing = [value for value in map(str, values) if not _word(value).search(text)]
    if missing:
        pytest.fail(f"This text does not name {', '.join(map(repr, missing))}:\n{text}")


def _word(value: str) -> re.Pattern[str]:
    """Return what finds `value`: 3 stands in "(3,)" and "0-3", not in 13, 3.5, 0.3, -3 or x3."""
    before = after = ""
    if re.match(r"\w", value):
        before = r"(?<!\w)"
    if re.match(r"\d", value):
        before += r"(?<!\d\.)(?<!^-)(?<!\W-)"
    if re.search(r"\w$", value):
        after = r"(?!\w)"
    if re.search(r"\d$", value):
        after += r"(?!\.\d)"
    return re.compile(before + re.escape(value) + after)
