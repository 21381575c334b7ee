"""Random calls of NumPy's functions on split arrays, held against NumPy in one process.

A case is a line of Python that :func:`check` runs; :mod:`tests.helpers.rule_cases` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.dtensor.consistency import gather_facts
from mpimesh.errors import DeadlockError, MismatchError, MpimeshError, NoRuleError, RemoteError
from tests.helpers import warned
from tests.helpers.dtensor_check import split

__all__ = [
    "Case",
    "Operand",
    "check",
    "evaluated",
    "expected_of",
    "problem_on",
    "problems",
    "values",
    "with_rare_values",
]


@dataclass(frozen=True, slots=True)
class Operand:
    """A split array: its placement, what it is like, and the seed of its elements."""

    placement: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    flavour: str = ""

    def __repr__(self) -> str:
        row = (self.placement, self.shape, self.dtype, self.seed, self.flavour)
        return repr(row)


@dataclass(frozen=True, slots=True)
class Case:
    """An expression with x0, x1, ... on a mesh; `exact` if results are equal to the bit.

    With `strict`, NumPy is to raise its errors of floats, which may leave results half written.
    With `any_error` the dtype may be wrong as well as other arguments, and each be told first.
    """

    dims: str
    text: str
    operands: tuple[Operand, ...]
    exact: bool = True
    rule: str = ""
    strict: bool = False
    any_error: bool = False

    def __str__(self) -> str:
        more = ("" if self.exact else ", exact=False") + (", strict=True" if self.strict else "")
        return f"check({self.dims!r}, {self.text!r}, {[*self.operands]!r}{more})"


RARE = {
    "i": (-1, -128, 127, 0),
    "u": (0, 255),
    "f": (0.0, -1.0, np.nan, np.inf, 6e4, 1e-7),
    "c": (0.0, np.nan, 6e4),
}
"""Values that some functions refuse or cannot work with, by the kind of the dtype."""


def with_rare_values(case: Case) -> Case:
    """Return the case with one such value in each operand, and so on one rank, if it is split."""
    rows = [
        replace(one, flavour="rare") if np.dtype(one.dtype).kind in RARE else one
        for one in case.operands
    ]
    return replace(case, operands=tuple(rows), strict=True)


# -- elements --------------------------------------------------------------------------------


def values(one: Operand) -> Any:
    """Return the elements of an operand: small, and sums of them are exact in every dtype."""
    rng = np.random.default_rng(one.seed)
    kind = np.dtype(one.dtype)
    flavour, _, limit = one.flavour.partition(":")
    made: Any
    if kind.kind in "mMSUV":
        made = rng.integers(1 if flavour == "positive" else -4, 6, one.shape)
        made = of_kind(np.sort(made, -1) if flavour == "sorted" and made.ndim else made, kind)
        if flavour == "nan" and kind.kind in "mM":
            made[rng.random(one.shape) < 0.25] = "NaT"
        return np.asarray(made, kind)
    if flavour == "rare":
        made = rng.integers(1, 3, one.shape).astype(kind)
        if made.size:
            large = [np.finfo(kind).max] if kind.kind in "fc" else []
            rare = [*RARE[kind.kind], *large]
            made.flat[rng.integers(made.size)] = kind.type(rare[rng.integers(len(rare))])
        return made
    if flavour == "index":
        return rng.integers(0, max(1, int(limit)), one.shape).astype(kind)
    if flavour == "unit":
        made = rng.choice([1, -1, 2, 1] if kind.kind in "iu" else [1, -1, 0.5, 2], one.shape)
    elif flavour == "positive":
        made = rng.integers(1, 6, one.shape)
    else:
        made = rng.integers(-4, 5, one.shape)
    if kind.kind in "bu":
        made = np.abs(made) % 2 if kind.kind == "b" else np.abs(made)
    if kind.kind in "fc" and flavour not in ("unit", "positive"):
        made = made / 2
    if kind.kind == "c":
        made = made + 1j * rng.integers(-3, 4, one.shape)
    made = np.asarray(made).astype(kind)
    if kind.kind == "c" and flavour == "nan":  # in one part alone, too
        made.imag[rng.random(one.shape) < 0.15] = np.nan
    if flavour == "sorted" and made.ndim:
        made = np.sort(made, -1)
    if flavour == "matrix" and made.ndim >= 2:
        made = (made + 8 * np.eye(*made.shape[-2:])).astype(kind)
    if flavour in ("nan", "inf") and kind.kind in "fc" and made.size:
        spots = rng.random(one.shape) < 0.25
        made = np.where(spots, made.dtype.type({"nan": np.nan, "inf": np.inf}[flavour]), made)
        made = np.where(rng.random(one.shape) < 0.05, made.dtype.type(-np.inf), made)
    return np.asarray(made, kind)


def of_kind(numbers: Any, dtype: Any) -> Any:
    """Return small integers as dates, spans, texts, raw bytes or records, in the same order."""
    kind, whole = np.dtype(dtype), np.asarray(numbers, np.int64)
    if kind.kind in "SU":
        return np.asarray((whole + 90).astype("U2"), kind)
    if kind.names:
        made = np.zeros(whole.shape, kind)
        for number, name in enumerate(kind.names):
            made[name] = whole // 2 if number == 0 else whole % 2
        return made
    if kind.kind == "V":
        data = np.zeros((*whole.shape, kind.itemsize), np.uint8)
        data[..., -1] = whole + 90
        return data.view(kind)[..., 0]
    return whole.astype(kind)


def _then(x: Any, _: Any) -> Any:
    """Return an array after something was done to it in place."""
    return x


def _set(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


def _gathering(call: Callable[[], Any]) -> Any:
    with mm.allow_gather():
        return call()


_NAMES: dict[str, Any] = {
    "np": np,
    "then": _then,
    "set": _set,
    "gathering": _gathering,
    "nan": np.nan,
    "inf": np.inf,
}
_NAMES["of_kind"] = of_kind
"""Names for expressions beside their operands."""


def evaluated(case: Case, arrays: Sequence[Any]) -> Any:
    """Evaluate the expression; the case is its file name, and so stands in every traceback."""
    names = {f"x{number}": array for number, array in enumerate(arrays)}
    with np.errstate(all="raise" if case.strict else "ignore"):
        return eval(compile(case.text, f"<{case}>", "eval"), _NAMES | names)


# -- what NumPy says -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """The result or error of NumPy, and its first operand afterwards."""

    found: Any
    error: Exception | None
    after: Any


def expected_of(case: Case) -> Expected:
    """Return what NumPy says to a case."""
    arrays = [values(one) for one in case.operands]
    with warned.ignored:
        try:
            return Expected(_tree(evaluated(case, arrays)), None, arrays[0])
        except Exception as error:
            return Expected(None, error, arrays[0])


def _tree(found: Any) -> Any:
    """Return a result as nested lists of plain arrays. Collective, if there are split ones."""
    if isinstance(found, mm.DTensor):
        return np.asarray(found.full())
    if isinstance(found, list | tuple):
        return [_tree(one) for one in found]
    if isinstance(found, np.ndarray | np.generic | bool | int | float | complex):
        return np.array(found)
    return found


# -- comparing -------------------------------------------------------------------------------


def _differs(found: Any, expected: Any, case: Case) -> str:
    """Return in which way a result is not as expected; nothing if it is."""
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return f"{found!r} is not {len(expected)} results"
        rows = (_differs(one, other, case) for one, other in zip(found, expected, strict=True))
        return next((text for text in rows if text), "")
    if not isinstance(expected, np.ndarray):
        return "" if found == expected else f"{found!r}, not {expected!r}"
    if not isinstance(found, np.ndarray):
        return f"{found!r}, not {expected!r}"
    if not expected.shape and expected.dtype.kind in "SU":  # of its scalars the length is lost
        found = found.astype(expected.dtype)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if expected.dtype.kind not in "fc":
        same = np.array_equal(found, expected, equal_nan=expected.dtype.kind in "mM")
    elif case.exact:
        same = np.array_equal(found, expected, equal_nan=True)
    else:
        same = _close(found, expected, case)
    return "" if same else f"{found.tolist()}, not {expected.tolist()}"


def _close(found: Any, expected: Any, case: Case) -> bool:
    kinds = [np.dtype(one.dtype) for one in case.operands] + [expected.dtype]
    eps = max(float(np.finfo(kind).eps) for kind in kinds if kind.kind in "fc")
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(found), finite):
        return False
    if expected.dtype.kind == "f" and not np.array_equal(
        found[~finite], expected[~finite], equal_nan=True
    ):
        return False
    with np.errstate(all="ignore"):
        scale = 1 + np.max(np.abs(expected[finite]), initial=0.0).astype(float)
        most = np.max(np.abs(found[finite] - expected[finite]), initial=0.0)
    return bool(most <= 200 * eps * float(scale))


STRICTER = ("cannot be written into", "axis must be a whole number, got")
"""Errors where NumPy casts without asking, or raises another kind: see docs/project/limits.md."""

_FAMILIES = (IndexError, ZeroDivisionError, FloatingPointError, ValueError, TypeError, KeyError)


def _error_differs(error: Exception, expected: Exception | None, case: Case) -> str:
    """Return in which way an error is not NumPy's; a refusal never is wrong."""
    if isinstance(error, NoRuleError) or "sum it up first" in str(error):
        return ""
    said = f"{type(error).__name__}: {error}"
    casts = expected is None or type(expected) is ValueError
    if casts and isinstance(error, TypeError) and any(one in said for one in STRICTER):
        return ""
    if expected is None:
        # NumPy may look at no dtype where there are no elements.
        empty = case.any_error and isinstance(error, TypeError | ValueError)
        empty = empty and any(0 in one.shape for one in case.operands)
        return "" if empty else f"raised {said}"
    families: list[type[Exception]] = [one for one in _FAMILIES if isinstance(expected, one)]
    if isinstance(expected, np.exceptions.AxisError):
        families = [np.exceptions.AxisError]
    if case.any_error and families:
        families = [ValueError, TypeError, IndexError, ArithmeticError]
    if families and not isinstance(error, tuple(families)):
        return f"raised {said}, not {type(expected).__name__}: {expected}"
    return ""


