"""The plugin by which ranks agree on tests, seen from outside: it must never hide or hang."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from mpimesh.testing.launch import LaunchResult
from tests.helpers.raises import names

RunTests: TypeAlias = Callable[..., LaunchResult]

CONFTEST = 'pytest_plugins = ["mpimesh.testing.pytest_plugin"]\n'
INI = "[pytest]\nlimit_s = 30\naddopts = --strict-markers -p no:cacheprovider\n"


@pytest.fixture
def run_tests(tmp_path: Path, launch: Callable[..., LaunchResult]) -> RunTests:
    """Run a test file's text under mpiexec, as a user of the plugin would."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(INI)

    def run(nprocs: int, text: str, *options: str, timeout_s: float = 50) -> LaunchResult:
        (folder / "test_it.py").write_text("import pytest\n" + textwrap.dedent(text))
        arguments = ["-m", "pytest", "--with-mpi", str(folder), *options]
        result = launch(nprocs, arguments, timeout_s=timeout_s)
        assert not result.timed_out, str(result)
        return result

    return run


def counts(result: LaunchResult) -> dict[str, int]:
    """The numbers of pytest's last line. One reporter speaks, so there is one such line."""
    lines = [line for line in result.stdout.splitlines() if re.search(r" in [0-9.]+s", line)]
    assert len(lines) == 1, str(result)
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[0])}


def test_all_pass(run_tests):
    result = run_tests(3, "def test_size(comm): assert comm.Get_size() == 3")
    assert result.returncode == 0, str(result)
    assert counts(result) == {"passed": 1}


def test_failure_of_one_rank_fails_all_and_shows_where(run_tests):
    result = run_tests(
        3,
        """
        def test_bad(comm):
            print(f"output of {comm.Get_rank()}")
            assert comm.Get_rank() != 1, "only this rank"

        def test_good(comm):
            comm.Barrier()
        """,
    )
    assert result.returncode == 1, str(result)
    assert counts(result) == {"failed": 1, "passed": 1}
    assert "on rank 1 of 3: AssertionError: only this rank" in result.stdout
    assert 'assert comm.Get_rank() != 1, "only this rank"' in result.stdout
    assert "output of 1" in result.stdout
    assert "output of 0" not in result.stdout


@pytest.mark.deep
@pytest.mark.parametrize("ci", ["", "true"])
def test_failure_of_all_ranks_is_shown_once(run_tests, monkeypatch, ci):
    # In CI pytest's short summary is not cut to the line: once, all of it stood there again.
    monkeypatch.setenv("CI", ci)
    # What else a rank captures makes its text another: equal texts are what this is about.
    result = run_tests(3, "def test_bad(): assert 1 + 1 == 3", "-s")
    assert counts(result) == {"failed": 1}
    assert "on ranks 0-2 of 3: assert (1 + 1) == 3" in result.stdout
    assert result.stdout.count("def test_bad") == 1, result.stdout


@pytest.mark.deep
def test_failed_setup_keeps_the_others_from_the_test(run_tests):
    result = run_tests(
        2,
        """
        @pytest.fixture
        def broken(comm):
            assert comm.Get_rank() == 0, "broken here"
            return comm

        def test_would_hang(broken):
            broken.Barrier()
        """,
    )
    assert result.returncode == 1, str(result)
    assert counts(result) == {"error": 1}
    assert "on rank 1 of 2: AssertionError: broken here" in result.stdout


@pytest.mark.deep
def test_first_failure_stops_all_ranks_together(run_tests):
    result = run_tests(
        3,
        """
        def test_bad(comm): assert comm.Get_rank() != 2
        def test_next(comm): comm.Barrier()
        """,
        "-x",
    )
    assert result.returncode == 1, str(result)
    assert counts(result) == {"failed": 1}


@pytest.mark.deep
@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_other_sizes_are_deselected(run_tests, nprocs):
    result = run_tests(
        nprocs,
        """
        @pytest.mark.nprocs(2, 3)
        def test_some(comm): assert comm.Get_size() in (2, 3)
        @pytest.mark.nprocs(1)
        def test_one(comm): assert comm.Get_size() == 1
        def test_any(comm): pass
        """,
    )
    assert result.returncode == 0, str(result)
    assert counts(result) == {"passed": 2, "deselected": 1}


def test_deadlock_ends_the_job_and_tells_where_each_rank_was(run_tests):
    result = run_tests(
        2,
        """
        @pytest.mark.limit(2)
        def test_stuck(comm):
            if comm.Get_rank() == 1:
                comm.Barrier()  # nobody else comes
        """,
    )
    assert result.returncode != 0, str(result)
    reports = re.findall(
        r"rank (\d) of 2: \S+::test_stuck ran past its limit of 2 s", result.stderr
    )
    assert sorted(reports) == ["0", "1"], str(result)
    assert "comm.Barrier()  # nobody else comes" in result.stderr
    # Of nothing else a frame: rank 0 is in the plugin.
    assert re.findall(r'File ".*/(.*)", line', result.stderr) == ["test_it.py"]
    assert "waits for the other ranks, which have not come to the end of it" in result.stderr


