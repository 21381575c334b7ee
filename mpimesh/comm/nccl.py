"""Device memory moved by NCCL, through CuPy, and NCCL's communicators for programs of your own.

NCCL wants one GPU for each rank. Its operations are put on a stream like kernels, and kernels wait
on the device for those of the other ranks. So:

* Operations are put on the stream where they are called, in the order of the calls on this rank
  over all its groups: NCCL asks for the same order on all ranks, and may block the host in a first
  call until the others have come to it. Groups that share ranks must be called in one order on all
  of these; no transport can mend that (NCCL's guide, "Using multiple communicators concurrently").
  NCCL_LAUNCH_ORDER_IMPLICIT=1 lets NCCL 2.26 keep to it on the device, too.
* A communicator is made by a thread, because that blocks until all its ranks have come, and each
  rank may be making several, whose turns come at other moments on each.
* An operation is done when the device has done it, and not when it is queued. Up to then each test
  asks NCCL for errors of its own, and whoever waits is seen, by a limit of time, too. What has
  failed, or is still under way when the communicator is freed, is aborted: to destroy it would wait
  for ever.

Messages of pairs are left to other strategies: NCCL matches them by their order alone, and one
whose partner has not come yet holds up all that follows on the communicator.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import Array, DType
from mpimesh.comm.base import Communicator
from mpimesh.comm.device_strategy import Collective, DeviceStrategy, agree, gpu_key, node_key
from mpimesh.comm.engine import ProgressEngine, Steps
from mpimesh.comm.requests import Condition
from mpimesh.errors import TransportError, on_all_ranks

__all__ = ["Nccl", "generate_id", "nccl_communicator", "nccl_library", "share_id"]

_ID_BYTES = 128
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_NO_MESSAGES = (
    "NCCL matches messages by their order alone, and one that waits holds up all that follows"
)
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")


# -- communicators of NCCL -------------------------------------------------------------------


def nccl_library() -> Any:
    """Return `cupy.cuda.nccl`, which CuPy does not import by itself; None where it has none."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    nccl: Any = getattr(cupy.cuda, "nccl", None)
    if nccl is None:
        try:
            with warnings.catch_warnings(action="ignore"):
                from cupy.cuda import nccl as imported
        except ImportError:
            return None
        nccl = imported
    return nccl if nccl.available else None


def generate_id() -> bytes:
    """Return a new id, by which ranks find each other to make a communicator of NCCL. Local.

    One rank makes it, and all others are told: see :func:`share_id`.

    Raises:
        TransportError: If CuPy is not imported, or finds no NCCL.
    """
    nccl = nccl_library()
    if nccl is None:
        raise TransportError(_what_is_missing())
    unique_id = nccl.get_unique_id()
    # Before CuPy 14 it is a tuple of signed numbers.
    return unique_id if isinstance(unique_id, bytes) else np.array(unique_id, np.int8).tobytes()


def share_id(communicator: Communicator) -> bytes:
    """Make an id of NCCL on rank 0, and return it on all ranks. Collective.

    Args:
        communicator: The ranks, as `mesh.comm` or `group.communicator`.

    Raises:
        TransportError: On every rank, if one of them has no NCCL.

    Example:
        >>> from mpimesh.comm import nccl
        >>> unique_id = nccl.share_id(mesh.comm)
        >>> own = nccl.nccl_communicator(unique_id, mesh.size, mesh.rank)
        >>> own.allReduce(x.data.ptr, y.data.ptr, x.size, ...)
    """
    request = ProgressEngine().stage("the id", _id_steps(communicator))
    communicator.wait(request.test, what="the id of an NCCL communicator")
    unique_id, why_not = request.value
    if why_not:
        raise on_all_ranks(TransportError(why_not))
    return bytes(unique_id)


def nccl_communicator(unique_id: bytes, size: int, rank: int) -> Any:
    """Return CuPy's `NcclCommunicator` of all ranks that have this id. It waits for them.

    Args:
        unique_id: As :func:`generate_id` has made it on one rank.
        size: The number of ranks.
        rank: This one.

    Raises:
        TransportError: If CuPy is not imported or finds no NCCL, or NCCL refuses, as ranks that
            share a GPU.
    """
    nccl = nccl_library()
    if nccl is None:
        raise TransportError(_what_is_missing())
    if len(unique_id) != _ID_BYTES or not 0 <= rank < size:
        raise TransportError(
            f"a communicator of NCCL takes an id of {_ID_BYTES} bytes and a rank below its size, "
            f"got {len(unique_id)} bytes, rank {rank} of {size}"
        )
    try:
        try:
            return nccl.NcclCommunicator(size, unique_id, rank)
        except TypeError:  # before CuPy 14 an id is a tuple of signed numbers
            numbers = tuple(np.frombuffer(unique_id, np.int8).tolist())
            return nccl.NcclCommunicator(size, numbers, rank)
    except Exception as error:  # NCCL's own class is known only where NCCL is
        raise TransportError(f"NCCL cannot start on rank {rank} of {size}: {error}") from error


def _what_is_missing() -> str:
    if "cupy" not in sys.modules:
        return (
            "NCCL is used through CuPy, which is not imported: import cupy first, or install it: "
            "pip install cupy-cuda13x (for a GPU driver before 580, cupy-cuda12x)"
        )
    return "CuPy finds no NCCL: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for CUDA 12"


def _id_steps(host: Communicator) -> Steps:
    """Make an id on rank 0; the steps' value is (the id on all ranks, why not)."""
    unique_id, problem = np.zeros(_ID_BYTES, np.uint8), ""
    try:
        if host.rank == 0:
            unique_id[:] = np.frombuffer(generate_id(), np.uint8)
        elif nccl_library() is None:
            problem = _what_is_missing()
    except Exception as error:  # also one of NCCL's own
        problem = str(error)
    why_not = yield from agree(host, problem, "has no NCCL that CuPy can use")
    if not why_not:
        yield host.broadcast(unique_id, 0)
    return unique_id, why_not


