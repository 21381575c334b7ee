"""The result of a collective that may still be under way."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Self, SupportsIndex

from mpimesh.arguments import as_function, as_time
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    MpimeshError,
    UnresolvedError,
    UnresolvedWarning,
)
from mpimesh.runtime.call import site_line
from mpimesh.runtime.operation import Operation
from mpimesh.runtime.unresolved import Unresolved
from mpimesh.transport.waiting import test_often

__all__ = ["CollectiveTensor"]


class CollectiveTensor(Unresolved):
    """A result to come. Start the operation, do other work, then :meth:`resolve`.

    Handles may be resolved in any order, each waits for its own operation only,
    and every handle must be resolved: one that is dropped warns with the line that
    made it, and :meth:`DeviceMesh.close` fails while one is open. It is no array, nor does it
    become one: what :meth:`resolve` returns is. Operators and NumPy's functions on the handle
    raise UnresolvedError, for none of them waits in secret.
    """

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def resolve(self, timeout_s: float | None = None) -> Any:
        """Wait for this operation and return its result; a second call returns the same.

        A CuPy array may be used at once on the stream that is current here, whichever was current
        when the operation was called.

        Args:
            timeout_s: Longest wait; None waits as long as it takes.

        Raises:
            GroupError: If `timeout_s` is no time.
            CollectiveTimeoutError: After `timeout_s`; the operation goes on, and
                `resolve` may be called again.
            MismatchError: If the ranks called different operations: on every rank of the group
                with ``MPIMESH_CHECKS`` on; else on those that know of another one on their node,
                and for each later collective of the group.
            TransportError: If the transport failed.

        An exception from elsewhere, such as Ctrl-C or one of a signal handler, ends the wait and
        not the operation: `resolve` may be called again. But what goes in several steps, as large
        ordinary arrays through shared memory and all that takes two levels over nodes, may end
        with it on this rank; then so must the program.
        """
        operation = self._operation
        if timeout_s is not None:
            timeout_s = as_time(timeout_s, "timeout_s", GroupError)
        if operation.resolved:
            if operation.error is not None:
                raise operation.error
            return operation.value
        test = operation.request.test
        try:
            # Most small operations are over within a few tests: no wait need be set up.
            group = operation.group
            done = test_often(test, group.progress) or group.wait(operation, timeout_s)
        except Exception as error:
            # Any other error is of the wait, such as one raised by a signal handler: even if the
            # operation is over meanwhile, its result can still be taken.
            if isinstance(error, MpimeshError) or operation.failed_with(error):
                explained = operation.explained(error)
                operation.fail(explained)
                if explained is not error:
                    # A mismatch says it all: what MPI made of it is no cause.
                    raise explained from (None if isinstance(explained, MismatchError) else error)
            raise
        if not done:
            raise CollectiveTimeoutError(
                f"rank {operation.group.world_rank} waited {timeout_s} s for {operation.call}; "
                "it is still under way, and not all ranks may have started it"
            )
        operation.settle()
        return operation.value

    def done(self) -> bool:
        """Tell whether :meth:`resolve` would return (or raise) at once. Never waits."""
        operation = self._operation
        if operation.resolved:
            return True
        operation.group.progress.advance()
        try:
            if operation.request.test():
                return True
            operation.look()
        except Exception:
            return True  # resolve() raises it
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as :meth:`resolve` does, but return False after `timeout_s` instead of raising."""
        try:
            self.resolve(timeout_s)
        except CollectiveTimeoutError:
            return False
        return True

    def assume_resolved(self) -> Any:
        """Return the result of an operation that is known to be done. Never waits.

        Raises:
            UnresolvedError: If it is not done after all.
        """
        if not self.done():
            raise UnresolvedError(f"{self._operation.call} is still under way; use resolve()")
        return self.resolve()

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Let :meth:`resolve` give what `function` makes of the result; return this handle. Local.

        The function is called once, on the rank that resolves, and calls no collective.

        Raises:
            UnresolvedError: If the result was taken already.
            GroupError: If `function` is none.

        Example:
            >>> norm = group.all_reduce(x @ x).map(np.sqrt)
            >>> norm.resolve()
        """
        if self._operation.resolved:
            raise UnresolvedError(f"{self._operation.call} is resolved; map its handle before that")
        self._operation.map(as_function(function, "function", GroupError))
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: an operation has one handle.

        Raises:
            UnresolvedError: Always.
        """
        raise UnresolvedError(
            f"the handle of {self._what()} cannot be copied or pickled: copy the array that "
            "resolve() returns"
        )

    def _what(self) -> object:
        return self._operation.call

    def _is_resolved(self) -> bool:
        return self._operation.resolved

    def __repr__(self) -> str:
        """Say what was called and how far it is. Never waits, never tests."""
        operation = self._operation
        state = "failed" if operation.error else "resolved" if operation.resolved else "started"
        return f"<CollectiveTensor {operation.call.text()} on {operation.call.group!r}, {state}>"

    def __del__(self) -> None:
        """Warn, with the line that started it, about a result that nobody took."""
        operation = getattr(self, "_operation", None)
        if operation is None or operation.resolved or sys.is_finalizing():
            return  # at the interpreter's end nothing can be shown any more
        filename, line = site_line(operation.call.site)
        message = (
            f"the result of {operation.call.text()} on group {operation.call.group!r} was dropped "
            f"on rank {operation.group.world_rank} before it was resolved; keep the handle and "
            "call resolve()"
        )
        warnings.warn_explicit(message, UnresolvedWarning, filename, line)
