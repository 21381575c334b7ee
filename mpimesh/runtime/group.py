"""A named group of ranks and everything it can do together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypeAlias, TypeVar

from mpimesh.arguments import as_int, as_time
from mpimesh.arrays import Array, DTypeLike, HostArray, OpLike
from mpimesh.comm import Communicator
from mpimesh.comm.algorithms import AlgorithmName, Algorithms
from mpimesh.core.call import Ledger
from mpimesh.errors import GroupError, RankError, ShapeError, tell_elsewhere
from mpimesh.runtime import messages, plan
from mpimesh.runtime.group_core import GroupCore, collective
from mpimesh.runtime.persistent import Persistent, planning
from mpimesh.runtime.scatter import plan_scatter, scatter
from mpimesh.runtime.work import CollectiveTensor
from mpimesh.runtime.world import MeshContext, solo_communicator

__all__ = ["Backend", "ProcessGroup"]

Backend: TypeAlias = Literal["mpi", "node_shared", "nccl", "virtual"]
"""The mover of a group's bytes; ``"virtual"`` for threads of one process."""

A = TypeVar("A")

_broadcast, _scatter = collective(messages.broadcast), collective(scatter)


class ProcessGroup:
    """An ordered set of ranks with its own collectives and messages.

    Made by a :class:`~mpimesh.DeviceMesh`: one for the world, one for each dim, and more by
    :meth:`~mpimesh.DeviceMesh.add_group`. Each operation starts at once and returns a
    :class:`~mpimesh.CollectiveTensor`, but :meth:`barrier` and :meth:`empty_once`, which wait.
    Ranks are counted in the group. :meth:`algorithms` tells how bytes are moved, and why.

    A CuPy array is sent from its device, and the result is made there, on the stream that was
    current at the call; what ``resolve()`` gives is safe to use on the stream that is current then.
    In one operation all ranks pass host arrays, or all pass device arrays; with ``MPIMESH_CHECKS``
    on, ranks that differ get a MismatchError. Messages, shifts, scatter, and broadcast with
    ``root=None`` are free of this rule. An `out` may be of the other kind, alike on all ranks.

    Groups of the same ranks in the same order, such as ``"world"`` and a dim that spans it, share
    one communicator: all ranks start the operations and messages of all of them in one order.

    Attributes:
        name: ``"world"``, the dim that it is along, or the name that it was added by.
        size: Number of its ranks.
        rank: This rank's place in the group; None if it is not in it.
        ranks: The ranks of the mesh that are in it, in group order.
        world_rank: This rank in the mesh's communicator.
        backend: ``"mpi"``, ``"node_shared"``, ``"nccl"`` or ``"virtual"``.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        ledger: Ledger | None,
        context: MeshContext,
        backend: Backend,
        *,
        prefer: str = "",
    ) -> None:
        self._core = core = GroupCore(name, ranks, ledger, context, prefer)
        self._run = core.run
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.rank, self.world_rank = core.rank, context.rank
        self.backend = backend

    def all_reduce(
        self,
        x: A,
        op: OpLike = "sum",
        *,
        out: Array | None = None,
        label: str | None = None,
        algorithm: AlgorithmName | None = None,
    ) -> CollectiveTensor[A]:
        """Reduce `x` element by element over all ranks of the group; every rank gets the result.

        Collective: every rank of the group calls it, in the same order among all
        collectives on the group. Returns at once; do not write `x` or read `out`
        before :meth:`CollectiveTensor.resolve`.

        Its adjoint is itself: the gradient of an all-reduce by sum is the
        all-reduce by sum of the gradients, and so for mean.

        Shapes:
            x: any, the same on every rank; 0-d and empty arrays too.
            result: the shape of `x`.

        Args:
            x: This rank's array, NumPy or CuPy, of any memory order and stride.
            op: ``"sum"``, ``"mean"`` (or ``"avg"``), ``"prod"``, ``"min"``, ``"max"``, or mpi4py's
                ``MPI.SUM`` and the like. "mean" is the sum divided by the group's size. "min" and
                "max" of values with NaN are NaN, as NumPy's, with the same bits on all ranks.
            out: Array for the result; may be `x` itself. New if None.
            label: A name for this call in messages of errors, the same on every rank.
            algorithm: For host arrays: ``"centralized"``, ``"tree(b)"`` or ``"ring"``, by messages,
                or one that :meth:`algorithms` lists; None takes the one that it shows.

        Returns:
            A handle; ``resolve()`` gives the array.

        Raises:
            DTypeError: If the dtype cannot be reduced by `op`; see :mod:`mpimesh.arrays.dtypes`.
            ShapeError: If `out` does not fit.
            GroupError: If the group has no such `algorithm` for this array.

        Cost:
            MPI's: about ``2 log2(n) * latency_s + 2 nbytes / bytes_per_s`` seconds for n ranks.
        """
        return self._run(plan.plan_all_reduce, x, out, label, (op, algorithm))

    def reduce(
        self,
        x: A,
        op: OpLike = "sum",
        *,
        root: int = 0,
        out: Array | None = None,
        label: str | None = None,
        algorithm: AlgorithmName | None = None,
    ) -> CollectiveTensor[A | Any]:
        """Reduce `x` element by element over all ranks; only `root` gets the result.

        Collective, as :meth:`all_reduce`.

        Args:
            x: This rank's array.
            op: As in :meth:`all_reduce`.
            root: The receiving rank, counted in the group.
            out: Array for the result on `root`, ignored elsewhere. New if None.
            label: A name for this call in messages of errors, the same on every rank.
            algorithm: As in :meth:`all_reduce`.

        Returns:
            A handle; ``resolve()`` gives the array on `root` and None elsewhere.

        Raises:
            RankError: If `root` is not a rank of the group.
            DTypeError: If the dtype cannot be reduced by `op`.
            ShapeError: If `out` does not fit.
        """
        return self._run(plan.plan_reduce, x, out, label, (op, root, algorithm))

    def reduce_scatter(
        self,
        x: A,
        op: OpLike = "sum",
        *,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor[A]:
        """Reduce `x` over all ranks and give each rank one block of the result along `axis`.

        Collective, as :meth:`all_reduce`.

        Shapes:
            x: (..., sum(sizes), ...), the same on every rank.
            result: (..., sizes[r], ...), with r this rank's place in the group. A size may be 0.

        Args:
            x: This rank's array, at least 1-d.
            op: As in :meth:`all_reduce`.
            axis: The axis that is cut.
            sizes: Block size of each rank along `axis`, in group order; equal blocks if None.
            out: Array for the result. New if None.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives this rank's block.

        Raises:
            ShapeError: If `x` does not fall into such blocks, or `out` does not fit.
            DTypeError: If the dtype cannot be reduced by `op`.
        """
        return self._run(plan.plan_reduce_scatter, x, out, label, (op, axis, sizes))

    def all_gather(
        self,
        x: A,
        *,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor[A]:
        """Join the blocks of all ranks of this group along array axis `axis`.

        Collective, as :meth:`all_reduce`.

        Shapes:
            x: (..., sizes[r], ...), with r this rank's place in the group. A size may be 0. A 0-d
                array counts as one of shape (1,).
            result: (..., sum(sizes), ...), the same on every rank.

        Args:
            x: This rank's block, NumPy or CuPy.
            axis: Array axis to join.
            sizes: Block size of each rank along `axis`, in group order; if None,
                all blocks have the shape of `x`.
            out: Array for the result. New if None.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives the joined array.

        Raises:
            ShapeError: If `x` does not fit `sizes`, or `out` does not fit.
            DTypeError: If `x` holds Python objects.

        Cost:
            Ring: ``(n-1) * (latency_s + nbytes / (n * bytes_per_s))`` seconds for n ranks,
            with `nbytes` the bytes of the result.
        """
        return self._run(plan.plan_all_gather, x, out, label, (axis, sizes))

    def gather(
        self,
        x: A,
        *,
        root: int = 0,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor[A | Any]:
        """Join the blocks of all ranks along `axis`, on `root` only.

        Collective, with the shapes of :meth:`all_gather`.

        Args:
            x: This rank's block.
            root: The receiving rank, counted in the group.
            axis: Array axis to join.
            sizes: Block sizes along `axis`, given on every rank; equal blocks if None.
            out: Array for the result on `root`, ignored elsewhere. New if None.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives the joined array on `root` and None elsewhere.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: If `x` does not fit `sizes`, or `out` does not fit.
        """
        return self._run(plan.plan_gather, x, out, label, (root, axis, sizes))

    def all_to_all(
        self,
        x: A,
        *,
        split_axis: int = 0,
        concat_axis: int | None = None,
        sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor[A]:
        """Cut `x` into one block for each rank, exchange them, and join what came.

        Collective, as :meth:`all_reduce`. Block d of this rank becomes block r of
        rank d, with r this rank's place in the group.

        Shapes:
            x: (..., sum(sizes), ...) along `split_axis`.
            result: if `concat_axis` is `split_axis`: (..., sum(recv_sizes), ...) along it;
                else sizes[r] along `split_axis` and sum(recv_sizes) along `concat_axis`.

        Args:
            x: This rank's array, at least 1-d.
            split_axis: The axis that is cut.
            concat_axis: The axis along which what came is joined; `split_axis` if None.
            sizes: Size of the block for each rank along `split_axis`; equal blocks if None.
            recv_sizes: Size of the block from each rank along `concat_axis`; if None, that of
                what this rank itself puts in. All ranks give one of both, or none does: comparing
                them costs an all-to-all of shapes and an all-reduce of 8 bytes.
            out: Array for the result. New if None.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives the joined array.

        Raises:
            ShapeError: If `x` does not fall into such blocks, or its own or `out` does not fit.
            MismatchError: From ``resolve()`` on every rank, if a rank sends another a block that it
                does not expect; without sizes over nodes only with ``MPIMESH_CHECKS`` on.
        """
        options = split_axis, concat_axis, sizes, recv_sizes
        return self._run(plan.plan_all_to_all, x, out, label, options)

    def broadcast(
        self,
        x: A | None,
        *,
        root: int | None = 0,
        out: Array | None = None,
        label: str | None = None,
        algorithm: AlgorithmName | None = None,
    ) -> CollectiveTensor[A]:
        """Give every rank the array of `root`.

        Collective, as :meth:`all_reduce`.

        Args:
            x: On `root`, the array. Elsewhere an array of the same shape and dtype, whose
                values do not matter. With ``root=None``, exactly one rank passes its array
                and the others None.
            root: The sending rank, counted in the group; None to find it, together with its
                shape and dtype, at the cost of one more small exchange.
            out: Array for the result; may be `x` itself. New if None.
            label: A name for this call in messages of errors, the same on every rank.
            algorithm: As in :meth:`all_reduce`.

        Returns:
            A handle; ``resolve()`` gives the array; with ``root=None`` it lies where the root's
            does, on the host or on this rank's device.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: If a rank passes no array though `root` is given, or `out` does not fit.
            GroupError: From ``resolve()`` on every rank, if ``root=None`` and not one has an array.
            DTypeError: The same with ``root=None``, if its dtype cannot be described.
        """
        if (root is None or x is None) and isinstance(self, ProcessGroup):
            return _broadcast(self._core, x, root, out, label, algorithm)
        return self._run(plan.plan_broadcast, x, out, label, (root, algorithm))

    def scatter(
        self,
        x: A | None,
        *,
        root: int = 0,
        axis: int = 0,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str | None = None,
    ) -> CollectiveTensor[A]:
        """Cut the array of `root` along `axis` and give each rank its block.

        Collective, as :meth:`all_reduce`. The root tells its shape and dtype, so the other ranks
        need not know them: on one node beside its blocks, over several in a small broadcast
        ahead. On one node a rank with an `out` need not wait to be told first. For
        ``scatter_init``, where nothing is told, the other ranks give an `out` for their block, or
        an `x` like the root's.

        Shapes:
            x: (..., sum(sizes), ...) on `root`.
            result: (..., sizes[r], ...), with r this rank's place in the group. A size may be 0.

        Args:
            x: On `root`, the array; ignored elsewhere.
            root: The sending rank, counted in the group.
            axis: The axis that is cut.
            sizes: Block sizes along `axis`, given on every rank; equal blocks if None.
            out: Array for the result. New if None.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives this rank's block, which lies where the root's array
            does, on the host or on this rank's device.

        Raises:
            RankError: If `root` is not a rank of the group.
            ShapeError: From ``resolve()`` on every rank, if root passes None (over several nodes
                at once, on root) or its array does not fall into such blocks; from ``resolve()``,
                if `out` does not fit.
            DTypeError: From ``resolve()`` on every rank, if its dtype cannot be described.
        """
        core, is_group = self._core, isinstance(self, ProcessGroup)
        if is_group:
            handle = core.scatter(plan_scatter, x, out, label, (root, axis, sizes))
            if handle is None:
                return _scatter(core, x, root, axis, sizes, out, label)
            return handle
        mine: Array | None = out if x is None else x
        if mine is None or (x is None and core.rank == root):
            raise ShapeError(
                f"a planned scatter needs x on its root, and x or out= on every other rank, for no "
                f"shape is told; rank {core.rank} gives none"
            )
        return self._run(plan.plan_scatter, mine, out, label, (root, axis, sizes, x is not None))

    # -- started many times ---------------------------------------------------------------------

    all_reduce_init = planning(all_reduce)
    reduce_init = planning(reduce)
    reduce_scatter_init = planning(reduce_scatter)
    all_gather_init = planning(all_gather)
    gather_init = planning(gather)
    all_to_all_init = planning(all_to_all)
    broadcast_init = planning(broadcast)
    scatter_init = planning(scatter)

    # -- messages ---------------------------------------------------------------------------

    def send(
        self, x: Array, dest: int, *, tag: int = 0, label: str | None = None
    ) -> CollectiveTensor[None]:
        """Send `x` to one rank of the group, which must :meth:`recv` it.

        Returns at once; do not write `x` before the handle is resolved. Messages of one
        sender, receiver and tag arrive in order, and never meet a collective.

        Args:
            x: The array: any dtype but objects, any memory order.
            dest: The receiving rank, counted in the group; not this one.
            tag: 0 to `MAX_TAG`, tells messages of one pair apart.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives None once `x` may be written again. Within a node that is
            at once up to 8 KiB; a larger message is read where it lies, and waits for its receive.
            So may any message between nodes: ranks that send to each other call :meth:`recv`
            before they resolve their sends.

        Raises:
            RankError: If `dest` is no other rank of the group.
            DTypeError: If `x` holds Python objects, or its dtype cannot be described.

        Cost:
            One message within a node, and up to 4 KiB between nodes, else two:
            ``2 * latency_s + nbytes / bytes_per_s``.
        """
        return messages.send(self._core, x, dest, tag, label)

    def recv(
        self,
        source: int,
        *,
        shape: Sequence[int] | int | None = None,
        dtype: DTypeLike | None = None,
        out: Array | None = None,
        tag: int = 0,
        label: str | None = None,
    ) -> CollectiveTensor:
        """Receive the array that `source` sends to this rank.

        What comes may be of any shape and dtype, or be held to those given: a message that
        differs is an error and is never cut or left half-filled.

        Args:
            source: The sending rank, counted in the group; not this one.
            shape: The shape that must come, for one axis as a number, too; any if None.
            dtype: The dtype that must come; any if None.
            out: Array to receive into; its shape and dtype must come. New if None.
            tag: The sender's tag.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives the array, which lies where the sender's did: on the
            host, or on this rank's device.

        Raises:
            RankError: If `source` is no other rank of the group.
            ShapeError: If `shape` is no shape; from ``resolve()``, if another one came. The
                message is gone.
            DTypeError: If `dtype` is no dtype that can be sent; from ``resolve()``, if another one
                came. The message is gone.
            GroupError: From ``resolve()``, if it was sent on another group of the same ranks.
        """
        return messages.recv(
            self._core, source, shape=shape, dtype=dtype, out=out, tag=tag, label=label
        )

    def send_init(
        self, x: Array, dest: int, *, tag: int = 0, label: str | None = None
    ) -> Persistent:
        """Plan a :meth:`send` of `x`, to be started many times. Local. Each reads what it holds."""
        return messages.send_init(self._core, x, dest, tag, label)

    def recv_init(
        self, out: Array, source: int, *, tag: int = 0, label: str | None = None
    ) -> Persistent:
        """Plan a :meth:`recv` into `out`, to be started many times, as :meth:`send_init`. Local."""
        return messages.recv_init(self._core, out, source, tag, label)

    def shift(
        self, x: A, offset: int = 1, *, wrap: bool = False, label: str | None = None
    ) -> CollectiveTensor[A | Any]:
        """Send `x` to the rank `offset` places on, and receive from the one `offset` before.

        Collective: every rank of the group calls it with the same `offset` and `wrap`.

        Args:
            x: This rank's array; shapes and dtypes may differ over ranks.
            offset: How many places; negative goes backwards.
            wrap: Whether the last rank is followed by the first.
            label: A name for this call in messages of errors, the same on every rank.

        Returns:
            A handle; ``resolve()`` gives the array that came, or None where the row ends.
        """
        return messages.shift(self._core, x, offset, wrap=wrap, label=label)

    def send_next(self, x: Array, *, tag: int = 0) -> CollectiveTensor[None]:
        """Send `x` to the next rank of the group, under `tag`; an error on the last one."""
        return self.send(x, messages.neighbour(self._core, 1, "send_next"), tag=tag)

    def send_prev(self, x: Array, *, tag: int = 0) -> CollectiveTensor[None]:
        """Send `x` to the rank before, under `tag`; an error on the first one."""
        return self.send(x, messages.neighbour(self._core, -1, "send_prev"), tag=tag)

    def recv_next(self, *, out: Array | None = None, tag: int = 0) -> CollectiveTensor:
        """Receive into `out` what the next rank sent under `tag`; an error on the last one."""
        return self.recv(messages.neighbour(self._core, 1, "recv_next"), out=out, tag=tag)

    def recv_prev(self, *, out: Array | None = None, tag: int = 0) -> CollectiveTensor:
        """Receive into `out` what the rank before sent under `tag`; an error on the first one."""
        return self.recv(messages.neighbour(self._core, -1, "recv_prev"), out=out, tag=tag)

    def start_barrier(self, *, label: str | None = None) -> CollectiveTensor[None]:
        """Start a barrier: the handle is done once every rank of the group has started it.

        Collective. ``resolve()`` gives None.
        """
        return self._core.barrier(label)

    def barrier(self, *, timeout_s: float | None = None, label: str | None = None) -> None:
        """Wait until every rank of the group has come.

        Collective, with or without `timeout_s` on all ranks alike.

        Args:
            timeout_s: Longest wait in seconds. With a limit, each rank tells every other that
                it has come, so that a timeout can name who has not.
            label: A name for this call in messages of errors, the same on every rank.

        Raises:
            GroupError: If `timeout_s` is no time.
            CollectiveTimeoutError: After `timeout_s`, naming the ranks that did not come; on
                every rank that did. A rank that comes later finds all others there and does
                not raise.

        Cost:
            ``log2(n) * latency_s``; with a limit, n-1 messages of 8 bytes from each of n ranks.
        """
        limit_s = as_time(timeout_s, "timeout_s of a barrier", GroupError)
        if limit_s is None:
            self.start_barrier(label=label).resolve()
        else:
            messages.roll_call(self._core, limit_s, label)

    def empty_once(
        self, shape: Sequence[SupportsIndex] | SupportsIndex, dtype: DTypeLike = float
    ) -> tuple[HostArray, bool]:
        """Return an array that exists once for the ranks of the group on each node.

        For values that are the same on all ranks, such as parameters that are not split: they
        cost the memory of one rank. Collective, and waits.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     group = mesh.group("dp")
            ...     table, writes = group.empty_once((50, 4), "float32")
            ...     if writes:
            ...         table[...] = np.arange(200).reshape(50, 4)
            ...     group.barrier()  # from here on all ranks may read it
            ...     print(table[10])
            [40. 41. 42. 43.]

        Args:
            shape: Its shape, the same on every rank.
            dtype: Its dtype.

        Returns:
            The array, uninitialised, and whether this rank is the one of its node that writes it;
            to the others it is read-only. Ranks that cannot open each other's memory have an
            array each, and all write. Once the mesh is closed, it holds its values for the readers
            as long as the writer has it.

        Raises:
            ShapeError: On every rank, if a size is negative or no whole number.
            DTypeError: On every rank, if `dtype` holds Python objects.
            MismatchError: On every rank, if the ranks ask for different arrays.
        """
        return self._core.empty_once(shape, dtype)

    def algorithms(self) -> Algorithms:
        """Return the table of algorithms by which the group moves its bytes, and why. Local.

        Each row is a rule: an operation, where its arrays lie, from which size on, how they are
        moved; printed, a row a line. Of arrays on a device there are rows from the first operation
        with one on, because it finds out what the ranks can do together.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the mesh is closed.
        """
        return self._core.algorithms()

    def alone(self) -> Self:
        """Return a group of this rank only, whose operations need no other rank. Local."""
        ranks, name = (self.world_rank,), f"{self.name}[{self.rank}]"
        context = self._core.context
        return type(self)(name, ranks, Ledger(solo_communicator()), context, self.backend)

    # -- the group itself ---------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """The transport of the group, for code that moves flat buffers itself.

        Raises:
            RankError: If this rank is not a member.
            ClosedError: If the group or the mesh is closed.
        """
        return self._core.communicator

    @property
    def closed(self) -> bool:
        """True once the group, or its mesh, is closed."""
        return self._core.closed

    def close(self) -> None:
        """Drop a group that was made by :meth:`DeviceMesh.add_group`.

        Collective over its ranks; a rank that is no member may call it, too, and forgets the name.
        A second call does nothing, nor does one on a closed mesh. The communicator is given back
        unless another group has the same. The name can be used again when all ranks of the group
        have closed it; of groups along dims, all ranks of the mesh.

        As a context manager a group closes at the end of the block. After an error it stays open
        until its mesh closes, because the other ranks may be elsewhere.

        Raises:
            GroupError: If it is the mesh's own: the world, or that of a dim or a topology.
            UnresolvedError: On every rank of the group, naming the operations, if any of them has
                results of it that are not resolved. It stays open, so that they can be.
            MismatchError: On every rank of the group, with ``MPIMESH_CHECKS`` on, if a message was
                sent that was not received; and if the ranks close different groups.

        Cost:
            Two agreements on small values among its ranks, and the end of an MPI communicator.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     with mesh.add_group("first", [0]) as first:
            ...         if first.rank is not None:
            ...             print(first.all_reduce(np.ones(2)).resolve())
            ...     print(first.closed, mesh.group_names)
            [1. 1.]
            True ['world', 'dp']
        """
        if self.closed:
            return
        if self._core.drop is None:
            raise GroupError(
                f"rank {self.world_rank} cannot close group {self.name!r}, which is the mesh's "
                "own: only what add_group made can be closed, and mesh.close() closes all"
            )
        self._core.drop(self)

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the group; after an error, when others may be elsewhere, leave it to its mesh."""
        if error is None:
            self.close()

    def __repr__(self) -> str:
        """Show name, ranks and this rank's place. Local."""
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        state = ", closed" if self.closed else ""
        return f"ProcessGroup({self.name!r}, ranks=[{shown}], rank={self.rank}{state})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a group belongs to its mesh.

        Raises:
            GroupError: Always.
        """
        raise GroupError(
            f"{self!r} cannot be copied or pickled, for it belongs to its mesh: pass the group "
            "itself on, or its name for mesh.group(name)"
        )

    def __contains__(self, world_rank: object) -> bool:
        """Tell whether a rank of the mesh is in the group. Local."""
        return world_rank in self.ranks

    def group_rank_of(self, world_rank: int) -> int | None:
        """Return the place in this group of a rank of the mesh; None if it is not in. Local."""
        rank = as_int(world_rank, "world_rank", RankError)
        return list(self.ranks).index(rank) if rank in self.ranks else None


_MPI4PY = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
_MPI4PY |= {"bcast": "broadcast", "Recv": "recv", "Reduce": "reduce", "Send": "send"}
_MPI4PY |= {name.capitalize(): ours for name, ours in _MPI4PY.items()}
_ELSEWHERE = {mpi: f"use {ours}()" for mpi, ours in _MPI4PY.items()}
_ELSEWHERE |= {"Get_rank": "use group.rank", "Get_size": "use group.size"}
tell_elsewhere(ProcessGroup, _ELSEWHERE)
