"""Which ways to move device memory the ranks of a communicator have, and which is best."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays.types import DType
from mpimesh.errors import GroupError, on_all_ranks
from mpimesh.transport.base import Communicator
from mpimesh.transport.cuda_ipc import CudaIpc
from mpimesh.transport.cuda_probe import PROCESS_PROBE, ProbeResult, cuda_aware
from mpimesh.transport.device_mover import COLLECTIVES, DeviceMover
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.mpi_cuda import MPICuda
from mpimesh.transport.nccl import Nccl
from mpimesh.transport.route import Route
from mpimesh.transport.staged import Staged

__all__ = ["Choice", "find_ways"]

_ONE_SHOT_BYTES = {2: 1 << 62, 3: 512 << 10, 4: 512 << 10}
"""Up to which size reading all others directly beats NCCL (vLLM's rule); further ranks: 256 KiB."""

_MOST_ONE_SHOT_RANKS = 8


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way that works, and from which size to which it is the first choice."""

    mover: DeviceMover
    below_bytes: int | None
    reason: str

    def fits(self, nbytes: int | None) -> bool:
        """Tell whether it is the way for arrays of this size; None is for any size."""
        return self.below_bytes is None or (nbytes is not None and nbytes < self.below_bytes)


class Choice:
    """The ways of one communicator, in the order of preference.

    Args:
        twin: The communicator that the movers talk on.
        candidates: Those that work.
        refused: Why the others do not, by name.
        prefer: The one that was asked for, or empty.
    """

    def __init__(
        self,
        twin: Communicator,
        candidates: Sequence[_Candidate],
        refused: dict[str, str],
        prefer: str,
    ) -> None:
        self._twin = twin
        self._candidates = candidates
        self._refused = refused
        self._prefer = prefer
        self._freed = False

    def pick(self, operation: str, nbytes: int | None, dtype: DType, op: str) -> DeviceMover:
        """Return who does it; the same on all ranks.

        Args:
            operation: The collective.
            nbytes: Its size; None where ranks do not know each other's.
            dtype: Of its arrays.
            op: The reduction.

        Raises:
            GroupError: On every rank, if a way was asked for that cannot.
        """
        whys = []
        for one in self._candidates:
            if self._prefer and one.mover.name != self._prefer:
                continue
            if not self._prefer and not one.fits(nbytes):
                continue
            why = one.mover.cannot(operation, dtype, op)
            if why is None:
                return one.mover
            whys.append(why)
        why = "; ".join(whys) or self._refused.get(self._prefer, "it was not found")
        raise on_all_ranks(
            GroupError(
                f"{operation} of {dtype} cannot be done by {self._prefer!r}, which was asked for: "
                f"{why}; leave the way open, or ask for 'staged'"
            )
        )

    def has(self, name: str, operation: str) -> bool:
        """Tell whether a way works, and does `operation`."""
        return any(
            one.mover.name == name and one.mover.cannot(operation) is None
            for one in self._candidates
        )

    def routes(self) -> Sequence[Route]:
        """Return for each operation who does it from which size on, and why."""
        return [route for operation in COLLECTIVES for route in self._routes_of(operation)]

    def _routes_of(self, operation: str) -> list[Route]:
        sizes = {0} | {one.below_bytes for one in self._candidates if one.below_bytes is not None}
        if operation == "all_to_all":
            sizes = {0}  # sizes differ over ranks, so they decide nothing
        found: list[Route] = []
        for size in sorted(sizes):
            nbytes = None if operation == "all_to_all" else size
            try:
                mover = self.pick(operation, nbytes, np.dtype(np.float32), "sum")
            except GroupError as error:
                return [Route(operation, "device", 0, "none", str(error))]
            if not found or found[-1].transport != mover.name:
                found.append(Route(operation, "device", size, mover.name, self._why(mover)))
        return found

    def _why(self, mover: DeviceMover) -> str:
        own = next(one.reason for one in self._candidates if one.mover is mover)
        if self._prefer:
            return f"asked for; {own}"
        others = [f"{name}: {why}" for name, why in self._refused.items()]
        return "; ".join([own, *others])

    def ways(self) -> dict[str, ProbeResult]:
        """Return for each way, by name, whether the ranks have it, and why. Local."""
        refused = {name: ProbeResult(False, why) for name, why in self._refused.items()}
        return refused | {one.mover.name: ProbeResult(True, one.reason) for one in self._candidates}

    def free(self) -> None:
        """Give all back. A second call does nothing."""
        if not self._freed:
            self._freed = True
            for one in self._candidates:
                one.mover.free()
            self._twin.free()


def find_ways(communicator: Communicator, engine: Engine, prefer: str) -> Steps:
    """Collective: find the ways that all ranks have; the steps' value is the :class:`Choice`."""
    twin: Communicator = yield from communicator.idup()
    chain: Hashable = ("device", id(twin))
    refused: dict[str, str] = {}
    candidates: list[_Candidate] = []
    ipc, refused["cuda_ipc"] = yield from CudaIpc.find(twin, engine, chain)
    nccl, refused["nccl"] = yield from Nccl.find(twin, engine, chain)
    if ipc is not None:
        below = None
        if nccl is not None:
            most = _ONE_SHOT_BYTES.get(twin.size, 256 << 10)
            below = most if twin.size <= _MOST_ONE_SHOT_RANKS else 0
        why = "all ranks open each other's memory on this node"
        candidates.append(_Candidate(ipc, below, why))
    if nccl is not None:
        candidates.append(_Candidate(nccl, None, "every rank has a GPU of its own"))
    if ipc is not None and prefer != "mpi_cuda":
        refused["mpi_cuda"] = "not tried, since memory is read in place"
    else:
        yield from PROCESS_PROBE.steps(twin)
        mpi = MPICuda(twin, engine, chain)
        why_not = mpi.cannot("messages")
        votes = np.array([why_not is None], np.uint8)
        yield twin.all_reduce(None, votes, "min")
        if votes[0]:
            candidates.append(_Candidate(mpi, None, cuda_aware("messages")[1]))
        else:
            refused["mpi_cuda"] = why_not or "not proven on another rank"
    candidates.append(_Candidate(Staged(twin, engine, chain), None, "works everywhere"))
    return Choice(twin, candidates, {n: why for n, why in refused.items() if why}, prefer)
