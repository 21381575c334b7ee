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

import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mpimesh.arguments import rank_names, ranks_by_value
from mpimesh.runtime.failure import TimeLimit
from mpimesh.runtime.world import current_world
from mpimesh.testing import launch as launch_module
from mpimesh.testing.launch import LaunchResult, Program

if TYPE_CHECKING:
    from mpi4py import MPI

__all__: list[str] = []

_PLUGIN_NAME = "mpimesh_ranks"
_FIRST_NAP_S = 0.0002
_LONGEST_NAP_S = 0.003


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini value ``limit_s``."""
    parser.addini("limit_s", "Seconds that one test may take on all ranks.", default="60")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and, with ``--with-mpi``, what makes the ranks agree."""
    config.addinivalue_line("markers", "nprocs(*sizes): world sizes that the test runs in")
    config.addinivalue_line("markers", "limit(seconds): time limit of one test under mpiexec")
    if config.getoption("--with-mpi", default=False):
        # Importing MPI starts it: only a run that has several ranks may come here.
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank:
            _keep_quiet(config)
        if MPI.COMM_WORLD.size > 1:
            _keep_apart(config)
        config.pluginmanager.register(_RanksPlugin(config, MPI.COMM_WORLD.Dup()), _PLUGIN_NAME)


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

    def __init__(self, config: pytest.Config, comm: MPI.Intracomm) -> None:
        # Of the plugin alone, so that it never meets a message of the test.
        self._comm = comm
        self._limit_s = float(config.getini("limit_s"))
        # While plugins are configured nothing is captured: this is the real stderr.
        self._stderr_fd = os.dup(sys.stderr.fileno())
        self._limit: TimeLimit | None = None
        self._failures: list[str] = []
        # Pytest fails the test in which a thread has raised; the job goes on.
        current_world().threads_may_fail = True

    def close(self) -> None:
        self._stop_limit()
        self._comm.Free()
        os.close(self._stderr_fd)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order. Collective.

        It naps while it waits: a test suite runs more ranks than there are cores, and a rank that
        spins takes the core from the rank it waits for.
        """
        here, nap_s = self._comm.Ibarrier(), _FIRST_NAP_S
        while not here.Test():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return self._comm.allgather(value)

    # -- the time limit ---------------------------------------------------------------

    def _start_limit(self, what: str, limit_s: float) -> None:
        """Give `what` at most `limit_s` seconds from now on.

        A rank that hangs inside MPI sees neither signals nor exceptions: the limit's thread ends
        the process, which makes the launcher end the other ranks.
        """
        self._stop_limit()
        too_late = partial(self._too_late, what, limit_s)
        self._limit = TimeLimit(limit_s, too_late, fd=self._stderr_fd)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.stop()
            self._limit = None

    def _too_late(self, what: str, limit_s: float) -> None:
        # Pytest shows failures at its end, which does not come.
        failures = "".join(f"\n{failure}\n" for failure in self._failures)
        who = f"rank {self._comm.rank} of {self._comm.size}"
        report = f"{failures}\n{who}: {what} ran past its limit of {limit_s:g} s\n{_stacks()}"
        # One write, so that the reports of several ranks do not mix.
        os.write(self._stderr_fd, report.encode(errors="replace"))
        time.sleep(_LAST_WORDS_S)
        os._exit(_EXIT_CODE)

    # -- collection ---------------------------------------------------------------

    def pytest_collection(self) -> None:
        self._start_limit("collection", self._limit_s)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests that are for other world sizes."""
        other = [item for item in items if not _runs_at(item, self._comm.size)]
        if other:
            config.hook.pytest_deselected(items=other)
            items[:] = [item for item in items if _runs_at(item, self._comm.size)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to start unless all ranks are about to run the same tests."""
        ids = [item.nodeid for item in session.items]
        collected = self.all_gather((ids, session.testsfailed))
        if any(found != collected[0] for found in collected):
            common = set.intersection(*(set(found) for found, _ in collected))
            lines = ["the ranks collected different tests:"]
            for rank, (found, errors) in enumerate(collected):
                extra = [name for name in found if name not in common][:3]
                lines.append(
                    f"rank {rank}: {len(found)} tests, {errors} errors"
                    + (f", not on all ranks: {', '.join(extra)}" if extra else "")
                )
            raise pytest.UsageError("\n  ".join(lines))
        self._stop_limit()

    # -- tests --------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Hold the test, with all its phases, to its limit."""
        marker = item.get_closest_marker("limit")
        self._start_limit(item.nodeid, float(marker.args[0]) if marker else self._limit_s)
        try:
            return (yield)
        finally:
            self._stop_limit()

    # First in, last out: what is agreed on is the outcome after xfail and its like.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Replace this rank's outcome by the one that all ranks agree on."""
        report = yield
        _agree(report, self.all_gather(_Outcome.of(report)))
        if report.failed and self._comm.rank == 0:
            self._failures.append(f"{report.nodeid}: {report.longrepr}")
        return report

    # -- the ways out that other ranks would not notice -----------------------------

    def pytest_keyboard_interrupt(self) -> None:
        self._abort(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)
    def pytest_internalerror(self, excrepr: object) -> None:
        os.write(self._stderr_fd, f"rank {self._comm.rank}: {excrepr}\n".encode())
        self._abort(pytest.ExitCode.INTERNAL_ERROR)

    def _abort(self, code: int) -> None:
        if self._comm.size > 1:
            self._comm.Abort(int(code))


def _runs_at(item: pytest.Item, size: int) -> bool:
    marker = item.get_closest_marker("nprocs")
    return marker is None or size in marker.args


# -- the outcome of a phase of a test --------------------------------------------------------------

# One rank failed, so the test failed. A test that is skipped, or fails as expected, does so on all
# ranks or on none; otherwise it failed too, because the ranks that went on would wait for those
# that did not.

_MOST_CHARACTERS = 20_000
_MOST_TEXTS = 3


class _Outcome(NamedTuple):
    """One rank's side of a report.

    Attributes:
        kind: ``"passed"``, ``"failed"``, ``"skipped"``, ``"xfailed"`` or ``"xpassed"``.
        headline: The line that says what went wrong; empty if nothing did.
        text: Traceback and captured output; empty unless the test failed.
    """

    kind: str
    headline: str = ""
    text: str = ""

    @classmethod
    def of(cls, report: pytest.TestReport) -> _Outcome:
        """Read this rank's outcome off its report."""
        if report.failed:
            captured = "".join(
                f"\n{title:-^70}\n{content}" for title, content in report.sections if content
            )
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message) if crash is not None else report.longreprtext
            text = (report.longreprtext + captured)[-_MOST_CHARACTERS:]
            return cls("failed", message.strip().partition("\n")[0], text)
        if hasattr(report, "wasxfail"):
            return cls("xfailed" if report.skipped else "xpassed")
        return cls(report.outcome)


