"""The interface of a stage to the next one, and the way in which both come to know it.

How large a message is both ends must know before it moves. A stage's *interface* is
the structure of its output, and for each of its arrays the shape of a row, and the dtype; the
gradient that comes back has the same. The first time a kind of batch passes, the sender
announces the interface before its first activation. From then on both ends know it, and only
the number of rows differs from message to message. An output that does not keep to it is refused
where it was made.

Where a batch is given as microbatches of any shapes, each has interfaces of its own, see
:mod:`mpimesh.parallel.task`.

An array whose dtype is not floating has no gradient: both ends know that by its
dtype, and nothing is sent back for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from mpimesh.arrays import Array, DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json, is_half
from mpimesh.errors import ModuleStateError, ShapeError, TransportError
from mpimesh.parallel.microbatch import Structure, Tree, flatten

__all__ = [
    "FIRST_PIECE_BYTES",
    "Interface",
    "Leaf",
    "check_gradient",
    "check_output",
    "first_gradient",
    "length_of",
    "pieces",
]

FIRST_PIECE_BYTES = 2048
"""Room for the first piece of an announcement, nearly always all of it."""

_MARK = b"mpimesh\0"
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a stage's output.

    Attributes:
        row_shape: The shape of a row.
        dtype: The dtype.
    """

    row_shape: tuple[int, ...]
    dtype: DType

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it: its dtype is floating."""
        return self.dtype.kind in "fc" or is_half(self.dtype)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of so many rows."""
        return (rows, *self.row_shape)

    def fits(self, x: Any, rows: int) -> bool:
        """Tell whether `x` is an array of so many of these rows."""
        shape: object = getattr(x, "shape", None)
        return shape == (rows, *self.row_shape) and bool(x.dtype == self.dtype)

    def __str__(self) -> str:
        return f"rows of shape {self.row_shape} and dtype {self.dtype}"


@dataclass(frozen=True, slots=True)
class Interface:
    """The outputs of a stage.

    Attributes:
        structure: How their arrays are put together.
        leaves: The arrays.
        gradients: Those that have a gradient.
        sole: The array where an output is just that, as it mostly is; else None.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    gradients: tuple[Leaf, ...] = field(init=False, repr=False, compare=False)
    sole: Leaf | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gradients = tuple(leaf for leaf in self.leaves if leaf.has_gradient)
        object.__setattr__(self, "gradients", gradients)
        sole = self.leaves[0] if self.structure.parts is None else None
        object.__setattr__(self, "sole", sole)

    def gradient_tree(self, gradients: list[Array]) -> Tree:
        """Return the gradients of :attr:`gradients` in the places of the arrays, None in others."""
        if self.sole is not None:
            return gradients[0]
        rest = iter(gradients)
        return self.structure.unflatten(
            [next(rest) if leaf.has_gradient else None for leaf in self.leaves]
        )

    def to_json(self) -> Any:
        """Return a JSON value that :meth:`from_json` reads."""
        leaves = [[leaf.row_shape, dtype_to_json(leaf.dtype)] for leaf in self.leaves]
        return [self.structure.to_json(), leaves]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what :meth:`to_json` gave."""
        structure, leaves = value
        return cls(
            Structure.from_json(structure),
            tuple(Leaf(tuple(shape), dtype_from_json(dtype)) for shape, dtype in leaves),
        )

    def __str__(self) -> str:
        pairs = zip(self.leaves, self.structure.paths(), strict=True)
        return ", ".join(f"{leaf}{_at(path)}" for leaf, path in pairs)


