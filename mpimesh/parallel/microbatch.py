"""Batches: trees of arrays, their rows over replicas, and a replica's rows into microbatches.

The input and the output of a stage are a *tree*: an array, or a tuple or a dict with text keys, of
trees. Its arrays are the *leaves*; the order is that of the tuples, and of the sorted keys of
dicts, so that it does not depend on the order in which a dict was filled. The form without the
arrays is a :class:`Structure`, a small value that has a JSON form.

A list is no tree: in a user's batch a list holds numbers, as ``np.asarray`` takes them, and a
stage that returns one is refused with the advice to return a tuple.

Two rules, both closed formulas in the number of rows, so that every rank knows
the parts of every other without a message.

- Over replicas, rows stay in order and the first ``rows % parts`` parts get one
  row more: 10 rows over 4 are 3, 3, 2, 2; 2 rows over 4 are 1, 1, 0, 0.
- Into microbatches: at most as many as there are rows, all of
  ``ceil(rows / count)`` rows, the last one with what is left. So there may be
  fewer than asked for: 10 in 4 are 3, 3, 3, 1; 9 in 4 are 3, 3, 3; 5 in 4 are
  2, 2, 1. A batch of no rows is one microbatch of no rows.

Who cuts a batch himself gives :class:`Microbatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, overload

from mpimesh.arguments import as_int, as_items, shape_of, shown
from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, RankError, ScheduleError, ShapeError
from mpimesh.schedule.schedule import MOST_FORWARDS

__all__ = [
    "LEAF",
    "Microbatches",
    "Structure",
    "Tree",
    "check_microbatches",
    "flatten",
    "microbatch_rows",
    "num_rows",
    "replica_rows",
    "replica_sizes",
    "split_microbatches",
    "tree_map",
]

Tree: TypeAlias = Any
"""An array, or a tuple or a dict with text keys, of trees."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its arrays.

    Attributes:
        parts: The entries of a tuple or dict, in order; None for an array.
        keys: The sorted keys of a dict; None for a tuple or an array.
    """

    parts: tuple[Structure, ...] | None = None
    keys: tuple[str, ...] | None = None

    @property
    def num_leaves(self) -> int:
        """Number of arrays."""
        return 1 if self.parts is None else sum(part.num_leaves for part in self.parts)

    def paths(self) -> list[str]:
        """Return where each leaf stands, as Python would say it: ``[1]``, ``['mask'][0]``."""
        return list(self._paths(""))

    def unflatten(self, leaves: Sequence[Any]) -> Tree:
        """Put `leaves`, one for each array, into the places of the arrays.

        Raises:
            ModuleError: If there are more or fewer.
        """
        if self.parts is None and len(leaves) == 1:
            return leaves[0]
        if len(leaves) != self.num_leaves:
            raise ModuleError(f"{self} has {self.num_leaves} arrays, got {len(leaves)}")
        return self._put_together(iter(leaves))

    def leaves_of(self, tree: Tree) -> list[Any] | None:
        """Return what stands in `tree` where this has arrays; None if it is built otherwise.

        What stands there may be anything but a tuple or a dict, such as None.
        """
        if self.parts is None:
            return None if isinstance(tree, tuple | dict) else [tree]
        if self.keys is None:
            entries = tree if isinstance(tree, tuple) else None
        else:
            entries = _values(tree, self.keys)
        if entries is None or len(entries) != len(self.parts):
            return None
        leaves: list[Any] = []
        for part, entry in zip(self.parts, entries, strict=True):
            inner = part.leaves_of(entry)
            if inner is None:
                return None
            leaves += inner
        return leaves

    def to_json(self) -> Any:
        """Return null for an array, a list for a tuple, an object for a dict."""
        if self.parts is None:
            return None
        inner = [part.to_json() for part in self.parts]
        return inner if self.keys is None else dict(zip(self.keys, inner, strict=True))

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what :meth:`to_json` gave."""
        if value is None:
            return cls()
        if isinstance(value, dict):
            keys = tuple(sorted(value))
            return cls(tuple(cls.from_json(value[key]) for key in keys), keys)
        return cls(tuple(map(cls.from_json, value)))

    def __str__(self) -> str:
        if self.parts is None:
            return "array"
        if self.keys is None:
            inner = ", ".join(map(str, self.parts))
            return f"({inner},)" if len(self.parts) == 1 else f"({inner})"
        pairs = zip(self.keys, self.parts, strict=True)
        return "{" + ", ".join(f"{key!r}: {part}" for key, part in pairs) + "}"

    def _paths(self, here: str) -> Iterator[str]:
        if self.parts is None:
            yield here
            return
        for place, part in enumerate(self.parts):
            key: int | str = place if self.keys is None else self.keys[place]
            yield from part._paths(f"{here}[{key!r}]")

    def _put_together(self, leaves: Iterator[Any]) -> Tree:
        if self.parts is None:
            return next(leaves)
        inner = [part._put_together(leaves) for part in self.parts]
        return tuple(inner) if self.keys is None else dict(zip(self.keys, inner, strict=True))


