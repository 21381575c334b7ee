"""Answers about CUDA-aware MPI: where they are kept, and what a child process is started with."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from mpimesh.settings import Settings
from mpimesh.transport import VirtualWorld, virtual_communicators
from mpimesh.transport.answer import OPERATIONS, Answer
from mpimesh.transport.child_process import ChildProcess, Ending
from mpimesh.transport.job_variables import clean_environment, tuning
from mpimesh.transport.proof import Proofs, cuda_aware
from mpimesh.transport.proof_cache import cache_folder, read_answers, write_answers

KEY = {"mpi": "MPICH 5", "gpu": "H200"}
YES = Answer(True, "moved right")
NO = Answer(False, "signal 11")
PERHAPS = Answer(False, "not within 60 s", lasting=False)


def test_answers_come_back_for_their_key_and_memory_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    assert write_answers(KEY, "device", {"messages": YES, "gather": NO}, folder) == ""
    assert read_answers(KEY, "device", folder) == ({"messages": YES, "gather": NO}, "")
    assert read_answers(KEY | {"gpu": "A100"}, "device", folder) == ({}, "")
    assert read_answers(KEY, "managed", folder) == ({}, "")
    assert len([*folder.iterdir()]) == 1, "a file was left beside the answers"


def test_what_may_be_otherwise_tomorrow_is_forgotten_by_then(tmp_path, monkeypatch):
    write_answers(KEY, "device", {"messages": PERHAPS, "gather": NO}, tmp_path)
    assert read_answers(KEY, "device", tmp_path)[0] == {"messages": PERHAPS, "gather": NO}
    tomorrow_s = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: tomorrow_s)
    assert read_answers(KEY, "device", tmp_path)[0] == {"gather": NO}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"answers": 3}', '{"at_s": 0, "answers": {"messages": {}}}']
)
def test_a_broken_file_is_no_answer_and_is_told(text, tmp_path):
    write_answers(KEY, "device", {"messages": YES}, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    answers, note = read_answers(KEY, "device", tmp_path)
    assert answers == {}
    assert str(path) in note


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    note = write_answers(KEY, "device", {"messages": YES}, tmp_path / "file")
    assert "cannot be kept" in note


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("/var/cache", Path("/var/cache/mpimesh")),
        ("", Path.home() / ".cache/mpimesh"),
        ("relative", Path.home() / ".cache/mpimesh"),
    ],
)
def test_the_cache_is_where_the_system_keeps_such_files(given, folder):
    assert cache_folder({"XDG_CACHE_HOME": given}) == folder
    assert cache_folder({}) == Path.home() / ".cache/mpimesh"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder({}) is None
    assert read_answers(KEY, "device", None) == ({}, "")
    assert "no home" in write_answers(KEY, "device", {"messages": YES}, None)


def test_a_child_knows_nothing_of_the_job_and_all_of_the_person():
    person = {"HOME": "/h", "UCX_TLS": "all", "OMPI_MCA_pml": "ucx", "LD_LIBRARY_PATH": "/l"}
    job = {
        "PMI_RANK": "1",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_MCA_initial_wdir": "/w",
        "PRTE_LAUNCHED": "1",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n0",
        "MPI_LOCALRANKID": "1",
        "HYDI_CONTROL_FD": "5",
    }
    clean = clean_environment(person | job)
    assert {name: clean.get(name) for name in person} == person
    assert not clean.keys() & job.keys()
    assert (Path(clean["PYTHONPATH"]) / "mpimesh").is_dir()
    assert tuning(person | job) == ["LD_LIBRARY_PATH=/l", "OMPI_MCA_pml=ucx", "UCX_TLS=all"]


# -- child processes -------------------------------------------------------------------


def run(program: str, limit_s: float = 20.0) -> Ending:
    child = ChildProcess([sys.executable, "-c", program], environment=os.environ, limit_s=limit_s)
    assert stat.S_IMODE(child.folder.stat().st_mode) == 0o700
    try:
        while not child.test():
            time.sleep(0.01)
        assert child.ending is not None
        return child.ending
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
    ending = run(started, limit_s=1)
    assert ending.timed_out
    assert str(ending) == "the child process did not end within 1 s"
    end_s = time.monotonic() + 10
    while Path(f"/proc/{int(ending.output)}/exe").exists():
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
    assert Ending(returncode, False, 60, output).signal == number


# -- who asks -----------------------------------------------------------------------------


def test_nothing_is_given_to_mpi_before_it_was_tried(monkeypatch):
    monkeypatch.delenv("MPIMESH_CUDA_AWARE", raising=False)
    assert cuda_aware("messages") == (False, "not tried yet in this process")


def test_threads_are_not_mpi(tmp_path):
    assert Settings.from_environment().cuda_aware == "auto"
    steps = Proofs(tmp_path).steps(virtual_communicators(VirtualWorld(1))[0])
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert {*stop.value.value} == {*OPERATIONS}
    assert not any(answer.usable for answer in stop.value.value.values())
