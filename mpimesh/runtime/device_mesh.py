"""The live mesh: named dims over the ranks of a communicator, with their groups."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

from mpimesh.arguments import as_int, shown
from mpimesh.arrays import HostArray
from mpimesh.comm import Communicator
from mpimesh.errors import (
    ClosedError,
    MeshError,
    MpimeshError,
    RankError,
    TransportError,
)
from mpimesh.layout import ASSUMED_LINKS, Links
from mpimesh.mesh import WORLD, DimsLike, GroupBackend, Mesh, MeshTopology
from mpimesh.runtime.agreement import agree, agreed
from mpimesh.runtime.allocator import aligned_empty
from mpimesh.runtime.call import Call, call_site
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.group import ProcessGroup
from mpimesh.runtime.mesh_shape import MeshShape, as_mesh
from mpimesh.runtime.traffic import Budget, Traffic
from mpimesh.runtime.world import world_of
from mpimesh.settings import Settings
from mpimesh.trace import Tracer

__all__ = ["DeviceMesh"]

_LEAVE_TOGETHER_S = 2.0


class DeviceMesh(MeshShape):
    """A mesh of ranks that can talk to each other.

    Everything that can be asked of a :class:`~mpimesh.Mesh` can be asked of it, and
    it has a :class:`~mpimesh.ProcessGroup` for the world, for each dim, and for each
    group added later.

    Making, changing and closing a mesh are collective: all ranks of `comm` do it, in the
    same order. Use it as a context manager, or call :meth:`close`.

    Each rank takes the GPU of its local rank, among those that it may see; where CuPy is imported,
    it is made current in the calling thread. :meth:`use_device` does so later and elsewhere.

    A rank uses its meshes from one thread at a time: what several threads start, wait for
    or close at once is not in one order over the ranks, and nothing here locks.

    Args:
        dims: ``"dp=2,pp=2"`` (one size may be -1), a mapping, (name, size) pairs, a
            :class:`~mpimesh.Mesh` (which may leave ranks out), or a
            :class:`~mpimesh.MeshTopology`, whose groups are made, too.
        comm: An mpi4py intracommunicator, which is duplicated once; None for all
            ranks: MPI's world, or the virtual ranks of :func:`~mpimesh.run_virtual`. Without
            any MPI library, a world of one rank. Or a :class:`~mpimesh.comm.Communicator`:
            that of another mesh or group, or one of a class of your own
            (docs/own-communicators.md).
        name: Name of the mesh.
        tracer: Where the mesh records its waits; nowhere if None.

    Raises:
        WorldSizeError: On every rank, if the mesh does not fit the world.
        LaunchError: On every rank, if MPI sees one rank where the launcher started more.
        MismatchError: On every rank, if the ranks ask for different meshes or settings.
        MeshError: On every rank, if ranks share a GPU and ``MPIMESH_SHARED_GPU`` is ``refuse``.
            If `comm` is no communicator, or has no rank and size that fit each other.

    Cost:
        One duplication of `comm`, one split for all ranks, and one for each dim of more
        than one rank that does not span the mesh, in the order of the dims.
    """

    def __init__(
        self,
        dims: DimsLike | Mesh | MeshTopology,
        comm: Any = None,
        *,
        name: str = "",
        tracer: Tracer | None = None,
    ) -> None:
        self._closed = True  # until it is whole
        if tracer is not None and not isinstance(tracer, Tracer):
            raise MeshError(f"tracer must be a Tracer or None, got {shown(tracer)}")
        world = world_of(comm)
        settings = Settings.from_environment()
        control = world.open_communicator(comm, settings)
        self._control = control
        self._links = ASSUMED_LINKS
        self._progress = world.progress
        self._context = MeshContext(world, settings, control.rank)
        if tracer is not None:
            self._context.tracer = tracer
        with self._progress.watched(Call("DeviceMesh", WORLD), control):
            try:
                mesh, topology = agreed(
                    world.progress,
                    control,
                    "DeviceMesh",
                    lambda: as_mesh(dims, control.size, name),
                    lambda made: f"{made[0]}, {made[1]}, {settings}",
                )
                # Before any group: what moves device memory asks which device is current.
                self._gather_devices(control)
            except MpimeshError:
                self._context.give_back(control)
                raise
            self._settle(mesh, topology)
            self._groups = self._make_groups(control)
        self._closed = False

    # -- who and where: local ------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank in `comm`."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of `comm`; `size` is that of the mesh."""
        return self._control.size

    @property
    def topology(self) -> MeshTopology | None:
        """The topology that the mesh was made or reshaped from, if it was."""
        return self._topology

    @property
    def settings(self) -> Settings:
        """The settings that were in force when the mesh was made."""
        return self._context.settings

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def links(self) -> Links:
        """Speeds of bytes from rank to rank: as assumed, or as :meth:`measure_links` found.

        The same on all ranks. By them redistributions between nodes choose their way.
        """
        return self._links

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks that the mesh was made on: its own duplicate of `comm`.

        Another mesh on the same ranks is ``DeviceMesh(dims, mesh.comm)``. To have the mesh itself
        on other connections of the same ranks there is :meth:`set_comm`. ``mesh.comm.native`` is
        mpi4py's, where the ranks are MPI's.

        Raises:
            ClosedError: If the mesh is closed.
        """
        self._refuse_closed("give the communicator of")
        return self._control

    @property
    def everyone(self) -> ProcessGroup:
        """The group of all ranks of `comm`, in their order, also those that the mesh leaves out."""
        self._refuse_closed("use a group of")
        backend = GroupBackend.MPI if self._control.kind == "mpi" else GroupBackend.VIRTUAL
        ranks = range(self.world_size)
        return ProcessGroup("everyone", ranks, self._control, self._context, backend)

    def set_rank(self, rank: int) -> None:
        """Accept the rank that this process has, and refuse any other.

        Raises:
            RankError: If `rank` is not this rank: MPI decides that.
        """
        if not 0 <= as_int(rank, "rank", RankError) < self.world_size:
            raise RankError(f"Rank {rank} out of bounds for world size {self.world_size}")
        if rank != self.rank:
            raise RankError(f"this process is rank {self.rank}, which cannot become rank {rank}")

    def coord(self, dim: str) -> int:
        """Return this rank's coordinate along `dim`.

        Raises:
            UnknownNameError: If there is no such dim.
            RankError: If this rank is not in the mesh.
        """
        return self.coord_of(self.rank, dim)

    def copy(self) -> DeviceMesh:
        """Collective: make another mesh of the same dims and groups, with its own communicators."""
        groups = self._live("copy")
        groups.settle("copy")
        other = DeviceMesh(self.mesh if self.topology is None else self.topology, self._control)
        other._live("copy").add_custom_of(groups)
        return other

    # -- all together ------------------------------------------------------------------------

    def barrier(self, name: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait for all started operations of this mesh, then for all its ranks.

        Collective over the mesh. See :meth:`ProcessGroup.barrier`.
        """
        self.sync_collective()
        self.group().barrier(timeout_s=timeout_s, label=name)

    def measure_links(self) -> Links:
        """Measure how fast bytes get from rank to rank, and reckon with it from now on.

        Collective over all ranks of `comm`, also those that the mesh leaves out, and waits. The
        slowest pair of neighbours counts; without a second node what is between nodes stays as
        assumed. Redistributions that start later choose their way by it.

        Returns:
            What :attr:`links` is then, the same on all ranks.

        Cost:
            Messages there and back between pairs of ranks, all at once: 100 of 8 bytes and 5 of
            4 MiB inside nodes and as many between them; 5 reads of 4 MiB; two small all-gathers.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     print(mesh.measure_links().measured == (mesh.size > 1))
            True
        """
        from mpimesh.runtime.link_speeds import measured_links

        self._refuse_closed("measure the links of")
        if self.settings.checks:
            agree(self._progress, self._control, Call("measure_links", WORLD))
        self._links = measured_links(self.everyone, self.shared_empty)
        self.layout_cache.clear()  # among it are plans
        return self._links

    def sync_collective(self) -> None:
        """Wait for all operations that this rank has started, in the order of their start.

        Their handles then resolve at once. An error of one is raised by its own handle.
        """
        for work in self._context.open_work.all():
            work._complete()

    def traffic(self) -> Traffic:
        """Return what this rank has put into the operations of this mesh, and received. Local.

        It counts on; :meth:`Traffic.snapshot` does not. ``print(mesh.traffic())`` shows a table.
        """
        return self._context.traffic

    def budget(
        self,
        *,
        bytes: int | None = None,  # noqa: A002 - as it reads best where it is called
        messages: int | None = None,
    ) -> Budget:
        """Return a limit on what the operations of a ``with`` block receive on this rank. Local.

        Counted as :class:`Traffic` does, for the operations of this mesh that start in the block;
        one that ends after it still belongs to it. Blocks may be nested, each counts its own
        section. Without limits a budget only counts: see its `used_bytes`, `used_messages`,
        and `used_by`, by operation.

        The operation that exceeds it raises BudgetError: before it moves anything, and then it can
        be left out or made smaller; or at its end, from ``resolve()``, where only the sender knew
        the size (a ``recv`` without shape and dtype, ``shift``, ``scatter``, and ``broadcast`` with
        ``root=None``). Operations on split arrays, of which ranks receive unequally much, raise it
        on every rank if one has not enough left, and a step of a model ends on all ranks by the
        same error, before its optimizer changes anything. So give the same budget on all ranks. A
        collective of a group is refused by the ranks that have not enough left: where they have
        used unequally much before, that may leave others waiting in it, unless ``MPIMESH_CHECKS``
        is on, which makes them raise MismatchError, too.

        Args:
            bytes: Most bytes that this rank may receive from others.
            messages: Most messages.

        Raises:
            MeshError: If a limit is no whole number from 0 on.
            ClosedError: If the mesh is closed.

        Example:
            A test that holds an exchange to its bytes, on virtual ranks:

            >>> def test_each_rank_gets_the_other_rows():
            ...     def main():
            ...         with mm.DeviceMesh("dp=4") as mesh:
            ...             rows = np.ones((10, 100))
            ...             with mesh.budget(bytes=3 * rows.nbytes, messages=3) as budget:
            ...                 mesh.group("dp").all_gather(rows).resolve()
            ...             return budget.used_bytes
            ...     assert mm.run_virtual(4, main) == [24000] * 4
            >>> test_each_rank_gets_the_other_rows()
        """
        self._live("give a budget to")
        return Budget(self._context.traffic, self.rank, call_site(2), bytes, messages)

    def shared_empty(
        self, shape: Sequence[SupportsIndex] | SupportsIndex, dtype: Any = float
    ) -> HostArray:
        """Return uninitialised memory for arrays that will be exchanged. Local.

        The ranks of this rank's node read and write it where it lies: collectives on arrays
        that come from here, on all ranks, need no copies. All buckets, pipeline slots and blocks
        of mpimesh do. It starts on a cache line and lives as long as the array. A forked child
        sees its parent's writes to it, and the parent the child's.

        Each rank gets an array of its own; one for all ranks of a node is
        :meth:`ProcessGroup.empty_once`.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     gradient = mesh.shared_empty(3, "float32")
            ...     gradient[...] = 2 * mesh.rank + 1
            ...     mean = mesh.group("dp").all_reduce(gradient, "mean", out=gradient).resolve()
            ...     print(mean is gradient, mean / mesh.size)
            True [1. 1. 1.]

        Raises:
            ShapeError: If a size is negative or no whole number.
            DTypeError: If `dtype` holds Python objects.
            MemoryError: If there is not as much memory.
        """
        if self._closed:
            self._refuse_closed("allocate from")
        return aligned_empty(shape, dtype, self._context.world.shared_bytes)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give all communicators back. Collective; a second call does nothing.

        Nor does one in a forked child.

        Raises:
            UnresolvedError: On every rank, naming the operations, if any rank has results that
                are not resolved. The mesh stays open, so that they can be.
        """
        self._close()

    def _close(self, *, leaving: bool = False) -> None:
        if self._closed or self._context.forked:
            return
        self._refuse_unresolved("close", "closed", leaving=leaving)
        self._closed = True
        self._context.closed = True
        with self._progress.watched(Call("close", WORLD), self._control):
            if self._groups is not None:
                self._groups.free()
            self._context.give_back(self._control)

    def __enter__(self) -> Self:
        """Return the mesh."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the mesh; after an error that is this rank's alone, only stop using it.

        In a forked child, which has no part in the mesh, nothing is done.

        Closing is collective: with the other ranks elsewhere, it would wait for them for ever.
        """
        if self._context.forked:
            return
        if error is None:
            self.close()
            return
        self._abandon_operations()
        if isinstance(error, MpimeshError) and error.agreed and self._all_here():
            self._close(leaving=True)
            return
        self._closed = True
        self._context.leave(self._control, error)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: two meshes cannot own one communicator."""
        raise MeshError(
            f"{self!r} cannot be copied or pickled, for its communicators are this mesh's alone: "
            "make another with mesh.copy(), which is collective, or pass mesh.value on, the plain "
            "Mesh"
        )

    def __repr__(self) -> str:
        """Show dims, rank and groups. Local."""
        state = ", closed" if self._closed else ""
        return (
            f"<DeviceMesh {self.dims_text} rank={self.rank}/{self.world_size} "
            f"groups={self.group_names}{state}>"
        )

    # -- helpers -----------------------------------------------------------------------------

    def _all_here(self) -> bool:
        """Tell whether all ranks leave the mesh by an error that one of its groups agrees on."""
        request = self._control.barrier()
        what = Call("close after an error", WORLD)
        try:
            return self._progress.wait(
                self._control, request, what=what, timeout_s=_LEAVE_TOGETHER_S
            )
        except TransportError:
            return False

    def _abandon_operations(self) -> None:
        """Let go of all results. Their buffers stay: the transport may still write into them."""
        for work in self._context.open_work.all():
            work._fail(ClosedError(f"{work._call}: its mesh ended by an error before"))