@dataclass(frozen=True, slots=True)
class _RanksFailure:
    """The failure of a test on some of the ranks, as pytest shows it."""

    text: str

    @property
    def reprcrash(self) -> SimpleNamespace:
        """The message of pytest's short summary: the first line, which tells the first failure.

        The summary cuts a text to the terminal's width, but not where it thinks it is in
        CI (the variable `CI`): the whole of every rank's traceback would stand there again.
        """
        return SimpleNamespace(message=self.text.partition("\n")[0])

    def toterminal(self, tw: Any) -> None:
        """Write the text to pytest's terminal writer."""
        tw.line(self.text)

    def __str__(self) -> str:
        return self.text


def _agree(report: pytest.TestReport, outcomes: Sequence[_Outcome]) -> None:
    """Write into `report` what `outcomes`, one per rank, make together.

    The result is the same on every rank that was given the same `outcomes`.
    """
    kinds = [outcome.kind for outcome in outcomes]
    if "failed" in kinds:
        _fail(report, _failure_text(outcomes))
    elif len(set(kinds)) > 1:
        each = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        _fail(report, f"the ranks disagree on this test, it must end alike on all: {each}")


def _fail(report: pytest.TestReport, text: str) -> None:
    report.outcome = "failed"
    # pytest asks a longrepr for these two methods and this attribute, whatever its class.
    report.longrepr = _RanksFailure(text)  # type: ignore[assignment]
    # The outputs are in the text, each under its rank.
    report.sections = []
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _failure_text(outcomes: Sequence[_Outcome]) -> str:
    """Join the failing ranks' texts, equal ones once, after a line that tells the first."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.kind == "failed"]
    ranks_of = ranks_by_value((rank, outcomes[rank].text) for rank in failed)
    where = f"{rank_names(failed)} of {len(outcomes)}"
    parts = [f"on {where}: {outcomes[failed[0]].headline}"]
    for place, (text, ranks) in enumerate(ranks_of.items()):
        parts.append(f"{f' {rank_names(ranks)} ':=^70}")
        parts.append(text if place < _MOST_TEXTS else outcomes[ranks[0]].headline)
    return "\n".join(parts)


# -- where the threads of a test that takes too long are -------------------------------------------

_EXIT_CODE = 70
"""Exit code of a process that ran past its limit."""

_LAST_WORDS_S = 1.0
"""The ranks of a job meet their limits a little apart; each should have its say first."""

_RUNNERS = {"__main__", "_pytest", "hypothesis", "pluggy", "pytest"}
_RUNNERS |= {"__channelexec__", "execnet", "xdist"}  # the first is xdist in a worker
_NOT_THE_TESTS = {*sys.stdlib_module_names, *_RUNNERS, "mpi4py", "numpy"}
_OF_MPIMESH = "mpimesh"


def _stacks() -> str:
    """Return the frames of the tests' code in each thread but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = []
    for ident, frame in sys._current_frames().items():
        stack = [] if ident == threading.get_ident() else _stack(frame)
        if stack:
            text.append(f"  thread {names.get(ident, ident)}:\n{''.join(stack)}")
    return "".join(text)


def _stack(innermost: FrameType) -> list[str]:
    """Return the frames of the tests' code; of what these call in mpimesh, only the call.

    Empty for a thread that runs nothing of the tests.
    """
    text: list[str] = []
    inside = False
    for frame, line in reversed([*traceback.walk_stack(innermost)]):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code is _RanksPlugin.all_gather.__code__:
            return ["    waits for the other ranks, which have not come to the end of it\n"]
        if package == _OF_MPIMESH:
            if text and not inside:
                text.append(f"    in mpimesh: {frame.f_code.co_qualname}\n")
            inside = True
        elif package not in _NOT_THE_TESTS:
            place = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            text += traceback.format_list([place])
            inside = False
    return text
