"""The table of who can move what."""

from __future__ import annotations

import dataclasses

import pytest

from mpimesh.cli.examine import SHARED_MEMORY, capability_table
from mpimesh.cli.facts import Capability, Cuda, Measurement, Mpi
from mpimesh.comm.cuda_probe import ProbeResult
from mpimesh.comm.cuda_probe_child import OPERATIONS

YES, NO = ProbeResult(True, "seen"), ProbeResult(False, "not there")
SHARED = Measurement("within a node", SHARED_MEMORY, (0, 1), bytes_per_s=1e9)


def table(**changes):
    facts = {
        "mpi": Mpi(large_counts=True),
        "cuda": Cuda(installed=True, gpus=2),
        "world_size": 2,
        "speeds": (SHARED,),
        "probed": dict.fromkeys(OPERATIONS, NO) | {"messages": YES},
        "ways": {"nccl": YES, "cuda_ipc": NO},
    }
    return capability_table(**{**facts, **changes})


def test_each_operation_of_cuda_aware_mpi_has_its_own_row():
    rows = [row for row in table() if row.transport == "mpi_cuda"]
    assert [row.operation for row in rows] == [*OPERATIONS]
    assert [row.usable for row in rows] == [True] + [False] * (len(OPERATIONS) - 1)
    assert {row.proof for row in rows} == {"seen", "not there"}


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (Cuda(), "CuPy is not installed"),
        (Cuda(installed=True), "CuPy sees 0 GPUs"),
        (Cuda(installed=True, problem="no driver"), "no driver"),
    ],
)
def test_without_a_device_nothing_is_usable_there(cuda, why):
    rows = [row for row in table(cuda=cuda) if row.memory == "device"]
    assert {row.transport for row in rows} == {"mpi_cuda", "nccl", "cuda_ipc", "staged"}
    assert {(row.usable, row.proof) for row in rows} == {(False, why)}


@pytest.mark.parametrize(("ranks", "why"), [(1, "there is one rank"), (2, "no mesh could be made")])
def test_each_way_on_devices_says_how_it_is_known(ranks, why):
    found = {row.transport: (row.usable, row.proof) for row in table() if row.memory == "device"}
    assert (found["nccl"], found["cuda_ipc"]) == ((True, "seen"), (False, "not there"))
    assert found["staged"] == (True, "copied through host memory, with any MPI; CuPy sees 2 GPUs")
    rows = [row for row in table(world_size=ranks, ways={}) if row.memory == "device"]
    found = {row.transport: (row.usable, row.proof) for row in rows}
    assert found["nccl"] == found["cuda_ipc"] == (False, why)


@pytest.mark.parametrize(
    ("speeds", "setting", "usable", "why"),
    [
        ((), "auto", False, "rank 0 is alone on its node"),
        ((dataclasses.replace(SHARED, problem="no memory"),), "auto", False, "no memory"),
        ((SHARED,), "never", False, "off (MPIMESH_NODE_SHARED=never)"),
        ((SHARED,), "auto", True, "rank 0 has read an array of rank 1 in place"),
    ],
)
def test_shared_memory_is_usable_where_it_was_read(speeds, setting, usable, why, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", setting)
    rows = [row for row in table(speeds=speeds) if row.transport == "node_shared"]
    assert [row.memory for row in rows] == ["host", "shared"]
    assert {(row.usable, row.proof) for row in rows} == {(usable, why)}


def test_threads_need_no_mpi_and_staging_does():
    usable = {row.transport: row.usable for row in table(mpi=Mpi(problem="not there"))}
    assert (usable["mpi"], usable["staged"], usable["virtual"]) == (False, False, True)


def test_counts_are_possible_with_any_mpi():
    row = Capability("mpi", "counts above 2^31", "host", True, "in one call")
    assert row in table()
    (old,) = [row for row in table(mpi=Mpi()) if row.operation.startswith("counts")]
    assert old.usable
    assert "in pieces" in old.proof
