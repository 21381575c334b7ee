"""Registry of NumPy's functions that know split arrays, and the refusal of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from mpimesh.dtensor.refused import ADVICE, REFUSED
from mpimesh.errors import NoRuleError

__all__ = [
    "FACTS",
    "FUNCTIONS",
    "StandIn",
    "allow_gather",
    "implements",
    "may_gather",
    "name_of",
    "rule_of",
    "sure_rule_of",
]

F = TypeVar("F", bound=Callable[..., Any])

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each function of NumPy the one that does it on split arrays."""


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
