"""A limit on what a rank receives in a section of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mpimesh.errors import BudgetError, MeshError
from mpimesh.runtime.call import Site, site_text

if TYPE_CHECKING:
    from mpimesh.runtime.traffic import Traffic

__all__ = ["Budget", "Late", "admit", "excess", "spend"]


class Budget:
    """A limit on what a section receives on this rank; made by `DeviceMesh.budget`.

    A context manager, to be entered once. Of nested ones each counts its own section.

    Attributes:
        bytes: The limit of bytes; None for none.
        messages: The limit of messages; None for none.
        used_bytes: Bytes of the section so far.
        used_messages: Messages of the section so far.
        used_by: Bytes and messages of the section so far, by operation.
    """

    def __init__(
        self, traffic: Traffic, rank: int, site: Site, nbytes: Any = None, messages: Any = None
    ) -> None:
        self.bytes = _limit(nbytes, "bytes")
        self.messages = _limit(messages, "messages")
        self.used_bytes = 0
        self.used_messages = 0
        self.used_by: dict[str, tuple[int, int]] = {}
        self._traffic = traffic
        self._rank = rank
        self._site = site
        self._entered = False

    def __enter__(self) -> Self:
        """Count from here on."""
        if self._entered:
            raise MeshError(f"the budget made at {site_text(self._site)} was entered before")
        self._entered = True
        self._traffic.budgets = (*self._traffic.budgets, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Count no operation that starts from here on."""
        self._traffic.budgets = tuple(one for one in self._traffic.budgets if one is not self)

    def exceeds(self, nbytes: int, messages: int) -> bool:
        """Tell whether there is not so much left."""
        return _over(self.used_bytes, nbytes, self.bytes) or _over(
            self.used_messages, messages, self.messages
        )

    def use(self, name: str, nbytes: int, messages: int) -> None:
        """Count what an operation receives."""
        self.used_bytes += nbytes
        self.used_messages += messages
        had = self.used_by.get(name, (0, 0))
        self.used_by[name] = (had[0] + nbytes, had[1] + messages)

    def error(self, what: object, verb: str, nbytes: int, messages: int) -> BudgetError:
        """Return the error about an operation, with what was used before it."""
        limits = [] if self.bytes is None else [f"{self.bytes} bytes"]
        limits += [] if self.messages is None else [f"{self.messages} messages"]
        used = "nothing"
        if self.used_bytes or self.used_messages:
            rows = sorted(self.used_by.items(), key=lambda row: (-row[1][0], row[0]))
            by = ", ".join(f"{name} {_amount(*counts)}" for name, counts in rows if any(counts))
            used = f"{_amount(self.used_bytes, self.used_messages)} ({by})"
        return BudgetError(
            f"rank {self._rank}: {what} {verb} {_amount(nbytes, messages)}, which exceeds the "
            f"budget of {' and '.join(limits)} given at {site_text(self._site)}; used before: "
            f"{used}. Move less, or give a larger budget, on all ranks"
        )

    def __repr__(self) -> str:
        """Show limits and what is used. Local."""
        limits = f"bytes={self.bytes}, messages={self.messages}"
        return f"<Budget {limits}, used {_amount(self.used_bytes, self.used_messages)}>"


class Late:
    """Keeps the first error of a budget for a moment when all ranks can hear of it."""

    def __init__(self) -> None:
        self.error: BudgetError | None = None

    def keep(self, error: BudgetError | None) -> None:
        """Keep `error` unless there is one already."""
        self.error = self.error or error

    def take(self) -> BudgetError | None:
        """Return the error, if there is one, and keep it no more."""
        error, self.error = self.error, None
        return error

    def check(self) -> None:
        """Raise the error, if there is one."""
        error = self.take()
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame


def admit(budgets: tuple[Budget, ...], name: str, what: object, nbytes: int, messages: int) -> None:
    """Count an operation that is about to start.

    Raises:
        BudgetError: If one of the budgets has not so much left; then none counts it.
    """
    error = excess(budgets, what, nbytes, messages)
    if error is not None:
        raise error
    for budget in budgets:
        budget.use(name, nbytes, messages)


def excess(
    budgets: tuple[Budget, ...], what: object, nbytes: int, messages: int
) -> BudgetError | None:
    """Return the error of the innermost budget that has not so much left. Nothing is counted."""
    for budget in reversed(budgets):
        if budget.exceeds(nbytes, messages):
            return budget.error(what, "would receive", nbytes, messages)
    return None


def spend(
    budgets: tuple[Budget, ...],
    name: str,
    what: Callable[[], object],
    nbytes: int,
    messages: int,
) -> BudgetError | None:
    """Count what has come, and return the error if a budget had not so much left."""
    error = None
    for budget in reversed(budgets):
        if error is None and budget.exceeds(nbytes, messages):
            error = budget.error(what(), "received", nbytes, messages)
        budget.use(name, nbytes, messages)
    return error


def _over(used: int, more: int, limit: int | None) -> bool:
    """Tell whether `more` is too much. Nothing is never too much, even where too much was used."""
    return limit is not None and more > 0 and used + more > limit


def _limit(value: Any, what: str) -> int | None:
    if value is None:
        return None
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise MeshError(f"{what} of a budget is a whole number from 0 on, or None, got {value!r}")
    return number


def _amount(nbytes: int, messages: int) -> str:
    return f"{nbytes} bytes in {messages} message{'' if messages == 1 else 's'}"
