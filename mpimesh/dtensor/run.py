"""Execution of a rule: arguments are checked, operands redistributed, blocks computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpimesh.arrays import DType, HostArray, refuse_masked, refuse_objects
from mpimesh.core.dispatch import INTO, Entry
from mpimesh.dtensor.consistency import raise_together
from mpimesh.dtensor.dispatch import implements, name_of
from mpimesh.dtensor.dtensor import DTensor, common_mesh, whole_of
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.redistribute import identity_of, moves_between_ranks
from mpimesh.errors import (
    AxisError,
    AxisTypeError,
    DTypeError,
    LayoutError,
    NoRuleError,
    ShapeError,
)
from mpimesh.layout import (
    Box,
    Layout,
    Operand,
    OpRule,
    Partial,
    Placement,
    PlacementLike,
    Replicate,
)
from mpimesh.layout.axis_rules import lines_placement
from mpimesh.layout.boxes import extent, whole
from mpimesh.layout.op_rules import (
    KEEP,
    Pattern,
    broadcast_axes,
    broadcast_shape,
    reduction_pattern,
    rule_for,
)
from mpimesh.mesh import Mesh
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.operands import normal_axis

__all__ = [
    "Work",
    "all_redistributed",
    "apply_rule",
    "are_in_reach",
    "as_tensor",
    "as_tensors",
    "axes_of",
    "checked_out",
    "implements_anew",
    "implements_by_name",
    "moved_to",
    "on_stacks",
    "operand_of",
    "plain_values",
    "planned",
    "reduced_anywhere",
    "row_of",
    "run",
    "shape_of",
    "store",
    "whole_key",
    "whole_places",
]


F = TypeVar("F", bound=Callable[..., Any])


def implements_by_name(*functions: Callable[..., Any]) -> Callable[[F], F]:
    """Mark a function as the rule of NumPy's `functions`, whose arguments it gets by their names.

    It gets those that a program gives, but for `out`, into which its result is then written. An
    option of NumPy's that it has no parameter for is refused, unless it has the default.

    For functions that NumPy has in Python: those in C may have no signature.
    """

    def register(rule: F) -> F:
        for function in functions:
            implements(function)(_by_name(function, rule))
        return rule

    return register


def implements_anew(*functions: Callable[..., Any]) -> Callable[[F], F]:
    """Mark a function as the rule of NumPy's `functions`, whose result is then always a copy.

    The marked function itself may return an argument or a view of one, as layouts have it: other
    rules call it and save the copy.
    """

    def register(rule: F) -> F:
        @wraps(rule)
        def do(*args: Any, **options: Any) -> Any:
            return _unshared(rule(*args, **options), args)

        implements(*functions)(do)
        return rule

    return register


def _unshared(found: Any, args: Any) -> Any:
    """Return a result, copied where its block shares memory with that of an argument."""
    if isinstance(found, tuple | list):
        return type(found)(_unshared(one, args) for one in found)
    if not isinstance(found, DTensor) or not found.is_member:
        return found
    for one in args:
        if isinstance(one, DTensor | np.ndarray):
            block = one if isinstance(one, np.ndarray) else one.local
            if found is one or np.may_share_memory(found.local, block):
                return found.copy()
    return found


def _by_name(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    defaults = {name: one.default for name, one in signature(function).parameters.items()}
    names, own, no_value = tuple(defaults), signature(rule).parameters, np._NoValue
    taken = {*names} if any(one.kind is one.VAR_KEYWORD for one in own.values()) else {*own}

    def do(*args: Any, **options: Any) -> Any:
        options.update(zip(names, args, strict=False))  # NumPy has checked the call
        out = options.pop("out", None)
        for key in [k for k, value in options.items() if value is no_value or k not in taken]:
            value = options.pop(key)
            if value is not no_value and value is not defaults[key]:
                raise NoRuleError(f"{name_of(function)} of split arrays takes no {key}")
        made = rule(**options)
        return made if out is None or out is no_value else store(made, out)

    return do


def axes_of(axes: Any, ndim: int, what: str = "axis", *, lists: bool = True) -> tuple[int, ...]:
    """Return one axis or several, counted from 0.

    Args:
        axes: The axis, or some.
        ndim: How many the array has.
        what: The name of the argument, for messages.
        lists: Whether they may be another sequence than a tuple, and an axis a truth value.

    Raises:
        AxisError: If there is no such axis, or one is named twice.
        AxisTypeError: If one is no whole number, or they are another sequence.
    """
    if not lists and (isinstance(axes, list) or getattr(axes, "shape", ()) != ()):
        raise AxisTypeError(f"{what} must be a whole number or a tuple, got {axes!r}")
    rows = row_of(axes)
    if not lists and any(isinstance(one, bool) for one in rows):
        raise AxisTypeError(f"{what} must be a whole number, got {axes!r}")
    found = tuple(normal_axis(one, ndim, what) for one in rows)
    if len(set(found)) != len(found):
        raise AxisError(f"{what} names an axis twice: {rows}")
    return found


def row_of(x: Any) -> tuple[Any, ...]:
    """Return the items of a sequence; of a number, or an array without axes, itself alone."""
    return tuple(x) if isinstance(x, Iterable) and getattr(x, "shape", None) != () else (x,)


def as_tensor(x: Any, mesh: DeviceMesh) -> DTensor:
    """Return `x`, or a plain array that all ranks have alike as a replicated one. Local.

    Raises:
        LayoutError: If `x` is on another mesh.
        DTypeError: If it holds Python objects, or has a mask.
    """
    if isinstance(x, DTensor):
        if x.mesh is not mesh:
            raise LayoutError(
                f"operands must be on one mesh, but {x!r} is not on {mesh.dims_text}; bring it "
                "over with x.redistribute(placements, mesh=...)"
            )
        return x
    refuse_masked(x)
    whole = np.asarray(x)
    refuse_objects(whole.dtype)
    layout = Layout.replicated(mesh)
    block = whole if layout.mesh.contains_rank(mesh.rank) else None
    return DTensor(mesh, layout, whole.shape, whole.dtype, block)


def as_tensors(operands: Iterable[Any]) -> list[DTensor]:
    """Return all of some arrays, one of which is split, as split ones; see :func:`as_tensor`."""
    rows = list(operands)
    mesh = common_mesh(rows)
    return [as_tensor(one, mesh) for one in rows]


def whole_key(key: Any) -> Any:
    """Return a key with plain arrays in place of split ones. Collective, if there are any.

    Raises:
        RankError: If there are any, and this rank is not in their mesh.
    """
    if isinstance(key, tuple):
        return tuple(map(whole_key, key))
    return whole_of(key) if isinstance(key, DTensor) else key


def whole_places(indices: Any) -> HostArray:
    """Return indices of which truth values are 0 and 1, not a mask, as a whole plain array."""
    rows = np.asarray(whole_key(indices))
    return rows.astype(np.intp) if rows.dtype == bool else rows


def plain_values(x: Any) -> Any:
    """Return a plain array in place of a split one, whose values no layout depends on. Collective.

    Ranks that are not in the mesh get zeros: their work has no elements.
    """
    if not isinstance(x, DTensor):
        return x
    return x.full() if x.is_member else np.zeros(x.shape, x.dtype)


def moved_to(x: DTensor, placement: Placement) -> DTensor:
    """Return `x` in another placement. Collective, if it is another."""
    return x if x.placement == placement else x.redistribute(placement)


@dataclass(frozen=True, slots=True)
class Work:
    """The operands and result of one rank's work.

    Attributes:
        blocks: Its block of each operand.
        boxes: Their boxes in the whole arrays.
        shape: The shape of its block of the result.
        out: Memory for its block of the result, if that was asked for.
    """

    blocks: tuple[Any, ...]
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    out: tuple[HostArray, ...] = ()


def run(
    function: Callable[[Work], Any],
    operands: Sequence[Any],
    pattern: Pattern,
    shape: Sequence[int],
    dtypes: Sequence[Any],
    *,
    outs: Sequence[DTensor | None] = (),
    into: bool = False,
    refuses: bool = True,
) -> tuple[DTensor, ...]:
    """Do an operation on split arrays. Collective, if anything has to be moved.

    Args:
        function: Gets what this rank has, and gives its block of the result, or a tuple of them.
        operands: Split arrays, at least one; what is none is the same on all ranks.
        pattern: The operation.
        shape: The global shape of all results.
        dtypes: Their dtypes.
        outs: Where results are to go. Their memory is used if the result has their layout; else
            :func:`store` has to bring it there.
        into: Whether the function writes its results into ``Work.out``.
        refuses: Whether the function may raise for some numbers, which one rank may have alone.
            Then all ranks raise what one does, at the cost of an all-reduce of 40 bytes. With
            elements that are no numbers they always do, for those may fail to be cast.

    Raises:
        Exception: On every rank of the mesh, if the function raises it on one.
    """
    mesh, kinds = common_mesh([*operands, *outs]), [np.dtype(dtype) for dtype in dtypes]
    placed = _cheapest(operands, pattern, tuple(shape), kinds, outs, mesh.rank)
    together = not placed.alike and (refuses or not _are_numbers([*operands, *outs, *kinds]))
    return _run_placed(function, operands, mesh, placed, tuple(shape), kinds, outs, into, together)


def _cheapest(
    operands: Sequence[Any],
    pattern: Pattern,
    shape: tuple[int, ...],
    kinds: Sequence[DType],
    outs: Sequence[DTensor | None],
    rank: int,
) -> _Placed:
    """Return where the rule that moves least has operands and result; see :func:`run`."""
    place = next(one for one in (*operands, *outs) if isinstance(one, DTensor)).layout.mesh
    known = tuple(
        operand_of(one)
        if isinstance(one, DTensor)
        else Operand(shape_of(one), Placement([Replicate()] * place.ndim))
        for one in operands
    )
    itemsize = max(kind.itemsize for kind in kinds)
    goal = next((one.placement for one in outs if one is not None), None)
    return _placed_rule(place, known, pattern, shape, itemsize, goal, rank)


def planned(
    kernel: Callable[..., Any],
    operands: Sequence[Any],
    pattern: Pattern,
    shape: tuple[int, ...],
    kind: DType,
    *,
    way: int = INTO,
    options: tuple[Any, ...] = (Entry.OUT,),
    names: tuple[str, ...] = ("out",),
    into: DTensor | None = None,
    refuses: bool = False,
) -> Entry | None:
    """Return what is to be done for a kind of call, if no rank may raise alone.

    Args:
        kernel: Works on the blocks, and on `options` after them.
        operands: Split arrays, numbers, and plain arrays.
        pattern: The operation.
        shape: The global shape of the result.
        kind: Its dtype.
        way: What the kernel gives; see :class:`Entry`.
        options: The kernel's further arguments.
        names: Names of the last of these.
        into: What the result goes into.
        refuses: Whether the kernel may raise for some numbers; see :func:`run`.
    """
    arrays = [one for one in operands if isinstance(one, DTensor)]
    if not arrays:
        return None  # only what the result goes into is one
    mesh = common_mesh(arrays)
    placed = _cheapest(operands, pattern, shape, [kind], [into], mesh.rank)
    if len(arrays) < len(operands) and any(one.layout.partial_op for one in arrays):
        return None  # others may count by their values, and on one rank alone
    if placed.local is None or (refuses and not placed.alike):
        return None
    spec = mesh._core.dispatch.spec(placed.layout, shape, kind)
    if into is not None and (into.shape != shape or spec is not into._spec):
        return None
    if any(
        one.layout != goal and _moves(one, goal)
        for one, goal in zip(operands, placed.inputs, strict=True)
        if isinstance(one, DTensor)
    ):
        if any(0 in extent(box) for box in placed.boxes):
            return None  # of no elements
        bring = partial(_brought, goals=placed.inputs, rank=mesh.rank)
        return Entry(way, kernel, len(operands), spec, placed.local, options, names, (), bring)
    cuts: list[Any] = []
    for one, box in zip(operands, placed.boxes, strict=True):
        is_split = isinstance(one, DTensor)
        block = one.local if is_split else one
        here = one.layout.box(one.shape, mesh.rank) if is_split else whole(shape_of(one))
        cuts.append(None if here == box else _cut_key(box, here))
        if cuts[-1] is not None and block[cuts[-1]].shape != extent(box):
            return None  # of no elements
    parts = tuple(cuts) if any(cuts) else ()
    return Entry(way, kernel, len(operands), spec, placed.local, options, names, parts)


def apply_rule(
    function: Callable[..., HostArray],
    operands: Sequence[DTensor],
    rule: OpRule,
    shape: Sequence[int],
    dtype: Any,
) -> DTensor:
    """Call `function` on the blocks of all operands. Collective, if any has to be moved.

    Args:
        function: Takes the operands' blocks and returns the result's, whatever numbers they have.
        operands: The arrays, on one mesh.
        rule: The layouts of the operands, and of the result.
        shape: The result's global shape.
        dtype: The result's dtype.
    """
    mesh, shape = common_mesh(operands), tuple(shape)
    placed = _placed(operands[0].layout.mesh, operands, rule, shape, mesh.rank)
    kind = np.dtype(dtype)
    together = not placed.alike and not _are_numbers([*operands, kind])

    def work(here: Work) -> Any:
        return function(*here.blocks)

    (result,) = _run_placed(work, operands, mesh, placed, shape, [kind], (), False, together)
    return result


def _are_numbers(row: Iterable[Any]) -> bool:
    """Tell whether arrays have numbers as elements, and dtypes are of numbers."""
    return all(getattr(getattr(one, "dtype", one), "kind", "f") in "biufc" for one in row)


class _Placed(NamedTuple):
    """The layouts of the operands and of the result of a rule, and what one rank has of them.

    It has no boxes, and `local` is None, on a rank that the mesh leaves out. `alike` says that all
    ranks have the same.
    """

    inputs: tuple[Layout, ...]
    boxes: tuple[Box, ...]
    layout: Layout
    local: tuple[int, ...] | None
    alike: bool


def _placed(
    place: Mesh,
    operands: Sequence[Operand | DTensor],
    rule: OpRule,
    shape: tuple[int, ...],
    rank: int,
) -> _Placed:
    inputs = tuple(Layout(place, to) for to in rule.inputs)
    layout = Layout(place, rule.output)
    if not place.contains_rank(rank):
        return _Placed(inputs, (), layout, None, True)
    boxes = tuple(to.box(one.shape, rank) for one, to in zip(operands, inputs, strict=True))
    alike = all(to.is_replicated for to in (*inputs, layout))
    return _Placed(inputs, boxes, layout, layout.local_shape(shape, rank), alike)


@lru_cache(maxsize=4096)
def _placed_rule(
    place: Mesh,
    known: tuple[Operand, ...],
    pattern: Pattern,
    shape: tuple[int, ...],
    itemsize: int,
    goal: Placement | None,
    rank: int,
) -> _Placed:
    """Return where the cheapest rule has its operands and result."""
    rule = rule_for(place, known, pattern, shape, itemsize, goal)
    return _placed(place, known, rule, shape, rank)


def _run_placed(
    function: Callable[[Work], Any],
    operands: Sequence[Any],
    mesh: DeviceMesh,
    placed: _Placed,
    shape: tuple[int, ...],
    kinds: Sequence[DType],
    outs: Sequence[DTensor | None],
    into: bool,
    together: bool,
) -> tuple[DTensor, ...]:
    """Bring operands to the layouts of a rule and work on their blocks; see :func:`run`."""
    inputs, boxes, layout, local, _ = placed
    if local is None:
        return tuple(DTensor(mesh, layout, shape, kind, None) for kind in kinds)
    blocks = _brought(operands, inputs, mesh.rank)
    out: tuple[HostArray, ...] = ()
    if into:
        out = tuple(
            mesh.shared_empty(local, kind)
            if one is None or one.layout != layout or one.dtype != kind
            else one.local
            for kind, one in zip(kinds, outs or [None] * len(kinds), strict=True)
        )
    if together:
        function = raise_together(mesh, "work on blocks")(function)
    made = function(Work(blocks, boxes, local, out))
    if out:
        return tuple(
            DTensor._of_block(mesh, layout, shape, kind, block)
            for kind, block in zip(kinds, out, strict=True)
        )
    results = []
    for kind, one in zip(kinds, made if isinstance(made, tuple) else (made,), strict=True):
        block = np.asarray(one, kind)
        if any(np.may_share_memory(block, other) for other in blocks):
            block = block.copy()  # of a view: some layouts give none
        results.append(DTensor(mesh, layout, shape, kind, block))
    return tuple(results)


def _brought(operands: Sequence[Any], goals: Sequence[Layout], rank: int) -> tuple[Any, ...]:
    """Return this rank's blocks of all operands, in the layouts that are wanted. Collective.

    What needs no other rank is cut out of what is here, without a copy.
    """
    starts = (
        partial(_cut_or_start, one, goal)
        if isinstance(one, DTensor)
        else partial(_whole_value, one, goal, rank)
        for one, goal in zip(operands, goals, strict=True)
    )
    return tuple(one.local if isinstance(one, DTensor) else one for one in _all_of(starts))


def _all_of(starts: Iterable[Callable[[], Any]]) -> list[Any]:
    """Start all moves, then wait for them. Collective.

    If one is refused, on all ranks, those before it are waited for, too: nothing stays under way.
    """
    started: list[Any] = []
    try:
        for start in starts:
            started.append(start())  # noqa: PERF401 - what came before an error stays
    finally:
        found = [one.resolve() if isinstance(one, CollectiveTensor) else one for one in started]
    return found


def _cut_or_start(x: DTensor, goal: Layout) -> Any:
    """Return a part of this rank's block, or the started move that brings it."""
    if x.layout == goal:
        return x.local
    if _moves(x, goal):
        return x.start_redistribute(goal.placement)
    return _cut(x.local, goal.box(x.shape, x.mesh.rank), x.layout.box(x.shape, x.mesh.rank))


