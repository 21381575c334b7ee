"""Barriers: with and without a limit, and one that tells who is missing."""

from __future__ import annotations

import numpy as np

from mpimesh.arguments import as_time
from mpimesh.errors import CollectiveTimeoutError, GroupError
from mpimesh.runtime.call import Call
from mpimesh.runtime.group_core import GroupCore
from mpimesh.runtime.handle import CollectiveTensor
from mpimesh.runtime.traffic import uniform
from mpimesh.transport import MAX_USER_TAG, RecvRequest, Request

__all__ = ["Barriers"]

_ROLL_CALL_TAG = MAX_USER_TAG + 5
_NOTE_BYTES = 8


class Barriers(GroupCore):
    """``barrier`` of a group."""

    def start_barrier(self, *, label: str | None = None) -> CollectiveTensor:
        """Start a barrier: the handle is done once every rank of the group has started it.

        Collective. ``resolve()`` gives None.
        """
        return self._launch("barrier", lambda: self.communicator.barrier(), label=label)

    def barrier(self, *, timeout_s: float | None = None, label: str | None = None) -> None:
        """Wait until every rank of the group has come.

        Collective, with or without `timeout_s` on all ranks alike.

        Args:
            timeout_s: Longest wait in seconds. With a limit, each rank tells every other that
                it has come, so that a timeout can name who has not.
            label: The caller's name for this barrier.

        Raises:
            GroupError: If `timeout_s` is no time.
            CollectiveTimeoutError: After `timeout_s`, naming the ranks that did not come; on
                every rank that did. A rank that comes later finds all others there and does
                not raise.

        Cost:
            ``log2(n) * latency_s``; with a limit, n-1 messages of 8 bytes from each of n ranks.
        """
        limit_s = as_time(timeout_s, "timeout_s of a barrier", GroupError)
        if limit_s is None:
            self.start_barrier(label=label).resolve()
        else:
            self._roll_call(limit_s, label)

    def _roll_call(self, timeout_s: float, label: str | None) -> None:
        rank = self._member("barrier")
        communicator = self.communicator
        call = Call("barrier", self.name, rule=f"timeout_s {timeout_s}", label=label)
        traffic = self._context.traffic
        traffic.admit_by(call, uniform, self._members, _NOTE_BYTES)
        traffic.count("barrier", _NOTE_BYTES * (self.size - 1))
        traffic.counter.add("barrier", uniform, self._members, _NOTE_BYTES)
        # Counted by communicator: groups of the same ranks share one, and so its messages.
        communicator.roll_calls = current = communicator.roll_calls + 1
        number = np.array([current])
        heard = {peer: np.zeros(1, np.int64) for peer in range(self.size) if peer != rank}
        receives: dict[int, RecvRequest] = {
            peer: communicator.irecv(buffer, peer, _ROLL_CALL_TAG) for peer, buffer in heard.items()
        }
        sends: list[Request] = [communicator.isend(number, p, _ROLL_CALL_TAG) for p in heard]

        def all_here() -> bool:
            for peer in list(receives):
                if not receives[peer].test():
                    continue
                if heard[peer][0] < current:
                    # Of an earlier barrier that this rank gave up: wait for the current one.
                    receives[peer] = communicator.irecv(heard[peer], peer, _ROLL_CALL_TAG)
                else:
                    del receives[peer]
            unsent = [send for send in sends if not send.test()]
            return not receives and not unsent

        try:
            if self.progress.wait(communicator, all_here, what=call, timeout_s=timeout_s):
                return
        except BaseException:
            self.abandon(number, heard, receives, sends)
            raise
        # A rank that comes later still looks for what this one has sent.
        unsent = [send for send in sends if not send.test()]
        self.abandon(number, unsent)
        missing = sorted(peer for peer, receive in receives.items() if receive.cancel())
        if not missing:  # the last one came in this moment
            return
        raise CollectiveTimeoutError(
            f"{call}: after {timeout_s} s, ranks {missing} of group {self.name!r} had not come "
            f"(ranks {[self.ranks[peer] for peer in missing]} of the mesh); rank {rank} waited"
        )