LEAF = Structure()
"""The structure of a single array."""


def flatten(tree: Tree, *, name: str = "") -> tuple[list[Array], Structure]:
    """Return the arrays of `tree`, and its structure.

    Args:
        tree: The value.
        name: How messages call it; the paths of its leaves come behind that.

    Raises:
        ModuleError: If it holds anything but arrays, tuples and dicts with text keys, or an
            empty tuple or dict.
    """
    leaves: list[Array] = []

    def keep(leaf: Any, path: str) -> None:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            hint = "; make a list a tuple" if isinstance(leaf, list) else ""
            raise ModuleError(
                f"{path or 'it'} must be an array, or a tuple or dict of arrays, got "
                f"{type(leaf).__name__}{hint}"
            )
        leaves.append(leaf)

    return leaves, _walk(tree, name, keep)


def tree_map(change: Callable[[Any, str], Any], tree: Tree, *, name: str = "") -> Tree:
    """Return `tree` with ``change(leaf, path)`` in the place of each leaf.

    Args:
        change: Makes the new leaf, or raises.
        tree: The value. Anything but a tuple or a dict is a leaf.
        name: What all paths begin with.

    Raises:
        ModuleError: As :func:`flatten` does for tuples and dicts.
    """
    changed: list[Any] = []
    structure = _walk(tree, name, lambda leaf, path: changed.append(change(leaf, path)))
    return structure.unflatten(changed)


def _walk(tree: Any, path: str, visit: Callable[[Any, str], None]) -> Structure:
    """Visit each leaf of `tree` in order; return the structure."""
    if not isinstance(tree, tuple | dict):
        visit(tree, path)
        return LEAF
    where = path or "it"
    if type(tree) not in (tuple, dict):
        raise ModuleError(
            f"{where} must be a plain tuple or dict, got {type(tree).__name__}, whose class would "
            "be lost on the way to another rank"
        )
    if not tree:
        raise ModuleError(f"{where} is an empty {type(tree).__name__}: it must hold an array")
    if isinstance(tree, tuple):
        return Structure(tuple(_walk(x, f"{path}[{i}]", visit) for i, x in enumerate(tree)))
    odd = [key for key in tree if not isinstance(key, str)]
    if odd:
        raise ModuleError(f"{where} must have text keys, got {odd[0]!r}")
    keys = tuple(sorted(tree))
    return Structure(tuple(_walk(tree[key], f"{path}[{key!r}]", visit) for key in keys), keys)


def _values(tree: Any, keys: tuple[str, ...]) -> tuple[Any, ...] | None:
    """Return the values of a dict with just these keys; None for anything else."""
    if not isinstance(tree, dict) or tree.keys() != set(keys):
        return None
    return tuple(tree[key] for key in keys)


