"""CUDA-aware MPI is tried in child processes: what ends there is an answer here.

The children run the MPI at hand; a stand-in for CuPy decides what "device memory" is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from mpimesh.comm.cuda_probe import BETWEEN_NODES, ChildProcess, ProbeResult, probe_in_children
from mpimesh.comm.cuda_probe_child import OPERATIONS
from mpimesh.testing.launch import mpiexec_environment
from tests.helpers.raises import names

STAND_IN = Path(__file__).with_name("stand_in")


def finish(
    trials: Generator[ChildProcess, None, dict[str, ProbeResult]],
) -> dict[str, ProbeResult]:
    """Wait for the children of a probe, and return its results."""
    folders: list[Path] = []
    while True:
        try:
            child = next(trials)
        except StopIteration as stop:
            assert not any(folder.exists() for folder in folders), "a child left its folder"
            results: dict[str, ProbeResult] = stop.value
            return results
        folders.append(child.folder)
        while not child.test():
            time.sleep(0.01)


def probe(kind, operations=OPERATIONS, **options) -> dict[str, ProbeResult]:
    environment = {
        **os.environ,
        **mpiexec_environment(),
        "PYTHONPATH": str(STAND_IN),
        "STAND_IN": kind,
    }
    return finish(probe_in_children(operations, environment=environment, **options))


@pytest.mark.deep
def test_memory_that_mpi_can_read_is_moved_right_by_every_operation():
    found = probe("host")
    assert [*found] == [*OPERATIONS]
    right = "two ranks under mpiexec moved 8 B, 32 KiB and 4 MiB right"
    assert {*found.values()} == {ProbeResult(True, right)}


@pytest.mark.deep
def test_memory_that_it_cannot_read_kills_the_child_alone():
    found = probe("nowhere")
    assert [*found] == [*OPERATIONS]
    for result in found.values():
        assert not result.usable
        assert result.lasting
        names(result.reason, "signal 11", "SIGSEGV", "two ranks", "mpiexec")


def test_what_goes_between_nodes_is_tried_by_the_network_alone():
    """MPI moves this memory in a node, and would crash between nodes."""
    assert probe("near", ["messages"])["messages"].usable
    found = probe("near", ["messages"], way=BETWEEN_NODES)
    names(found["messages"].reason, "the child process", "by the network alone")
    assert not found["messages"].usable


@pytest.mark.deep
def test_memory_that_the_network_can_read():
    for result in probe("host", way=BETWEEN_NODES).values():
        assert result.usable, result.reason
        names(result.reason, "two ranks", "by the network alone")


def test_without_mpiexec_nothing_is_tried():
    """One process that talks to itself would show nothing of two."""
    found = probe("host", ["messages", "all_to_all"], mpiexec=None)
    assert {result.usable for result in found.values()} == {False}
    names(found["messages"].reason, "no mpiexec", "MPIMESH_CUDA_AWARE=yes")


@pytest.mark.deep
def test_wrong_data_is_a_no_for_its_operation_and_the_rest_is_tried():
    found = probe("elsewhere", ["broadcast", "gather"])
    for operation, result in found.items():
        assert result.reason.startswith(f"wrong data in {operation} of 8 bytes; wrong data in")


@pytest.mark.deep
def test_a_hang_ends_at_its_limit_with_all_its_processes():
    start_s = time.monotonic()
    found = probe("stuck", ["gather", "scatter"], limit_s=3)
    assert time.monotonic() - start_s < 15
    for result in found.values():
        assert result.reason.startswith("the child process did not end within 3 s")
        assert not result.lasting


@pytest.mark.deep
def test_without_a_device_nothing_is_tried():
    found = probe("absent")
    assert len({*found.values()}) == 1
    assert found["messages"].reason == "RuntimeError: no CUDA-capable device is detected"
    assert not found["messages"].lasting


@pytest.mark.deep
def test_a_launcher_of_another_mpi_is_not_trusted(tmp_path):
    """It starts two processes, each a world of its own."""
    other = tmp_path / "mpiexec"
    other.write_text('#!/bin/sh\nshift 2\n"$@"\n"$@"\n')
    other.chmod(0o755)
    found = probe("host", ["messages"], mpiexec=str(other))
    assert not found["messages"].usable
    assert not found["messages"].lasting
    names(found["messages"].reason, "mpiexec", "not start two ranks")


PROGRAM = """
import json, os
from mpi4py import MPI
from mpimesh.comm import cuda_probe
from mpimesh.comm.mpi import MPICommunicator

