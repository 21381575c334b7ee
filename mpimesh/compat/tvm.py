"""TVM's ``tvm.relax.distributed`` and its collectives of workers.

A session of workers is a program that mpiexec starts; :class:`ThreadedSession` runs one in threads.
What TVM does with ``in_group`` is a group here: ``mesh.group("worker")`` or ``mesh.group()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mpimesh import layout as layouts, runtime
from mpimesh.arguments import as_int, as_items, as_shape, check_kind, shape_of, shown
from mpimesh.arrays import Array, OpLike
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.dtensor import DTensor
from mpimesh.errors import GroupError, LayoutError, RankError, ShapeError
from mpimesh.layout import Layout, PlacementLike, Replicate, Shard
from mpimesh.mesh import Mesh
from mpimesh.runtime import ProcessGroup, run_virtual
from mpimesh.runtime.agreement import agree_alike

__all__ = [
    "DTensorStructInfo",
    "Placement",
    "PlacementSpec",
    "PlacementSpecKind",
    "ThreadedSession",
    "allgather",
    "allreduce",
    "annotate_sharding",
    "broadcast_from_worker0",
    "device_mesh",
    "gather_to_worker0",
    "recv_from_prev_group",
    "recv_from_worker",
    "recv_from_worker0",
    "redistribute",
    "redistribute_replica_to_shard",
    "scatter_from_worker0",
    "send_to_next_group",
    "send_to_worker",
    "struct_info",
]


def device_mesh(shape: Sequence[int], device_ids: Sequence[int]) -> Mesh:
    """Return a mesh of a shape and the ids of its ranks; its dims are ``d0``, ``d1`` and so on."""
    return Mesh.from_ids(shape, device_ids)


class PlacementSpecKind(Enum):
    """The kind of a spec."""

    kSharding = 0
    kReplica = 1


@dataclass(frozen=True, slots=True, init=False)
class PlacementSpec:
    """The treatment of an array along one dim of a mesh; made by `sharding` and `replica`.

    Attributes:
        axis: The array axis that is split; -1 if none is.
        kind: Whether one is.
    """

    axis: int
    kind: PlacementSpecKind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("make a PlacementSpec by PlacementSpec.sharding(axis) or .replica()")

    @classmethod
    def sharding(cls, axis: int) -> PlacementSpec:
        """Return the spec that splits `axis`.

        Raises:
            LayoutError: If it is negative, or no whole number.
        """
        return cls._of(Shard(axis).axis, PlacementSpecKind.kSharding)

    @classmethod
    def replica(cls) -> PlacementSpec:
        """Return the spec of copies."""
        return cls._of(-1, PlacementSpecKind.kReplica)

    @classmethod
    def _of(cls, axis: int, kind: PlacementSpecKind) -> PlacementSpec:
        spec = object.__new__(cls)
        object.__setattr__(spec, "axis", axis)
        object.__setattr__(spec, "kind", kind)
        return spec

    def __str__(self) -> str:
        return "R" if self.kind is PlacementSpecKind.kReplica else f"S[{self.axis}]"


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """One spec for each dim of a mesh; taken wherever mpimesh takes placements.

    Args:
        dim_specs: The specs.

    Attributes:
        dim_specs: The specs, as a tuple.
    """

    dim_specs: tuple[PlacementSpec, ...]

    def __init__(self, dim_specs: Iterable[PlacementSpec]) -> None:
        object.__setattr__(self, "dim_specs", as_items(dim_specs, "dim_specs", LayoutError))
        self.placement  # noqa: B018 - refuses what is no spec

    @classmethod
    def from_text(cls, text: str) -> Placement:
        """Read ``"S[0], R"``.

        Raises:
            LayoutError: If it is not one of `R` and `S[axis]` for each dim.
        """
        specs = []
        for spec in layouts.Placement.from_text(text):
            if isinstance(spec, Shard) and spec.sizes is None:
                specs.append(PlacementSpec.sharding(spec.axis))
            elif isinstance(spec, Replicate):
                specs.append(PlacementSpec.replica())
            else:
                raise LayoutError(f"a placement is written with R and S[axis], got {text!r}")
        return cls(specs)

    @property
    def placement(self) -> layouts.Placement:
        """The same of :mod:`mpimesh.layout`."""
        return layouts.Placement([str(spec) for spec in self.dim_specs])

    def __str__(self) -> str:
        return ", ".join(map(str, self.dim_specs))


@dataclass(frozen=True, slots=True, init=False)
class DTensorStructInfo:
    """Shape, dtype, mesh and placement of an array, as a value.

    Args:
        tensor_sinfo: The global shape and the dtype.
        device_mesh: A :class:`mpimesh.Mesh` or a live one.
        placement: As for a :class:`mpimesh.Layout`.
        span: The place in a source text; not compared.

    Raises:
        LayoutError: If the placement does not have one spec for each mesh dim, or splits an axis
            that the shape does not have.
        DTypeError: If there is no such dtype.

    Attributes:
        shape: The global shape.
        dtype: The name of the dtype.
        layout: The mesh and the placement.
        span: As given.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    span: Any = field(compare=False)

    def __init__(
        self,
        tensor_sinfo: tuple[Sequence[int], Any],
        device_mesh: Mesh | runtime.DeviceMesh,
        placement: PlacementLike,
        span: Any = None,
    ) -> None:
        wanted = "a shape and a dtype"
        facts = as_items(tensor_sinfo, "tensor_sinfo", LayoutError, wanted=wanted)
        if len(facts) != 2:
            raise LayoutError(f"tensor_sinfo must be {wanted}, got {shown(tensor_sinfo)}")
        made, lengths = Layout(device_mesh, placement), as_shape(facts[0], LayoutError)
        for spec in made.placement:
            if isinstance(spec, Shard) and spec.axis >= len(lengths):
                raise LayoutError(
                    f"Sharding dimension should be smaller than tensor ndim: {spec}, but shape "
                    f"{lengths} has {len(lengths)} axes"
                )
        made.tiling(lengths)
        dtype = as_dtype(facts[1]).name
        for name, value in (("shape", lengths), ("dtype", dtype), ("layout", made), ("span", span)):
            object.__setattr__(self, name, value)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.layout.mesh

    @property
    def placement(self) -> layouts.Placement:
        """One spec for each dim of the mesh."""
        return self.layout.placement

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def to_record(self) -> dict[str, Any]:
        """Write the fields in JSON's types, without the span."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "mesh": [[name, size] for name, size in self.mesh.dims],
            "device_ids": self.mesh.ids.tolist(),
            "placement": str(self.placement),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DTensorStructInfo:
        """Read what :meth:`to_record` writes.

        Raises:
            LayoutError: If a field is missing.
        """
        wanted = "a mapping, as to_record() makes"
        check_kind(record, Mapping, "record", LayoutError, wanted=wanted)
        try:
            mesh = Mesh([(name, size) for name, size in record["mesh"]], record["device_ids"])
            return cls((record["shape"], record["dtype"]), mesh, record["placement"])
        except KeyError as error:
            raise LayoutError(f"a record of a DTensorStructInfo has a field {error}") from None

    def __str__(self) -> str:
        ids = self.mesh.ids.tolist()
        plain = ids == list(range(ids[0], ids[0] + len(ids)))
        ranks = f"R.Range({ids[0]}, {ids[-1] + 1})" if plain else str(ids)
        shape = tuple(dim.size for dim in self.mesh.dims)
        return (
            f'R.DTensor({self.shape}, "{self.dtype}", R.device_mesh({shape}, {ranks}), '
            f'"{self.placement}")'
        )


def annotate_sharding(x: DTensor, mesh: runtime.DeviceMesh, placement: PlacementLike) -> DTensor:
    """Return `x`, of which is said how it lies; that is checked, and nothing moves. Local.

    Args:
        x: The array.
        mesh: The mesh that it should be on.
        placement: As for :class:`Layout`; TVM's text is ``"S[0], R"``.

    Raises:
        LayoutError: With both layouts, if it lies otherwise, or is no DTensor.
    """
    found, expected = _tensor(x, "annotate_sharding").layout, Layout(mesh, placement)
    if not found.agrees_with(expected):
        raise LayoutError(
            f"{x!r} is annotated to be {expected}; bring it there with redistribute(x, mesh, "
            "placement)"
        )
    return x


def redistribute(x: DTensor, mesh: runtime.DeviceMesh, placement: PlacementLike) -> DTensor:
    """Return the same array on `mesh`, placed so: :meth:`DTensor.redistribute` in TVM's words.

    Collective, and waits. Any placement to any other, on the mesh of `x` or on another.

    Raises:
        LayoutError: If the placement does not fit the array or the mesh, or `x` is no DTensor.

    Example:
        >>> y = mm.compat.tvm.redistribute(x, mesh, "S[0], R")
    """
    return _tensor(x, "redistribute").redistribute(placement, mesh=mesh)


def redistribute_replica_to_shard(x: DTensor, num_workers: int, axis: int) -> DTensor:
    """Return the array of which each rank keeps its own slice of `axis`. Local: nothing moves.

    Worker k of n keeps ``[k * length / n, (k + 1) * length / n)``.

    Args:
        x: An array that is replicated on a mesh of one dim.
        num_workers: The number of ranks of the mesh.
        axis: The axis to split, counted from 0.

    Raises:
        LayoutError: If the length of `axis` is not divisible by `num_workers`, or `x` is not such
            an array. It is a `ValueError`.
    """
    layout = _tensor(x, "redistribute_replica_to_shard").layout
    dims = layout.mesh.dims
    if len(dims) != 1 or list(layout.placement) != [Replicate()]:
        raise LayoutError(
            f"redistribute_replica_to_shard takes an array that is R on a mesh of one dim, got "
            f"{x!r}; redistribute goes from any layout to any other"
        )
    if as_int(num_workers, "num_workers", LayoutError) != dims[0].size:
        raise LayoutError(
            f"num_workers is {num_workers}, but mesh {layout.mesh.dims_text} has "
            f"{dims[0].size} ranks"
        )
    target = Shard(axis)
    layout_there = Layout(layout.mesh, [target])
    layout_there.tiling(x.shape)  # refuses an axis that is not there
    if x.shape[axis] % num_workers:
        raise LayoutError(
            f"axis {axis} of shape {x.shape} is not divisible by num_workers {num_workers}; "
            "redistribute makes uneven slices"
        )
    return x.redistribute([target])


def struct_info(x: Any) -> DTensorStructInfo:
    """Return all that is known of a split array but its values. Local.

    Raises:
        LayoutError: If `x` is no DTensor.

    Example:
        >>> with mm.DeviceMesh("a=1,b=1") as mesh:
        ...     x = mm.ones((4, 4), mesh, "S[0], R", dtype="float32")
        ...     print(mm.compat.tvm.struct_info(x))
        R.DTensor((4, 4), "float32", R.device_mesh((1, 1), R.Range(0, 1)), "S[0], R")
    """
    tensor = _tensor(x, "struct_info")
    return DTensorStructInfo((tensor.shape, tensor.dtype), tensor.layout.mesh, tensor.placement)


def _tensor(x: Any, what: str) -> DTensor:
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"{what} takes a DTensor, got {type(x).__name__}, which has no layout; make one with "
            "mm.distribute"
        )
    return x


# -- collectives of workers: they wait ------------------------------------------------------------


class ThreadedSession:
    """Workers in threads, of one or several groups. Else ``mpiexec -n`` starts them.

    Args:
        num_workers: Number of workers.
        num_groups: Number of groups of as many workers each.

    Raises:
        GroupError: If the groups cannot be equal.
    """

    def __init__(self, num_workers: int, num_groups: int = 1) -> None:
        num_workers = as_int(num_workers, "num_workers", GroupError, least=1)
        num_groups = as_int(num_groups, "num_groups", GroupError, least=1)
        if num_workers % num_groups:
            raise GroupError(f"{num_workers} workers cannot be {num_groups} equal groups")
        self.dims = f"group={num_groups},worker={num_workers // num_groups}"
        self.num_workers = num_workers

    def run(self, function: Callable[[runtime.DeviceMesh], Any]) -> list[Any]:
        """Call `function` with each worker's mesh, whose dims are ``group`` and ``worker``."""

        def main() -> Any:
            with runtime.DeviceMesh(self.dims) as mesh:
                return function(mesh)

        return run_virtual(self.num_workers, main)


