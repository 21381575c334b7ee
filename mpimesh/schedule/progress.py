"""Does every rank get to the end of its list? Follow the messages, with no buffering at all.

The model. Each rank goes through its list. The bytes of a message move only when both ends
are there: the sender has reached its SEND and the receiver its RECV, as under rendezvous with
zero buffering. A rank at a RECV waits for the message. A rank at a SEND starts it and goes
on, as long as no more than `send_window` of its sends are unfinished; else it waits
until enough of them have been received. With a window of 0 a send blocks, as `MPI_Ssend`.

Why this covers the executor. The executor promises that sends do not block (their buffers are
kept until they are done), and that a receive is posted no later than its place in
the list. A receive posted earlier, or an MPI that buffers, lets a message move sooner, and never
makes a rank wait that did not wait before: which actions a rank can reach only grows.
So what ends here ends there.

Whether all ranks end does not depend on which of them runs first: a rank that can go on
still can after any other rank went on. One order, here taken from a queue, decides for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from mpimesh.schedule.messages import Messages

__all__ = ["Progress"]


class Progress:
    """The progress of the ranks of a lowered schedule, whose sends and receives match.

    Computing never waits, so only the messages of each rank count. Those of an edge are received
    in the order in which they are sent, so that of each edge it is enough to know how many were
    begun at both ends.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def blocked(self, *, send_window: int | None = None) -> dict[int, int]:
        """Return the ranks that wait for ever, each with the step it waits in; empty if none.

        Args:
            send_window: Most sends of a rank that may be unfinished while it goes on; None is
                no limit.
        """
        messages = self._messages
        senders, receivers = messages.senders, messages.receivers
        limit = len(messages) if send_window is None else send_window
        num_ranks = len(messages.ranks)
        position = [0] * num_ranks
        unfinished = [0] * num_ranks
        waiting = [False] * num_ranks
        sent, received = [0] * len(senders), [0] * len(senders)
        queue = deque(range(num_ranks))
        while queue:
            rank = queue.popleft()
            mine, at = messages.ranks[rank], position[rank]
            if waiting[rank]:
                # Whoever put it back into the queue has done what it waited for.
                waiting[rank] = False
                at += 1
            while at < len(mine):
                number = mine[at]
                if number >= 0:
                    sent[number] += 1
                    if sent[number] > received[number]:
                        unfinished[rank] += 1
                        if unfinished[rank] > limit:
                            waiting[rank] = True
                            break
                    else:
                        queue.append(receivers[number])
                else:
                    number = ~number
                    received[number] += 1
                    if received[number] > sent[number]:
                        waiting[rank] = True
                        break
                    sender = senders[number]
                    unfinished[sender] -= 1
                    if waiting[sender] and unfinished[sender] == limit:
                        queue.append(sender)
                at += 1
            position[rank] = at
        return {
            rank: messages.step(rank, at)
            for rank, at in enumerate(position)
            if at < len(messages.ranks[rank])
        }

    def smallest_send_window(self) -> int:
        """Return the fewest unfinished sends with which no rank waits for ever.

        0 says that the schedule is safe even where every send blocks. Only for a schedule of
        which :meth:`blocked` finds none without a limit.
        """
        # A wider window only lets ranks go on sooner, so the windows that suffice have no gap.
        # Most schedules need few: look at 0, 1, 3, 7, ... first.
        enough = 0
        while self.blocked(send_window=enough):
            enough = 2 * enough + 1
        return bisect_left(
            range(enough), True, key=lambda window: not self.blocked(send_window=window)
        )
