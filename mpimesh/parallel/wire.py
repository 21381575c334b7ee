"""What both directions of a pipeline's messages need in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from mpimesh.arrays import Array, namespace
from mpimesh.errors import TransportError
from mpimesh.runtime import ProcessGroup, Traffic
from mpimesh.schedule import Action
from mpimesh.trace import Tracer
from mpimesh.transport import RecvRequest, Request

__all__ = ["Ended", "Guarded", "Wire"]


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


@dataclass(frozen=True, slots=True)
class Wire:
    """The pipeline's ranks, as the messages of one step see them.

    Attributes:
        group: The ranks of the pipeline.
        library: NumPy, or CuPy where activations and gradients stay on devices. The same on all
            ranks.
        placement: For each stage the rank that holds it.
        look: Raises if the step is to be left.
        traffic: Counts the messages.
        tracer: Records them.
    """

    group: ProcessGroup
    library: ModuleType
    placement: Sequence[int]
    look: Callable[[], None]
    traffic: Traffic
    tracer: Tracer

    def isend(self, data: Array, peer: int, tag: int) -> Request:
        """Start a send of flat bytes, from wherever they lie."""
        request: Request = self.group.side(namespace(data)).isend(data, peer, tag)
        return request

    def irecv(self, data: Array, peer: int, tag: int) -> RecvRequest:
        """Start a receive of flat bytes into `data`, which lies where they come from, too."""
        request: RecvRequest = self.group.side(namespace(data)).irecv(data, peer, tag)
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
        peer = self.placement[action.partner.stage]
        self.group.wait_for(request, what=f"pipeline action {action}", peers=(peer,))

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
