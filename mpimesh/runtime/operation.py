"""A started operation, from its start until its result is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpimesh.errors import MismatchError, MpimeshError, TransportError
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress
from mpimesh.transport import Moved, Request, StagedRequest
from mpimesh.transport.signatures import LAST_SLOT

__all__ = ["Operation", "Owner"]


class Owner(Protocol):
    """The group that started an operation, as far as the operation needs it."""

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

    def abandon(self, *buffers: object) -> None:
        """Keep the buffers of an operation that nobody waits for any more."""
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

    def compare(self) -> None:
        """Look whether a rank of this node has started something else in its place.

        Raises:
            MismatchError: If so.
        """
        call = self.call
        if call.signatures is not None:
            call.signatures.compare(call.number, call.word, call.group)

    def look(self) -> None:
        """Look, while it is waited for, what the ranks of this node have started up to now.

        Raises:
            MismatchError: If one of them has started something else.
        """
        call = self.call
        if call.signatures is not None:
            call.signatures.look(call.number, call.group)

    def explained(self, error: BaseException) -> BaseException:
        """Return what is behind an error of the transport, as far as it is known."""
        if isinstance(error, TransportError | MismatchError):
            try:
                self.compare()
            except MismatchError as found:
                if str(found) != str(error):  # or it was found while waiting
                    found.agreed = error.agreed
                    return found
        return error

    def settle(self) -> None:
        """Take the result of the finished request, and let go of the buffers.

        Raises:
            MismatchError: If a rank of this node has started something else in its place.
        """
        if self.unlock is not None:
            self._give_back()  # first: the result may be written into the caller's own array
        call = self.call
        try:
            if (signatures := call.signatures) is not None:
                at, word = call.number & LAST_SLOT, call.word
                for words in signatures.others:  # without the cost of a call
                    if words[at] != word:
                        self.compare()
            if self.finish is not None:
                self.value = self.finish()
            elif self.value is None and isinstance(self.request, StagedRequest):
                self.value = self.request.value
        except Exception as error:
            self.error = error  # a second resolve must not find a half-made result
            if isinstance(error, MismatchError):
                self.group.abandon()  # over here, but perhaps not elsewhere
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
        except MpimeshError:
            return True

    def failed_with(self, error: BaseException) -> bool:
        """Tell whether `error` has ended the request, and is none that came from elsewhere."""
        return getattr(self.request, "error", None) is error

    def fail(self, error: BaseException) -> None:
        """Remember that the operation ended with `error` for this rank."""
        self.error = error
        if not self.is_over():
            self.group.abandon(self.request, self.finish, self.value)
            if isinstance(error, MismatchError) and isinstance(self.request, Moved):
                self.request.give_up(error)
        elif isinstance(error, TransportError | MismatchError):
            # Over here, but perhaps not elsewhere; and one that consists of several messages ends
            # with the first that fails, while MPI may still write the others.
            several = hasattr(self.request, "settled")
            buffers = (self.request, self.finish, self.value) if several else ()
            self.group.abandon(*buffers)
        self.release()

    def release(self) -> None:
        """Drop everything but the result; the operation is over for this rank."""
        self.finish = None
        self.call.ended = True
        if self.unlock is not None:
            self._give_back()
        self.group.forget(self)
        self.resolved = True  # last: whatever ends this before, it can be done again

    def _give_back(self) -> None:
        """Make the caller's array writable again."""
        if self.unlock is not None:
            self.unlock()
            self.unlock = None
