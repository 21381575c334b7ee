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

from mpimesh.schedule.action import Action
from mpimesh.schedule.schedule import Schedule

__all__ = ["Progress"]


class Progress:
    """How far the ranks of a lowered schedule get, whose sends and receives match.

    Computing never waits, so only the messages of each rank are kept: as numbers, because
    they are gone through once for every `send_window` that is tried.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._steps: list[list[int]] = []  # for each rank: where its messages stand in its list
        self._messages: list[list[tuple[int, bool]]] = []  # and their numbers, and if it sends
        numbers: dict[Action, int] = {}
        ends: dict[tuple[int, bool], int] = {}  # the rank at the sending and receiving end
        for rank, actions in enumerate(schedule.ranks):
            steps, messages = [], []
            for step, action in enumerate(actions):
                if action.kind.is_message:
                    sends = action.kind.is_send
                    sending = action if sends else action.partner
                    number = numbers.setdefault(sending, len(numbers))
                    steps.append(step)
                    messages.append((number, sends))
                    ends[number, sends] = rank
            self._steps.append(steps)
            self._messages.append(messages)
        self._senders = [ends[number, True] for number in range(len(numbers))]
        self._receivers = [ends[number, False] for number in range(len(numbers))]

    def blocked(self, *, send_window: int | None = None) -> dict[int, int]:
        """Return the ranks that wait for ever, each with the step it waits in; empty if none.

        Args:
            send_window: Most sends of a rank that may be unfinished while it goes on; None is
                no limit.
        """
        limit = len(self._senders) if send_window is None else send_window
        position = [0] * len(self._messages)
        unfinished = [0] * len(self._messages)
        sent, received = [False] * len(self._senders), [False] * len(self._senders)
        queue = deque(range(len(self._messages)))
        while queue:
            rank = queue.popleft()
            messages = self._messages[rank]
            while position[rank] < len(messages):
                number, sends = messages[position[rank]]
                if sends:
                    if not sent[number]:
                        sent[number] = True
                        if received[number]:
                            queue.append(self._receivers[number])
                        else:
                            unfinished[rank] += 1
                    if unfinished[rank] > limit:
                        break
                else:
                    if not received[number]:
                        received[number] = True
                        if sent[number]:
                            unfinished[self._senders[number]] -= 1
                            queue.append(self._senders[number])
                    if not sent[number]:
                        break
                position[rank] += 1
        return {
            rank: steps[position[rank]]
            for rank, steps in enumerate(self._steps)
            if position[rank] < len(steps)
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
