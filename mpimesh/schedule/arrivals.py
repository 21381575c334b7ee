"""The number of messages of an edge that can have come before a rank takes the first of them."""

from __future__ import annotations

from mpimesh.schedule.lower import lower
from mpimesh.schedule.messages import Messages
from mpimesh.schedule.schedule import Schedule, check_schedule

__all__ = ["most_waiting"]


def most_waiting(schedule: Schedule, rank: int) -> dict[tuple[int, int], int]:
    """Return the most messages of each edge to `rank` that can be sent and not yet received.

    The most over all speeds of the ranks, where no send waits: so many receives of the edge find a
    message if they are posted ahead, and never more. It is at least 1.

    How. While `rank` stands before a receive, let all others go on until each waits for something:
    no other way of running the ranks sends more by then. Then do the receive, and go on.

    Args:
        schedule: A schedule that :func:`~mpimesh.schedule.validate` has proved; lowered here if
            it is not.
        rank: The rank that receives.

    Returns:
        By the sending stage and the receiving stage of each edge.

    Raises:
        ScheduleError: If there is no such rank.

    Cost:
        Half a microsecond for each message of the whole schedule.

    Example:
        >>> most_waiting(make_schedule("gpipe", 2, 8), 1)
        {(0, 1): 8}
        >>> most_waiting(make_schedule("1f1b", 3, 8), 1)
        {(0, 1): 3, (2, 1): 2}
    """
    check_schedule(schedule).stages_of(rank)
    schedule.stages_of(rank)  # raises if there is none
    messages = Messages(lower(schedule))
    run = _Run(messages)
    for other in range(len(messages.ranks)):
        if other != rank:
            run.go_on(other, held=rank)
    most: dict[tuple[int, int], int] = {}
    for message in messages.ranks[rank]:
        if message >= 0:
            run.send(message, held=rank)
        else:
            edge = messages.edges[~message]
            most[edge] = max(most.get(edge, 0), run.sent[~message] - run.received[~message])
            run.received[~message] += 1
    return most


class _Run:
    """Ranks that go on as far as they can, but for one that is held."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._position = [0] * len(messages.ranks)
        self.sent = [0] * len(messages.edges)
        self.received = [0] * len(messages.edges)

    def send(self, edge: int, *, held: int) -> None:
        """Send a message of the rank that is held, and let the others go on."""
        self.sent[edge] += 1
        self.go_on(self._messages.receivers[edge], held=held)

    def go_on(self, rank: int, *, held: int) -> None:
        """Let `rank` go on until it waits, and then those to which it has sent."""
        ready = [rank]
        while ready:
            rank = ready.pop()
            mine, position = self._messages.ranks[rank], self._position[rank]
            while position < len(mine):
                message = mine[position]
                if message >= 0:
                    self.sent[message] += 1
                    receiver = self._messages.receivers[message]
                    if receiver != held and self._waits(receiver, message):
                        ready.append(receiver)
                elif self.received[~message] < self.sent[~message]:
                    self.received[~message] += 1
                else:
                    break
                position += 1
            self._position[rank] = position

    def _waits(self, rank: int, edge: int) -> bool:
        """Whether `rank` stands before a receive of `edge`."""
        theirs, position = self._messages.ranks[rank], self._position[rank]
        return position < len(theirs) and theirs[position] == ~edge
