"""Messages that MPI moves between nodes: blocks that lie apart in an array."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.transport.base import Request
from mpimesh.transport.mpi import MPICommunicator, places_but

__all__ = ["Crossing"]


class Crossing(MPICommunicator):
    """Ranks of an MPI communicator on several nodes."""

    def all_gather_in_place(self, array: HostArray, blocks: Sequence[slice]) -> Request:
        """Copy ``blocks[r]`` of rank r's `array` into those of all; blocks may lie anywhere."""
        counts = [block.stop - block.start for block in blocks]
        if max(sum(counts), *(block.stop for block in blocks)) > self._limit:
            own = array[blocks[self.rank]]
            coming = [array[block] for block in blocks]
            coming[self.rank] = own[:0]
            return self._exchange(self._all_but_own(own), coming)
        starts = [block.start for block in blocks]
        whole = [array, (counts, starts)]
        return self._start("all_gather", self._comm.Iallgatherv, MPI.IN_PLACE, whole)

    def all_to_all_but(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        apart: Collection[int],
    ) -> Request:
        """As :meth:`all_to_all`, but leave out the blocks from and to the ranks in `apart`.

        If a rank is in another's `apart`, that one is in its.
        """
        sent, received = (places_but(counts, apart) for counts in (send_counts, recv_counts))
        if not self._large_blocks_in_pairs:
            return self._start("all_to_all", self._comm.Ialltoallv, [send, sent], [recv, received])
        outgoing, incoming = (
            [array[start : start + count] for count, start in zip(*places, strict=True)]
            for array, places in ((send, sent), (recv, received))
        )
        return self._exchange(outgoing, incoming)

    def _all_but_own(self, block: HostArray) -> list[HostArray]:
        return [block[:0] if rank == self.rank else block for rank in range(self.size)]
