"""All that the doctor has found, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpimesh.cli.clean import Leftover
from mpimesh.cli.facts_rank import Rank
from mpimesh.cli.facts_software import Cuda, Mpi, Software
from mpimesh.cli.measure import Measurement
from mpimesh.comm.algorithms import Row
from mpimesh.runtime import Launch

__all__ = ["Capability", "Diagnosis", "Finding", "Node", "nodes_of"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know.

    Attributes:
        severity: ``"error"`` if programs will fail or give wrong results, ``"warning"`` if they
            will be slow or may fail, else ``"note"``.
        what: What is so.
        cure: What mends it, a command where there is one; "" if there is nothing to do.
    """

    severity: str
    what: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One node and its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether one transport may be used for one operation on one kind of memory.

    Attributes:
        transport: Who moves the bytes, such as ``"mpi_cuda"``.
        operation: A collective, ``"messages"``, or ``"*"`` for all.
        memory: ``"host"``, ``"shared"`` or ``"device"``.
        usable: Whether it may be used.
        proof: How that is known.
    """

    transport: str
    operation: str
    memory: str
    usable: bool
    proof: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All facts, before and beside the findings.

    Attributes:
        software: Versions.
        mpi: The MPI library.
        cuda: CuPy and CUDA on rank 0.
        launch: What the launcher says.
        world_size: How many ranks MPI has.
        ranks: Each of them.
        capabilities: Who can move what.
        measurements: How fast.
        algorithms: How the world's group of a mesh moves its bytes.
        leftovers: Files of dead jobs on rank 0's node.
        problems: What did not work while the doctor looked.
    """

    software: Software
    mpi: Mpi
    cuda: Cuda
    launch: Launch
    world_size: int
    ranks: tuple[Rank, ...]
    capabilities: tuple[Capability, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    algorithms: tuple[Row, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in the order of their first ranks."""
        return nodes_of(self.ranks)

    def to_fields(self, findings: Sequence[Finding]) -> dict[str, Any]:
        """Return everything in JSON's types."""
        fields = asdict(self)
        del fields["problems"]
        healthy = all(finding.severity != "error" for finding in findings)
        return {
            "healthy": healthy,
            "findings": [asdict(finding) for finding in findings],
            "nodes": [asdict(node) for node in self.nodes],
            **fields,
        }


def nodes_of(ranks: Sequence[Rank]) -> tuple[Node, ...]:
    """Return the nodes of `ranks`, in the order of their first ranks."""
    members: dict[str, list[int]] = {}
    for one in ranks:
        members.setdefault(one.node, []).append(one.rank)
    return tuple(Node(name, tuple(those)) for name, those in members.items())
