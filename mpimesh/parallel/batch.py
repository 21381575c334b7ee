"""A global batch as one rank was given it: the input and the target, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import ShapeError
from mpimesh.nn import Loss
from mpimesh.parallel.header import checksum
from mpimesh.parallel.microbatch import num_rows
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["Value", "as_value"]


@dataclass(frozen=True, slots=True)
class Value:
    """One of the values of a batch.

    Attributes:
        name: Its name in messages.
        tree: The value, all its arrays with the same rows.
        rows: How many.
    """

    name: str
    tree: Tree
    rows: int

    def cut(self, parts: Sequence[slice]) -> list[Tree]:
        """Return the rows of each of some parts, as views."""
        leaves, structure = flatten(self.tree)
        return [structure.unflatten([leaf[part] for leaf in leaves]) for part in parts]

    def kind(self) -> str:
        """Return the shapes and dtypes of a row, in words."""
        return _kind(self.tree)

    def checksum(self) -> str | None:
        """Return what tells its values from others: those on the host without Python objects."""
        leaves = [
            leaf
            for leaf in flatten(self.tree)[0]
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
        ]
        return checksum(leaves) if leaves else None

    def denominator(self, loss: Loss) -> float:
        """Return what it counts as a target of `loss`."""
        counted = getattr(loss, "count", None)
        return float(self.rows) if counted is None else float(counted(self.tree))


def as_value(given: Any, name: str) -> Value | None:
    """Return a value that a user gave; None for None.

    Args:
        given: An array, or anything that ``np.asarray`` takes; or a tuple or a dict of them.
        name: Its name.

    Raises:
        ModuleError: If it is built otherwise.
        ShapeError: If an array has no rows, or not as many as the others.
    """
    if given is None:
        return None
    tree = tree_map(_as_array, given, name=name)
    return Value(name, tree, _rows(tree, name))


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
    return x if hasattr(x, "shape") else np.asarray(x)
