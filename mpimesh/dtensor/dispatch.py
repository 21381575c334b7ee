"""Dispatch of NumPy's functions to their rules for split arrays, and the refusal of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from mpimesh.core.dispatch import Entry
from mpimesh.errors import NoRuleError

__all__ = [
    "ADVICE",
    "FACTS",
    "FUNCTIONS",
    "PLANNERS",
    "REFUSED",
    "StandIn",
    "allow_gather",
    "implements",
    "may_gather",
    "name_of",
    "plans",
    "rule_of",
    "sure_rule_of",
]

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound="Planner")

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each function of NumPy the one that does it on split arrays."""


Planner = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Entry | None]
"""Decides on a kind of call: gets the function, its arguments, options and what it writes into."""

PLANNERS: dict[Callable[..., Any], tuple[Planner, int]] = {}
"""For functions whose calls are looked up: what decides, and how many arguments are operands."""


FACTS: set[Callable[..., Any]] = set()
"""Those of them that only say what each rank knows: a rank may call them alone."""


class StandIn:
    """A stand-in for a split array in functions of NumPy, asked before that array."""

    __slots__ = ()


_allowed: ContextVar[bool] = ContextVar("allow_gather", default=False)


def implements(*functions: Callable[..., Any], fact: bool = False) -> Callable[[F], F]:
    """Mark a function as the one that does NumPy's `functions` on split arrays.

    Args:
        functions: NumPy's functions.
        fact: Whether they only say what each rank knows.
    """

    def register(function: F) -> F:
        for one in functions:
            FUNCTIONS[one] = function
        if fact:
            FACTS.update(functions)
        return function

    return register


def plans(*functions: Callable[..., Any], operands: int = 1) -> Callable[[P], P]:
    """Mark a function as the planner of calls of NumPy's `functions`; see :func:`adopt`.

    It is local, and refuses what their rule does. `operands` is how many arguments come first of
    which numbers count by their types alone.
    """

    def register(planner: P) -> P:
        def decide(*call: Any) -> Entry | None:
            try:
                return planner(*call)
            except NoRuleError:  # its rule says so, or whole arrays are gathered
                return None

        PLANNERS.update(dict.fromkeys(functions, (decide, operands)))
        return planner

    return register


def rule_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what does `function` on split arrays; None if it has to be done on whole ones.

    Raises:
        NoRuleError: If there is no rule, and gathering is not allowed.
    """
    if function in FUNCTIONS or _allowed.get():
        return FUNCTIONS.get(function)
    return sure_rule_of(function)


def sure_rule_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does `function` on split arrays.

    Raises:
        NoRuleError: If there is no rule.
    """
    found = FUNCTIONS.get(function)
    if found is None:
        name = name_of(function)
        raise NoRuleError(f"{name} has no rule for split arrays; {REFUSED.get(name, ADVICE)}")
    return found


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function of NumPy, as programs write it."""
    name = getattr(function, "__name__", repr(function))
    return f"{getattr(function, '__module__', '') or 'numpy'}.{name}"


def may_gather() -> bool:
    """Tell whether operands may be gathered: within :func:`allow_gather`."""
    return _allowed.get()


@contextmanager
def allow_gather() -> Iterator[None]:
    """Let functions without a rule gather their operands, within the block.

    Every rank then works on the whole arrays, and the result is replicated.

    Example:
        >>> with mm.allow_gather():
        ...     spectrum = np.fft.fft(x)
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


ADVICE = (
    "call it on x.full(), on blocks with local_map, or within `with mm.allow_gather():`, where "
    "every rank gets the whole arrays"
)

_SAVED = (
    'mm.save_array("x.npy", x) writes it, each rank its part; or let one rank save x.full(root=0)'
)
_SHOWN = "print(x) shows this rank's block; x.full() is the whole array, on all ranks"
_YOURS = "it calls your function on lines: mm.local_map(f, layout)(x) calls one on blocks"
_SMALL = f"it is for a few coefficients: {ADVICE}"
_MEMORY = "ask that of two blocks, x.local and y.local: it may differ from rank to rank"
_ORDER = "what an element becomes depends on all that come before it: write by x[mask] = value"
_DAYS = f"it is done element by element: {ADVICE}"

REFUSED: dict[str, str] = {
    "numpy.apply_along_axis": _YOURS,
    "numpy.array2string": _SHOWN,
    "numpy.array_repr": _SHOWN,
    "numpy.array_str": _SHOWN,
    "numpy.busday_count": _DAYS,
    "numpy.busday_offset": _DAYS,
    "numpy.datetime_as_string": _DAYS,
    "numpy.is_busday": _DAYS,
    "numpy.linalg.tensorinv": ADVICE,
    "numpy.linalg.tensorsolve": ADVICE,
    "numpy.may_share_memory": _MEMORY,
    "numpy.place": _ORDER,
    "numpy.poly": _SMALL,
    "numpy.polyadd": _SMALL,
    "numpy.polyder": _SMALL,
    "numpy.polydiv": _SMALL,
    "numpy.polyfit": _SMALL,
    "numpy.polyint": _SMALL,
    "numpy.polymul": _SMALL,
    "numpy.polysub": _SMALL,
    "numpy.roots": _SMALL,
    "numpy.save": _SAVED,
    "numpy.savetxt": _SAVED,
    "numpy.savez": _SAVED,
    "numpy.savez_compressed": _SAVED,
    "numpy.shares_memory": _MEMORY,
}
"""For each its name, and what its error says."""
