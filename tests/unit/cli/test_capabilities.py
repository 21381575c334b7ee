"""The table of who can move what."""

from __future__ import annotations

from mpimesh.cli.examine import capability_table
from mpimesh.cli.facts import Capability
from mpimesh.comm.cuda_probe import ProbeResult
from mpimesh.comm.cuda_probe_child import OPERATIONS

YES, NO = ProbeResult(True, "seen"), ProbeResult(False, "not there")


def table(**changes):
    facts = {
        "mpi": YES,
        "large_counts": True,
        "node_shared": YES,
        "device": YES,
        "mpi_cuda": dict.fromkeys(OPERATIONS, NO) | {"messages": YES},
        "nccl": YES,
        "cuda_ipc": NO,
    }
    return capability_table(**{**facts, **changes})


def test_each_operation_of_cuda_aware_mpi_has_its_own_row():
    rows = [row for row in table() if row.transport == "mpi_cuda"]
    assert [row.operation for row in rows] == [*OPERATIONS]
    assert [row.usable for row in rows] == [True] + [False] * (len(OPERATIONS) - 1)
    assert {row.proof for row in rows} == {"seen", "not there"}


def test_without_a_device_nothing_is_usable_there():
    rows = [row for row in table(device=NO) if row.memory == "device"]
    assert {row.transport for row in rows} == {"mpi_cuda", "nccl", "cuda_ipc", "staged"}
    assert {(row.usable, row.proof) for row in rows} == {(False, "not there")}


def test_threads_need_no_mpi_and_staging_does():
    usable = {row.transport: row.usable for row in table(mpi=NO)}
    assert (usable["mpi"], usable["staged"], usable["virtual"]) == (False, False, True)


def test_counts_are_possible_with_any_mpi():
    row = Capability("mpi", "counts above 2^31", "host", True, "in one call")
    assert row in table()
    (old,) = [row for row in table(large_counts=False) if row.operation.startswith("counts")]
    assert old.usable
    assert "in pieces" in old.proof
