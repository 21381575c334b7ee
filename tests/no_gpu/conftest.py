"""Tests with the real CuPy, for which no GPU is needed. `make test-cupy` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_PLUGIN = sys.modules.get("tests.no_gpu.plugin")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if _HERE in item.path.parents]
    why_not = ""
    if _PLUGIN is None:
        why_not = "needs a process of its own: make test-cupy"
    elif _PLUGIN.driver is None:
        why_not = "needs CuPy: make test-cupy"
    for item in own if why_not else ():
        item.add_marker(pytest.mark.skip(reason=why_not))
