"""The arrival of one operation whose size only the sender knows."""

from __future__ import annotations

from mpimesh.errors import BudgetError
from mpimesh.runtime.call import Call
from mpimesh.runtime.traffic import Members, Traffic, spend

__all__ = ["Arrival"]


class Arrival:
    """Counts what comes, for the budgets that were open when the operation was called.

    An operation takes part to its end, whatever came: a rank that left it would meet the
    others' next one in the wrong one. So :meth:`settle` is called last.

    Attributes:
        call: The operation, which is to be set before anything is counted.
        budgets: Those that hold for it.
    """

    __slots__ = ("_bytes", "_error", "_members", "_messages", "_traffic", "budgets", "call")

    call: Call

    def __init__(self, traffic: Traffic, members: Members) -> None:
        self.budgets = traffic.budgets
        self._traffic = traffic
        self._members = members
        self._error: BudgetError | None = None
        self._bytes = self._messages = 0

    def expect(self, place: int, nbytes: int, messages: int) -> None:
        """Count now what must come from a place of the group, so that nothing else can.

        Raises:
            BudgetError: If it is too much.
        """
        if self.budgets:
            self._traffic.admit(self.call, nbytes, messages)
        self._bytes, self._messages = nbytes, messages
        self._count(place, nbytes, messages)

    def came(self, place: int, nbytes: int, messages: int) -> None:
        """Count what came from a place of the group, but for what was expected."""
        nbytes -= self._bytes
        messages -= self._messages
        if nbytes or messages:
            self._count(place, nbytes, messages)
            if self.budgets:
                name, what = self.call.name, self.call.__str__
                self._error = spend(self.budgets, name, what, nbytes, messages)

    def settle(self) -> None:
        """End the operation.

        Raises:
            BudgetError: If what came was too much.
        """
        if self._error is not None:
            self._traffic.refuse(self._error)

    def _count(self, place: int, nbytes: int, messages: int) -> None:
        self._traffic.counter.add_from(self.call.name, self._members.ranks[place], nbytes, messages)