class Microbatches(Sequence[Any]):
    """A batch that is cut already: microbatches of any shapes, such as sequences of other lengths.

    Of x, the target and the inputs of a step all are given so or none. They have the same
    number of microbatches, and each microbatch has the same rows in all of them; there may be other
    rows in the next one, and rows of another shape. They are dealt to the replicas in order: the
    first ``len(x) % replicas`` replicas get one more.

    A loss counts rows, as ever: where a row is a sequence, tokens of short ones weigh more. To
    count tokens, give the last layer's output and the targets a row for each token.

    Args:
        parts: For each microbatch an array, or a tuple or a dict of arrays.

    Raises:
        ModuleError: If there is none.

    Example:
        >>> x = mm.Microbatches([np.zeros((4, 10)), np.zeros((3, 17))])
        >>> x
        Microbatches([(4, 10), (3, 17)])
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        wanted = "the microbatches in order, arrays or trees of them"
        self._parts = as_items(parts, "parts of Microbatches", ModuleError, wanted=wanted)
        if not self._parts:
            raise ModuleError("Microbatches must hold at least one microbatch, got none")

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, place: int) -> Any: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...

    def __getitem__(self, place: int | slice) -> Any:
        return self._parts[place]

    def __repr__(self) -> str:
        shapes = [getattr(part, "shape", type(part).__name__) for part in self._parts]
        return f"Microbatches([{', '.join(map(str, shapes))}])"


def check_microbatches(num_microbatches: int) -> int:
    """Return `num_microbatches` if it is a whole number of at least 1, and can be scheduled.

    Raises:
        ScheduleError: If it is not.
    """
    return as_int(num_microbatches, "num_microbatches", ScheduleError, least=1, most=MOST_FORWARDS)


def num_rows(x: Array, *, name: str = "x") -> int:
    """Return the number of rows of a batch, its extent along axis 0.

    Raises:
        ShapeError: If `x` has no axis.
    """
    if not shape_of(x):
        raise ShapeError(
            f"{name} must be an array with rows, that is of shape (rows, ...), got {shown(x)}"
        )
    return int(x.shape[0])


def replica_rows(rows: int, parts: int, part: int) -> slice:
    """Return which of `rows` rows the replica `part` of `parts` takes.

    Raises:
        ShapeError: If `rows` is negative.
        RankError: If there is no such part.
    """
    rows = as_int(rows, "rows", ShapeError, least=0)
    parts = as_int(parts, "parts", RankError, least=1)
    part = as_int(part, "part", RankError, least=0, most=parts - 1)
    base, more = divmod(rows, parts)
    start = part * base + min(part, more)
    return slice(start, start + base + (part < more))


def replica_sizes(rows: int, parts: int) -> list[int]:
    """Return how many of `rows` rows each of `parts` replicas takes."""
    taken = [replica_rows(rows, parts, part) for part in range(parts)]
    return [one.stop - one.start for one in taken]


def microbatch_rows(rows: int, num_microbatches: int) -> tuple[slice, ...]:
    """Return the rows of each microbatch, in order, at least one microbatch.

    Raises:
        ScheduleError: If `num_microbatches` is less than 1.
        ShapeError: If `rows` is negative.
    """
    count = min(check_microbatches(num_microbatches), as_int(rows, "rows", ShapeError, least=0))
    if count <= 1:
        return (slice(0, rows),)
    size = -(-rows // count)
    return tuple(slice(start, min(start + size, rows)) for start in range(0, rows, size))


def split_microbatches(x: Array, num_microbatches: int) -> list[Array]:
    """Return views of the microbatches of `x`.

    Shapes:
        x: (rows, ...).
        result[i]: (rows of microbatch i, ...).

    Raises:
        ShapeError: If `x` is 0-d.
        ScheduleError: If `num_microbatches` is less than 1.
    """
    return [x[rows] for rows in microbatch_rows(num_rows(x), num_microbatches)]
