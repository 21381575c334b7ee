"""Arguments converted and checked; reductions; values and ranks in messages; digests."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from operator import index
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from mpimesh.errors import MeshError, MpimeshError, ReduceOpError, ShapeError

__all__ = [
    "MOST",
    "OpLike",
    "ReduceOp",
    "as_flag",
    "as_function",
    "as_int",
    "as_items",
    "as_real",
    "as_reduce_op",
    "as_shape",
    "as_time",
    "check_kind",
    "counted",
    "digest_bits",
    "digest_text",
    "is_real",
    "plain_text",
    "rank_names",
    "ranks_by_value",
    "ranks_of",
    "ranks_text",
    "shape_of",
    "shown",
    "size_text",
]

T = TypeVar("T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_S = 1e9
"""Thirty years: clocks and locks take no longer waits."""

MOST = 2**63 - 1
"""The most bytes or elements of an array: what an address can count to."""

_SHOWN = 120
"""Most characters of a value that a message shows."""

_RUN = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_MOST_RANKS = 1 << 20
_SHORTEST_STRIDE = 4
"""So many ranks at one distance are written as a run."""


def plain_text(text: str) -> str:
    """Return `text` without addresses of objects, which differ from rank to rank."""
    return _ADDRESS.sub("", text)


def shown(value: object) -> str:
    """Return a value as messages show it: in one line, not too long, alike on all ranks."""
    try:
        text = plain_text(" ".join(repr(value).split()))
    except Exception:  # somebody's own __repr__
        text = f"<{type(value).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``"0-3,8"`` or ``"0-12:4"``, in their order."""
    return ",".join(map(_run_text, _runs(ranks)))


def ranks_of(text: str) -> list[int]:
    """Return the ranks that a text of :func:`ranks_text` names; none of another text."""
    found: list[int] = []
    for part in map(_RUN.fullmatch, text.split(",")):
        if part is not None:
            low, high, step = part.groups()
            run = range(int(low), int(high or low) + 1, int(step or 1) or 1)
            if len(found) + len(run) > _MOST_RANKS:
                return []
            found += run
    return found