if os.environ.get("NODES") == "2":
    cuda_probe.node_key = lambda: 1 + MPI.COMM_WORLD.rank % 2
communicator = MPICommunicator.duplicate(MPI.COMM_WORLD)
results = cuda_probe.PROCESS_PROBE.run(communicator, ["messages", "gather"])
facts = [[result.usable, result.reason] for result in results.values()]
every = MPI.COMM_WORLD.gather(facts)
communicator.free()
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(every))
"""


def environment(cache, kind, **more):
    return {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(Path(__file__).parents[2])]),
        "STAND_IN": kind,
        "XDG_CACHE_HOME": str(cache),
        **more,
    }


def test_ranks_share_one_probe_and_the_next_job_its_result(launch, tmp_path):
    """Inside a job, whose variables the children must not see."""
    cache = tmp_path / "cache"
    first = launch(3, PROGRAM, env=environment(cache, "nowhere"))
    assert first.returncode == 0, str(first)
    told = json.loads(first.stdout)
    assert told[0] == told[1] == told[2]
    for usable, reason in told[0]:
        assert not usable
        assert "signal 11" in reason
    (kept,) = (cache / "mpimesh").iterdir()

    # Were it tried again, the answer would be yes.
    second = launch(2, PROGRAM, env=environment(cache, "host"))
    assert json.loads(second.stdout)[0] == told[0], str(second)

    kept.write_text('{"answers": ')
    third = launch(2, PROGRAM, env=environment(cache, "host"))
    assert json.loads(third.stdout)[1][0][0] is True, str(third)
    assert json.loads(kept.read_text())["answers"]["messages"]["usable"] is True


def test_ranks_of_two_nodes_are_told_of_the_network(launch, tmp_path):
    """Three ranks on two nodes need both ways, and one of them crashes."""
    env = environment(tmp_path, "near", NODES="2")
    told = json.loads(launch(3, PROGRAM, env=env).stdout)
    assert told[0] == told[1] == told[2]
    names(told[0][0][1], "the child process", "by the network alone")
    assert not told[0][0][0]
    # What was found for ranks of one node is another answer.
    env = environment(tmp_path, "near")
    assert json.loads(launch(2, PROGRAM, env=env).stdout)[0][0][0] is True


def test_ranks_that_see_one_gpu_each_have_no_proof_of_two(launch, tmp_path):
    env = environment(tmp_path, "host", STAND_IN_GPUS="0;1")
    for facts in json.loads(launch(2, PROGRAM, env=env).stdout):
        names(facts[0][1], "rank 0", "--gpus-per-task", "MPIMESH_CUDA_AWARE=yes")
        assert not facts[0][0]
    for gpus in ("0,1;1,0", "3"):  # each sees both; both have one
        env = environment(tmp_path, "host", STAND_IN_GPUS=gpus)
        assert json.loads(launch(2, PROGRAM, env=env).stdout)[0][0][0] is True


@pytest.mark.deep
@pytest.mark.parametrize("setting", ["yes", "no"])
def test_the_setting_is_believed_and_nothing_is_tried(setting, launch, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MPIMESH_CUDA_AWARE": setting}
    result = launch(2, PROGRAM, env=env)
    assert json.loads(result.stdout)[1] == [[setting == "yes", f"MPIMESH_CUDA_AWARE={setting}"]] * 2
    assert not (tmp_path / "cache").exists()


TWICE = """
import os, sys
from mpi4py import MPI
from mpimesh.comm.cuda_probe import PROCESS_PROBE
from mpimesh.comm.mpi import MPICommunicator

communicator = MPICommunicator.duplicate(MPI.COMM_WORLD)
first = PROCESS_PROBE.run(communicator, ["messages"])
os.environ["STAND_IN"] = "nowhere"  # a second trial would crash
second = PROCESS_PROBE.run(communicator, ["messages"])
fresh = PROCESS_PROBE.run(communicator, ["messages"], fresh=True)
communicator.free()
print(first == second, first["messages"].usable, fresh["messages"].usable, len(PROCESS_PROBE.notes))
"""


@pytest.mark.deep
def test_where_no_cache_can_be_kept_a_process_still_tries_once(launch, tmp_path):
    (tmp_path / "file").write_text("")
    env = {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(Path(__file__).parents[2])]),
        "STAND_IN": "host",
        "XDG_CACHE_HOME": str(tmp_path / "file"),
    }
    result = launch(1, TWICE, env=env)
    assert result.stdout == "True True False 3\n", str(result)