def allreduce(x: Array, op_type: OpLike = "sum", *, group: ProcessGroup) -> Array:
    """Reduce over the workers: ``sum``, ``prod``, ``min``, ``max`` or ``avg``. Collective.

    Raises:
        GroupError: If there is no such operation.
    """
    return _workers(group).all_reduce(x, op_type).resolve()


def allgather(x: Array, num_workers: int, axis: int = 0, *, group: ProcessGroup) -> Array:
    """Join the arrays of all workers along `axis`. Collective.

    Raises:
        GroupError: On every rank, if there are not `num_workers`.
        MismatchError: On every rank, if the workers give different `num_workers`.

    Cost:
        Beside the all-gather an all-reduce of 40 bytes, by which `num_workers` is compared.
    """
    _agree_on_workers("allgather", num_workers, group)
    return group.all_gather(x, axis=axis).resolve()


def broadcast_from_worker0(x: Array, *, group: ProcessGroup) -> Array:
    """Return the array of worker 0; the others give arrays of its shape and dtype. Collective."""
    return _workers(group).broadcast(x, root=0).resolve()


def gather_to_worker0(x: Array, *, group: ProcessGroup) -> Array | None:
    """Join the arrays of all workers on worker 0 along axis 0; None elsewhere. Collective."""
    return _workers(group).gather(x, root=0).resolve()


