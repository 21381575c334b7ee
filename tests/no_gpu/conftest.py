"""Tests with the real CuPy, for which no GPU is needed. `make test-cupy` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if _HERE in item.path.parents]
    plugin = sys.modules.get("tests.no_gpu.plugin")
    why_not = ""
    if plugin is None:
        why_not = "needs a process of its own: make test-cupy"
    elif plugin.driver is None:
        why_not = "needs CuPy: make test-cupy"
    for item in own if why_not else ():
        item.add_marker(pytest.mark.skip(reason=why_not))
