"""Tests in two depths: `make test` is quick, `make test-all` runs what is deep, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["deep", "deep_but", "examples", "is_deep"]

_WHOLE = settings.get_profile("deep").max_examples


def deep(*values: Any) -> list[Any]:
    """Return `values` of a parameter that only deep runs take: ``[2, 3, *deep(4, 8)]``."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep)
        for value in values
    ]


def deep_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return `values` of a parameter, of which quick runs take `quick` alone."""
    values = list(values)
    assert all(value in values for value in quick), (quick, values)
    return [one for value in values for one in ([value] if value in quick else deep(value))]


def _now() -> settings:
    assert settings.default is not None
    return settings.default


def is_deep() -> bool:
    """Tell whether this is a deep run."""
    return _now().max_examples >= _WHOLE


def examples(number: int) -> int:
    """Return the `max_examples` of a property test that takes `number` in a deep run."""
    return max(1, -(-number * _now().max_examples // _WHOLE))
