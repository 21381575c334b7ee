"""Options, markers and profiles of all tests: the depth, the ranks' plugin, hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mpimesh.comm.base import Communicator
from mpimesh.comm.virtual import VirtualCommunicator
from tests.helpers.parallel_models import STAGE

pytest_plugins = ["mpimesh.testing.pytest_plugin"]

_MPI = Path(__file__).parent / "mpi"
_PROJECT = Path(__file__).parent / "unit" / "project"
_STEPS = ((9, 3), (4, 2))
"""Of a function with so many cases a quick run takes every third or second, unless it is marked.

What is checked of the project itself costs little, and a quick run takes all of it.
"""

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
    group.addoption("--quick", action="store_true", help="run a sample of all tests, the default")
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
    functions = {item: (item.path, getattr(item, "originalname", item.name)) for item in items}
    cases, numbers = Counter(functions.values()), Counter[tuple[Path, str]]()
    runs: dict[pytest.Item, bool] = {}
    for item, function in functions.items():
        sampled = _PROJECT not in item.path.parents
        step = next((step for many, step in _STEPS if sampled and cases[function] >= many), 1)
        runs[item] = _runs(item, numbers[function], step, config)
        numbers[function] += 1
    config.hook.pytest_deselected(items=[item for item in items if not runs[item]])
    items[:] = [item for item in items if runs[item]]
    for item in items:
        if _MPI in item.path.parents:
            # It runs under mpiexec, where the plugin keeps the time.
            item.add_marker(pytest.mark.mpi)
            item.add_marker(pytest.mark.timeout(0))


def _runs(item: pytest.Item, number: int, step: int, config: pytest.Config) -> bool:
    """Tell whether this run takes the case `number` of its function; a quick one each `step`-th."""
    marks = {mark.name: mark.args for mark in item.iter_markers()}
    if "large" in marks and "large" not in config.option.markexpr:
        return False
    quick: bool = "deep" not in marks and number % marks.get("thin", (step,))[0] == 0
    if config.getoption("--rest"):
        property_test = getattr(getattr(item, "function", None), "is_hypothesis_test", False)
        return bool(not quick or property_test or "scaled" in marks)
    return quick or bool(config.getoption("--deep"))


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
