"""Blocks, errors and calls on which the ranks agree in functions of split arrays.

With ``MPIMESH_CHECKS`` on, calls are compared over the ranks. Most functions move nothing, so that
a rank that calls another one, or the same one with another number, goes on with values that no
other rank has. Each call that a program makes costs one small all-reduce; what a function does
inside to other split arrays is not compared again.

These calls are counted, alike on all ranks, and an array has the number of the call that made it,
or wrote into it last: by that ranks tell arrays of the same shape, dtype and layout apart. What is
local copies the number of its source, as `copy` and `astype`, or has none, as ``DTensor(...)``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpimesh.arguments import digest_text
from mpimesh.arrays import DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.core.dispatch import floats_are_quiet, warnings_raise
from mpimesh.errors import LayoutError, MismatchError, ShapeError, on_all_ranks
from mpimesh.layout import Layout, Placement, Replicate, Shard
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call, Site, call_stack, site_text

__all__ = [
    "CallNumber",
    "agreed_blocks",
    "agreed_dtype",
    "call_compared",
    "compare_call",
    "compare_copies",
    "compare_move",
    "gather_facts",
    "next_number",
    "number_text",
    "numbered",
    "origin_place",
    "raise_together",
    "table_of",
    "with_float_errors",
    "writable_block",
]

R = TypeVar("R")

_LONGEST = 80
"""Longer texts are cut, and end with a digest."""
_inside: ContextVar[bool] = ContextVar("inside a function of split arrays", default=False)


def gather_facts(
    mesh: DeviceMesh, name: str, fact: Any, problem: Exception | None = None
) -> list[Any]:
    """Return what each rank of the mesh brings, in the order of its group. Collective.

    Args:
        mesh: The mesh; this rank is in it.
        name: What is called, for messages.
        fact: What this rank brings: what JSON has.
        problem: Why it brings nothing.

    Raises:
        Exception: On every rank, if any has a problem, of its class.

    Cost:
        One all-reduce of 40 bytes; if facts differ, an all-gather of them.
    """
    group, call = mesh.group(), Call(name, mesh.group().name)
    return agree(group, call, fact, problem=problem)


@contextmanager
def raise_together(
    mesh: DeviceMesh,
    name: str,
    *,
    needed: bool = True,
) -> Iterator[None]:
    """Raise on all ranks what the body raises on one for what is in its block. Collective.

    Args:
        mesh: The mesh.
        name: What is called, for messages.
        needed: Whether the ranks may differ in that; if not, nothing is collective.

    Cost:
        One all-reduce of 40 bytes, if needed and none raises.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if not needed:
            raise
        problem = error
    if needed:
        gather_facts(mesh, name, None, problem)


def with_float_errors(mesh: DeviceMesh, name: str, do: Callable[[], R]) -> R:
    """Do what meets errors of floats; raise on all ranks what these raise on one.

    Collective if they raise anything: under ``np.errstate(all="raise")``, a callback of the
    caller's, or warnings that are errors, all of which must be alike on all ranks. They are noted
    until all is done, for a rank that raised in between would leave the others waiting.
    """
    if floats_are_quiet() or not mesh.contains_rank(mesh.rank):
        return do()
    modes: Any = np.geterr()
    warns = "warn" in modes.values() and warnings_raise()
    raising = {"raise", "call", "log", *(["warn"] if warns else [])}
    own: Any = np.geterrcall()
    met: dict[str, int] = {}

    def note(kind: str, flag: int) -> None:
        if modes[_FLOAT_ERRORS[kind]] == "log":
            own.write(f"Warning: {kind} encountered in {name}\n")
        else:
            met.setdefault(kind, flag)

    noted: dict[str, Any] = {key: "call" for key, mode in modes.items() if mode in raising}
    with np.errstate(**noted, call=note):
        made = do()
    problem: Exception | None = None
    try:
        for kind, flag in met.items():
            text = f"{kind} encountered in {name} on rank {mesh.rank}"
            mode = modes[_FLOAT_ERRORS[kind]]
            if mode == "raise":
                raise FloatingPointError(text)
            if mode == "call":
                own(kind, flag)
            else:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
    except Exception as error:
        problem = error
    gather_facts(mesh, name, None, problem)
    return made


