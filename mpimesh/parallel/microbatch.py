"""Parts of a batch: rows over replicas, and a replica's rows into microbatches.

Two rules, both closed formulas in the number of rows, so that every rank knows
the parts of every other without a message.

- Over replicas, rows stay in order and the first ``rows % parts`` parts get one
  row more: 10 rows over 4 are 3, 3, 2, 2; 2 rows over 4 are 1, 1, 0, 0.
- Into microbatches, shrew's rule: at most as many as there are rows, all of
  ``ceil(rows / count)`` rows, the last one with what is left. So there may be
  fewer than asked for: 10 in 4 are 3, 3, 3, 1; 9 in 4 are 3, 3, 3; 5 in 4 are
  2, 2, 1. A batch of no rows is one microbatch of no rows.

Who cuts a batch himself gives :class:`Microbatches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from mpimesh.arguments import as_int, as_items, shape_of, shown
from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, RankError, ScheduleError, ShapeError
from mpimesh.schedule.schedule import MOST_FORWARDS

__all__ = [
    "Microbatches",
    "check_microbatches",
    "microbatch_rows",
    "num_rows",
    "replica_rows",
    "replica_sizes",
    "split_microbatches",
]


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