def check_output(
    y: Tree, *, stage: int, rows: int, interface: Interface | None
) -> tuple[list[Array], Interface]:
    """Hold the output of a stage to its interface; return its arrays and the interface.

    Args:
        y: The output.
        stage: The stage that made it.
        rows: Rows of the microbatch that it is of.
        interface: What the next stage expects; None if it does not know yet.

    Raises:
        ModuleError: If `y` is no tree of arrays.
        ShapeError: If an array has other rows, or another shape or dtype than expected.
    """
    if interface is not None and interface.sole is not None and interface.sole.fits(y, rows):
        return [y], interface
    leaves, structure = flatten(y, name=f"the output of stage {stage}")
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        shape = tuple(leaf.shape)
        if not shape or shape[0] != rows:
            raise ShapeError(
                f"stage {stage} made an output of shape {shape}{_at(path)} from an input of {rows} "
                "rows: a stage gives one row for each that it gets"
            )
    got = Interface(
        structure, tuple(Leaf(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves)
    )
    if interface is not None and interface != got:
        made, expected = _difference(got, interface)
        raise ShapeError(
            f"stage {stage} made {made} for stage {stage + 1}, which expects {expected} as before"
        )
    return leaves, got


def _difference(got: Interface, expected: Interface) -> tuple[str, str]:
    """Return the texts of both; of the first leaf that differs, if they are built alike."""
    if got.structure != expected.structure:
        return f"{got.structure}, {got}", f"{expected.structure}, {expected}"
    pairs = zip(got.leaves, expected.leaves, got.structure.paths(), strict=True)
    return next((f"{a}{_at(path)}", f"{b}{_at(path)}") for a, b, path in pairs if a != b)


def check_gradient(
    dx: Tree | None, *, stage: int, source: int, rows: int, interface: Interface
) -> list[Array]:
    """Hold the gradient that a stage gives back to the interface of a stage before it.

    Args:
        dx: The gradient.
        stage: The stage that made it.
        source: The stage whose output it is the gradient of.
        rows: Rows of that output.
        interface: That of `source`.

    Returns:
        The gradients of the arrays that have one.

    Raises:
        ModuleStateError: If one is missing.
        ShapeError: If it is built otherwise, or one has another shape or dtype than the output.
    """
    if interface.sole is not None and interface.gradients and interface.sole.fits(dx, rows):
        return [dx]
    if dx is None or not interface.gradients:
        raise ModuleStateError(
            f"stage {stage} gives no gradient for what it gets from stage {source}, which is to be "
            "trained: return zeros where the gradient is 0, or put a layer that can give none into "
            "the first stage"
        )
    gradients = interface.structure.leaves_of(dx)
    if gradients is None:
        raise ShapeError(
            f"stage {stage} made a gradient that is {_kind(dx)} for stage {source}, whose output "
            f"was {interface.structure}: a gradient is built like what it is of"
        )
    checked: list[Array] = []
    for gradient, leaf, path in zip(
        gradients, interface.leaves, interface.structure.paths(), strict=True
    ):
        if not leaf.has_gradient:
            continue
        if gradient is None:
            raise ModuleStateError(
                f"stage {stage} gives no gradient{_at(path)} of its input, {leaf}, so stage "
                f"{source} could not be trained by it: give zeros where it does not matter"
            )
        expected = leaf.shape(rows)
        if tuple(gradient.shape) != expected or gradient.dtype != leaf.dtype:
            raise ShapeError(
                f"stage {stage} made a gradient of shape {tuple(gradient.shape)} and dtype "
                f"{gradient.dtype}{_at(path)} for stage {source}, whose output had shape "
                f"{expected} and dtype {leaf.dtype}{_at(path)}"
            )
        checked.append(gradient)
    return checked


def first_gradient(dx: Tree | None, structure: Structure, entries: int) -> Tree | None:
    """Return the gradient of the first of several things that a stage was given.

    Args:
        dx: What its backward returned: a tuple of gradients, or the first one only. If `dx` as a
            whole is built like the first one, it is that.
        structure: How the first one is built.
        entries: How many things the stage was given.
    """
    if entries == 1 or not isinstance(dx, tuple) or len(dx) != entries:
        return dx
    if structure.leaves_of(dx) is None:
        return dx[0]
    return dx


def _at(path: str) -> str:
    return path and f" in {path}"


def _kind(tree: Tree) -> str:
    """Return how a gradient is built, whatever stands in it."""
    if isinstance(tree, tuple):
        return f"({', '.join(map(_kind, tree))})"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_kind(tree[key])}" for key in tree) + "}"
    return "array" if hasattr(tree, "shape") else type(tree).__name__


# -- announcements ---------------------------------------------------------------------------------


def pieces(text: bytes) -> list[HostArray]:
    """Return a text of any length as messages: its length and beginning, then what is left."""
    data = _MARK + np.array(len(text), _LENGTH).tobytes() + text
    cut = np.split(np.frombuffer(data, np.uint8).copy(), [FIRST_PIECE_BYTES])
    return [piece for piece in cut if piece.size]


def length_of(first: HostArray) -> tuple[int, HostArray]:
    """Return the bytes of a text that are still to come after its first piece, and that part.

    Raises:
        TransportError: If this is no first piece, but data of ranks that were given another kind of
            batch.
    """
    start = len(_MARK) + _LENGTH.itemsize
    if bytes(first[: len(_MARK)]) != _MARK or first.size < start:
        raise TransportError("data came where an announcement of its shape was expected")
    total = int(first[len(_MARK) : start].view(_LENGTH)[0])
    return total - (first.size - start), first[start:]
