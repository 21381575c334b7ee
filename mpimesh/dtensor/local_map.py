"""`local_map`: a function of NumPy's arrays called on every rank's blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

from mpimesh.arguments import as_items
from mpimesh.dtensor.alike import same_call
from mpimesh.dtensor.apply import placed
from mpimesh.dtensor.results import wrapped_result
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import LayoutError
from mpimesh.layout import Box, Placement, PlacementLike
from mpimesh.layout.placement import Placed
from mpimesh.runtime import DeviceMesh

__all__ = ["BlockPlace", "local_map"]

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
        out_placements: How the results lie, as for :class:`Layout`: one for all, or a tuple or
            dict with one for each. None leaves a result as it is: an object of this rank.
        in_placements: Where arguments are brought first: a text, a :class:`Placement` or a layout
            for all split arrays; one for each positional argument; or by name. None leaves one
            where it is.
        out_shapes: The results' global shapes: one for all, or a tuple (of tuples) or dict with
            one for each. ``"agree"``: the ranks tell each other what they have, as
            :meth:`DTensor.from_local` does. None: an axis that is split as axes of the arguments
            are, all of one length, has that length, an axis that nobody splits is as long as
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
    how = _Mapping(
        function, tuple(parameters), asks, out_placements, in_placements, out_shapes, mesh
    )

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return how.call(args, kwargs)

    return mapped


@dataclass(frozen=True, slots=True)
class _Mapping:
    """The arguments of :func:`local_map`.

    Attributes:
        names: The function's parameters.
        asks: Whether it wants to know where its blocks are.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    asks: bool
    out_placements: Any
    in_placements: Any
    out_shapes: Any
    mesh: DeviceMesh | None

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function on the blocks of its arguments."""
        # Arguments by their number, or by their name.
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        split = [slot for slot, value in values.items() if isinstance(value, DTensor)]
        mesh = self._mesh_of([values[slot] for slot in split])
        # Ordinary arguments may differ: each rank works on its own blocks.
        same_call(mesh, f"local_map of {self._name}", [values[slot] for slot in split])
        moving = self._moving(values, split)
        brought = placed([values[slot] for slot in moving], list(moving.values()))
        values.update(zip(moving, brought, strict=True))
        if not mesh.contains_rank(mesh.rank):
            return None
        tensors = [values[slot] for slot in split]
        values.update((slot, values[slot].local) for slot in split)
        if self.asks and "block" not in values:
            values["block"] = _place(mesh, tensors)
        by_name = {slot: value for slot, value in values.items() if isinstance(slot, str)}
        found = self.function(*(values[slot] for slot in range(len(args))), **by_name)
        return wrapped_result(
            found, self.out_placements, self.out_shapes, mesh, tensors, self._name
        )

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def _mesh_of(self, tensors: Sequence[DTensor]) -> DeviceMesh:
        if not tensors:
            if self.mesh is None:
                raise LayoutError(
                    f"no argument of {self._name} is a DTensor: split arrays, or give local_map "
                    "the mesh="
                )
            return self.mesh
        mesh = common_mesh(tensors)
        if self.mesh is not None and self.mesh is not mesh:
            raise LayoutError(
                f"{self._name} is mapped over {self.mesh!r}, but {tensors[0]!r} is on {mesh!r}"
            )
        return mesh

    def _moving(self, values: Mapping[Any, Any], split: Sequence[Any]) -> dict[Any, PlacementLike]:
        """Return which arguments are to be brought where."""
        wanted = self.in_placements
        if wanted is None:
            return {}
        if isinstance(wanted, str | Placement) or hasattr(wanted, "placement"):
            return dict.fromkeys(split, wanted)
        if isinstance(wanted, Mapping):
            found = {self._slot(name, values): to for name, to in wanted.items()}
        else:
            found = dict(enumerate(as_items(wanted, "in_placements", LayoutError)))
        goals = {slot: to for slot, to in found.items() if to is not None}
        for slot, to in goals.items():
            if slot not in split:
                raise LayoutError(
                    f"in_placements bring argument {slot!r} of {self._name} to {to!r}, but it is "
                    f"{'a ' + type(values[slot]).__name__ if slot in values else 'not given'}"
                )
        return goals

    def _slot(self, name: str, values: Mapping[Any, Any]) -> Any:
        """Return by what an argument was given."""
        if name not in values and name in self.names and self.names.index(name) in values:
            return self.names.index(name)
        return name


def _place(mesh: DeviceMesh, tensors: Sequence[DTensor]) -> BlockPlace:
    coords = dict(zip(mesh.dim_names, mesh.coords_of(mesh.rank), strict=True))
    boxes = tuple(x.layout.box(x.shape, mesh.rank) for x in tensors)
    return BlockPlace(mesh.rank, coords, tuple(x.shape for x in tensors), boxes)