# -- running ---------------------------------------------------------------------------------


def problem_on(mesh: mm.DeviceMesh, case: Case, expected: Expected) -> str:
    """Run a case on this rank. Collective: all ranks tell each other how it ended.

    Returns:
        What is wrong with it; nothing if nothing is.
    """
    arrays = [split(values(one), mesh, one.placement) for one in case.operands]
    error: Exception | None = None
    found: Any = None
    try:
        found = evaluated(case, arrays)
    except (DeadlockError, MismatchError, RemoteError):
        raise
    except Exception as caught:
        error = caught
    outcome = "" if error is None else f"{type(error).__name__}: {error}"
    outcomes = gather_facts(mesh, "fuzz", outcome)
    if len(set(outcomes)) > 1:
        raise _Torn(f"ranks differ: {outcomes}")
    if case.strict:
        errors = (error, expected.error)
        if any(isinstance(one, FloatingPointError) for one in errors):
            return ""  # which errors of floats there are, depends on the order of sums
        if error is None:
            return "" if expected.error is None else f"no {expected.error!r}"
        return _error_differs(error, expected.error, case)
    if error is None:
        found = _tree(found)  # collective, so also where NumPy raises
        if expected.error is not None:
            return f"{found!r}, where NumPy raises {expected.error!r}"
        text = _differs(found, expected.found, case)
    else:
        text = _error_differs(error, expected.error, case)
    # What raises has written nothing.
    after = expected.after if error is None else values(case.operands[0])
    text = text or _differs(np.asarray(arrays[0].full()), after, case)
    return (
        text if error is None or text else (f"{REFUSED}{error}" if expected.error is None else "")
    )


