"""What all tests share: checks on, the ranks' plugin, hypothesis profiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Every mesh of every test compares the ranks' calls. A stricter value may be given from outside.
os.environ.setdefault("MPIMESH_CHECKS", "1")

pytest_plugins = ["mpimesh.testing.pytest_plugin"]

_RANKS = Path(__file__).parent / "ranks"

# The machines of a test run are shared: a slow example is no failure.
settings.register_profile("default", deadline=None)
# All ranks must draw the same examples.
settings.register_profile("ranks", deadline=None, derandomize=True, database=None)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("ranks" if config.getoption("--with-mpi") else "default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in tests/ranks: it runs under mpiexec, where the plugin keeps the time."""
    if "large" not in config.option.markexpr:
        large = [item for item in items if item.get_closest_marker("large")]
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]
    for item in items:
        if _RANKS in item.path.parents:
            item.add_marker(pytest.mark.mpi)
            item.add_marker(pytest.mark.timeout(0))
