"""The messages of a lowered schedule by edges, as numbers: they are gone through many times."""

from __future__ import annotations

from mpimesh.schedule.action import ActionKind
from mpimesh.schedule.schedule import Schedule

__all__ = ["Messages"]


class Messages:
    """The messages of a schedule whose actions exist, see :class:`~mpimesh.schedule.rules.Rules`.

    An edge goes from one stage to another; edges are numbered as they come.

    Attributes:
        schedule: Where the messages stand.
        ranks: For each rank its messages in order: the number of the edge for a send, and
            ``~number`` for a receive.
        edges: For each edge the stage that sends and the one that receives.
        senders: For each edge the rank at its beginning.
        receivers: For each edge the rank at its end.
        sends: For each edge the microbatches in the order in which they are sent.
        recvs: For each edge the microbatches in the order in which they are received.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks: list[list[int]] = []
        self.edges: list[tuple[int, int]] = []
        self.senders: list[int] = []
        self.receivers: list[int] = []
        self.sends: list[list[int]] = []
        self.recvs: list[list[int]] = []
        numbers: dict[tuple[int, int], int] = {}
        # What a kind on a stage is; None for a computation.
        known: dict[tuple[ActionKind, int, int | None], int | None] = {}
        for actions in schedule.ranks:
            messages = []
            for action in actions:
                key = action.kind, action.stage, action.other
                if key in known:
                    message = known[key]
                elif action.kind.is_message:
                    stages = action.stage, action.far_stage
                    edge = stages if action.kind.is_send else stages[::-1]
                    number = numbers.setdefault(edge, len(numbers))
                    if number == len(self.edges):
                        self._add(edge)
                    message = known[key] = number if action.kind.is_send else ~number
                else:
                    message = known[key] = None
                if message is not None:
                    messages.append(message)
                    if message >= 0:
                        self.sends[message].append(action.microbatch)
                    else:
                        self.recvs[~message].append(action.microbatch)
            self.ranks.append(messages)

    @property
    def match(self) -> bool:
        """Whether each edge's messages are received in the order in which they are sent."""
        return self.sends == self.recvs

    def __len__(self) -> int:
        return sum(map(len, self.sends))

    def step(self, rank: int, position: int) -> int:
        """Return where the message `position` of `rank` stands in its list."""
        actions = enumerate(self.schedule.ranks[rank])
        steps = (step for step, action in actions if action.kind.is_message)
        return next(step for number, step in enumerate(steps) if number == position)

    def _add(self, edge: tuple[int, int]) -> None:
        placement = self.schedule.placement
        self.edges.append(edge)
        self.senders.append(placement[edge[0]])
        self.receivers.append(placement[edge[1]])
        self.sends.append([])
        self.recvs.append([])
