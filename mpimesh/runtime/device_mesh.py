"""The live mesh: named dims over the ranks of a communicator, with their groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

from mpimesh.arguments import as_int, shown
from mpimesh.arrays import DTypeLike, HostArray, aligned_empty
from mpimesh.comm import Communicator
from mpimesh.errors import GroupError, MeshError, RankError, UnknownNameError, tell_elsewhere
from mpimesh.layout import LinkCosts
from mpimesh.mesh import (
    WORLD,
    Device,
    DeviceBackend,
    DeviceTable,
    GroupSpec,
    Mesh,
    MeshDimension,
    MeshTopology,
    NamesLike,
)
from mpimesh.mesh.dims import parse_names
from mpimesh.runtime.call import call_site
from mpimesh.runtime.group import Backend, ProcessGroup
from mpimesh.runtime.mesh_core import MeshArgument, MeshCore
from mpimesh.runtime.traffic import Budget, Traffic
from mpimesh.trace import Tracer

__all__ = ["DeviceMesh"]

P = ParamSpec("P")
R = TypeVar("R")


def _asked(query: Callable[Concatenate[Mesh, P], R]) -> Callable[Concatenate[DeviceMesh, P], R]:
    """Return the method that asks a query of the mesh that a live one has."""

    @wraps(query)
    def ask(live: DeviceMesh, /, *args: P.args, **options: P.kwargs) -> R:
        return query(live._core.mesh, *args, **options)

    ask.__qualname__ = f"DeviceMesh.{query.__name__}"
    return ask


class DeviceMesh:
    """A mesh of ranks that can talk to each other.

    It has a :class:`~mpimesh.ProcessGroup` for the world, for each dim, and for each group added
    later. About dims, coordinates and ranks it answers what its :class:`~mpimesh.Mesh` does, a
    value without communicators, which is :attr:`mesh`.

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
            that of another mesh or group, or one of a class of your own.
        name: Name of the mesh.
        tracer: Where the mesh records its waits; nowhere if None.

    Raises:
        WorldSizeError: On every rank, if the mesh does not fit the world.
        LaunchError: On every rank, if MPI sees one rank where the launcher started more.
        MismatchError: On every rank, if the ranks ask for different meshes or settings.
        MeshError: If `comm` is no communicator, or has no rank and size that fit each other.

    Cost:
        One duplication of `comm`, one split for all ranks, and one for each dim of more
        than one rank that does not span the mesh, in the order of the dims.

    Example:
        >>> def main():
        ...     with mm.DeviceMesh("dp=2,tp=-1") as mesh:
        ...         group = mesh.group("tp")
        ...         total = group.all_reduce(np.array([mesh.rank])).resolve()
        ...         return mesh.coord("dp"), mesh.dim_size("tp"), group.rank, total.item()
        >>> mm.run_virtual(4, main)
        [(0, 2, 0, 1), (0, 2, 1, 1), (1, 2, 0, 5), (1, 2, 1, 5)]
    """

    def __init__(
        self,
        dims: MeshArgument,
        comm: Any = None,
        *,
        name: str = "",
        tracer: Tracer | None = None,
    ) -> None:
        self._core = MeshCore(dims, comm, name, tracer)

    # -- the mesh as a value: local ------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh as a value, equal on all ranks."""
        return self._core.mesh

    @property
    def name(self) -> str:
        """Name of the mesh."""
        return self._core.mesh.name

    @property
    def dims(self) -> tuple[MeshDimension, ...]:
        """Its (name, size) pairs, slowest first."""
        return self._core.mesh.dims

    @property
    def ids(self) -> HostArray:
        """Its ranks in row-major order, a read-only array."""
        return self._core.mesh.ids

    @property
    def dim_names(self) -> list[str]:
        """Names of the dims, slowest first."""
        return self._core.mesh.dim_names

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims, slowest first."""
        return self._core.mesh.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._core.mesh.ndim

    @property
    def size(self) -> int:
        """Number of ranks of the mesh: the product of the sizes."""
        return self._core.mesh.size

    @property
    def strides(self) -> list[int]:
        """Steps in offset for one step along each dim."""
        return self._core.mesh.strides

    @property
    def dims_text(self) -> str:
        """The dims as ``dp=2,pp=2``."""
        return self._core.mesh.dims_text

    __getitem__ = _asked(Mesh.__getitem__)
    __contains__ = _asked(Mesh.__contains__)
    __iter__ = _asked(Mesh.__iter__)
    dim_size = _asked(Mesh.dim_size)
    contains_dim = _asked(Mesh.contains_dim)
    contains_rank = _asked(Mesh.contains_rank)
    coords_of = _asked(Mesh.coords_of)
    coord_of = _asked(Mesh.coord_of)
    offset_of = _asked(Mesh.offset_of)
    rank_of = _asked(Mesh.rank_of)
    rank_at = _asked(Mesh.rank_at)
    neighbour = _asked(Mesh.neighbour)
    groups = _asked(Mesh.groups)
    num_groups = _asked(Mesh.num_groups)
    group_index = _asked(Mesh.group_index)
    group_ranks = _asked(Mesh.group_ranks)
    place_in_group = _asked(Mesh.place_in_group)

    # -- who and where: local ------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank in `comm`."""
        return self._core.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of `comm`; `size` is that of the mesh."""
        return self._core.context.communicator.size

    @property
    def topology(self) -> MeshTopology | None:
        """The topology that the mesh was made or reshaped from, if it was."""
        return self._core.topology

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._core.closed

    @property
    def links(self) -> LinkCosts:
        """Speeds of bytes from rank to rank: as assumed, or as :meth:`measure_links` found.

        The same on all ranks. By them redistributions between nodes choose their way.
        """
        return self._core.context.links

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks that the mesh was made on: its own duplicate of `comm`.

        Another mesh on the same ranks is ``DeviceMesh(dims, mesh.comm)``. To have the mesh itself
        on other connections of the same ranks there is :meth:`set_comm`. ``mesh.comm.native`` is
        mpi4py's, where the ranks are MPI's.

        Raises:
            ClosedError: If the mesh is closed.
        """
        self._core.refuse_closed("give the communicator of")
        return self._core.context.communicator

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

    # -- groups --------------------------------------------------------------------------------

    def group(self, name: NamesLike = WORLD) -> ProcessGroup:
        """Return a group: ``"world"``, a dim's name, or one that was added. Local.

        Raises:
            UnknownNameError: If there is no such group; says which there are.
            ClosedError: If the mesh is closed.
            RankError: If this rank is not in the mesh.
        """
        groups = self._core.live("use a group of")
        if not isinstance(name, str | Sequence):
            raise UnknownNameError(f"a group is asked for by its name, a text; got {shown(name)}")
        key = name if isinstance(name, str) else ",".join(parse_names(name))
        found = groups.get(key)
        if found is None:
            raise UnknownNameError(
                f"Group {key!r} not found; there are {', '.join(groups.names)}; "
                "make more with add_group, which is collective"
            )
        return found

    def get_group(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, None if there is none. Local."""
        groups = self._core.groups
        return None if groups is None else groups.get(name)

    @property
    def group_names(self) -> list[str]:
        """Names of all groups, in the order of their making, the same on every rank."""
        groups = self._core.groups
        return [] if groups is None else groups.names

    def in_group(self, name: str) -> bool:
        """Tell whether this rank is in a group; False if there is none of that name."""
        group = self.get_group(name)
        return group is not None and group.rank is not None

    def group_rank(self, name: str) -> int | None:
        """Return this rank's place in a group; None for a non-member or an unknown group."""
        group = self.get_group(name)
        return None if group is None else group.rank

    def add_group(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        *,
        dims: NamesLike | None = None,
        backend: Backend | None = None,
        apart: bool = False,
    ) -> ProcessGroup:
        """Make a group of listed ranks, or one for each line of ranks along several dims.

        Collective over the mesh, with the same arguments on all ranks, members or not.

        Args:
            name: A new name.
            ranks: The members, counted in `comm`; their order is the group's.
            dims: Instead of `ranks`: the group that each rank is in along these dims.
            backend: The only transport to use: ``"mpi"``, ``"node_shared"`` (host memory; the ranks
                must share a node) or ``"nccl"`` (device memory; arrays on the host move as without
                it). If None, the fastest of all that the ranks have, for each operation and size;
                :meth:`ProcessGroup.algorithms` shows them.
            apart: Give listed ranks an order of operations of their own, even if another group
                has the same ranks: for collectives that may be under way when those ranks meet
                otherwise. It takes a communicator more.

        Returns:
            The group. On a rank that is no member, only its description can be used.

        Raises:
            GroupError: On every rank, if the name is taken, not printable or of more than 200
                characters, `ranks` has none or one twice, or the backend is one that these ranks
                do not have; the message says why.
            RankError: On every rank, if a rank is not in the mesh.
            MismatchError: On every rank, if the arguments differ.
        """
        groups = self._core.live("add a group to")
        return groups.add(name, ranks, dims=dims, backend=backend, apart=apart)

    # -- devices: local ------------------------------------------------------------------------

    def use_device(self) -> Device:
        """Make this rank's GPU current in CuPy, for the calling thread, and return its record.

        Local. Making the mesh does it, where CuPy is imported by then. Call it yourself where
        CuPy comes later, and in every further thread that makes arrays. Nothing happens on a rank
        whose device is a CPU.

        Raises:
            MeshError: If CuPy cannot be imported or does not find the GPU.
        """
        return self._core.devices.use()

    @property
    def local_rank(self) -> int:
        """This rank among those of its node: as the launcher says, or counted where it does not."""
        return self._core.devices.local_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of the node of each rank."""
        return self._core.devices.table.hosts

    def get_device(self, rank: int) -> Device | None:
        """Return the device of `rank`, None if there is no such rank. Local."""
        return self._core.devices.table.get(rank)

    def local_device(self) -> Device:
        """Return the device of this rank. Local."""
        return self._core.devices.mine

    def all_devices(self) -> DeviceTable:
        """Return the devices of all ranks, in rank order. Local."""
        return self._core.devices.table

    def devices_by_backend(self, backend: DeviceBackend | str) -> list[Device]:
        """Return the devices of exactly this backend. Local."""
        return self._core.devices.table.by_backend(backend)

    def devices_in_group(self, name: str) -> list[Device]:
        """Return the devices of a group's ranks, in group order. Local.

        Raises:
            UnknownNameError: If there is no such group.
        """
        group = self.get_group(name)
        if group is None:
            known = ", ".join(self.group_names)
            raise UnknownNameError(f"Group {name!r} not found; there are {known}")
        return self._core.devices.table.in_group(GroupSpec(group.name, group.ranks))

    @property
    def total_memory_mb(self) -> int:
        """Memory of all devices in MiB, shared hardware counted once."""
        return self._core.devices.table.total_memory_mb

    @property
    def total_compute_units(self) -> int:
        """Multiprocessors and cores of all devices, shared hardware counted once."""
        return self._core.devices.table.total_compute_units

    # -- all together ------------------------------------------------------------------------

    def copy(self) -> Self:
        """Make another mesh of the same class, dims and groups. Collective.

        The copy has communicators of its own.
        """
        core = self._core
        groups = core.live("copy")
        groups.settle("copy")
        dims = core.mesh if core.topology is None else core.topology
        other = type(self)(dims, core.context.communicator)
        other._core.live("copy").add_custom_of(groups)
        other._core.devices.table = core.devices.table
        return other

    def reshape(self, dims: MeshArgument) -> None:
        """Arrange the same ranks in other dims.

        Collective over the mesh. The groups of the old dims go and those of the new ones come;
        groups made by :meth:`add_group` stay. If the new dims do not fit, nothing changes.

        Raises:
            WorldSizeError: On every rank, if `dims` do not fit the ranks of the mesh.
            UnresolvedError: On every rank, if any has results that are not resolved.
            GroupError: On every rank, if a group added by the user has the name of a new dim or
                of a group of the new topology.
            MismatchError: On every rank, if the ranks ask for different dims.
        """
        self._core.reshape(dims)

    def set_comm(self, comm: Any) -> None:
        """Move the mesh, with all its groups, to another communicator of the same ranks.

        Collective over both. Take the groups anew afterwards: the old ones are closed.

        Raises:
            RankError: On every rank, if the size or any rank differs.
            UnresolvedError: On every rank, if any has results that are not resolved.
        """
        self._core.set_comm(comm)

    def barrier(self, name: str | None = None, *, timeout_s: float | None = None) -> None:
        """Wait for all started operations of this mesh, then for all its ranks.

        Collective over the mesh. See :meth:`ProcessGroup.barrier`.

        Raises:
            GroupError: If `name` is no text, such as a number of seconds.
        """
        if name is not None and not isinstance(name, str):
            raise GroupError(
                f"a barrier's name must be text or None, got {shown(name)}; a limit in seconds is "
                "timeout_s, as in mesh.barrier(timeout_s=30)"
            )
        self.sync_collective()
        self.group().barrier(timeout_s=timeout_s, label=name)

    def measure_links(self) -> LinkCosts:
        """Measure how fast bytes get from rank to rank, and reckon with it from now on.

        Collective over all ranks of `comm`, also those that the mesh leaves out, and waits. The
        slowest pair of neighbours counts; without a second node what is between nodes stays as
        assumed. Redistributions that start later choose their way by it.

        Returns:
            What :attr:`links` is then, the same on all ranks.

        Cost:
            Messages there and back between pairs of ranks, all at once: 100 of 8 bytes and 5 of
            4 MiB inside nodes and as many between them; 5 reads of 4 MiB; two agreements on small
            values.

        Example:
            >>> with mm.DeviceMesh("dp=-1") as mesh:
            ...     print(mesh.measure_links().measured == (mesh.size > 1))
            True
        """
        self._core.measure_links()
        return self.links

    def sync_collective(self) -> None:
        """Wait for all operations that this rank has started, in the order of their start.

        Their handles then resolve at once. An error of one is raised by its own handle.
        """
        for work in self._core.context.open_work.all():
            work._complete()

    def traffic(self) -> Traffic:
        """Return what this rank has put into the operations of this mesh, and received. Local.

        It counts on; :meth:`Traffic.snapshot` does not. ``print(mesh.traffic())`` shows a table.
        """
        return self._core.context.traffic

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
        self._core.live("give a budget to")
        return Budget(self._core.context.traffic, self.rank, call_site(), bytes, messages)

    def shared_empty(
        self, shape: Sequence[SupportsIndex] | SupportsIndex, dtype: DTypeLike = float
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
            OutOfMemoryError: If there is not as much memory.
        """
        core = self._core
        if core.closed:
            core.refuse_closed("allocate from")
        return aligned_empty(shape, dtype, core.context.world.shared_bytes)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give all communicators back. Collective; a second call does nothing.

        Nor does one in a forked child.

        Raises:
            UnresolvedError: On every rank, naming the operations, if any rank has results that
                are not resolved. The mesh stays open, so that they can be.
            MismatchError: If a rank of this node waits in a collective of a group meanwhile, there
                and here. The mesh is closed on this rank, but with ``MPIMESH_CHECKS`` on, which
                tell it to every rank.
        """
        self._core.close()

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
        if self._core.context.forked:
            return
        if error is None:
            self.close()
        else:
            self._core.leave(error)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: two meshes cannot own one communicator."""
        raise MeshError(
            f"{self!r} cannot be copied or pickled, for its communicators are this mesh's alone: "
            "make another with mesh.copy(), which is collective, or pass mesh.mesh on, the plain "
            "Mesh"
        )

    def _repr_html_(self) -> str:
        """Show the ranks in a grid, in notebooks. Local."""
        from mpimesh.trace import html  # late: pictures are for notebooks

        return html.paragraph(repr(self)) + html.rank_grid(self.dims, self.ids.tolist())

    def __repr__(self) -> str:
        """Show dims, rank and groups. Local."""
        state = ", closed" if self.closed else ""
        return (
            f"<DeviceMesh {self.dims_text} rank={self.rank}/{self.world_size} "
            f"groups={self.group_names}{state}>"
        )


_OF_GROUPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "gather"]
_OF_GROUPS += ["broadcast", "scatter", "send", "recv"]
_ELSEWHERE = {name: f"a group has it: mesh.group(dim).{name}()" for name in _OF_GROUPS}
_ELSEWHERE |= {
    mpi: f"a group has it: mesh.group().{ours}()"
    for mpi, ours in {
        "Allreduce": "all_reduce",
        "Allgather": "all_gather",
        "Alltoall": "all_to_all",
        "Bcast": "broadcast",
    }.items()
}
_ELSEWHERE |= {"get_rank": "use mesh.rank", "get_world_size": "use mesh.size"}
_ELSEWHERE |= {"Get_rank": "use mesh.rank", "Get_size": "use mesh.size"}
_ELSEWHERE |= {"get_local_rank": "use mesh.coord(dim)"}
tell_elsewhere(DeviceMesh, _ELSEWHERE)
