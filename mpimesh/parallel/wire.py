"""The parts that both directions of a pipeline's messages need in one step.

An activation or gradient goes from rank to rank in one of two ways. Between ranks of a node, from
a size on, the receiver reads it in place: what is sent is a *ticket* of a few bytes, see
:mod:`mpimesh.comm.lending`. All others are messages. Both ends know which, by rank and size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from mpimesh.arrays import Array, HostArray, namespace
from mpimesh.comm import RecvRequest, Request
from mpimesh.comm.lending import Lending
from mpimesh.errors import TransportError
from mpimesh.runtime import ProcessGroup, Traffic
from mpimesh.schedule import Action, Edges
from mpimesh.trace import Tracer

__all__ = ["LENT", "LENT_FROM_BYTES", "Ended", "GivenBack", "Guarded", "Wire"]

LENT = -1
"""Stands for a ticket where the bytes of messages are listed."""

LENT_FROM_BYTES = 8 * 1024
"""Smaller arrays are copied in less time than it takes to lend and borrow them."""


class Guarded:
    """A request whose wait also looks for news, which end it by raising."""

    __slots__ = ("_look", "_request")

    def __init__(self, request: Request, look: Callable[[], None]) -> None:
        self._request = request
        self._look = look

    def test(self) -> bool:
        """Tell whether the request is done; if not, look for news."""
        if self._request.test():
            return True
        self._look()
        return False


class Ended:
    """A request that is done when another one has ended, be it by failing."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def test(self) -> bool:
        """Tell whether nothing more will happen."""
        try:
            return self._request.test()
        except TransportError:
            return True


class GivenBack:
    """Done when a ticket that nobody wants has come, and gone back."""

    __slots__ = ("_ended", "_lending", "_rank", "_ticket")

    def __init__(self, request: Request, ticket: HostArray, rank: int, lending: Lending) -> None:
        self._ended = Ended(request)
        self._ticket = ticket
        self._rank = rank
        self._lending: Lending | None = lending

    def test(self) -> bool:
        """Tell whether it has."""
        if not self._ended.test():
            return False
        if self._lending is not None:
            self._lending.give_back(self._ticket, self._rank)
            self._lending = None
        return True


@dataclass(frozen=True, slots=True)
class Wire:
    """The pipeline's ranks, as the messages of one step see them.

    Attributes:
        group: The ranks of the pipeline.
        library: NumPy, or CuPy where activations and gradients stay on devices. The same on all
            ranks.
        placement: For each stage the rank that holds it.
        edges: The edges between the stages.
        look: Raises if the step is to be left.
        traffic: Counts the messages.
        tracer: Records them.
        lending: Lends arrays to ranks of the node; None if there are none, or arrays stay on
            devices.
    """

    group: ProcessGroup
    library: ModuleType
    placement: Sequence[int]
    edges: Edges
    look: Callable[[], None]
    traffic: Traffic
    tracer: Tracer
    lending: Lending | None = None

    def lender(self, peer: int, nbytes: int) -> Lending | None:
        """Return what lends an array of this size to `peer`, and borrows it there; None if sent."""
        lending = self.lending
        if lending is None or nbytes < LENT_FROM_BYTES or not lending.reaches(peer):
            return None
        return lending

    def isend(self, data: Array, peer: int, tag: int) -> Request:
        """Start a send of flat bytes, from wherever they lie."""
        request: Request = self.group._core.side(namespace(data)).isend(data, peer, tag)
        return request

    def irecv(self, data: Array, peer: int, tag: int) -> RecvRequest:
        """Start a receive of flat bytes into `data`, which lies where they come from, too."""
        request: RecvRequest = self.group._core.side(namespace(data)).irecv(data, peer, tag)
        return request

    def wait(self, request: Request, action: Action) -> None:
        """Wait for a message of `action`, which the trace shows as waiting."""
        if request.test():
            return
        stage, microbatch = action.stage, action.microbatch
        with self.tracer.span(str(action), "wait", stage=stage, microbatch=microbatch):
            guarded = Guarded(request, self.look)
            self.wait_plainly(guarded, action)

    def wait_plainly(self, request: Request, action: Action) -> None:
        """Wait for a message of `action`, whose other end is on its way for sure."""
        peer = self.placement[action.far_stage]
        self.group._core.wait_for(request, what=f"pipeline action {action}", peers=(peer,))

    def record(
        self, category: Literal["send", "recv"], action: Action, start_s: float, nbytes: int
    ) -> None:
        """Note in the trace a message that is done."""
        if self.tracer.enabled:
            self.tracer.record(
                str(action),
                category,
                start_s=start_s,
                duration_s=self.tracer.clock() - start_s,
                nbytes=nbytes,
                stage=action.stage,
                microbatch=action.microbatch,
            )