def send_to_worker(x: Array, worker: int, *, group: ProcessGroup) -> None:
    """Send to another worker of the group, and wait until `x` may be written again.

    Raises:
        RankError: If it is no other worker.
    """
    _workers(group).send(x, worker).resolve()


def recv_from_worker(worker: int, *, group: ProcessGroup) -> Array:
    """Receive what another worker of the group sends.

    Raises:
        RankError: If it is no other worker.
    """
    return _workers(group).recv(worker).resolve()


def recv_from_worker0(*, group: ProcessGroup) -> Array:
    """Receive what worker 0 of the group sends with :func:`send_to_worker`.

    Raises:
        RankError: On worker 0.
    """
    return recv_from_worker(0, group=group)


def send_to_next_group(x: Array, *, mesh: runtime.DeviceMesh) -> None:
    """Send to the worker of the same number in the next group.

    Raises:
        RankError: In the last group.
    """
    group = _groups(mesh)
    send_to_worker(x, _neighbour(group, 1, "next"), group=group)


def recv_from_prev_group(*, mesh: runtime.DeviceMesh) -> Array:
    """Receive what the worker of the same number in the previous group sends.

    Raises:
        RankError: In the first group.
    """
    group = _groups(mesh)
    return recv_from_worker(_neighbour(group, -1, "previous"), group=group)


