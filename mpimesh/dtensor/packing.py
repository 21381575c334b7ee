"""`pack` and `unpack`: this rank's component of a split array, in TensorFlow's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag, digest_text
from mpimesh.arrays import HostArray
from mpimesh.dtensor.consistency import gather_facts, host_block, table_of
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.mesh_context import mesh_for
from mpimesh.dtensor.relayout import tensor_of
from mpimesh.errors import (
    LayoutError,
    MismatchError,
    RankError,
    ShapeError,
    on_all_ranks,
)
from mpimesh.layout import AxisLayout, Layout, Partial, PlacementLike, Shard
from mpimesh.runtime import DeviceMesh

__all__ = ["pack", "shape_of_blocks", "unpack"]


def pack(
    tensors: Sequence[Any],
    layout: PlacementLike,
    *,
    mesh: DeviceMesh | None = None,
    check_replicas: bool = False,
) -> DTensor:
    """Make a split array of the component that each rank has. Nothing is copied.

    Collective over the mesh: the ranks compare what they have, and no more than that moves. All
    components have one shape; :meth:`DTensor.from_local` takes uneven ones.

    Args:
        tensors: This rank's components: a list of one, for a rank is one device.
        layout: An :class:`AxisLayout`, a :class:`Layout`, or placements.
        mesh: The live mesh; the default one if None.
        check_replicas: Whether ranks that should hold copies of each other are compared, by a
            digest of 64 bits. Without it copies that differ stay different.

    Raises:
        RankError: If this rank is not in the mesh.
        ShapeError: On every rank, if one does not give one component that fits its layout.
        MismatchError: On every rank, saying who gave what, if shapes, dtypes or layouts differ, or
            copies do.

    Cost:
        Two small messages; with `check_replicas` one reading of the component.

    Example:
        >>> with mm.DeviceMesh("x=3,y=2") as mesh:
        ...     layout = AxisLayout(["x", "unsharded"], mesh)
        ...     rows = np.full((2, 4), mesh.coord("x"))
        ...     print(mm.dtensor.pack([rows], layout, mesh=mesh).shape)
        (6, 4)
    """
    live = mesh_for(mesh)
    if not live.contains_rank(live.rank):
        raise RankError(
            f"rank {live.rank} is not in mesh {live.dims_text} and has no component to pack; "
            "mm.empty(shape, mesh, placements, dtype=...) makes the tensor without block"
        )
    mine = _component(tensors, layout, live, check_replicas)
    if isinstance(mine, ShapeError):
        gather_facts(live, "pack", [], mine)
        raise mine
    rows, ranks = gather_facts(live, "pack", mine.facts), list(live.group().ranks)
    _check_alike(rows, ranks)
    if check_replicas:
        _check_copies(mine, dict(zip(ranks, (row[3] for row in rows), strict=True)))
    return DTensor(live, mine.layout, mine.shape, mine.block.dtype, mine.block)


def unpack(x: DTensor) -> list[HostArray]:
    """Return this rank's components of an array, which are the array's own: a list of one. Local.

    On a rank that the mesh leaves out the list is empty.

    Raises:
        LayoutError: If `x` is no DTensor.
    """
    tensor = tensor_of(x, "unpack")
    return [tensor.local] if tensor.is_member else []


def shape_of_blocks(
    spelling: PlacementLike, layout: Layout, local_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of an array whose blocks all have `local_shape`.

    Args:
        spelling: How the layout was given; an `AxisLayout` has a number of axes of its own.
        layout: The layout.
        local_shape: The shape of all blocks.

    Raises:
        LayoutError: If the layout is not for as many axes, or it has sizes.
    """
    if isinstance(spelling, AxisLayout):
        return spelling.global_shape_from_local_shape(local_shape)
    shards = [1] * len(local_shape)
    for dim, spec in zip(layout.mesh.dims, layout.placement, strict=True):
        if not isinstance(spec, Shard):
            continue
        if spec.sizes is not None:
            raise LayoutError(f"{layout} has sizes, so its blocks are not alike; use from_local")
        if spec.axis >= len(local_shape):
            raise LayoutError(
                f"{spec!r} along mesh dim {dim} needs an array of more axes than a component has: "
                f"its shape is {tuple(local_shape)}"
            )
        shards[spec.axis] *= dim.size
    return tuple(n * k for n, k in zip(local_shape, shards, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Component:
    """The component that this rank packs, and its array if the others' are like it."""

    block: HostArray
    layout: Layout
    shape: tuple[int, ...]
    digest: str
    checked: bool

    @property
    def facts(self) -> list[Any]:
        """Facts that the ranks compare."""
        block = self.block
        return [block.shape, str(block.dtype), self.layout.text, self.digest, self.checked]


def _component(
    tensors: Any, layout: PlacementLike, mesh: DeviceMesh, check_replicas: bool
) -> _Component | ShapeError:
    """Return this rank's component, or what is wrong with it, which all ranks have to hear."""
    try:
        made = Layout(mesh, layout)
        block = _only(tensors)
        shape = shape_of_blocks(layout, made, block.shape)
        check_replicas = as_flag(check_replicas, "check_replicas", ShapeError)
        digest = digest_text(_bytes_of(block)) if check_replicas else ""
        return _Component(block, made, shape, digest, check_replicas)
    except Exception as error:
        return ShapeError(str(error) or type(error).__name__)


def _only(tensors: Any) -> HostArray:
    if not isinstance(tensors, list | tuple):
        raise ShapeError(
            f"DTensorPack takes the list of this rank's components, got {type(tensors).__name__}"
        )
    if len(tensors) != 1:
        raise ShapeError(
            f"expected 1 inputs to DTensorPack, but got {len(tensors)}: a rank is one device, and "
            "gives one component"
        )
    return host_block(tensors[0])


def _bytes_of(block: HostArray) -> memoryview:
    flat: memoryview = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    return flat


def _check_alike(rows: list[list[Any]], ranks: list[int]) -> None:
    heads = [(tuple(shape), dtype, text) for shape, dtype, text, *_ in rows]
    if len(set(heads)) > 1:
        raise on_all_ranks(
            MismatchError(
                "components of DTensorPack must currently all have the same shape, dtype and "
                f"layout; DTensor.from_local takes uneven ones; got\n{table_of(heads, ranks)}"
            )
        )
    flags = [bool(row[4]) for row in rows]
    if len(set(flags)) > 1:
        asked = [rank for rank, flag in zip(ranks, flags, strict=True) if flag]
        raise on_all_ranks(
            MismatchError(f"check_replicas must be alike on all ranks; only ranks {asked} set it")
        )


def _check_copies(mine: _Component, digests: dict[int, str]) -> None:
    layout, shape = mine.layout, mine.shape
    partial = [d for d, spec in enumerate(layout.placement) if isinstance(spec, Partial)]
    first: dict[Any, int] = {}
    for rank, digest in digests.items():
        coords = layout.mesh.coords_of(rank)
        place = (layout.box(shape, rank), tuple(coords[d] for d in partial))
        other = first.setdefault(place, rank)
        if digests[other] != digest:
            index = ", ".join(f"{start}:{stop}" for start, stop in place[0])
            raise on_all_ranks(
                MismatchError(
                    f"ranks {other} and {rank} give different components to DTensorPack, but as "
                    f"{layout} both hold the same part, [{index}]"
                )
            )
