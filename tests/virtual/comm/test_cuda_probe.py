"""The probe of CUDA-aware MPI: its cache, and how its child processes end."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from mpimesh.comm import VirtualWorld, virtual_communicators
from mpimesh.comm.cuda_probe import (
    BETWEEN_NODES,
    IN_NODE,
    ChildProcess,
    ChildResult,
    CudaAwareProbe,
    ProbeResult,
    needed_ways,
    read_results,
    write_results,
)
from mpimesh.comm.cuda_probe_child import OPERATIONS
from mpimesh.comm.mpi_environment import cache_folder, network_environment
from mpimesh.settings import Settings
from tests.helpers.raises import names

KEY = {"mpi": "MPICH 5", "gpu": "H200"}
YES = ProbeResult(True, "moved right")
NO = ProbeResult(False, "signal 11")
PERHAPS = ProbeResult(False, "not within 60 s", lasting=False)


def test_answers_come_back_for_their_key_and_way_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    assert write_results(KEY, IN_NODE, {"messages": YES, "gather": NO}, folder) == ""
    assert read_results(KEY, IN_NODE, folder) == ({"messages": YES, "gather": NO}, "")
    assert read_results(KEY | {"gpu": "A100"}, IN_NODE, folder) == ({}, "")
    assert read_results(KEY, BETWEEN_NODES, folder) == ({}, "")
    assert len([*folder.iterdir()]) == 1, "a file was left beside the answers"


def test_what_may_be_otherwise_tomorrow_is_forgotten_by_then(tmp_path, monkeypatch):
    write_results(KEY, IN_NODE, {"messages": PERHAPS, "gather": NO}, tmp_path)
    assert read_results(KEY, IN_NODE, tmp_path)[0] == {"messages": PERHAPS, "gather": NO}
    tomorrow_s = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: tomorrow_s)
    assert read_results(KEY, IN_NODE, tmp_path)[0] == {"gather": NO}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"answers": 3}', '{"at_s": 0, "answers": {"messages": {}}}']
)
def test_a_broken_file_is_no_answer_and_is_told(text, tmp_path):
    write_results(KEY, IN_NODE, {"messages": YES}, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    results, note = read_results(KEY, IN_NODE, tmp_path)
    assert results == {}
    assert str(path) in note


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    note = write_results(KEY, IN_NODE, {"messages": YES}, tmp_path / "file")
    assert "cannot be kept" in note


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder({}) is None
    assert read_results(KEY, IN_NODE, None) == ({}, "")
    assert "no home" in write_results(KEY, IN_NODE, {"messages": YES}, None)


# -- child processes -------------------------------------------------------------------


def run(program: str, limit_s: float = 20.0) -> ChildResult:
    child = ChildProcess([sys.executable, "-c", program], environment=os.environ, limit_s=limit_s)
    assert stat.S_IMODE(child.folder.stat().st_mode) == 0o700
    try:
        while not child.test():
            time.sleep(0.01)
        assert child.result is not None
        return child.result
    finally:
        child.close()
        assert not child.folder.exists()


def test_how_a_child_ended_is_told():
    assert str(run("print('a'); print('b'); raise SystemExit(3)")).endswith("exit code 3: b")
    killed = run("import os; os.kill(os.getpid(), 11)")
    assert killed.signal == signal.SIGSEGV
    assert str(killed) == "the child process was killed by signal 11 (SIGSEGV)"


def test_a_child_ends_at_its_limit_with_those_it_has_started():
    started = (
        "import subprocess, sys, time; one = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(100)'], start_new_session=True); print(one.pid, flush=True); "
        "time.sleep(100)"
    )
    result = run(started, limit_s=1)
    assert result.timed_out
    assert str(result) == "the child process did not end within 1 s"
    end_s = time.monotonic() + 10
    while Path(f"/proc/{int(result.output)}/exe").exists():
        assert time.monotonic() < end_s, "a grandchild lives on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("output", "returncode", "number"),
    [
        ("EXIT STRING: Segmentation fault (signal 11)", 11, 11),
        ("process rank 0 on node vm exited on\nsignal 7 (Bus error).", 135, 7),
        ("", 139, 11),
        ("", -9, 9),
        ("", 3, 0),
        ("a matter of signal 3", 3, 0),
    ],
)
def test_the_signal_is_found_in_what_a_launcher_says(output, returncode, number):
    assert ChildResult(returncode, False, 60, output).signal == number


# -- who asks -----------------------------------------------------------------------------


def test_each_way_is_tried_that_ranks_need_and_what_cannot_be_is_a_no():
    one, two = (100, 7, 4), (100, 8, 4)
    assert needed_ways([one]) == ([IN_NODE], "")
    assert needed_ways([one, one, two]) == ([IN_NODE], "")
    assert needed_ways([one, (200, 7, 1)]) == ([BETWEEN_NODES], "")
    assert needed_ways([one, two, (200, 7, 1)]) == ([IN_NODE, BETWEEN_NODES], "")
    # Two ranks that share the only GPU they see, and two that see one each (--gpus-per-task).
    assert needed_ways([(100, 7, 1), (100, 7, 1)]) == ([IN_NODE], "")
    ways, why_not = needed_ways([(100, 7, 2), (100, 8, 1), (200, 7, 1)])
    assert ways == []
    names(why_not, "rank 1", "of 2", "--gpus-per-task", "MPIMESH_CUDA_AWARE=yes")


@pytest.mark.parametrize(
    ("chosen", "network"),
    [
        ("", "^sm,cuda_ipc"),
        ("all", "^sm,cuda_ipc"),
        ("^ib", "^ib,sm,cuda_ipc"),
        ("rc,sm,cuda", "rc,cuda_copy,gdr_copy"),
        ("self,posix,sysv,tcp,cuda_copy,cuda_ipc", "self,tcp,cuda_copy"),
    ],
)
def test_the_network_alone(chosen, network):
    of_mpich = network_environment({"UCX_TLS": chosen}, "MPICH") or {}
    assert of_mpich["UCX_TLS"] == network
    of_openmpi = network_environment({"OMPI_MCA_btl": "self,sm,tcp"}, "Open MPI") or {}
    assert of_openmpi["OMPI_MCA_btl"] == "self,tcp"
    assert network_environment({}, "Microsoft MPI") is None


def test_threads_are_not_mpi(tmp_path):
    assert Settings.from_environment().cuda_aware == "auto"
    steps = CudaAwareProbe(tmp_path).steps(virtual_communicators(VirtualWorld(1))[0])
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert {*stop.value.value} == {*OPERATIONS}
    assert not any(result.usable for result in stop.value.value.values())