def _workers(group: object) -> ProcessGroup:
    wanted = "a group of ranks, as mesh.group('tp') gives"
    return check_kind(group, ProcessGroup, "group", GroupError, wanted=wanted)


def _groups(mesh: object) -> ProcessGroup:
    return check_kind(
        mesh, runtime.DeviceMesh, "mesh", GroupError, wanted="a live DeviceMesh"
    ).group("group")


def _neighbour(group: ProcessGroup, step: int, which: str) -> int:
    mine = as_int(group.rank, "the rank in the group", RankError)
    if not 0 <= mine + step < group.size:
        raise RankError(f"group {mine} of {group.size} has no {which} group")
    return mine + step


def _agree_on_workers(name: str, num_workers: int, group: ProcessGroup) -> None:
    """Raise on every rank if `num_workers` is not the size of the group on any. Collective."""
    group = _workers(group)

    def check() -> None:
        if as_int(num_workers, "num_workers", GroupError) != group.size:
            raise GroupError(
                f"num_workers is {num_workers}, but group {group.name!r} has {group.size} ranks; "
                "give group.size, or the group of those workers"
            )

    agree_alike(group, name, check)


def scatter_from_worker0(
    x: Array | None,
    num_workers: int,
    axis: int = 0,
    *,
    group: ProcessGroup,
    out: Array | None = None,
) -> Array:
    """Cut the array of worker 0 along `axis`, and return this worker's part, ``length / n`` long.

    Collective, and waits. Whatever the axis, each worker receives its part in one piece.

    Args:
        x: On worker 0, the array. None elsewhere: what another worker gives is not sent, which a
            RuntimeWarning tells.
        num_workers: The number of ranks of `group`.
        axis: The axis to cut; negative counts from the end.
        group: The workers; worker 0 is its first rank.
        out: Array for the part. New if None.

    Raises:
        GroupError: If `group` is none; on every rank, if it has another number of ranks than
            `num_workers`.
        MismatchError: On every rank, if the workers give different `num_workers`.
        ShapeError: On every rank, if there is no such axis, or its length is not divisible by
            `num_workers`, or if worker 0 has none. On a worker whose `out` does not fit.

    Example:
        >>> with mm.DeviceMesh("tp=-1") as mesh:
        ...     x = np.arange(6).reshape(2, 3) if mesh.rank == 0 else None
        ...     mm.compat.tvm.scatter_from_worker0(x, mesh.size, 1, group=mesh.group("tp")).shape[0]
        2
    """
    _agree_on_workers("scatter_from_worker0", num_workers, group)
    # An array without axes, if worker 0 has none: it is refused on all workers.
    sent = np.empty(()) if x is None and group.rank == 0 else x
    try:
        part = group.scatter(sent, root=0, axis=axis, out=out).resolve()
    except ShapeError as error:
        error.add_note(
            "scatter_from_worker0 makes equal parts, group.scatter(x, sizes=...) others; None from "
            "worker 0 counts as an array with 0 axes"
        )
        raise
    if x is not None and group.rank != 0:
        # After the exchange: a warning may be an error here, and the others would wait for it.
        shape = shape_of(x)
        warnings.warn(
            f"scatter_from_worker0 sends the array of worker 0; worker {group.rank} of group "
            f"{group.name!r} gave one, too, {shown(x) if shape is None else f'of shape {shape}'}, "
            "which is dropped: give None there",
            RuntimeWarning,
            stacklevel=2,
        )
    return part