# -- the strategy ----------------------------------------------------------------------------


class Nccl(DeviceStrategy):
    """Moves device memory by NCCL.

    Args:
        host: As for :class:`DeviceStrategy`.
        communicator: NCCL's, of the same ranks.
    """

    name = "nccl"
    reason = "every rank has a GPU of its own"
    at_call = True

    def __init__(self, host: Communicator, communicator: Any) -> None:
        super().__init__(host)
        self._nccl: Any = nccl_library()
        self._comm = communicator
        self._dtypes = {
            np.dtype(name): getattr(self._nccl, f"NCCL_{name.upper()}") for name in _DTYPES
        }
        self._under_way = 0

    @classmethod
    def find(cls, host: Communicator) -> Steps:
        """Collective: make it if all ranks can; the steps' value is (strategy or None, reason)."""
        mine = np.array([node_key(), gpu_key(), nccl_library() is not None], np.int64)
        facts = np.empty((host.size, 3), np.int64)
        yield host.all_gather(mine, facts.reshape(-1), [3] * host.size)
        why_not = _why_not(facts)
        if why_not:
            return None, why_not
        unique_id, why_not = yield from _id_steps(host)
        if why_not:
            return None, why_not
        joining = _Joining(host, unique_id.tobytes())
        yield joining
        why_not = yield from agree(host, joining.problem, "cannot start NCCL")
        return (None, why_not) if why_not else (cls(host, joining.communicator), "")

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
        """Destroy NCCL's communicator, or abort it if something is still under way on it."""
        communicator, self._comm = self._comm, None
        if communicator is not None:
            with self.stream.device:
                communicator.abort() if self._under_way else communicator.destroy()

    def steps(self, what: Collective) -> Steps:
        """Do a collective by NCCL's own, or by its reductions or messages, started together."""
        send, recv, root = what.send, what.recv, what.root
        equal = len(set(what.recv_counts)) == 1
        op = getattr(self._nccl, f"NCCL_{what.op.upper()}") if what.op else None
        if what.name == "all_reduce":
            self._call("allReduce", send, recv, op)
        elif what.name == "reduce":
            self._call("reduce", send, send if recv is None else recv, op, root)
        elif what.name == "broadcast":
            self._call("broadcast", what.data, what.data, root)
        elif what.name == "all_gather" and equal:
            self._call("allGather", send, recv)
        elif what.name == "reduce_scatter" and equal:
            self._call("reduceScatter", send, recv, op, like=recv)
        elif what.name == "reduce_scatter":
            with self._group():
                for rank, block in enumerate(what.outgoing()):
                    self._call("reduce", block, recv if rank == self.rank else block, op, rank)
        else:
            outgoing, incoming = self.keep_own_block(what)
            with self._group():
                for peer, block in outgoing:
                    self._call("send", block, None, peer)
                for peer, block in incoming:
                    self._call("recv", block, None, peer)
        yield from self._done()

    # -- helpers ---------------------------------------------------------------------------

    def _call(
        self, name: str, send: Array, recv: Array | None, *options: Any, like: Array | None = None
    ) -> None:
        """Put one call of NCCL on the stream, unless it is of no bytes.

        Args:
            name: Of the method.
            send: What is sent; of a message what is moved.
            recv: Where the result comes; None for a message.
            options: What stands behind the type of the elements: the reduction, the rank.
            like: Whose elements are counted; None for those of `send`.
        """
        counted = send if like is None else like
        if not counted.size:
            return
        dtype = np.dtype(counted.dtype)
        count = counted.size * (2 if dtype.kind == "c" else 1)
        addresses = [x.data.ptr for x in (send, recv) if x is not None]
        call: Callable[..., None] = getattr(self._comm, name)
        call(*addresses, count, self._dtypes[_real(dtype)], *options, self.stream.ptr)

    def _done(self) -> Steps:
        """Wait until the device has done what it was given, and look for errors meanwhile.

        Raises:
            TransportError: If NCCL tells of one.
        """
        reached, communicator = self.stream.reached(), self._comm

        def test() -> bool:
            try:
                communicator.check_async_error()
            except Exception as error:  # NCCL's own class is known only where NCCL is
                communicator.abort()
                raise TransportError(
                    f"NCCL has failed on rank {self.rank}, and its communicator is aborted: {error}"
                ) from error
            return reached.test()

        self._under_way += 1
        yield Condition(test)
        self._under_way -= 1

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


class _Joining:
    """A communicator of NCCL that is being made by a thread: the request for it.

    Attributes:
        communicator: It, once this is done; None if it failed.
        problem: Why it failed.
    """

    def __init__(self, host: Communicator, unique_id: bytes) -> None:
        self.communicator: Any = None
        self.problem = ""
        self._host = host
        self._device = sys.modules["cupy"].cuda.Device()
        arguments = (unique_id, host.size, host.rank)
        # A daemon: it never ends if a rank does not come, and must not hold up the program's end.
        self._thread = threading.Thread(target=self._join, args=arguments, daemon=True)
        self._thread.start()

    def _join(self, unique_id: bytes, size: int, rank: int) -> None:
        try:
            with self._device:
                self.communicator = nccl_communicator(unique_id, size, rank)
        except Exception as error:
            self.problem = str(error)

    def test(self) -> bool:
        """Tell whether it is made, or has failed."""
        if self._thread.is_alive():
            self._host.stir()
            return False
        return True


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


def _real(dtype: DType) -> DType:
    if dtype.kind != "c":
        return dtype
    return np.dtype(f"f{dtype.itemsize // 2}")
