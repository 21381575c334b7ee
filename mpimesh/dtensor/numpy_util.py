"""TensorFlow's ``numpy_util``: between split arrays and NumPy's, and the blocks of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.arrays import to_numpy as host_of
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.packing import shape_of_blocks
from mpimesh.dtensor.relayout import copy_to_mesh
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import AxisLayout, Layout
from mpimesh.runtime import DeviceMesh

__all__ = ["pack_numpy", "to_numpy", "unpack", "unpacked_to_numpy"]


def to_numpy(x: Any, *, root: int | None = None) -> Any:
    """Return the whole array: on every rank of the mesh, or on rank `root` only.

    Collective over the mesh, see :meth:`DTensor.full`. Of an array that is not split it returns
    that array.

    Args:
        x: The array.
        root: A rank of the mesh; None for all.

    Returns:
        The array; None on ranks that do not get it.

    Raises:
        RankError: If `root` is not in the mesh.
    """
    return x.full(root=root) if isinstance(x, DTensor) else host_of(x)


def pack_numpy(
    value: Any, layout: AxisLayout | Layout, *, mesh: DeviceMesh | None = None
) -> DTensor:
    """Put a whole array, which every rank has, on a mesh. Nothing moves.

    It is :func:`copy_to_mesh`; errors as there.
    """
    return copy_to_mesh(host_of(value), layout, mesh=mesh)


def unpack(value: Any, layout: AxisLayout | Layout) -> list[HostArray]:
    """Return the blocks of a whole array for all places of a mesh, as views. Local.

    Raises:
        LayoutError: If the layout does not fit; with an :class:`AxisLayout`, also if the blocks
            would not be equal.

    Example:
        >>> x = np.arange(4)
        >>> mm.dtensor.numpy_util.unpack(x, AxisLayout(["x"], mm.Mesh("x=2,y=2")))
        [array([0, 1]), array([0, 1]), array([2, 3]), array([2, 3])]
    """
    whole = host_of(value)
    if isinstance(layout, AxisLayout):
        layout.local_shape_from_global_shape(whole.shape)
    made = Layout(layout.mesh, layout)
    _refuse_summands(made)
    return [whole[_index(made, whole.shape, rank)] for rank in made.mesh.ids]


def unpacked_to_numpy(blocks: Sequence[Any], layout: AxisLayout | Layout) -> HostArray:
    """Return the whole array that has these blocks. Local; it undoes :func:`unpack`.

    Args:
        blocks: One for each place of the mesh, in row-major order, all of one shape. Of several
            copies the last one counts.
        layout: The layout.

    Raises:
        LayoutError: If the layout does not fit.
        ShapeError: If there is not one block for each place, or they have different shapes.
    """
    made = Layout(layout.mesh, layout)
    _refuse_summands(made)
    parts = [host_of(block) for block in blocks]
    if len(parts) != made.mesh.size or len({part.shape for part in parts}) > 1:
        raise ShapeError(
            f"unpacked_to_numpy takes one block for each of {made.mesh.size} places of mesh "
            f"{made.mesh.dims_text or '()'}, all of one shape; got {[part.shape for part in parts]}"
        )
    shape = shape_of_blocks(layout, made, parts[0].shape)
    whole: HostArray = np.empty(shape, np.result_type(*parts))
    for rank, part in zip(made.mesh.ids, parts, strict=True):
        whole[_index(made, shape, rank)] = part
    return whole


def _index(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in layout.box(shape, rank))


def _refuse_summands(layout: Layout) -> None:
    if layout.partial_op:
        raise LayoutError(f"blocks are parts of an array, and {layout} has summands instead")
