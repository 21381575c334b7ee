"""Options, markers and profiles of all tests: the depth, the ranks' plugin, hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mpimesh.comm.base import Communicator
from mpimesh.comm.virtual import VirtualCommunicator
from tests.helpers.parallel_models import STAGE

pytest_plugins = ["mpimesh.testing.pytest_plugin"]

_MPI = Path(__file__).parent / "mpi"
_UNIT = Path(__file__).parent / "unit"

# `max_examples` is the share in percent of what a property test asks for: see helpers/depth.py.
# The machines of a test run are shared: a slow example is no failure.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("deep", deadline=None, max_examples=100)
# All ranks must draw the same examples.
for depth in ("quick", "deep"):
    settings.register_profile(
        f"{depth} under MPI",
        settings.get_profile(depth),
        derandomize=True,
        database=None,
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("depth")
    group.addoption("--quick", action="store_true", help="without what is marked deep, the default")
    group.addoption("--deep", action="store_true", help="run all tests, with all their examples")
    group.addoption(
        "--rest", action="store_true", help="of --deep only what a run without it leaves out"
    )


def pytest_configure(config: pytest.Config) -> None:
    depth = "deep" if config.getoption("--deep") or config.getoption("--rest") else "quick"
    under_mpi = config.getoption("--with-mpi")
    settings.load_profile(f"{depth} under MPI" if under_mpi else depth)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this depth does not run, and mark what lies in tests/mpi."""
    runs = {item: _runs(item, config) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
    items[:] = [item for item in items if runs[item]]
    for item in items:
        if _MPI in item.path.parents:
            # It runs under mpiexec, where the plugin keeps the time.
            item.add_marker(pytest.mark.mpi)
            item.add_marker(pytest.mark.timeout(0))
        if _UNIT in item.path.parents:
            # Where no split array agrees with other ranks on them: see pyproject.toml.
            item.add_marker(pytest.mark.filterwarnings("error:.* encountered in :RuntimeWarning"))


def _runs(item: pytest.Item, config: pytest.Config) -> bool:
    """Tell whether a run of this depth takes `item`."""
    marks = {mark.name for mark in item.iter_markers()}
    if "large" in marks and "large" not in config.option.markexpr:
        return False
    if config.getoption("--rest"):
        property_test = getattr(getattr(item, "function", None), "is_hypothesis_test", False)
        return bool(marks & {"deep", "scaled"} or property_test)
    return "deep" not in marks or bool(config.getoption("--deep"))


@pytest.fixture
def nodes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let virtual ranks have no memory that they see alike, as if each were a node."""
    alone = Communicator.offer_once
    monkeypatch.setattr(VirtualCommunicator, "offer_once", alone)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.deep), 3, "3 over nodes"])
def stage(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test at each stage at which replicas divide something."""
    STAGE[0] = number = int(str(request.param)[0])
    if number != request.param:
        request.getfixturevalue("nodes_apart")
    yield number
    STAGE[0] = 1
