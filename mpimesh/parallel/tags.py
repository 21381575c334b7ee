"""The message tags of this room.

MPI guarantees tags up to 32767. Those up to `MAX_USER_TAG` (16383) are the users', a few
above it the groups' own (roll calls, shifts, pairwise exchange, up to 16383 + 16). Here

| tags | what |
|---|---|
| 20480 + 2 s | from stage s to stage s + 1: announcements and activations |
| 20480 + 2 s + 1 | from stage s to stage s - 1: gradients |
| 28672 | the alarm by which a failed rank ends the step of the others |

No tag holds the number of a microbatch, so none grows: messages of one tag
between two ranks arrive in order, and a valid schedule receives the messages of each pair of stages
in the order in which they are sent.
"""

from __future__ import annotations

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Action, ActionKind

__all__ = ["ALARM_TAG", "MAX_STAGES", "message_tag"]

_FIRST = 20480

MAX_STAGES = 4096
"""Most stages of a pipeline."""

ALARM_TAG = _FIRST + 2 * MAX_STAGES


def message_tag(action: Action) -> int:
    """Return the tag of a SEND, or of the SEND that a RECV belongs to.

    Raises:
        ScheduleError: If the action moves no message, or there are too many stages.
    """
    send = action if action.kind.is_send else action.partner
    if send.stage >= MAX_STAGES:
        raise ScheduleError(f"a pipeline has at most {MAX_STAGES} stages, got stage {send.stage}")
    return _FIRST + 2 * send.stage + (send.kind is ActionKind.SEND_B)
