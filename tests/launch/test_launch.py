"""Starting and, above all, ending programs under mpiexec."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpimesh.testing import LaunchResult, mpi_vendor
from mpimesh.testing.launch import launch as launch_in


def test_ranks_environment_and_exit_code(launch):
    result = launch(
        3,
        """
        import os, sys
        from mpi4py import MPI
        sys.stdout.write(f"{MPI.COMM_WORLD.rank}/{MPI.COMM_WORLD.size} {os.environ['COLOUR']}\\n")
        """,
        env={"COLOUR": "blue"},
    )
    assert result.returncode == 0, str(result)
    assert sorted(result.stdout.split("\n")) == ["", "0/3 blue", "1/3 blue", "2/3 blue"]
    assert not result.timed_out
    assert result.strays == ()


def test_lines_of_several_ranks_are_whole(launch, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # as in many containers
    program = """
        import sys
        from mpi4py import MPI
        for _ in range(20):
            MPI.COMM_WORLD.Barrier()
            print("one", 2, "three", flush=True)
            print("four", 5, "six", file=sys.stderr)
        """
    result = launch(3, program)
    assert result.stdout.splitlines() == ["one 2 three"] * 60, str(result)
    assert result.stderr.splitlines() == ["four 5 six"] * 60, str(result)


def test_arguments_and_files(launch, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text("print('from a file')")
    assert launch(1, script).stdout.strip() == "from a file"
    assert launch(1, ["-c", "print('from arguments')"]).stdout.strip() == "from arguments"


@pytest.mark.deep
def test_the_limit_ends_every_process(launch):
    """The ranks have sessions of their own and are deaf to SIGTERM: only the mark finds them."""
    result = launch(
        2,
        """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                                 start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(300)
        """,
        timeout_s=6,
    )
    assert result.timed_out
    assert result.returncode != 0
    assert result.seconds < 16
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 4, str(result)
    assert not [pid for pid in pids if alive(pid)]


def test_a_process_left_behind_is_told_and_ended(tmp_path):
    result: LaunchResult = launch_in(
        1,
        """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                                 start_new_session=True, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        print(child.pid, flush=True)
        """,
        folder=tmp_path,
    )
    (stray,) = result.strays
    assert stray.split()[0] == result.stdout.strip()
    assert "time.sleep(300)" in stray
    assert not alive(int(result.stdout))
    assert stray in str(result)


def test_temporary_files_stay_in_the_folder(tmp_path):
    program = "from mpi4py import MPI; import tempfile; print(tempfile.gettempdir())"
    result = launch_in(1, ["-c", program], folder=tmp_path)
    assert result.stdout.strip() == str(tmp_path / "tmp")


def test_the_vendor_is_that_of_the_library(launch):
    result = launch(1, ["-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"])
    assert result.stdout.strip().lower().replace(" ", "") == mpi_vendor()


def test_another_launcher(launch):
    result = launch(1, ["-c", "print('alone')"], launcher=[sys.executable, "-c", RELAY])
    assert result.stdout.strip() == "alone", str(result)


RELAY = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_alive_knows_itself():
    assert alive(os.getpid())
