"""Device memory moved by NCCL, through CuPy.

NCCL wants one GPU for each rank. Its operations are queued on a stream like kernels, so a request
is done as soon as that has happened; the caller's stream waits for the result on the device.
Messages of pairs are left to other ways: NCCL matches them by their order alone, and one whose
partner has not come yet holds up all that follows on the communicator.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mpimesh.arrays.types import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_ipc import gpu_key, node_key
from mpimesh.comm.device_strategy import BlockMove, DeviceStrategy, cut
from mpimesh.comm.engine import Steps

__all__ = ["Nccl", "nccl_library"]

_ID_BYTES = 128
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_NO_MESSAGES = (
    "NCCL matches messages by their order alone, and one that waits holds up all that follows"
)


class Nccl(DeviceStrategy):
    """Moves device memory by NCCL.

    Args:
        host: As for :class:`DeviceStrategy`.
        communicator: NCCL's, of the same ranks.
    """

    name = "nccl"

    def __init__(self, host: Communicator, communicator: Any) -> None:
        super().__init__(host)
        self._nccl: Any = nccl_library()
        self._comm = communicator
        self._dtypes = _dtypes(self._nccl)
        self._freed = False

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Collective: make it if all ranks can; the steps' value is (strategy or None, reason).

        Its last step waits for the other ranks, which have all come by then.
        """
        nccl = nccl_library()
        mine = np.array([node_key(), gpu_key(), nccl is not None], np.int64)
        facts = np.empty((host.size, 3), np.int64)
        yield host.all_gather(mine, facts.reshape(-1), [3] * host.size)
        why_not = _why_not(facts)
        if nccl is None or why_not:
            return None, why_not
        unique_id = np.zeros(_ID_BYTES, np.uint8)
        if host.rank == 0:
            unique_id[:] = np.frombuffer(_as_bytes(nccl.get_unique_id()), np.uint8)
        yield host.broadcast(unique_id, 0)
        try:
            communicator, problem = _join(nccl, host, unique_id.tobytes()), ""
        except Exception as error:  # NCCL's own class is known only where NCCL is
            communicator, problem = None, f"NCCL cannot start: {error}"
        joined = np.array([communicator is not None], np.uint8)
        yield host.all_reduce(None, joined, "min")
        if not joined[0]:
            return None, problem or "NCCL cannot start on another rank"
        return cls(host, communicator), ""

    def cannot(self, operation: str, dtype: DType | None = None, op: str = "") -> str | None:
        """Return why it does not do `operation`: NCCL lacks some number types, and keeps no NaN."""
        if operation == "messages":
            return _NO_MESSAGES
        if operation in _REDUCTIONS and dtype is not None:
            if dtype.kind == "c" and op != "sum":
                return f"NCCL has no complex numbers, and only sums of them go as pairs, not {op}"
            if dtype.kind == "f" and op in ("min", "max"):
                return f"NCCL's {op} leaves NaN out"
            if _real(dtype) not in self._dtypes:
                return f"NCCL has no {dtype}"
        return super().cannot(operation, dtype, op)

    def free(self) -> None:
        """Destroy NCCL's communicator. A second call does nothing."""
        if not self._freed:
            self._freed = True
            self._comm.destroy()

    # -- reductions ----------------------------------------------------------------------

    def reduce(self, send: Array, recv: Array | None, op: str, root: int | None) -> Steps:
        """Reduce over all ranks into `recv` on `root`; on each if None."""
        count, kind = self._numbers(send)
        source, target = send.data.ptr, (send if recv is None else recv).data.ptr
        function, stream = self._op(op), self.stream.ptr
        if count and root is None:
            self._comm.allReduce(source, target, count, kind, function, stream)
        elif count:
            self._comm.reduce(source, target, count, kind, function, root, stream)
        yield from ()

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str) -> Steps:
        """Reduce `send`; rank r gets block r, ``counts[r]`` elements long."""
        stream, function = self.stream.ptr, self._op(op)
        if len(set(counts)) == 1:
            count, kind = self._numbers(recv)
            if count:
                self._comm.reduceScatter(
                    send.data.ptr, recv.data.ptr, count, kind, function, stream
                )
        else:
            with self._group():
                for root, block in enumerate(cut(send, counts)):
                    count, kind = self._numbers(block)
                    out = recv if root == self.rank else block
                    if count:
                        self._comm.reduce(
                            block.data.ptr, out.data.ptr, count, kind, function, root, stream
                        )
        yield from ()

    # -- movements, as bytes ---------------------------------------------------------------

    def move_blocks(self, move: BlockMove) -> Steps:
        """Move blocks of bytes: all sends and receives at once, or as an all-gather of NCCL's."""
        if move.operation == "all_gather" and len(set(move.recv_counts)) == 1:
            self._all_gather(move.send, move.recv)
        else:
            self._exchange(move.outgoing(), move.incoming())
        yield from ()

    def broadcast(self, buffer: Array, root: int) -> Steps:
        """Copy the bytes of `root` into those of every rank."""
        if buffer.nbytes:
            address, kind = buffer.data.ptr, self._nccl.NCCL_UINT8
            self._comm.broadcast(address, address, buffer.nbytes, kind, root, self.stream.ptr)
        yield from ()

    def _all_gather(self, send: Array, recv: Array) -> None:
        if send.nbytes:
            kind, stream = self._nccl.NCCL_UINT8, self.stream.ptr
            self._comm.allGather(send.data.ptr, recv.data.ptr, send.nbytes, kind, stream)

    def _exchange(self, outgoing: list[Array], incoming: list[Array]) -> None:
        """Send block d to rank d and receive block s from rank s, all at once."""
        kind, stream = self._nccl.NCCL_UINT8, self.stream.ptr
        if outgoing and incoming and outgoing[self.rank].nbytes:
            source, target = outgoing[self.rank], incoming[self.rank]
            self.stream.copy(target.data.ptr, source.data.ptr, source.nbytes)
        with self._group():
            for peer in range(self.size):
                if peer == self.rank:
                    continue
                if outgoing and outgoing[peer].nbytes:
                    block = outgoing[peer]
                    self._comm.send(block.data.ptr, block.nbytes, kind, peer, stream)
                if incoming and incoming[peer].nbytes:
                    block = incoming[peer]
                    self._comm.recv(block.data.ptr, block.nbytes, kind, peer, stream)

    # -- helpers ---------------------------------------------------------------------------

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Start together what is called within; an error must not leave the group open."""
        self._nccl.groupStart()
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._nccl.groupEnd()
            raise
        self._nccl.groupEnd()

    def _numbers(self, array: Array) -> tuple[int, int]:
        """Return how many numbers NCCL sees, and of which type."""
        dtype = np.dtype(array.dtype)
        return array.size * (2 if dtype.kind == "c" else 1), self._dtypes[_real(dtype)]

    def _op(self, op: str) -> int:
        function: int = getattr(self._nccl, f"NCCL_{op.upper()}")
        return function


def nccl_library() -> Any:
    """Return `cupy.cuda.nccl`, which CuPy does not import by itself; None where it has none."""
    nccl: Any = getattr(sys.modules["cupy"].cuda, "nccl", None)
    if nccl is None:
        try:
            with warnings.catch_warnings(action="ignore"):
                from cupy.cuda import nccl as imported
        except ImportError:
            return None
        nccl = imported
    return nccl if nccl.available else None


def _why_not(facts: Any) -> str:
    without = np.flatnonzero(facts[:, 2] == 0).tolist()
    if without:
        return f"CuPy finds no NCCL on ranks {without}"
    owner: dict[tuple[int, int], int] = {}
    for rank, (node, gpu, _) in enumerate(facts.tolist()):
        first = owner.setdefault((node, gpu), rank)
        if first != rank:
            return f"ranks {first} and {rank} share one GPU, which NCCL refuses"
    return ""


def _join(nccl: Any, host: Communicator, unique_id: bytes) -> Any:
    try:
        return nccl.NcclCommunicator(host.size, unique_id, host.rank)
    except TypeError:  # before CuPy 14 an id is a tuple of signed numbers
        numbers = tuple(np.frombuffer(unique_id, np.int8).tolist())
        return nccl.NcclCommunicator(host.size, numbers, host.rank)


def _as_bytes(unique_id: Any) -> bytes:
    if isinstance(unique_id, bytes):
        return unique_id
    return np.array(unique_id, np.int8).tobytes()


def _dtypes(nccl: Any) -> dict[DType, int]:
    names = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
    return {np.dtype(name): getattr(nccl, f"NCCL_{name.upper()}") for name in names}


def _real(dtype: DType) -> DType:
    if dtype.kind != "c":
        return dtype
    return np.dtype(f"f{dtype.itemsize // 2}")
