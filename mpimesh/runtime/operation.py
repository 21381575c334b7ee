"""A started operation, from its start until its result is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpimesh.errors import TransportError
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress
from mpimesh.transport import Request, StagedRequest

__all__ = ["Operation", "Owner"]


class Owner(Protocol):
    """What an operation needs of the group that started it."""

    @property
    def world_rank(self) -> int:
        """This rank, as numbered in the mesh."""
        ...

    @property
    def progress(self) -> Progress:
        """The unfinished operations of this rank."""
        ...

    def wait(self, operation: Operation, timeout_s: float | None) -> bool:
        """Wait for `operation`; False after `timeout_s`."""
        ...

    def complete(self, operation: Operation) -> None:
        """Wait for `operation` and take its result; its handle keeps an error to raise."""
        ...

    def forget(self, operation: Operation) -> None:
        """Let go of `operation`, which is resolved."""
        ...

    def abandon(self, operation: Operation) -> None:
        """Keep the buffers of `operation`, which nobody waits for any more."""
        ...


class Operation:
    """A started operation with all it needs to stay alive: its buffers live in `finish`.

    The group keeps it until it is resolved, whatever becomes of the user's handle,
    because the transport goes on writing into its buffers.
    """

    __slots__ = ("call", "error", "finish", "group", "request", "resolved", "unlock", "value")

    def __init__(
        self,
        group: Owner,
        call: Call,
        request: Request,
        finish: Callable[[], Any] | None,
        unlock: Callable[[], None] | None = None,
        value: Any = None,
    ) -> None:
        self.group = group
        self.call = call
        self.request = request
        self.finish = finish
        self.unlock = unlock
        self.value = value
        self.error: BaseException | None = None
        self.resolved = False

    def settle(self) -> None:
        """Take the result of the finished request, and let go of the buffers."""
        self._give_back()  # first: the result may be written into the caller's own array
        try:
            if self.finish is not None:
                self.value = self.finish()
            elif self.value is None and isinstance(self.request, StagedRequest):
                self.value = self.request.value
        except Exception as error:
            self.error = error  # a second resolve must not find a half-made result
            raise
        finally:
            self.release()

    def map(self, function: Callable[[Any], Any]) -> None:
        """Let the result be what `function` makes of it. Before it is resolved."""
        finish = self.finish

        def last() -> Any:
            if finish is not None:
                return function(finish())
            if self.value is None and isinstance(self.request, StagedRequest):
                return function(self.request.value)
            return function(self.value)

        self.finish = last

    def is_over(self) -> bool:
        """Tell whether the transport is done with the buffers. Never waits."""
        settled = getattr(self.request, "settled", None)
        if settled is not None:
            return bool(settled)  # a test might start its next step
        try:
            return self.request.test()
        except TransportError:
            return True

    def failed_with(self, error: BaseException) -> bool:
        """Tell whether `error` has ended the request, and is none that came from elsewhere."""
        return getattr(self.request, "error", None) is error

    def fail(self, error: BaseException) -> None:
        """Remember that the operation ended with `error` for this rank."""
        self.error = error
        if not self.is_over():
            self.group.abandon(self)
        self.release()

    def release(self) -> None:
        """Drop everything but the result; the operation is over for this rank."""
        self.finish = None
        self._give_back()
        self.group.forget(self)
        self.resolved = True  # last: whatever ends this before, it can be done again

    def _give_back(self) -> None:
        """Make the caller's array writable again."""
        if self.unlock is not None:
            self.unlock()
            self.unlock = None
