"""Collectives that other rooms put together from steps of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import BudgetError, on_all_ranks
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore, collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.traffic import Amount, Rule
from mpimesh.transport import Request, Steps, run_steps

__all__ = ["Composed"]


class Composed(GroupCore):
    """``compose`` of a group."""

    @collective
    def compose(
        self,
        name: str,
        begin: Callable[[], Request | Steps],
        *,
        rule: str,
        nbytes: int = 0,
        finish: Callable[[], Any] | None = None,
        lock: Array | None = None,
        label: str | None = None,
        receives: tuple[Rule, Amount] | None = None,
    ) -> CollectiveTensor:
        """Start a collective of several steps, which keeps its place among all of the group.

        Args:
            name: What it is called in messages and counts.
            begin: Starts it, be it one request or several steps, when what came before it on this
                group has ended.
            rule: What must agree over ranks; compared with ``MPIMESH_CHECKS`` on.
            nbytes: The bytes that this rank puts in.
            finish: Makes the result; None for the value of the steps.
            lock: The caller's input, which must not change meanwhile.
            label: The caller's name for this call.
            receives: How what this rank receives is counted; None if it receives nothing.

        Raises:
            BudgetError: When it is resolved, on every rank, if any receives more than a budget has
                left. Then nothing has moved.
        """
        if self.size > 1 and self._context.traffic.refuses:
            call = Call(name, self.name, rule, None, "", label, None)
            begin, receives = partial(self._within_budget, call, begin, receives), None
        return self._launch(
            name,
            begin,
            rule=rule,
            nbytes=nbytes,
            finish=finish,
            lock=lock,
            label=label,
            receives=receives,
        )

    def _within_budget(
        self,
        call: Call,
        begin: Callable[[], Request | Steps],
        receives: tuple[Rule, Amount] | None,
    ) -> Steps:
        """Begin only if no rank exceeds a budget: they may receive unequally much.

        One that refused alone would leave the others in an exchange with its next one.
        """
        traffic, side = self._context.traffic, self.communicator
        error: BudgetError | None = None
        if receives is not None:
            error = traffic.excess(call, receives[0], self._members, receives[1])
        exceeded = np.zeros(self.size, np.int8)
        yield side.all_gather(np.array([error is not None], np.int8), exceeded, [1] * self.size)
        if exceeded.any():
            ranks = [self.ranks[place] for place in np.flatnonzero(exceeded).tolist()]
            raise on_all_ranks(
                error
                or BudgetError(
                    f"rank {self.world_rank}: {call} is refused on all ranks, because it exceeds "
                    f"the budget of rank {', '.join(map(str, ranks[:8]))}"
                )
            )
        if receives is not None:
            traffic.admit_by(call, receives[0], self._members, receives[1])
            traffic.counter.add(call.name, receives[0], self._members, receives[1])
        yield from run_steps(begin)