def rank_names(ranks: Collection[int], most: int = 16) -> str:
    """Return ranks as a sentence names them: ``"rank 2"``, ``"ranks 0-3, 8"``.

    Args:
        ranks: The ranks, in any order.
        most: The most numbers and runs to show; of the other ranks their count is told.
    """
    runs = _runs(sorted(ranks))
    names = ", ".join(map(_run_text, runs[:most])) or "none"
    left = sum(map(len, runs[most:]))
    return f"rank{'s' * (len(ranks) != 1)} {names}{f' and {left} more' if left else ''}"


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks that have each value, for rows that ranks with one value share.

    Args:
        values: Ranks and their values.
    """
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def digest_bits(data: bytes | memoryview, bits: int) -> int:
    """Return a digest of `data`, a number of `bits` bits: at most 64."""
    return xxh3_64_intdigest(data) >> (64 - bits)


def digest_text(data: bytes | memoryview) -> str:
    """Return a digest of `data` as sixteen hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def as_int(
    value: object,
    name: str,
    error: type[MpimeshError] = MeshError,
    *,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """Return `value` as an int; a bool, a float or a text is refused, NumPy's integers are taken.

    Args:
        value: What a caller gave.
        name: What messages call it.
        error: The class to raise.
        least: The smallest that will do; None for any.
        most: The largest; None for any.

    Raises:
        MpimeshError: Of class `error`, if it is no whole number, or out of range.
    """
    try:
        if type(value).__name__ in ("bool", "bool_"):  # NumPy's is "bool" or "bool_"
            raise TypeError
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if (
        number is None
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        limits = "" if least is None else f" of at least {least}"
        limits += "" if most is None else f"{' and' if limits else ' of'} at most {most}"
        raise error(f"{name} must be a whole number{limits}, got {shown(value)}")
    return number


def as_items(
    value: object,
    what: str,
    error: type[MpimeshError] = MeshError,
    *,
    wanted: str = "a list or a tuple",
) -> tuple[Any, ...]:
    """Return what a list, a tuple or the like holds; a text is none.

    Args:
        value: What was given.
        what: For which argument.
        error: The class of the error.
        wanted: What it must be, in words.

    Raises:
        MpimeshError: Of class `error`, if `value` is none.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise error(f"{what} must be {wanted}, got {shown(value)}") from None


def as_flag(value: object, what: str, error: type[MpimeshError] = MeshError) -> bool:
    """Return `value` as a bool, which NumPy's is, too; 0 and 1 count, a text does not.

    Raises:
        MpimeshError: Of class `error`, if it is none.
    """
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_", "int") and value in (0, 1):
        return bool(value)
    raise error(f"{what} must be True or False, got {shown(value)}")


def as_time(value: Any, what: str, error: type[MpimeshError]) -> float | None:
    """Return a number of seconds from 0 on; None for no limit, or one of decades.

    Raises:
        MpimeshError: Of class `error`, if it is none.
    """
    if value is None:
        return None
    limit_s = _as_float(value) if hasattr(value, "__float__") else None
    if isinstance(value, bool) or limit_s is None or not limit_s >= 0:
        raise error(f"{what} must be a number of seconds from 0 on, or None, got {shown(value)}")
    return limit_s if limit_s < _LONGEST_S else None


def as_function(value: Any, what: str, error: type[MpimeshError]) -> Callable[..., Any]:
    """Return a function.

    Raises:
        MpimeshError: Of class `error`, if `value` cannot be called.
    """
    if not callable(value):
        raise error(f"{what} must be a function, got {shown(value)}")
    function: Callable[..., Any] = value
    return function


def as_shape(
    shape: object, error: type[MpimeshError] = ShapeError, *, one: bool = False
) -> tuple[int, ...]:
    """Return the shape of an array as a tuple of whole numbers that are not negative.

    Args:
        shape: What was given.
        error: The class of the error.
        one: Whether a whole number stands for a shape of one axis, as in NumPy.

    Raises:
        MpimeshError: Of class `error`, if it is none.
    """
    if one and hasattr(shape, "__index__") and not isinstance(shape, Sequence):
        return (as_int(shape, "the shape", error, least=0),)
    if not isinstance(shape, Iterable) or isinstance(shape, str | bytes):
        raise error(f"a shape must be a row of whole numbers, got {shown(shape)}")
    lengths = as_items(shape, "a shape", error)
    found = tuple(
        one
        if type(one) is int and one >= 0
        else as_int(one, f"a length in shape {shown(lengths)}", error, least=0)
        for one in lengths
    )
    if found and max(found) > MOST:
        raise error(f"shape {shown(found)} has a length that an address cannot count to")
    return found


def as_real(
    value: object,
    name: str,
    error: type[MpimeshError],
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    finite: bool = True,
    nan: bool = False,
) -> float:
    """Return `value` as a float of Python, never of NumPy.

    Args:
        value: What a caller gave.
        name: What messages call it.
        error: The class to raise.
        least: The smallest that will do.
        above: What it must be above.
        below: What it must be below.
        finite: Whether infinity is refused, too.
        nan: Whether NaN is taken.

    Raises:
        MpimeshError: Of class `error`, if it is no number, or out of range.
    """
    number = _as_float(value)
    if (
        number is None
        or (math.isnan(number) and not nan)
        or (finite and math.isinf(number))
        or number < least
        or (above > -math.inf and number <= above)
        or (below < math.inf and number >= below)
    ):
        rules = [
            f"{word} {limit:g}"
            for word, limit in (("at least", least), ("above", above), ("below", below))
            if math.isfinite(limit)
        ]
        kind = "finite number" if finite else "number"
        wanted = f"a {kind}{' ' if rules else ''}{' and '.join(rules)}"
        raise error(f"{name} must be {wanted}, got {shown(value)}")
    return number


def is_real(value: object) -> bool:
    """Tell whether `value` is one real number: of Python or NumPy, no text, no longer array."""
    return not isinstance(value, str | bytes) and _as_float(value) is not None


def shape_of(value: object) -> tuple[int, ...] | None:
    """Return the shape of an array; None of anything else."""
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) and hasattr(value, "dtype") else None


class ReduceOp(StrEnum):
    """Reduction of the values of all ranks to one: SUM, MEAN, PROD, MIN or MAX.

    ``ReduceOp("sum")`` is that of a name. So a type checker takes ``op=ReduceOp(name)`` where
    `name` is a variable of type str; literals, as ``op="sum"``, it checks by themselves.
    """

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp | None:
        """Take the other names, such as ``"avg"``, too."""
        return _ALIASES.get(value) if isinstance(value, str) else None


class MpiOp(Protocol):
    """One of mpi4py's operations, such as ``MPI.SUM``."""

    @property
    def is_predefined(self) -> bool:
        """True for an operation that MPI itself defines."""
        ...

    def Is_commutative(self) -> bool:
        """Tell whether operands may change places."""
        ...


OpName = Literal["sum", "mean", "avg", "average", "prod", "product", "min", "max"]
OpLike: TypeAlias = ReduceOp | OpName | MpiOp
"""A reduction: by its name, or as mpi4py's ``MPI.SUM``, ``MPI.PROD``, ``MPI.MIN``, ``MPI.MAX``."""

_ALIASES: dict[object, ReduceOp] = {
    **{op: op for op in ReduceOp},
    **{op.value: op for op in ReduceOp},
    # What the systems we follow call the same five.
    "avg": ReduceOp.MEAN,
    "average": ReduceOp.MEAN,
    "product": ReduceOp.PROD,
}


def as_reduce_op(op: object) -> ReduceOp:
    """Return the reduction called `op`, or that of mpi4py's operation.

    Raises:
        ReduceOpError: If there is none of that name.
    """
    try:
        return _ALIASES[op]
    except (KeyError, TypeError):
        pass
    # Whoever has an operation of mpi4py has imported it.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        for mine in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX):
            if op == getattr(mpi, mine.name):
                return mine
        raise ReduceOpError(
            "of mpi4py's operations there are MPI.SUM, MPI.PROD, MPI.MIN and MPI.MAX; for MPI.LAND "
            "and MPI.LOR take MIN and MAX of bool arrays, for MAXLOC and MINLOC np.argmax and "
            "np.argmin of a split array"
        )
    names = ", ".join(ReduceOp)
    raise ReduceOpError(f"no reduction is called {op!r}; there are: {names}")


def check_kind(
    value: object,
    kind: type[T] | tuple[type[T], ...],
    name: str,
    error: type[MpimeshError],
    *,
    wanted: str,
) -> T:
    """Return `value` if it is an object of a class.

    Args:
        value: What a caller gave.
        kind: The class, or several.
        name: What messages call it.
        error: The class to raise.
        wanted: What it must be, in words.

    Raises:
        MpimeshError: Of class `error`, if it is not.
    """
    if not isinstance(value, kind):
        raise error(f"{name} must be {wanted}, got {shown(value)}")
    return value


def _runs(ranks: Sequence[int]) -> list[range]:
    """Return ranks as ranges, in their order: one with a stride, or several without."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) == 1 and len(ranks) >= _SHORTEST_STRIDE and (step := steps.pop()) > 1:
        return [range(ranks[0], ranks[-1] + 1, step)]
    runs: list[range] = []
    for rank in ranks:
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


def _run_text(run: range) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" + (f":{run.step}" if run.step > 1 else "")


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number of things, ``1 rank`` or ``2 ranks``."""
    return f"{number:,} {noun}{plural * (number != 1)}"


def size_text(nbytes: float) -> str:
    """Return bytes as a person reads them, ``1.5 GiB``; three digits are enough."""
    value, power = float(nbytes), 0
    while abs(value) >= 1023.5 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{digits} {_UNITS[power]}"


def _as_float(value: object) -> float | None:
    """Return one real number; None if it is none, or has an imaginary part."""
    if isinstance(value, complex | str | bytes | bytearray | memoryview):
        return None
    if getattr(getattr(value, "dtype", None), "kind", "f") in "cSUO":
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError):
        return None
