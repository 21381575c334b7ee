"""Collectives with their arrays, started many times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import Array, namespace
from mpimesh.errors import DTypeError, ShapeError, UnresolvedError
from mpimesh.runtime.call import Call
from mpimesh.runtime.operands import check_output
from mpimesh.runtime.plan import Buffers, Plan
from mpimesh.runtime.work import CollectiveTensor, Operation

if TYPE_CHECKING:
    from mpimesh.runtime.group_core import GroupCore

__all__ = ["PersistentCollective"]


class PersistentCollective:
    """A collective with its arrays, checked and bound once, to be started many times.

    Made by :meth:`ProcessGroup.all_reduce_init` and the like; MPI's word for it is a persistent
    operation. Each :meth:`start` reads what the input holds then. Where no `out` was given, results
    may come into one array: use one before the next start.
    """

    __slots__ = (
        "_buffers",
        "_call",
        "_group",
        "_last",
        "_out",
        "_plan",
        "_x",
    )

    def __init__(
        self,
        group: GroupCore,
        plan: Plan,
        x: Array,
        out: Array | None,
        buffers: Buffers,
        label: str | None,
    ) -> None:
        self._group = group
        self._plan = plan
        self._x = x
        self._out = out
        self._call = plan.call(group.name, label)
        self._last: Operation | None = None
        self._buffers = buffers if self._reads_in_place(buffers) else None
        if self._buffers is not None and not plan.on_device:
            self._buffers.prepared = plan.prepared(group, self._buffers.arguments)

    def start(self) -> CollectiveTensor:
        """Start it once more; the handle's ``resolve()`` gives the result.

        Collective, as the call that it stands for.

        Raises:
            UnresolvedError: If the last start is not resolved: its buffers are in use.
            ClosedError: If the mesh is closed.
        """
        group, call = self._group, self._call
        try:
            buffers = self._ready()
        except Exception as error:
            group.poison(Call(self._plan.name, group.name), error)
            raise
        call.ended = False
        handle = group.start(self._plan, buffers, self._x, self._out, call, buffers.value)
        self._last = handle._operation  # not the handle, which warns when it is dropped
        return handle

    def _ready(self) -> Buffers:
        """Return the buffers of the next start."""
        plan, last = self._plan, self._last
        if last is not None:
            if not last.resolved:
                raise UnresolvedError(
                    f"{self!r} is started again while its last start is under way; resolve that "
                    "first"
                )
            if last.error is not None:
                self._buffers = None  # what failed here may still write into them
            self._last = None
        if self._buffers is not None:
            if self._out is not None and not self._out.flags.writeable:
                check_output(self._out)  # another operation uses it by now
            return self._buffers
        self._group.member(plan.name)
        data = self._group.operand(self._x)
        if data.shape != plan.shape_in:
            raise ShapeError(
                f"{self!r} has an input of shape {data.shape} now, not {plan.shape_in}"
            )
        if data.dtype != plan.dtype:
            raise DTypeError(f"{self!r} has an input of dtype {data.dtype} now, not {plan.dtype}")
        return plan.bind(self._group, self._x, data, self._out)

    def _reads_in_place(self, buffers: Buffers) -> bool:
        """Tell whether a start needs no copy of the input made before it."""
        plan = self._plan
        if type(self._x) is not np.ndarray:  # on a device each start is on the stream of its own
            return False
        if plan.name == "broadcast":
            return not plan.sends or buffers.value is self._x
        send = buffers.arguments[0]
        return send is None or bool(namespace(send).may_share_memory(send, self._x))

    def __repr__(self) -> str:
        """Show what it starts. Local."""
        plan = self._plan
        what = f"{plan.name}(shape {plan.shape_in}, {plan.kind}, {plan.rule})"
        return f"<PersistentCollective {what} on {self._group.name!r}>"
