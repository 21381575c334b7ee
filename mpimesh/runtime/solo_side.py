"""Device memory in a group of one rank: every collective is a copy on its device."""

from __future__ import annotations

from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.transport import Request

__all__ = ["SoloSide"]


class _Done:
    """The request of what is done, or in the order of the current stream, already."""

    def test(self) -> bool:
        return True


class SoloSide:
    """The collectives of a communicator of one rank, for flat CuPy arrays."""

    def all_reduce(self, send: Array | None, recv: Array, op: str) -> Request:
        """Copy `send` to `recv`; ``send=None`` means it is there."""
        return _copy(send, recv)

    def reduce(self, send: Array, recv: Array, op: str, root: int) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int]) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def gather(self, send: Array, recv: Array, counts: Sequence[int], root: int) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def scatter(self, send: Array, recv: Array, counts: Sequence[int], root: int) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Request:
        """Copy `send` to `recv`."""
        return _copy(send, recv)

    def broadcast(self, buffer: Array, root: int) -> Request:
        """Leave `buffer` as it is."""
        return _Done()


def _copy(send: Array | None, recv: Array) -> Request:
    if send is not None:
        recv[...] = send
    return _Done()
