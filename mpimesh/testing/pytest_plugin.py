"""A pytest plugin for tests that run on all ranks of an MPI world at once.

Load it with ``pytest_plugins = ["mpimesh.testing.pytest_plugin"]`` in the top
``conftest.py``, next to the pytest-mpi plugin, and run::

    mpiexec -n 4 python -m pytest --with-mpi tests/mpi

Every rank runs the same tests, and after each phase of a test (setup, call,
teardown) the ranks agree on its outcome: what failed on one rank has failed on
all, and rank 0 shows that rank's traceback. So no rank runs ahead of another,
``-x`` stops all of them at the same test, and the exit code is the same.

- ``@pytest.mark.nprocs(2, 4)`` runs the test in worlds of 2 and of 4 ranks only;
  in others it is deselected, not skipped. Without the marker any size will do.
- ``@pytest.mark.limit(5)`` gives the test 5 seconds; the default is the ini value
  ``limit_s``. A test that takes longer ends the whole job: every rank writes
  where it stands, and the exit code is not 0.
- The fixture ``comm`` is a communicator over the world for this test alone.

Ranks other than 0 write nothing but the reports of a limit. Without
``--with-mpi`` nothing of this happens.

The fixture ``launch`` is for plain pytest, without mpiexec: it starts a program
on several ranks, see :func:`mpimesh.testing.launch.launch`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mpimesh.runtime.world import current_world
from mpimesh.testing import launch as launch_module
from mpimesh.testing.agreement import Agreement
from mpimesh.testing.launch import LaunchResult, Program
from mpimesh.testing.limit import TimeLimit
from mpimesh.testing.outcome import Outcome, agree

if TYPE_CHECKING:
    from mpi4py import MPI

__all__: list[str] = []

_PLUGIN_NAME = "mpimesh_ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini value ``limit_s``."""
    parser.addini("limit_s", "Seconds that one test may take on all ranks.", default="60")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and, with ``--with-mpi``, what makes the ranks agree."""
    config.addinivalue_line("markers", "nprocs(*sizes): world sizes that the test runs in")
    config.addinivalue_line("markers", "limit(seconds): time limit of one test under mpiexec")
    if config.getoption("--with-mpi", default=False):
        agreement = Agreement()
        if agreement.rank:
            _keep_quiet(config)
        if agreement.size > 1:
            _keep_apart(config)
        config.pluginmanager.register(_RanksPlugin(config, agreement), _PLUGIN_NAME)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give back what :func:`pytest_configure` took."""
    plugin = config.pluginmanager.unregister(name=_PLUGIN_NAME)
    if isinstance(plugin, _RanksPlugin):
        plugin.close()


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """A duplicate of ``MPI.COMM_WORLD``, freed after the test. Collective."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., LaunchResult]]:
    """:func:`mpimesh.testing.launch.launch`, in a new folder each time.

    A process that outlives its launcher fails the test.
    """
    results: list[LaunchResult] = []

    def start(nprocs: int, program: Program, **options: Any) -> LaunchResult:
        folder = tmp_path / f"launch{len(results)}"
        folder.mkdir()
        results.append(launch_module.launch(nprocs, program, folder=folder, **options))
        return results[-1]

    yield start
    strays = [stray for result in results for stray in result.strays]
    if strays:
        pytest.fail("these processes outlived their launcher: " + "; ".join(strays))


def _keep_quiet(config: pytest.Config) -> None:
    # Other plugins expect a reporter, so there is one; it only has no reader.
    config.pluginmanager.unregister(name="terminalreporter")
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - the reporter writes to it until the end
    config.add_cleanup(nowhere.close)
    config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def _keep_apart(config: pytest.Config) -> None:
    # Each pytest removes what earlier runs have left of `tmp_path`. Several ranks that do so at
    # once find folders gone or filled under their hands, and warn, which may be an error.
    name = "PYTEST_DEBUG_TEMPROOT"
    before = os.environ.get(name)
    root = os.environ[name] = tempfile.mkdtemp(prefix="pytest-rank-", dir=before)

    def clean() -> None:
        shutil.rmtree(root, ignore_errors=True)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    config.add_cleanup(clean)


class _RanksPlugin:
    """The hooks of one run under mpiexec."""

    def __init__(self, config: pytest.Config, agreement: Agreement) -> None:
        self._agreement = agreement
        self._limit_s = float(config.getini("limit_s"))
        # While plugins are configured nothing is captured: this is the real stderr.
        self._stderr_fd = os.dup(sys.stderr.fileno())
        who = f"rank {agreement.rank} of {agreement.size}"
        self._limit = TimeLimit(fd=self._stderr_fd, who=who)
        # Pytest fails the test in which a thread has raised; the job goes on.
        current_world().threads_may_fail = True

    def close(self) -> None:
        self._limit.stop()
        self._agreement.close()
        os.close(self._stderr_fd)

    # -- collection ---------------------------------------------------------------

    def pytest_collection(self) -> None:
        self._limit.start("collection", self._limit_s)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests that are for other world sizes."""
        other = [item for item in items if not _runs_at(item, self._agreement.size)]
        if other:
            config.hook.pytest_deselected(items=other)
            items[:] = [item for item in items if _runs_at(item, self._agreement.size)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to start unless all ranks are about to run the same tests."""
        ids = [item.nodeid for item in session.items]
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        everywhere = self._agreement.all_gather([digest, session.testsfailed])
        if any(found != everywhere[0] for found in everywhere):
            raise pytest.UsageError(self._differences(ids, [failed for _, failed in everywhere]))
        self._limit.stop()

    def _differences(self, ids: list[str], failed: list[int]) -> str:
        lists: list[list[str]] = self._agreement.all_gather(ids)
        common = set.intersection(*(set(one) for one in lists))
        lines = ["the ranks collected different tests:"]
        for rank, (one, errors) in enumerate(zip(lists, failed, strict=True)):
            extra = [name for name in one if name not in common]
            lines.append(
                f"rank {rank}: {len(one)} tests, {errors} errors"
                + (f", not on all ranks: {', '.join(extra[:3])}" if extra else "")
            )
        return "\n  ".join(lines)

    # -- tests --------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Hold the test, with all its phases, to its limit."""
        marker = item.get_closest_marker("limit")
        self._limit.start(item.nodeid, float(marker.args[0]) if marker else self._limit_s)
        try:
            return (yield)
        finally:
            self._limit.stop()

    # First in, last out: what is agreed on is the outcome after xfail and its like.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Replace this rank's outcome by the one that all ranks agree on."""
        report = yield
        outcomes = [
            Outcome.from_json(fields)
            for fields in self._agreement.all_gather(Outcome.of(report).to_json())
        ]
        agree(report, outcomes)
        if report.failed and self._agreement.rank == 0:
            self._limit.note(f"{report.nodeid}: {report.longrepr}")
        return report

    # -- the ways out that other ranks would not notice -----------------------------

    def pytest_keyboard_interrupt(self) -> None:
        self._abort(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        os.write(self._stderr_fd, f"rank {self._agreement.rank}: {excrepr}\n".encode())
        self._abort(pytest.ExitCode.INTERNAL_ERROR)

    def _abort(self, code: int) -> None:
        if self._agreement.size > 1:
            self._agreement.abort(int(code))


def _runs_at(item: pytest.Item, size: int) -> bool:
    marker = item.get_closest_marker("nprocs")
    return marker is None or size in marker.args
