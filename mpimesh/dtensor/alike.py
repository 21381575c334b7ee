"""Facts, errors and calls on which the ranks agree in functions of split arrays.

With ``MPIMESH_CHECKS`` on, calls are compared over the ranks. Most functions move nothing, so that
a rank that calls another one, or the same one with another number, goes on with values that no
other rank has. Each call that a program makes costs one small all-reduce; what a function does
inside to other split arrays is not compared again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from mpimesh.arguments import digest_text
from mpimesh.arrays import HostArray
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.layout import Layout, Replicate
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call, Site, call_stack

__all__ = ["agree_copies", "alike", "gather_facts", "raise_together", "same_call"]

R = TypeVar("R")

_LONGEST = 80
"""Longer texts are cut, and told by a digest."""
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
    return agree(group._core, call, fact, problem=problem)


@contextmanager
def raise_together(
    mesh: DeviceMesh,
    name: str,
    *,
    needed: bool = True,
    caught: tuple[type[Exception], ...] = (ValueError, FloatingPointError),
) -> Iterator[None]:
    """Raise on all ranks what the body raises on one for what is in its block. Collective.

    Args:
        mesh: The mesh.
        name: What is called, for messages.
        needed: Whether the ranks may differ in that; if not, nothing is collective.
        caught: What counts; all else is a mistake of this rank.

    Cost:
        One all-reduce of 40 bytes, if needed and none raises.
    """
    problem: Exception | None = None
    try:
        yield
    except caught as error:
        if not needed:
            raise
        problem = error
    if needed:
        gather_facts(mesh, name, None, problem)


def alike(
    mesh: DeviceMesh,
    name: str,
    arguments: Iterable[Any],
    do: Callable[[], R],
    named: Mapping[str, Any] | None = None,
) -> R:
    """Do what every rank is to call with the same arguments. Collective, with checks on.

    Args:
        mesh: The ranks. One that the mesh leaves out is not asked.
        name: What is called.
        arguments: What must be alike: split arrays in shape, dtype and layout, ordinary ones in
            their values.
        do: Does it.
        named: More arguments, by name.

    Raises:
        MismatchError: On every rank, naming each rank's call, if they differ.
    """
    if not mesh.settings.checks or _inside.get():
        return do()
    same_call(mesh, name, arguments, named)
    token = _inside.set(True)
    try:
        return do()
    finally:
        _inside.reset(token)


def same_call(
    mesh: DeviceMesh,
    name: str,
    arguments: Iterable[Any],
    named: Mapping[str, Any] | None = None,
) -> None:
    """Compare a call as :func:`alike` does."""
    if not mesh.settings.checks or _inside.get() or not mesh.contains_rank(mesh.rank):
        return
    group = mesh.group()
    texts = [*map(_text, arguments), *(f"{key}={_text(x)}" for key, x in (named or {}).items())]
    call = Call(name, group.name, rule=", ".join(texts))
    call.site = _place()
    stack = call_stack() if mesh.settings.checks > 1 else ()
    agree(group._core, call, stack=stack)


def agree_copies(block: HostArray, mesh: DeviceMesh, layout: Layout, name: str) -> None:
    """Compare the values of ranks that are to hold the same block. Collective, with checks on.

    Raises:
        MismatchError: On every rank, naming two that differ.
    """
    repeated = [isinstance(spec, Replicate) for spec in layout.placement]
    if not mesh.settings.checks or _inside.get() or not any(repeated):
        return
    if not mesh.contains_rank(mesh.rank):
        return
    told = gather_facts(mesh, name, digest_text(_bytes(block)))
    first: dict[tuple[int, ...], tuple[int, str]] = {}
    for rank, digest in zip(mesh.group().ranks, told, strict=True):
        coords = layout.mesh.coords_of(rank)
        place = tuple(coord for coord, one in zip(coords, repeated, strict=True) if not one)
        other, expected = first.setdefault(place, (rank, digest))
        if digest != expected:
            raise on_all_ranks(
                MismatchError(
                    f"{name} as {layout.text}: ranks {other} and {rank} must bring the same "
                    f"block, but its values differ (digests {expected} and {digest}); make it "
                    "alike on both, or let one rank give it by mm.distribute(x, mesh, "
                    "placements, root=0)"
                )
            )


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
        return f"{tuple(x.shape)} {x.dtype} as {x.layout}"
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


def _bytes(x: HostArray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
