"""The hooks and the plugin for tests under mpiexec leave each other alone."""

from __future__ import annotations

import textwrap

import pytest

from mpimesh.testing import LaunchResult

CONFTEST = 'pytest_plugins = ["mpimesh.testing.pytest_plugin"]\n'
INI = """[pytest]
limit_s = 30
addopts = --strict-markers -p no:cacheprovider
filterwarnings = error
"""
HEAD = """
import sys
import threading

import numpy as np
import pytest

import mpimesh as mm
"""


def run(launch, tmp_path, text: str) -> LaunchResult:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_it.py").write_text(HEAD + textwrap.dedent(text))
    result: LaunchResult = launch(2, ["-m", "pytest", "--with-mpi", str(folder)], timeout_s=60)
    assert not result.timed_out, str(result)
    return result


def test_failures_and_exits_stay_those_of_a_test(launch, tmp_path):
    result = run(
        launch,
        tmp_path,
        """
        def test_one_rank_fails():
            with mm.DeviceMesh("dp=2") as mesh:
                mesh.group().barrier()
            assert mesh.rank == 0, "only rank 1"

        def test_all_ranks_exit(comm):
            with pytest.raises(SystemExit):
                with mm.DeviceMesh("dp=2"):
                    sys.exit(3)

        def test_goes_on(comm):
            with mm.DeviceMesh("dp=2") as mesh:
                assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 2
        """,
    )
    assert result.returncode == 1, str(result)
    assert "1 failed, 2 passed" in result.stdout, str(result)
    assert "on rank 1 of 2: AssertionError: only rank 1" in result.stdout
    assert "[rank" not in result.stderr, str(result)


@pytest.mark.deep
def test_a_thread_that_fails_fails_its_test(launch, tmp_path):
    result = run(
        launch,
        tmp_path,
        """
        def test_thread(comm):
            with mm.DeviceMesh("dp=2") as mesh:
                if mesh.rank == 1:
                    thread = threading.Thread(target=lambda: 1 / 0)
                    thread.start()
                    thread.join()

        def test_goes_on(comm):
            with mm.DeviceMesh("dp=2") as mesh:
                mesh.group().barrier()
        """,
    )
    assert result.returncode == 1, str(result)
    assert "1 passed" in result.stdout, str(result)
    assert "ZeroDivisionError" in result.stdout
    assert "[rank" not in result.stderr, str(result)