def _moves(x: DTensor, goal: Layout) -> bool:
    """Tell whether another layout of an array needs more than parts of the ranks' own blocks."""
    return bool(goal.partial_op or x.layout.partial_op) or moves_between_ranks(
        x.mesh, x.layout, goal, x.shape, x.itemsize
    )


def _cut(block: Any, box: Box, inside: Box) -> Any:
    """Return the part `box` of a block that is the box `inside` of the array."""
    part = block[_cut_key(box, inside)]
    # Without elements a box may be outside, and be longer than the block along other axes.
    return part if part.shape == extent(box) else np.empty(extent(box), block.dtype)


def _cut_key(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(
        slice(max(start - first, 0), max(stop - first, 0))
        for (start, stop), (first, _) in zip(box, inside, strict=True)
    )


def _whole_value(value: Any, layout: Layout, rank: int) -> Any:
    """Return the block of a value that all ranks have, such as a number or an ordinary array."""
    if layout.partial_op in ("sum", "prod"):
        coords = layout.mesh.coords_of(rank)
        first = not any(
            coord
            for coord, spec in zip(coords, layout.placement, strict=True)
            if isinstance(spec, Partial)
        )
        if not first:
            kind = np.asarray(value).dtype
            neutral = np.full_like(value, identity_of(layout.partial_op, kind))
            value = neutral if isinstance(value, np.ndarray | np.generic) else neutral.item()
    shape = shape_of(value)
    if not shape:
        return value
    return _cut(np.asarray(value), layout.box(shape, rank), tuple((0, n) for n in shape))


def reduced_anywhere(x: DTensor) -> DTensor:
    """Return `x` without summands, brought where that moves least. Collective if it has any."""
    if not x.layout.partial_op:
        return x
    pattern = reduction_pattern(x.shape, (), "")
    rule = rule_for(x.layout.mesh, (operand_of(x),), pattern, x.shape, x.itemsize)
    return moved_to(x, rule.output)


def store(result: DTensor, out: Any, casting: Any = "same_kind") -> DTensor:
    """Write a result into `out`, in the layout and the memory that it has. Collective.

    Raises:
        ShapeError: If it has another shape.
        DTypeError: If it may not be cast so.
    """
    if isinstance(out, tuple):
        (out,) = out
    target = checked_out(out, result.shape)
    if not np.can_cast(result.dtype, target.dtype, casting):
        raise DTypeError.everywhere(
            f"a result of {result.dtype} cannot be written into {target!r} by casting={casting!r}"
        )
    common_mesh([result, target])
    moved = moved_to(result, target.placement)
    if target.is_member and moved.local is not target.local:
        np.copyto(target.local, moved.local, casting=casting)
    return target


def checked_out(out: Any, shape: tuple[int, ...]) -> DTensor:
    """Return `out`, if a result of `shape` can be written into it.

    Raises:
        DTypeError: If it is no split array.
        ShapeError: If it has another shape.
    """
    target = split_out(out)
    if target.shape != shape:
        raise ShapeError.everywhere(
            f"out= has shape {target.shape}, but the result has shape {shape}"
        )
    return target


def split_out(out: Any) -> DTensor:
    """Return `out`, if it is a split array.

    Raises:
        DTypeError: If it is none.
    """
    if not isinstance(out, DTensor):
        raise DTypeError.everywhere(
            f"the result of an operation on split arrays is one, too, and cannot be written "
            f"into a {type(out).__name__}; give a DTensor as out="
        )
    return out


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an operand; a number has none."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return shape


def operand_of(x: DTensor) -> Operand:
    """Return what a rule has to know of an array."""
    return Operand(x.shape, x.placement, x.itemsize)


def all_redistributed(
    operands: Sequence[DTensor], placements: Sequence[PlacementLike]
) -> list[DTensor]:
    """Bring all operands to their placements, at once. Collective."""
    goals = [Layout(x.mesh, to) for x, to in zip(operands, placements, strict=True)]

    def start(x: DTensor, goal: Layout) -> Any:
        return x if x.layout == goal else x.start_redistribute(goal.placement)

    return _all_of(partial(start, x, to) for x, to in zip(operands, goals, strict=True))


def on_stacks(
    function: Callable[..., Any],
    operands: Sequence[Any],
    cores: Sequence[str],
    *,
    free: str = "",
    out: str = "",
    refuses: bool = True,
) -> list[DTensor]:
    """Do a function of the last axes, which are brought whole; the axes before them broadcast.

    Nothing moves where the last axes are whole. Else the cheapest layout is taken in which
    they are: a stack is split by another of its axes.

    Args:
        function: Takes blocks and gives an array or a tuple of arrays, with the axes of the stack
            first. What it gives of a stack of no members says what the results are.
        operands: Split arrays, and what all ranks have alike.
        cores: For each operand the letters of its last axes.
        free: Letters that may be split: the function does the same for each index of them.
        out: The letters of the last axes of the result, if some of `free` are among them.
        refuses: Whether `function` may raise for some numbers; see :func:`run`.

    Returns:
        The results; all are split as the stack is.
    """
    operands = [reduced(one) if isinstance(one, DTensor) else one for one in operands]
    shapes = [shape_of(one) for one in operands]
    edges = [len(shape) - len(core) for shape, core in zip(shapes, cores, strict=True)]
    stacks = [shape[:edge] for shape, edge in zip(shapes, edges, strict=True)]
    stack = broadcast_shape(stacks)
    # A stack without members shows what NumPy makes of these, or what it refuses, on all ranks.
    probes = [
        np.empty((0, *shape[edge:]), one.dtype)
        for one, shape, edge in zip(operands, shapes, edges, strict=True)
    ]
    known = _row(function(*probes))
    letters = {letter: len(stack) + n for n, letter in enumerate(dict.fromkeys("".join(cores)))}
    inputs = tuple(
        (*broadcast_axes(one, stack), *(letters[letter] for letter in core))
        for one, core in zip(stacks, cores, strict=True)
    )
    last = [letters[letter] if letter in free else KEEP for letter in out]
    last = last or [KEEP] * (known[0].ndim - 1)
    pattern = Pattern(inputs, (*range(len(stack)), *last))
    mesh, made = common_mesh(operands), []

    def work(here: Work) -> Any:
        made.extend(_row(function(*here.blocks)))
        return made[0]

    shape = (*stack, *known[0].shape[1:])
    (first,) = run(work, operands, pattern, shape, [known[0].dtype], refuses=refuses)
    rest = made[1:] or [None] * (len(known) - 1)
    return [first] + [
        DTensor(mesh, first.layout, (*stack, *one.shape[1:]), one.dtype, block)
        for one, block in zip(known[1:], rest, strict=True)
    ]


def are_in_reach(x: Any, count: int) -> bool:
    """Tell whether each rank can have its own of the whole last axes, be they split now or not."""
    if not isinstance(x, DTensor):
        return True
    last = range(x.ndim - count, x.ndim)
    return lines_placement(x.layout.mesh, x.placement, x.shape, *last) is not None


def _row(found: Any) -> list[Any]:
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]