_FLOAT_ERRORS = {
    "divide by zero": "divide",
    "overflow": "over",
    "underflow": "under",
    "invalid value": "invalid",
}


def call_compared(
    mesh: DeviceMesh,
    name: str,
    arguments: Iterable[Any],
    do: Callable[[], R],
    named: Mapping[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
) -> R:
    """Do what every rank is to call with the same arguments. Collective, with checks on.

    Args:
        mesh: The ranks. One that the mesh leaves out is not asked.
        name: What is called.
        arguments: What must be alike: split arrays in shape, dtype and layout, ordinary ones in
            their values.
        do: Does it.
        named: More arguments, by name.
        function: What is called, if it says which argument is which: then it does not matter
            whether they are given by name, or what they are without being given.

    Raises:
        MismatchError: On every rank, naming each rank's call, if they differ.
    """
    if not mesh._core.context.settings.checks or _inside.get():
        return with_float_errors(mesh, name, do)
    arguments = tuple(arguments)
    number = compare_call(mesh, name, arguments, named, function)
    token = _inside.set(True)
    try:
        made = with_float_errors(mesh, name, do)
    finally:
        _inside.reset(token)
    # What returns nothing has written into its first argument.
    numbered(arguments[0] if made is None and arguments else made, number)
    return made


def compare_call(
    mesh: DeviceMesh,
    name: str,
    arguments: Iterable[Any],
    named: Mapping[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
) -> CallNumber | None:
    """Compare a call as :func:`call_compared` does; return the number of what it makes."""
    number = next_number(mesh)
    if number is None:
        return None
    group = mesh.group()
    if function is not None:
        arguments, named = _bound(function, tuple(arguments), named or {})
    texts = [*map(_text, arguments), *(f"{key}={_text(x)}" for key, x in (named or {}).items())]
    call = Call(name, group.name, rule=", ".join(texts))
    call.site = number.site
    call.hint = _made_where([*arguments, *(named or {}).values()])
    stack = call_stack() if mesh._core.context.settings.checks > 1 else ()
    agree(group, call, stack=stack)
    return number


class CallNumber(NamedTuple):
    """The compared call that made an array, or wrote into it last.

    Attributes:
        text: Which one of its mesh, and which of its results.
        site: Where it was called.
    """

    text: str
    site: Site

    def __str__(self) -> str:
        return self.text


def next_number(mesh: DeviceMesh) -> CallNumber | None:
    """Count a call that is compared, be it here or elsewhere; None where none is. Local.

    A call is counted before it does anything: where it fails on one rank alone, and the program
    goes on, the ranks still count alike.
    """
    core = mesh._core
    if not core.context.settings.checks or _inside.get() or not mesh.contains_rank(mesh.rank):
        return None
    core.compared += 1
    return CallNumber(f"#{core.compared}", _place())


def numbered(made: R, origin: CallNumber | str | None) -> R:
    """Give a split array, or those in a row or dict, what tells them from others like them."""
    if origin is None:
        return made
    found: Any = made
    if hasattr(type(found), "_of_block"):
        found._origin = origin
    elif isinstance(origin, CallNumber) and isinstance(found, Mapping | list | tuple):
        rows = found.items() if isinstance(found, Mapping) else enumerate(found)
        for key, one in rows:
            numbered(one, origin._replace(text=f"{origin.text}[{key!r}]"))
    return made


def number_text(x: Any) -> str:
    """Return what tells a split array from others like it, to be appended; or nothing."""
    origin = getattr(x, "_origin", None)
    return "" if origin is None else f" {origin}"


def compare_move(x: Any, goal: DeviceMesh, target: Layout) -> CallNumber | None:
    """Compare what moves over the ranks that have it; return the number that it gets.

    Collective, with checks on. Ranks of `goal` that have none of it get the error, too.
    """
    if not x.mesh._core.context.settings.checks:
        return None
    try:
        number = compare_call(x.mesh, "redistribute", (x, target.text))
    except MismatchError as error:
        if goal is not x.mesh:
            everyone = x.mesh._core.everyone
            everyone._core.poison(Call("redistribute", everyone.name), error)
        raise
    return number if goal is x.mesh else next_number(goal)


def _made_where(arguments: Iterable[Any]) -> str:
    """Return where the numbered arrays among arguments were made, for messages."""
    places: dict[str, str] = {}
    rows = list(arguments)
    for one in rows:
        origin = getattr(one, "_origin", None)
        if origin is not None:
            places[str(origin)] = f"{origin}{origin_place(origin)}"
        elif isinstance(one, Mapping | list | tuple):
            rows.extend(one.values() if isinstance(one, Mapping) else one)
    return "".join(f"; {place}" for place in list(places.values())[:_MOST_SHOWN])


def origin_place(origin: CallNumber | str | None) -> str:
    """Return where a numbered array was made or written, for messages; nothing of others."""
    return f", made at {site_text(origin.site)}" if isinstance(origin, CallNumber) else ""


_MOST_SHOWN = 3


def compare_copies(block: HostArray, mesh: DeviceMesh, layout: Layout, name: str) -> None:
    """Compare the values of ranks that are to hold the same block. Collective, with checks on.

    Raises:
        MismatchError: On every rank, naming two that differ.
    """
    repeated = [isinstance(spec, Replicate) for spec in layout.placement]
    if not mesh._core.context.settings.checks or _inside.get() or not any(repeated):
        return
    if not mesh.contains_rank(mesh.rank):
        return
    digests = gather_facts(mesh, name, digest_text(_bytes(block)))
    first: dict[tuple[int, ...], tuple[int, str]] = {}
    for rank, digest in zip(mesh.group().ranks, digests, strict=True):
        coords = layout.mesh.coords_of(rank)
        place = tuple(coord for coord, one in zip(coords, repeated, strict=True) if not one)
        other, expected = first.setdefault(place, (rank, digest))
        if digest != expected:
            raise MismatchError.everywhere(
                f"{name} as {layout.text}: ranks {other} and {rank} must bring the same "
                f"block, but its values differ (digests {expected} and {digest}); make it "
                "alike on both, or let one rank give it by mm.distribute(x, mesh, "
                "placements, root=0)"
            )


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments as `function` reads them: by name, without defaults, axes counted from 0."""
    try:
        how = _signature(function)
        given = how.bind(*args, **named).arguments
    except (TypeError, ValueError):  # it does not say, or refuses them
        return list(args), dict(named)
    first: list[Any] = []
    rest: dict[str, Any] = {}
    for key, value in given.items():
        one = how.parameters[key]
        if one.kind is one.VAR_POSITIONAL:
            first += value
        elif one.kind is one.VAR_KEYWORD:
            rest |= value
        elif not first and not rest:
            first.append(value)
        elif value is not np._NoValue and not _is_default(value, one.default):
            rest[key] = value
    ndims = [len(x.shape) for x in _arrays(first) if hasattr(x, "layout")]
    if ndims and function not in (np.expand_dims, np.stack):
        for key in rest.keys() & how.parameters.keys() & _AXES:
            axes = _axes(rest.pop(key), ndims[0])
            default = _axes(how.parameters[key].default, ndims[0])
            if isinstance(axes, np.ndarray) or axes != default:
                rest[key] = axes
    return first, dict(sorted(rest.items()))


_signature = lru_cache(maxsize=1024)(signature)
_AXES = {"axis", "axes", "axis1", "axis2", "source", "destination"}


def _is_default(value: Any, default: Any) -> bool:
    if default is np._NoValue:
        return value is False or value is None
    return value is default or (type(value) is type(default) in _NUMBERS and value == default)


_NUMBERS = (bool, int, float, str)


def _arrays(rows: list[Any]) -> Iterator[Any]:
    for one in rows:
        yield from one if isinstance(one, list | tuple) else [one]


def _axes(axes: Any, ndim: int) -> Any:
    """Return axes counted from the first one; what is none as it is."""
    if isinstance(axes, list | tuple):
        return tuple(_axes(one, ndim) for one in axes)
    if isinstance(axes, int | np.integer) and not isinstance(axes, bool) and -ndim <= axes < ndim:
        return int(axes) % ndim
    return axes


def _place() -> Site:
    """Return the innermost place outside mpimesh and NumPy, which has the operators."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".", 1)[0] in ("mpimesh", "numpy"):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _text(x: Any) -> str:
    """Return an argument in words, equal on two ranks only if it is."""
    if hasattr(x, "layout") and hasattr(x, "shape"):
        return f"{tuple(x.shape)} {x.dtype} as {x.layout}{number_text(x)}"
    if isinstance(x, np.ndarray):
        if x.dtype.hasobject:
            return f"array {x.shape} {x.dtype}"
        if x.size == 1:  # as a scalar, which is written with all its digits
            return _cut(f"array {x.shape} {x.reshape(-1)[0]!r}")
        return f"array {x.shape} {x.dtype} with digest {digest_text(_bytes(x))}"
    if isinstance(x, Mapping):
        return _cut("{" + ", ".join(f"{key}: {_text(value)}" for key, value in x.items()) + "}")
    if isinstance(x, tuple):
        return _cut(f"({', '.join(map(_text, x))}{',' if len(x) == 1 else ''})")
    if isinstance(x, Sequence) and not isinstance(x, str | bytes | range):
        return _cut(f"[{', '.join(map(_text, x))}]")
    if callable(x):
        return str(getattr(x, "__qualname__", type(x).__name__))
    if x is None or isinstance(x, _PLAIN):
        return _cut(repr(x))
    return type(x).__name__


_PLAIN = (bool, int, float, complex, str, bytes, slice, range, type(...), np.generic, np.dtype)


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... with digest {digest_text(text.encode())}"


def _bytes(x: HostArray) -> bytes | memoryview:
    """Return the bytes of values, without those between and in them that hold nothing."""
    if x.dtype.names:
        return b"".join(bytes(_bytes(x[name])) for name in x.dtype.names)
    row = np.ascontiguousarray(x).reshape(-1)
    if x.dtype.kind in "fc" and np.finfo(x.dtype).nmant == 63:  # ten bytes of 12 or 16
        parts = row.view(np.longdouble).view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
        row = np.ascontiguousarray(parts[:, :10]).reshape(-1)
    return row.view(np.uint8).data


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
        raise MismatchError.everywhere(
            f"{name} needs blocks of one dtype; give dtype=, or cast them: {rows}"
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
) -> tuple[tuple[int, ...], Layout, DType, CallNumber | None]:
    """Return the shape of the whole array, the layout with the blocks' sizes, dtype and number.

    Collective over the mesh. A block without elements may be of any dtype.

    Raises:
        MismatchError: On every rank, if dtypes, numbers of axes or lengths disagree.
        ShapeError: On every rank, if several dims split an axis, and not evenly.
    """
    described = dtype_to_json(block.dtype)
    facts = [list(block.shape), str(block.dtype), layout.text, described]
    number = next_number(mesh)
    found = gather_facts(mesh, "from_local", facts)
    ranks = mesh.group().ranks
    rows = [(tuple(shape), name, text) for shape, name, text, _ in found]
    heads = {(len(shape), text) for shape, _, text in rows}
    full = [place for place, (shape, _, _) in enumerate(rows) if 0 not in shape]
    if len(heads) > 1 or len({rows[place][1] for place in full}) > 1:
        raise MismatchError.everywhere(_table("of one dtype, rank and layout", rows, ranks))
    shapes = np.array([shape for shape, _, _ in rows], np.int64).reshape(*layout.mesh.shape, -1)
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
            raise MismatchError.everywhere(_table(f"that fit along axis {axis}", rows, ranks))
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
        raise ShapeError.everywhere(
            f"blocks of shape {tuple(shape)} as {fitted} must be even where several dims "
            f"split an axis: {_table('that are', rows, ranks)}"
        )
    return tuple(shape), fitted, dtype_from_json(found[full[0] if full else 0][3]), number


def table_of(rows: Sequence[tuple[Any, ...]], ranks: Iterable[int]) -> str:
    """Return a table for messages: shape, dtype and placements of each rank."""
    return "\n".join(
        f"  rank {rank}: shape {shape}, dtype {dtype}, placements {text}"
        for rank, (shape, dtype, text) in list(zip(ranks, rows, strict=True))[:16]
    )


def _table(what: str, rows: list[tuple[Any, ...]], ranks: Any) -> str:
    return f"from_local takes blocks {what}, but got\n{table_of(rows, ranks)}"
