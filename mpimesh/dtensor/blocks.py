"""Blocks that ranks bring along: whether they fit each other, and what they are parts of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.dtensor.alike import gather_facts
from mpimesh.errors import LayoutError, MismatchError, ShapeError, on_all_ranks
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.operands import host_array

__all__ = ["agreed_blocks", "agreed_dtype", "host_block", "table_of", "writable_block"]


def host_block(block: Any) -> HostArray:
    """Return a block as a NumPy array, itself if it is one.

    Raises:
        DTypeError: If it holds Python objects.
    """
    return host_array(block)


def agreed_dtype(
    block: HostArray, mesh: DeviceMesh, name: str, problem: ShapeError | None = None
) -> DType:
    """Return the dtype that the blocks have, those without elements aside. Collective.

    ``np.array([])`` is of float64 whatever the other ranks have.

    Args:
        block: This rank's block.
        mesh: The mesh.
        name: What is called, for messages.
        problem: Why this rank has no block.

    Raises:
        ShapeError: On every rank, if one has no block.
        MismatchError: On every rank, saying which has what, if they differ.
    """
    facts = [dtype_to_json(block.dtype), block.size]
    found, ranks = gather_facts(mesh, name, facts, problem), mesh.group().ranks
    dtypes = [dtype_from_json(dtype) for dtype, _ in found]
    full = [dtype for dtype, (_, size) in zip(dtypes, found, strict=True) if size]
    if len(set(full)) > 1:
        rows = "; ".join(
            f"rank {rank}: {dtype}" for rank, dtype in zip(ranks[:16], dtypes, strict=False)
        )
        raise on_all_ranks(
            MismatchError(f"{name} needs blocks of one dtype; give dtype=, or cast them: {rows}")
        )
    return (full or dtypes)[0]


def writable_block(block: HostArray, mesh: DeviceMesh) -> HostArray:
    """Return a block that can be written: itself, or a copy of one that is read-only. Local.

    If a block of one rank were read-only, writing would fail there, while others go on.
    """
    if block.flags.writeable:
        return block
    made = mesh.shared_empty(block.shape, block.dtype)
    made[...] = block
    return made


def agreed_blocks(
    block: HostArray, mesh: DeviceMesh, layout: Layout
) -> tuple[tuple[int, ...], Layout, DType]:
    """Return the shape of the whole array, the layout with the blocks' sizes, and the dtype.

    Collective over the mesh. A block without elements may be of any dtype.

    Raises:
        MismatchError: On every rank, if dtypes, numbers of axes or lengths disagree.
        ShapeError: On every rank, if several dims split an axis, and not evenly.
    """
    described = dtype_to_json(block.dtype)
    facts = [list(block.shape), str(block.dtype), layout.text, described]
    found = gather_facts(mesh, "from_local", facts)
    ranks = mesh.group().ranks
    rows = [(tuple(shape), name, text) for shape, name, text, _ in found]
    heads = {(len(shape), text) for shape, _, text in rows}
    full = [place for place, (shape, _, _) in enumerate(rows) if 0 not in shape]
    if len(heads) > 1 or len({rows[place][1] for place in full}) > 1:
        raise on_all_ranks(MismatchError(_table("of one dtype, rank and layout", rows, ranks)))
    shapes = np.array([shape for shape, _, _ in rows], np.int64).reshape(*layout.mesh.shape(), -1)
    if any(isinstance(spec, Shard) and spec.axis >= block.ndim for spec in layout.placement):
        layout.tiling(block.shape)  # raises, and says why
    specs = list(layout.placement)
    shape = []
    for axis in range(block.ndim):
        dims = [d for d, spec in enumerate(specs) if isinstance(spec, Shard) and spec.axis == axis]
        lengths = shapes[..., axis]
        # Along all other dims the blocks must be alike.
        first = lengths[tuple(slice(None) if d in dims else slice(1) for d in range(lengths.ndim))]
        if (lengths != first).any():
            raise on_all_ranks(MismatchError(_table(f"that fit along axis {axis}", rows, ranks)))
        shape.append(int(first.sum()))
        if len(dims) == 1:
            (dim,) = dims
            spec = specs[dim]
            if isinstance(spec, Shard) and spec.sizes is None:
                specs[dim] = Shard.of_sizes(axis, first.reshape(-1).tolist())
    fitted = Layout(layout.mesh, Placement(specs))
    try:
        wrong = [
            rank
            for rank, (found_shape, _, _) in zip(ranks, rows, strict=True)
            if fitted.local_shape(shape, rank) != found_shape
        ]
    except LayoutError as error:
        raise on_all_ranks(error) from None
    if wrong:
        raise on_all_ranks(
            ShapeError(
                f"blocks of shape {tuple(shape)} as {fitted} must be even where several dims "
                f"split an axis: {_table('that are', rows, ranks)}"
            )
        )
    return tuple(shape), fitted, dtype_from_json(found[full[0] if full else 0][3])


def table_of(rows: Sequence[tuple[Any, ...]], ranks: Iterable[int]) -> str:
    """Return who has what, for messages: shape, dtype and placements of each rank."""
    return "\n".join(
        f"  rank {rank}: shape {shape}, dtype {dtype}, placements {text}"
        for rank, (shape, dtype, text) in list(zip(ranks, rows, strict=True))[:16]
    )


def _table(what: str, rows: list[tuple[Any, ...]], ranks: Any) -> str:
    return f"from_local takes blocks {what}, but got\n{table_of(rows, ranks)}"
