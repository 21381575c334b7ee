"""The message tags of this room.

MPI guarantees tags up to 32767. Those up to `MAX_USER_TAG` (16383) are the users', a few
above it the groups' own (roll calls, shifts, pairwise exchange, up to 16383 + 16). Here

| tags | what |
|---|---|
| 20480 + 2 e | along edge e to the later stage: announcements and activations |
| 20480 + 2 e + 1 | along edge e to the earlier stage: gradients |
| 28672 | the alarm by which a failed rank ends the step of the others |

:class:`~mpimesh.schedule.Edges` numbers the edges: e = s goes from stage s to s + 1, and those of
skips come after these.

No tag holds the number of a microbatch, so none grows: messages of one tag
between two ranks arrive in order, and a valid schedule receives the messages of each pair of stages
in the order in which they are sent.
"""

from __future__ import annotations

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Action, ActionKind, Edges

__all__ = ["ALARM_TAG", "MAX_EDGES", "message_tag"]

_FIRST = 20480

MAX_EDGES = 4096
"""Most edges of a pipeline: one less than stages, and the skips."""

ALARM_TAG = _FIRST + 2 * MAX_EDGES


def message_tag(action: Action, edges: Edges | None = None) -> int:
    """Return the tag of a SEND, or of the SEND that a RECV belongs to.

    Args:
        action: The SEND or RECV.
        edges: Those of the pipeline. Messages between neighbours do not need them.

    Raises:
        ScheduleError: If the action moves no message, or one along an edge that is not among
            `edges`, or there are too many edges.
    """
    number = (Edges(action.stage + 2) if edges is None else edges).number(action)
    if number >= MAX_EDGES:
        raise ScheduleError(
            f"a pipeline has at most {MAX_EDGES} edges between stages, got edge {number} for "
            f"{action}; make fewer stages or skips"
        )
    return _FIRST + 2 * number + (action.kind in (ActionKind.SEND_B, ActionKind.RECV_B))
