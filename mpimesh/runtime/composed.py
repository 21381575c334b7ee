"""Collectives that other rooms put together from steps of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpimesh.arrays import Array
from mpimesh.runtime.group_core import GroupCore, collective
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.received import Amount, Rule
from mpimesh.transport import Request, Steps

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
            BudgetError: If this rank receives more than a budget has left.
        """
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
