"""Diagnoses for the doctor's tests: a healthy machine, and changes to it."""

from __future__ import annotations

from typing import Any

from mpimesh.cli.facts import Capability, Cuda, Diagnosis, Mpi, Rank, Shm, Software
from mpimesh.runtime import Launch

GIB = 1 << 30


def rank(number: int, **changes: Any) -> Rank:
    """A rank with a core of its own on node n0."""
    fields = {
        "rank": number,
        "node": "n0",
        "pid": 100 + number,
        "cores": (number,),
        "cpu_quota": 0.0,
        "threads": 1,
        "local_rank": number,
        "gpu": "",
        "gpu_id": "",
        "gpu_driver": "",
        "gpus_seen": 0,
        "memory_bytes": 16 * GIB,
        "shm": Shm(8 * GIB, 8 * GIB),
        "software": "mpimesh 1",
        "settings": "",
    }
    return Rank(**{**fields, **changes})


def diagnosis(*ranks: Rank, **changes: Any) -> Diagnosis:
    """The diagnosis of a healthy machine, by default one of four ranks."""
    ranks = ranks or tuple(rank(number) for number in range(4))
    fields: dict[str, Any] = {
        "software": Software("1.0", "3.11", "2.0", "4.1", "/bin/python"),
        "mpi": Mpi(
            vendor="MPICH",
            version="5.0.2",
            standard="5.0",
            thread_level="multiple",
            tag_limit=536870911,
            communicator_limit=2046,
            large_counts=True,
        ),
        "cuda": Cuda(),
        "launch": Launch("mpiexec (MPICH)", len(ranks), 0, 0),
        "world_size": len(ranks),
        "ranks": ranks,
        "capabilities": (Capability("mpi", "*", "host", True, "a world of 4 ranks"),),
    }
    return Diagnosis(**{**fields, **changes})