@pytest.mark.deep
def test_deadlock_does_not_hide_the_failure_before_it(run_tests):
    """Pytest shows failures at the end, which does not come."""
    result = run_tests(
        2,
        """
        def test_bad(comm):
            assert comm.Get_rank() != 1, "the cause"

        @pytest.mark.limit(1)
        def test_stuck(comm):
            if comm.Get_rank() == 1:
                comm.Barrier()
        """,
    )
    assert result.returncode != 0, str(result)
    assert result.stderr.count("on rank 1 of 2: AssertionError: the cause") == 1, str(result)


@pytest.mark.deep
def test_limit_holds_where_the_interpreter_is_locked(run_tests):
    """A C call that keeps the interpreter's lock also keeps the limit's thread from running."""
    result = run_tests(
        1,
        """
        import ctypes

        @pytest.mark.limit(1)
        def test_locked():
            ctypes.PyDLL(None).sleep(60)  # PyDLL does not give the lock back
        """,
    )
    assert result.returncode != 0, str(result)
    assert "in test_locked" in result.stderr


@pytest.mark.deep
def test_a_skip_on_some_ranks_only_is_a_failure(run_tests):
    result = run_tests(
        2,
        """
        def test_half(comm):
            if comm.Get_rank():
                pytest.skip("not here")
        def test_all():
            pytest.skip("nowhere")
        """,
    )
    assert result.returncode == 1, str(result)
    assert counts(result) == {"failed": 1, "skipped": 1}
    assert "rank 0 passed, rank 1 skipped" in result.stdout


@pytest.mark.deep
def test_expected_failures_are_agreed_on_too(run_tests):
    result = run_tests(
        2,
        """
        @pytest.mark.xfail(strict=True)
        def test_fails_everywhere(): assert False
        @pytest.mark.xfail(strict=False)
        def test_fails_somewhere(comm): assert comm.Get_rank()
        """,
    )
    assert counts(result) == {"xfailed": 1, "failed": 1}
    assert "rank 0 xfailed, rank 1 xpassed" in result.stdout


@pytest.mark.deep
def test_ranks_that_collect_different_tests_refuse_to_start(run_tests):
    result = run_tests(
        2,
        """
        from mpi4py import MPI
        def test_same(): pass
        if MPI.COMM_WORLD.Get_rank() == 1:
            def test_extra(): pass
        """,
    )
    assert result.returncode != 0, str(result)
    names(result.stderr, "rank 1: 2 tests", "0 errors", "test_it.py::test_extra")


@pytest.mark.deep
def test_a_file_that_one_rank_cannot_import_stops_all(run_tests):
    result = run_tests(
        2,
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.Get_rank() == 1:
            raise ImportError("broken on one rank")
        def test_would_wait(comm): comm.Barrier()
        """,
    )
    assert result.returncode != 0, str(result)
    assert "rank 1: 0 tests, 1 errors" in result.stderr


@pytest.mark.deep
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit(5)"])
def test_an_interrupted_rank_ends_the_job(run_tests, error):
    result = run_tests(
        2,
        f"""
        def test_interrupted(comm):
            if comm.Get_rank() == 1:
                raise {error}
        """,
    )
    assert result.returncode != 0, str(result)


@pytest.mark.deep
def test_a_dead_rank_ends_the_job(run_tests):
    result = run_tests(
        2,
        """
        import os
        def test_dies(comm):
            if comm.Get_rank() == 1:
                os._exit(3)
        """,
    )
    assert result.returncode != 0, str(result)


@pytest.mark.deep
def test_plain_pytest_is_left_alone(launch, tmp_path):
    """Without --with-mpi no MPI is started, so a laptop's plain pytest needs none."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(
        "import sys\ndef test_no_mpi(): assert 'mpi4py.MPI' not in sys.modules\n"
    )
    result = launch(1, ["-m", "pytest", "-p", "no:cacheprovider", str(folder)], launcher=[])
    assert result.returncode == 0, str(result)
    assert counts(result) == {"passed": 1}


@pytest.mark.deep
def test_every_rank_has_a_folder_for_its_temporary_files(run_tests, tmp_path, monkeypatch):
    """Ranks that remove the folders of earlier runs at the same time are in each other's way."""
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    result = run_tests(
        3,
        """
        def test_folder(comm, tmp_path):
            roots = comm.allgather(str(tmp_path.parents[2]))
            assert len(set(roots)) == 3, roots
            (tmp_path / "file").write_text("here")
            comm.Barrier()
        """,
    )
    assert counts(result) == {"passed": 1}, str(result)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("pytest-rank-")]