REFUSED = "refused: "
"""So begins what comes of a case that split arrays have no rule for."""


class _Torn(MpimeshError):
    """The ranks are out of step."""


def problems(
    cases: Sequence[Case], on_refusal: Callable[[Case, str], object] | None = None
) -> list[str]:
    """Run cases on virtual ranks; return a line for each that went wrong.

    Args:
        cases: The cases.
        on_refusal: Gets a case that is refused, and why.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.dims, []).append(case)
    found = []
    with warned.ignored:
        for dims, group in groups.items():
            for case, text in _run(dims, group):
                if text.startswith(REFUSED):
                    if on_refusal:
                        on_refusal(case, text)
                elif text:
                    found.append(f"{case}  # {text}")
    return found


def _run(dims: str, cases: list[Case]) -> list[tuple[Case, str]]:
    """Run cases on one mesh, and on new ones after each that leaves the ranks out of step."""
    expected = [expected_of(case) for case in cases]
    size = math.prod(int(part.split("=")[1]) for part in dims.split(","))
    texts = [""] * len(cases)
    begin = 0
    while begin < len(cases):
        reached = [begin] * size

        def main(first: int, reached: list[int]) -> None:
            with mm.DeviceMesh(dims) as mesh:
                for number in range(first, len(cases)):
                    reached[mesh.rank] = number
                    text = problem_on(mesh, cases[number], expected[number])
                    texts[number] = texts[number] or text

        try:
            mm.run_virtual(size, main, begin, reached)
            break
        except Exception as error:
            begin = min(reached)
            texts[begin] = f"{type(error).__name__}: {error}".partition("\n")[0]
            begin += 1
    return list(zip(cases, texts, strict=True))


def check(
    dims: str, text: str, operands: Sequence[Any], *, exact: bool = True, strict: bool = False
) -> None:
    """Run one case on virtual ranks.

    Raises:
        AssertionError: If it is not as NumPy has it, on all ranks.
    """
    rows = tuple(Operand(*one) for one in operands)
    case = Case(dims, text, rows, exact, strict=strict)
    found = problems([case])
    assert not found, found[0]
