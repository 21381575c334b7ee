"""`local_map`: a function of NumPy's arrays called on every rank's blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from mpimesh.arguments import as_items, as_shape
from mpimesh.arrays import HostArray
from mpimesh.dtensor.consistency import agreed_dtype, compare_call, numbered, writable_block
from mpimesh.dtensor.dtensor import DTensor, common_mesh
from mpimesh.dtensor.run import all_redistributed
from mpimesh.errors import LayoutError, ShapeError
from mpimesh.layout import Box, Layout, Placement, PlacementLike, Shard
from mpimesh.layout.placement import Placed
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.operands import host_array

__all__ = ["BlockPlace", "local_map"]

_ADVICE = 'results of other lengths need out_shapes="agree", or their shapes'


def wrapped_result(
    found: Any,
    placements: Any,
    shapes: Any,
    mesh: DeviceMesh,
    tensors: Sequence[DTensor],
    name: str,
) -> Any:
    """Return what a function returned with arrays in place of their blocks.

    Args:
        found: A block, or a tuple, list or dict of them.
        placements: Their placements: one for all or one for each.
        shapes: Their global shapes: the same.
        mesh: The mesh.
        tensors: The arrays whose blocks the function got.
        name: What the function is called in messages.

    Raises:
        ShapeError: If there is not one for each, or a result is not the block that it should be.
    """
    if isinstance(found, dict):
        to = placements if isinstance(placements, dict) else dict.fromkeys(found, placements)
        of = shapes if isinstance(shapes, dict) else dict.fromkeys(found, shapes)
        _check_keys(mesh, name, found, to, of)
        made = {
            key: _wrapped(found[key], to[key], of[key], mesh, tensors, f"{name}()[{key!r}]")
            for key in sorted(found, key=str)  # ranks agree on shapes in one order
        }
        return {key: made[key] for key in found}
    if isinstance(found, tuple | list):
        count = len(found)
        goals = placements if isinstance(placements, tuple) else (placements,) * count
        wholes = shapes if _is_row(shapes) else (shapes,) * count
        _check_keys(mesh, name, range(count), range(len(goals)), range(len(wholes)))
        row = [
            _wrapped(found[k], goals[k], wholes[k], mesh, tensors, f"{name}()[{k}]")
            for k in range(count)
        ]
        return type(found)(*row) if hasattr(found, "_fields") else type(found)(row)
    return _wrapped(found, placements, shapes, mesh, tensors, f"{name}()")


def _is_row(shapes: Any) -> bool:
    """Tell whether these are several shapes, and not one."""
    return isinstance(shapes, tuple | list) and not all(
        isinstance(one, SupportsIndex) for one in shapes
    )


def _check_keys(mesh: DeviceMesh, name: str, found: Any, placements: Any, shapes: Any) -> None:
    for what, keys in (("out_placements", placements), ("out_shapes", shapes)):
        if set(keys) != set(found):
            raise ShapeError(
                f"rank {mesh.rank}: {name} returned results {list(found)}, but {what} are for "
                f"{list(keys)}"
            )


def _wrapped(
    value: Any,
    placements: Any,
    shape: Any,
    mesh: DeviceMesh,
    tensors: Sequence[DTensor],
    what: str,
) -> Any:
    if placements is None:
        return value
    layout = Layout(mesh, placements)
    if not isinstance(value, np.ndarray | np.generic):
        raise ShapeError(
            f"rank {mesh.rank}: {what} must be a NumPy array, the block of an array as {layout}; "
            f"got {value!r}"
        )
    block = writable_block(host_array(value), mesh)
    if any(one.is_member and np.may_share_memory(block, one.local) for one in tensors):
        block, shared = mesh.shared_empty(block.shape, block.dtype), block
        block[...] = shared  # of an argument that was brought elsewhere it would be new, too
    axes = 1 + max((s.axis for s in layout.placement if isinstance(s, Shard)), default=-1)
    if block.ndim < axes:
        raise ShapeError(
            f"rank {mesh.rank}: {what} gave an array of shape {block.shape}, which has no axis "
            f"{axes - 1} for the blocks of {layout}: keep that axis, or give "
            "out_placements of summands (P), or None, which leaves each rank its own result"
        )
    if isinstance(shape, str):
        if shape != "agree":
            raise ShapeError(f'out_shapes are shapes, "agree" or None; got {shape!r}')
        return DTensor.from_local(block, mesh, placements)
    if shape is not None:
        return _checked(block, mesh, layout, as_shape(shape, one=True), what)
    inferred = _inferred(block, layout, tensors)
    if inferred is None:
        return DTensor.from_local(block, mesh, placements)
    shape, layout = inferred
    if mesh._core.context.settings.checks:
        made = DTensor.from_local(block, mesh, layout.placement)
        if (made.shape, made.layout) != inferred:
            raise ShapeError.everywhere(
                f"{what} must be the blocks of an array of shape {shape} as {layout}, got "
                f"those of shape {made.shape} as {made.layout}; {_ADVICE}"
            )
        return made
    return _checked(block, mesh, layout, shape, what)


def _checked(
    block: HostArray, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], what: str
) -> DTensor:
    expected = layout.local_shape(shape, mesh.rank) if len(shape) == block.ndim else None
    if block.shape != expected:
        raise ShapeError(
            f"rank {mesh.rank}: {what} must be the block "
            f"{'' if expected is None else f'of shape {expected} '}of an array of shape {shape} as "
            f"{layout}, got shape {block.shape}; {_ADVICE}"
        )
    if any((bounds[1:] == bounds[:-1]).any() for bounds in layout.tiling(shape).bounds):
        # A block without elements may have any dtype; all ranks know that there is one.
        block = block.astype(agreed_dtype(block, mesh, what), copy=False)
    return DTensor(mesh, layout, shape, block.dtype, block)


def _inferred(
    block: HostArray, layout: Layout, tensors: Sequence[DTensor]
) -> tuple[tuple[int, ...], Layout] | None:
    """Return the shape of the whole, and the layout with the sizes of its blocks.

    None if the arguments do not tell, which is the same on all ranks: it asks how many axes there
    are and the layouts of the arguments, and never how long a block is.
    """
    mesh, specs = layout.mesh, list(layout.placement)
    lengths = list(block.shape)
    for axis in range(block.ndim):
        dims = _split_by(layout, axis)
        if prod(mesh.dims[dim].size for dim in dims) == 1:
            continue
        own = tuple(specs[dim].sizes for dim in dims)  # type: ignore[attr-defined]
        known = {
            (x.shape[a], sizes)
            for x in tensors
            for a in range(x.ndim)
            if x.layout.mesh.dims == mesh.dims and _split_by(x.layout, a) == dims
            for sizes in [tuple(x.placement[dim].sizes for dim in dims)]  # type: ignore[attr-defined]
            if own in (sizes, (None,) * len(dims))
        }
        if len(known) != 1:
            return None
        ((lengths[axis], sizes),) = known
        for dim, one in zip(dims, sizes, strict=True):
            specs[dim] = Shard(axis, sizes=one)
    return tuple(lengths), Layout(mesh, Placement(specs))


def _split_by(layout: Layout, axis: int) -> tuple[int, ...]:
    """Return the numbers of the dims that split an axis."""
    return tuple(
        dim
        for dim, spec in enumerate(layout.placement)
        if isinstance(spec, Shard) and spec.axis == axis
    )


InPlacements: TypeAlias = (
    "str | Placement | Placed | Sequence[PlacementLike | None] | Mapping[str, PlacementLike | None]"
)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the blocks are that a function is called on.

    Attributes:
        rank: This rank.
        coords: Its coordinate along each dim of the mesh, by name.
        shapes: The global shapes of the split arrays among the arguments, in their order.
        boxes: For each of them (start, stop) along each axis of its block.
    """

    rank: int
    coords: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[Box, ...]

    @property
    def box(self) -> Box:
        """The box of the first array."""
        return self.boxes[0]

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the block of the first array begins in it."""
        return tuple(start for start, _ in self.boxes[0])

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the block of the first array in it."""
        return tuple(slice(start, stop) for start, stop in self.boxes[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the first array."""
        return self.shapes[0]


def local_map(
    function: Callable[..., Any] | None = None,
    out_placements: Any = None,
    *,
    in_placements: InPlacements | None = None,
    out_shapes: Any = None,
    mesh: DeviceMesh | None = None,
) -> Callable[..., Any]:
    """Return a function of split arrays that calls `function` on this rank's blocks.

    All ranks of the mesh call what is returned alike. On a rank that the mesh leaves out it returns
    None, and `function` is not called.

    Every :class:`DTensor` among the arguments becomes its block, a NumPy array and no copy; other
    arguments, lists of them too, are passed on as they are. If `function` has a keyword-only
    parameter ``block``, it gets a :class:`BlockPlace` there: where its blocks are, and where this
    rank is.

    An exception of `function` is one of this rank alone, as any other: under mpiexec it ends the
    job, with its traceback.

    Args:
        function: Takes blocks and returns one array, or a tuple or dict of arrays, which are the
            blocks of the results. None to use this as a decorator, with keywords.
        out_placements: Those of the results, as for :class:`Layout`: one for all, or a tuple or
            dict with one for each. None leaves a result as it is: an object of this rank.
        in_placements: Where arguments are brought first: a text, a :class:`Placement` or a layout
            for all split arrays; one for each positional argument; or by name. None leaves one
            where it is.
        out_shapes: The results' global shapes: one for all, or a tuple (of tuples) or dict with
            one for each. ``"agree"``: the ranks tell each other what they have, as
            :meth:`DTensor.from_local` does. None: an axis that is split as axes of the arguments
            are, all of one length, has that length, an axis that no dim splits is as long as
            in the block, and for any other the ranks agree. With ``MPIMESH_CHECKS`` they always do.
        mesh: The mesh, where no argument is split.

    Raises:
        LayoutError: If there is no split argument and no mesh, or the placements do not fit.
        ShapeError: On the rank whose result is no array, or not the block that it should be.

    Cost:
        What :meth:`DTensor.redistribute` costs for arguments that have to be moved; one small
        message more where ranks agree on a shape.

    Example:
        >>> @mm.local_map(out_placements="dp=S0")
        ... def numbered(x, *, block):
        ...     return x + 10 * np.arange(*block.box[0])
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     print(numbered(mm.ones((4,), mesh, "dp=S0", dtype=int)).full())
        [ 1 11 21 31]
    """
    if function is None:
        return lambda found: local_map(
            found,
            out_placements,
            in_placements=in_placements,
            out_shapes=out_shapes,
            mesh=mesh,
        )
    if not callable(function):
        raise LayoutError(
            f"local_map maps a function, got {function!r}; as a decorator it takes keywords: "
            "@mm.local_map(out_placements=...)"
        )
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # one in C that does not tell
    place = parameters.get("block")
    asks = place is not None and place.kind is place.KEYWORD_ONLY
    name = getattr(function, "__qualname__", repr(function))

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        # Arguments by their number, or by their name.
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        split = [slot for slot, value in values.items() if isinstance(value, DTensor)]
        live = _mesh_of(name, mesh, [values[slot] for slot in split])
        # Ordinary arguments may differ: each rank works on its own blocks.
        number = compare_call(live, f"local_map of {name}", [values[slot] for slot in split])
        moving = _moving(name, in_placements, list(parameters), values, split)
        brought = all_redistributed([values[slot] for slot in moving], list(moving.values()))
        values.update(zip(moving, brought, strict=True))
        if not live.contains_rank(live.rank):
            return None
        tensors = [values[slot] for slot in split]
        values.update((slot, values[slot].local) for slot in split)
        if asks and "block" not in values:
            coords = dict(zip(live.dim_names, live.coords_of(live.rank), strict=True))
            boxes = tuple(x.layout.box(x.shape, live.rank) for x in tensors)
            shapes = tuple(x.shape for x in tensors)
            values["block"] = BlockPlace(live.rank, coords, shapes, boxes)
        by_name = {slot: value for slot, value in values.items() if isinstance(slot, str)}
        found = function(*(values[slot] for slot in range(len(args))), **by_name)
        made = wrapped_result(found, out_placements, out_shapes, live, tensors, name)
        return numbered(made, number)

    return mapped


def _mesh_of(name: str, mesh: DeviceMesh | None, tensors: Sequence[DTensor]) -> DeviceMesh:
    """Return the mesh of the split arguments, or that of :func:`local_map`."""
    if not tensors:
        if mesh is None:
            raise LayoutError(
                f"no argument of {name} is a DTensor: split arrays, or give local_map the mesh="
            )
        return mesh
    found = common_mesh(tensors)
    if mesh is not None and mesh is not found:
        raise LayoutError(f"{name} is mapped over {mesh!r}, but {tensors[0]!r} is on {found!r}")
    return found


def _moving(
    name: str, wanted: Any, names: list[str], values: Mapping[Any, Any], split: Sequence[Any]
) -> dict[Any, PlacementLike]:
    """Return which arguments are to be brought where, by their numbers or names."""
    if wanted is None:
        return {}
    if isinstance(wanted, str | Placement) or hasattr(wanted, "placement"):
        return dict.fromkeys(split, wanted)
    found: dict[Any, Any] = {}
    if isinstance(wanted, Mapping):
        for key, to in wanted.items():
            by_number = key not in values and key in names and names.index(key) in values
            found[names.index(key) if by_number else key] = to
    else:
        found = dict(enumerate(as_items(wanted, "in_placements", LayoutError)))
    goals = {slot: to for slot, to in found.items() if to is not None}
    for slot, to in goals.items():
        if slot not in split:
            raise LayoutError(
                f"in_placements bring argument {slot!r} of {name} to {to!r}, but it is "
                f"{'a ' + type(values[slot]).__name__ if slot in values else 'not given'}"
            )
    return goals
