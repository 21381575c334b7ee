"""Work under way: what a rank has started, and how its result is taken."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable
from inspect import Signature
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex, TypeVar, cast

import numpy as np

from mpimesh.arguments import as_function, as_time
from mpimesh.arrays import StreamScope
from mpimesh.comm import Moved, StagedRequest
from mpimesh.comm.engine import test_often
from mpimesh.comm.signatures import explained, mismatch
from mpimesh.core.call import Handle, OpenWork as OpenHandles
from mpimesh.core.mail import Message as NodeMessage
from mpimesh.core.node import Operation
from mpimesh.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    MpimeshError,
    TransportError,
    UnresolvedError,
    UnresolvedWarning,
    tell_elsewhere,
)
from mpimesh.runtime.call import Call, RecordedGroup, site_line
from mpimesh.runtime.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarOrAny

    T_co = TypeVarOrAny("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

__all__ = ["CollectiveTensor", "OpenWork", "Owner"]


class OpenWork(OpenHandles):
    """The work of one mesh on one rank that is started and not yet resolved."""

    __slots__ = ()

    def complete(self, call: Call | None) -> None:
        """Wait for what `call` started, if an exception from elsewhere has ended that wait."""
        for work in self.all():
            if work._call is call and work._interrupted:
                work._complete()

    def unresolved(self, group: Owner | None = None) -> list[str]:
        """Return the calls, of `group` alone if given, that the program has not resolved.

        One whose wait an exception from elsewhere has ended is given up: who it was raised to has
        no handle of what mpimesh itself waited for.
        """
        works = [work for work in self.all() if group is None or work._group is group]
        for work in works:
            work._let_go()
        return [str(work._call) for work in works if not work._resolved]


class Owner(RecordedGroup, Protocol):
    """The group that started an operation, as far as its work needs it."""

    @property
    def world_rank(self) -> int:
        """This rank, as numbered in the mesh."""
        ...

    @property
    def progress(self) -> Progress:
        """The unfinished operations of this rank."""
        ...

    @property
    def open_work(self) -> OpenWork:
        """What is not resolved."""
        ...

    def wait(self, work: CollectiveTensor, timeout_s: float | None) -> bool:
        """Wait for `work`; False after `timeout_s`."""
        ...

    def abandon(self, *buffers: object) -> None:
        """Keep the buffers of work that nobody waits for any more."""
        ...

    def misfit(self, call: Call, operation: Operation, out: Any) -> MpimeshError:
        """Return what is wrong with the array for a block of a scatter."""
        ...


def _refusing(example: str) -> Callable[..., NoReturn]:
    """Return a method that refuses, and shows how it would go."""

    def refuse(handle: CollectiveTensor, *_: Any, **_options: Any) -> NoReturn:
        raise handle._refusal(example)

    return refuse


def _binary(symbol: str) -> Callable[..., NoReturn]:
    return _refusing(f"handle.resolve() {symbol} x")


def _reflected(symbol: str) -> Callable[..., NoReturn]:
    return _refusing(f"x {symbol} handle.resolve()")


class CollectiveTensor(Handle[T_co]):
    """The result of an operation under way: do other work, then :meth:`resolve` it.

    Handles may be resolved in any order, each waits for its own operation only,
    and every handle must be resolved: one that is dropped warns with the line that
    made it, and :meth:`DeviceMesh.close` fails while one is open. It is no array, nor does it
    become one: what :meth:`resolve` returns is. Operators and NumPy's functions on the handle
    raise UnresolvedError, for none of them waits in secret.
    """

    __slots__ = ()
    __signature__ = Signature()  # groups make them, by a constructor that is compiled

    def _resolve(self, timeout_s: float | None) -> T_co:
        """Do as :meth:`resolve`, where that takes more than a short wait for one operation."""
        if timeout_s is not None:
            timeout_s = as_time(timeout_s, "timeout_s", GroupError)
        if self._resolved:
            if self._error is not None:
                raise self._error
            return self._result()
        test = self._request.test
        try:
            # Most small operations are over within a few tests: no wait need be set up.
            group = self._group
            done = test() or test_often(test, group.progress) or group.wait(self, timeout_s)
        except BaseException as error:
            # Any other error is of the wait, such as one raised by a signal handler: even if the
            # operation is over meanwhile, its result can still be taken.
            if not isinstance(error, MpimeshError) and not self._failed_with(error):
                self._interrupted = True
                raise
            explained = self._explained(error)
            self._fail(explained)
            if explained is not error:
                # A mismatch says it all: what MPI made of it is no cause.
                raise explained from (None if isinstance(explained, MismatchError) else error)
            raise
        if not done:
            raise CollectiveTimeoutError(
                f"rank {self._group.world_rank} waited {timeout_s} s for {self._call}; "
                "it is still under way, and not all ranks may have started it"
            )
        try:
            if self._scope is None:
                self._settle()
            else:
                self._settle_in(self._scope)
        finally:
            self._interrupted = not self._resolved
        return self._result()

    def done(self) -> bool:
        """Tell whether :meth:`resolve` would return (or raise) at once. Never waits."""
        if self._resolved:
            return True
        self._group.progress.advance()
        try:
            if self._request.test():
                return True
            self._compare()
        except Exception:
            return True  # resolve() raises it
        return False

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Do as :meth:`resolve`, by the name that PyTorch's and mpi4py's handles have for it."""
        return self.resolve(timeout_s)

    def assume_resolved(self) -> T_co:
        """Return the result of an operation that is known to be done. Never waits.

        Raises:
            UnresolvedError: If it is not done after all.
        """
        if not self.done():
            raise UnresolvedError(f"{self._call} is still under way; use resolve()")
        return self.resolve()

    def map(self, function: Callable[[T_co], U]) -> CollectiveTensor[U]:
        """Let :meth:`resolve` give what `function` makes of the result; return this handle. Local.

        The function is called once, on the rank that resolves, and calls no collective.

        Raises:
            UnresolvedError: If the result was taken already.
            GroupError: If `function` is none.

        Example:
            >>> norm = group.all_reduce(x @ x).map(np.sqrt)
            >>> norm.resolve()
        """
        if self._resolved:
            raise UnresolvedError(f"{self._call} is resolved; map its handle before that")
        function, finish = as_function(function, "function", GroupError), self._finish

        def last() -> Any:
            return function(self._received() if finish is None else finish())

        self._finish = last
        return cast("CollectiveTensor[U]", self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: an operation has one handle.

        Raises:
            UnresolvedError: Always.
        """
        raise UnresolvedError(
            f"the handle of {self._call} cannot be copied or pickled: copy the array that "
            "resolve() returns"
        )

    def __repr__(self) -> str:
        """Say what was called and how far it is. Never waits, never tests."""
        state = "failed" if self._error else "resolved" if self._resolved else "started"
        return f"<CollectiveTensor {self._call.text()} on {self._call.group!r}, {state}>"

    def _warn(self) -> None:
        """Warn, with the line that started it, about a result that nobody took."""
        call = self._call
        filename, line = site_line(call.site)
        planned = ", planned at this line and started by its start()," if call.planned else ""
        message = (
            f"the result of {call.text()} on group {call.group!r}{planned} was dropped "
            f"on rank {self._group.world_rank} before it was resolved; keep the handle and "
            "call resolve()"
        )
        warnings.warn_explicit(message, UnresolvedWarning, filename, line)

    # -- for the group -----------------------------------------------------------------------

    def _result(self) -> T_co:
        """Return the result, for the stream that is current where it is asked for."""
        if self._event is not None and self._scope is not None:
            self._scope.follow(self._event)
        return cast("T_co", self._value)

    def _received(self) -> Any:
        """Return what came, of which the result is made."""
        request = self._request
        if isinstance(request, NodeMessage) and request.value is not None:
            return request.value
        if self._value is None and isinstance(request, StagedRequest):
            return request.value
        return self._value

    def _complete(self) -> None:
        """Wait for it and take its result; an error is raised where it is resolved."""
        try:
            self._group.wait(self, None)
            if self._scope is None:
                self._settle()
            else:
                self._settle_in(self._scope)
        except MpimeshError as error:
            self._fail(self._explained(error))

    def _compare(self) -> None:
        """Look whether a rank of this node has started something else, here or before.

        Raises:
            MismatchError: If so.
        """
        operation, request = self._compared(), self._request
        if operation is not None:
            differs = operation.differs()
        elif self._call.number and isinstance(request, Moved) and request.after is not None:
            # It waits for its turn, behind what may never end.
            node = self._group.communicator.node
            differs = node is not None and node.difference is not None
        else:
            return
        if differs:
            communicator = self._group.communicator
            raise mismatch(communicator.node, communicator.node_ranks, self._call.group)

    def _explained(self, error: BaseException) -> BaseException:
        """Return what is behind an error of the transport, as far as it is known."""
        if isinstance(error, TransportError | MismatchError):
            communicator, group = self._group.communicator, self._call.group
            return explained(communicator, group, error, self._compared())
        return error

    def _settle_in(self, scope: StreamScope) -> None:
        """Take the result in the order of the stream that it was called on."""
        with scope.current():
            self._settle()
        # An array on the host is there by now. Without any, the input may still be read.
        if not isinstance(self._value, np.ndarray):
            self._event = scope.mark()

    def _settle(self) -> None:
        """Take the result of the finished request, and let go of the buffers.

        Raises:
            MismatchError: If a rank of this node has started something else in its place.
        """
        if self._unlock is not None:
            self._give_back()  # first: the result may be written into the caller's own array
        # What a signal handler raises here, where nothing is made yet, leaves it to be taken again.
        if self._error is None:
            try:
                self._compare()
            except MismatchError as error:
                self._error = error
                self._group.abandon()  # over here, but perhaps not elsewhere
        operation = self._compared()
        if self._error is None and operation is not None and operation.misfit:
            self._error = self._group.misfit(self._call, operation, self._value)
        if self._error is not None:
            self._release()
            raise self._error
        if self._finish is None:
            if self._value is None or isinstance(self._request, NodeMessage):
                self._value = self._received()
            self._release()
            return
        try:
            value = self._finish()
            # What a signal handler raises from here on must not have it made twice: a mean would
            # be divided again.
            self._finish = lambda: value
            self._value = value
        except Exception as error:
            self._error = error  # a second resolve must not find a half-made result
            if isinstance(error, MismatchError):
                self._group.abandon()
            raise
        except BaseException as error:  # such as Ctrl-C, which is no error of the operation's
            self._error = TransportError(
                f"rank {self._group.world_rank}: {type(error).__name__} came while the result of "
                f"{self._call} was made of what had come; the result is lost, start it again"
            )
            raise
        finally:
            self._release()

    def _is_over(self) -> bool:
        """Tell whether the transport is done with the buffers. Never waits."""
        settled = getattr(self._request, "settled", None)
        if settled is not None:
            return bool(settled)  # a test might start its next step
        try:
            return bool(self._request.test())
        except MpimeshError:
            return True

    def _failed_with(self, error: BaseException) -> bool:
        """Tell whether `error` has ended the request, and is none that came from elsewhere."""
        return getattr(self._request, "error", None) is error

    def _fail(self, error: BaseException) -> None:
        """Remember that the operation ended with `error` for this rank."""
        self._error = error
        request = self._request
        held = request, self._finish, self._value, self._operand, self._prepared
        if not self._is_over():
            self._group.abandon(*held)
            if isinstance(error, MismatchError) and isinstance(request, Moved):
                request.give_up(error)
        elif isinstance(error, TransportError | MismatchError):
            # Over here, but perhaps not elsewhere; and one that consists of several messages ends
            # with the first that fails, while MPI may still write the others.
            self._group.abandon(*(held if hasattr(request, "settled") else ()))
        self._release()

    def _let_go(self) -> None:
        """Give up what was started if its wait was ended by an exception from elsewhere."""
        if self._interrupted and not self._resolved:
            self._fail(ClosedError(f"{self._call}: it was interrupted, and its group is closed"))

    def _release(self) -> None:
        """Drop everything but the result; the operation is over for this rank."""
        self._finish = None
        prepared = self._prepared
        if prepared is not None:
            if self._error is None:
                prepared.busy = False
            self._prepared = None
        if self._unlock is not None:
            self._give_back()
        self._end(self._error is not None)

    def _give_back(self) -> None:
        """Make the caller's array writable again."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    # -- refusals to be an array -------------------------------------------------------------
    #
    # Without them Python says that ``+`` does not know a CollectiveTensor, and NumPy makes an array
    # that holds the handle.

    def _refusal(self, example: str) -> UnresolvedError:
        cure = "is no array yet: resolve it first"
        if self._resolved:
            cure = "does not become its array: use what resolve() returned"
        return UnresolvedError(
            f"a CollectiveTensor {cure}, as in {example}; it is the result of {self._call}"
        )

    # In place, too: Python takes the binary method where there is no other.
    __add__, __radd__ = _binary("+"), _reflected("+")
    __sub__, __rsub__ = _binary("-"), _reflected("-")
    __mul__, __rmul__ = _binary("*"), _reflected("*")
    __matmul__, __rmatmul__ = _binary("@"), _reflected("@")
    __truediv__, __rtruediv__ = _binary("/"), _reflected("/")
    __floordiv__, __rfloordiv__ = _binary("//"), _reflected("//")
    __mod__, __rmod__ = _binary("%"), _reflected("%")
    __pow__, __rpow__ = _binary("**"), _reflected("**")
    __and__, __rand__ = _binary("&"), _reflected("&")
    __or__, __ror__ = _binary("|"), _reflected("|")
    __xor__, __rxor__ = _binary("^"), _reflected("^")
    __lshift__, __rlshift__ = _binary("<<"), _reflected("<<")
    __rshift__, __rrshift__ = _binary(">>"), _reflected(">>")
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")
    __neg__, __pos__ = _refusing("-handle.resolve()"), _refusing("+handle.resolve()")
    __invert__, __abs__ = _refusing("~handle.resolve()"), _refusing("abs(handle.resolve())")
    __round__ = _refusing("handle.resolve().round()")
    __int__, __float__ = _refusing("int(handle.resolve())"), _refusing("float(handle.resolve())")
    __complex__ = _refusing("complex(handle.resolve())")
    __index__ = _refusing("int(handle.resolve())")
    __getitem__, __iter__ = _refusing("handle.resolve()[i]"), _refusing("iter(handle.resolve())")
    __setitem__ = _refusing("handle.resolve()[i] = x")
    __contains__ = _refusing("x in handle.resolve()")
    # A handle is no answer to a question: without this, `if handle:` is true whatever comes.
    __bool__ = _refusing("bool(handle.resolve())")
    __len__ = _refusing("len(handle.resolve())")
    __array__ = _refusing("numpy.asarray(handle.resolve())")

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is this very handle.

        Raises:
            UnresolvedError: If it is a number or an array.
        """
        if isinstance(other, numbers.Number) or hasattr(other, "dtype"):
            raise self._refusal("handle.resolve() == x")
        return self is other

    __hash__ = object.__hash__

    def __format__(self, how: str) -> str:
        """Say what it is, if asked for no format of numbers.

        Raises:
            UnresolvedError: If it is.
        """
        if how:
            raise self._refusal("format(handle.resolve(), ...)")
        return str(self)

    def __array_ufunc__(self, function: Any, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse to be an operand of NumPy.

        Raises:
            UnresolvedError: Always.
        """
        raise self._refusal(f"numpy.{function.__name__}(handle.resolve(), ...)")

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        """Refuse to be an argument of NumPy.

        Raises:
            UnresolvedError: Always.
        """
        raise self._refusal(f"numpy.{function.__name__}(handle.resolve(), ...)")


tell_elsewhere(
    CollectiveTensor,
    {
        name: f"its result may: handle.resolve().{name}"
        for name in dir(np.ndarray)
        if not name.startswith("_")
    },
)
