"""A global batch as one rank was given it: the input and the target, whole or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpimesh.arrays import Array
from mpimesh.dtensor import DTensor, DVariable
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Loss
from mpimesh.parallel.header import checksum, sample
from mpimesh.parallel.microbatch import Microbatches, num_rows
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["Value", "as_value"]


@dataclass(frozen=True, slots=True)
class Value:
    """One of the values of a batch.

    Attributes:
        name: Its name in messages.
        parts: The value, or its microbatches; all arrays of one with the same rows.
        sizes: The rows of each.
        is_cut: Whether they are microbatches.
    """

    name: str
    parts: tuple[Tree, ...]
    sizes: tuple[int, ...]
    is_cut: bool

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return sum(self.sizes)

    def spans(self) -> list[slice]:
        """Return the rows of each part, counted in the batch."""
        ends = list(accumulate(self.sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def cut(self, parts: Sequence[slice]) -> list[Tree]:
        """Return the rows of each of some parts of a batch that is whole, as views."""
        (whole,) = self.parts
        leaves, structure = flatten(whole)
        return [structure.unflatten([leaf[part] for leaf in leaves]) for part in parts]

    def kind(self) -> str:
        """Return the shapes and dtypes of a row, in words."""
        return "; ".join(map(_kind, self.parts))

    def checksum(self, *, whole: bool) -> str | None:
        """Return what tells its values from others: those on the host without Python objects.

        Args:
            whole: Whether to read all of them, or a sample.
        """
        leaves = [
            leaf
            for part in self.parts
            for leaf in flatten(part)[0]
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
        ]
        if not leaves:
            return None
        return checksum(leaves if whole else map(sample, leaves))

    def denominator(self, loss: Loss) -> float:
        """Return what it counts as a target of `loss`."""
        counted = getattr(loss, "count", None)
        if counted is None:
            return float(self.rows)
        return float(sum(float(counted(part)) for part in self.parts))


def as_value(given: Any, name: str) -> Value | None:
    """Return a value that a user gave; None for None.

    Args:
        given: An array, or anything that ``np.asarray`` takes; or a tuple or a dict of them; or
            microbatches of those.
        name: Its name.

    Raises:
        ModuleError: If it is built otherwise.
        ShapeError: If an array has no rows, or not as many as the others.
    """
    if given is None:
        return None
    is_cut = isinstance(given, Microbatches)
    names = [f"{name}[{place}]" for place in range(len(given))] if is_cut else [name]
    parts = [
        tree_map(_as_array, part, name=title)
        for part, title in zip(given if is_cut else [given], names, strict=True)
    ]
    sizes = tuple(_rows(part, title) for part, title in zip(parts, names, strict=True))
    return Value(name, tuple(parts), sizes, is_cut)


def _rows(tree: Tree, name: str) -> int:
    leaves, structure = flatten(tree, name=name)
    paths = [name + path for path in structure.paths()]
    rows = [num_rows(leaf, name=path) for leaf, path in zip(leaves, paths, strict=True)]
    for other, path in zip(rows, paths, strict=True):
        if other != rows[0]:
            raise ShapeError(
                f"all arrays of {name} must have the same rows; {paths[0]} has {rows[0]} and "
                f"{path} {other}"
            )
    return rows[0]


def _kind(tree: Tree) -> str:
    leaves, structure = flatten(tree)
    return ", ".join(
        f"{path}{' ' if path else ''}{tuple(leaf.shape[1:])} {leaf.dtype}"
        for leaf, path in zip(leaves, structure.paths(), strict=True)
    )


def _as_array(x: Any, path: str) -> Array:
    if x is None:
        raise ShapeError(f"{path} is None, where it must be an array")
    if isinstance(x, Microbatches):
        raise ModuleError(f"{path} is Microbatches: they go around a tuple or dict, not into it")
    if isinstance(x, DTensor | DVariable):
        raise ModuleError(
            f"{path} is a split array, and the ranks are given whole ones, of which each takes its "
            f"rows: give {path.split('[')[0]}.full(), which all ranks call; got {x!r}"
        )
    return x if hasattr(x, "shape") else np.asarray(x)
