"""Calls of a rank with their places in the user's program; tracebacks that show no other places."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from mpimesh.arguments import digest_bits, rank_names, shown
from mpimesh.errors import GroupError, MpimeshError, RemoteError, SettingsError
from mpimesh.settings import Settings

if TYPE_CHECKING:
    # Importing mpimesh, which imports this module, is to load little.
    from mpimesh.comm.signatures import Signatures

__all__ = [
    "Call",
    "Message",
    "Site",
    "call_site",
    "call_stack",
    "handled_exception",
    "has_unshown_cause",
    "innermost_line",
    "main_thread_stack",
    "readable",
    "site_line",
    "site_text",
    "user_line",
    "write_error",
]

Site = tuple[CodeType, int]
"""A place in a program: the code object and the offset of the instruction in it."""

_PACKAGE = __name__.split(".", 1)[0] + "."
_PACKAGES = (_PACKAGE, "numpy.", "contextlib")
"""Operators of a split array come by NumPy's mixin."""


def call_site(depth: int = 1) -> Site:
    """Return the innermost place outside mpimesh and NumPy on the stack.

    Costs a walk over a few frames. The line number is worked out only when it
    is shown.

    Args:
        depth: How many callers are known to be mpimesh's own.
    """
    frame = sys._getframe(depth)
    while frame.f_globals.get("__name__", "").startswith(_PACKAGES) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def site_line(site: Site) -> tuple[str, int]:
    """Return the file and line of a place."""
    code, offset = site
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line)
    return code.co_filename, next(lines, code.co_firstlineno)


def site_text(site: Site) -> str:
    """Return ``file:line`` of a place."""
    filename, line = site_line(site)
    return f"{filename}:{line}"


def call_stack() -> tuple[str, ...]:
    """Return ``file:line`` of all places on the stack that are the user's, innermost first."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_PACKAGES):
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(places)


class Call:
    """One call of an operation on a group.

    Attributes:
        name: The operation.
        group: The group's name.
        rule: What must agree over ranks beside name, shape and dtype: reduction, root, axis.
        shape: Shape of this rank's array; None if it has none.
        dtype: Its dtype as text.
        label: The caller's own name for this call.
        site: Where it was called.
        peers: The ranks of the group without which it cannot be done; None for all.
        number: Which of the collectives on its communicator it is, from 1; 0 for messages.
        compared: What of the shape must agree over ranks.
        ended: Whether its result was taken, or it has failed.
        planned: Whether `site` is where it was planned, to be started many times elsewhere.
        record: Its place in the rank's flight record; 0 if it has none.
        signatures: Where it is still to be compared with what the others start; None if nowhere.
        word: What this rank has posted there for it.
        hint: What messages say of it besides.
    """

    number = 0
    record = 0
    ended = False
    planned = False
    signatures: Signatures | None = None
    word = 0
    hint = ""

    def __init__(
        self,
        name: str,
        group: str,
        rule: str = "",
        shape: Any = None,
        dtype: object = "",
        label: str | None = None,
        compared: object = None,
        peers: tuple[int, ...] | None = None,
    ) -> None:
        if label is not None and not isinstance(label, str):
            raise GroupError(f"label must be text or None, got {shown(label)}")
        self.name = name
        self.group = group
        self.rule = rule
        self.shape = shape
        self.dtype = dtype
        self.label = label
        self.peers = peers
        self.compared = compared
        # Neither this constructor nor the operation that calls it.
        self.site = call_site(3)

    def __str__(self) -> str:
        """Return the call with its place, as error messages show it."""
        planned = ", planned" if self.planned else ""
        place = site_text(self.site) + self.hint
        return f"{self.text()} on group {self.group!r}{planned} at {place}"

    def text(self) -> str:
        """Return the call without its place."""
        shape = "" if self.shape is None else f"shape {tuple(self.shape)}"
        parts = (shape, str(self.dtype), self.rule, self.label and f"label {self.label!r}")
        return f"{self.name}({', '.join(part for part in parts if part)})"

    def fingerprint(self, compared_shape: object) -> int:
        """Return 63 bits that are equal on two ranks only if their calls agree.

        Args:
            compared_shape: The part of the shape that must agree, None if none must.
        """
        parts = (self.name, self.group, compared_shape, self.dtype, self.rule, self.label)
        text = "|".join(map(str, parts))
        return digest_bits(text.encode(errors="backslashreplace"), 63)


class Message(Call):
    """The call of one end of a message.

    Attributes:
        peer: The other rank, counted in the group.
        tag: Its tag.
        count: Which of the messages between the two it is, from 1; 0 if nobody counts.
    """

    def __init__(
        self,
        name: str,
        group: str,
        peer: int,
        tag: int,
        shape: Any,
        dtype: object,
        label: str | None,
    ) -> None:
        end = "dest" if name == "send" else "source"
        super().__init__(
            name, group, f"{end} {peer}, tag {tag}", shape, dtype, label, None, (peer,)
        )
        self.peer = peer
        self.tag = tag
        self.count = 0


# -- what users see -------------------------------------------------------------------------------


def write_error(rank: int | Collection[int], text: str) -> None:
    """Write `text` to stderr in one piece, each line with the rank or ranks before it."""
    name = f"rank {rank}" if isinstance(rank, int) else rank_names(rank)
    lines = "".join(f"[{name}] {line}\n" for line in text.splitlines())
    with suppress(Exception):
        sys.stderr.write(lines)
        sys.stderr.flush()


# -- tracebacks of exceptions --------------------------------------------------------------------


def readable(error: BaseException) -> str:
    """Return the traceback of `error`, and of what it came from, without mpimesh's own frames.

    Of an exception of another kind, those of the room of mpimesh within which it was raised stay.
    With ``MPIMESH_CHECKS=2`` nothing is left out.
    """
    shown = traceback.TracebackException.from_exception(error)
    with suppress(SettingsError):
        if Settings.from_environment().checks > 1:
            return "".join(shown.format())
    _hide_own_frames(shown, error)
    return "".join(shown.format())


def has_unshown_cause(error: BaseException) -> bool:
    """Tell whether `error` came up while the program dealt with another that nobody has shown."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is None or isinstance(error, RemoteError):  # which tells it in its message
        return False
    return str(before) not in str(error) or not any(map(_room, _frames(before)[-1:]))


def _hide_own_frames(shown: traceback.TracebackException, error: BaseException) -> None:
    rooms = [_room(frame) for frame in _frames(error)]
    visible = [not room for room in rooms]
    at = len(rooms)
    while at and rooms[-1] == rooms[at - 1] and not isinstance(error, MpimeshError):
        at -= 1
        visible[at] = True
    if not any(visible) and visible:
        visible[-1] = True
    frames = [frame for frame, show in zip(shown.stack, visible, strict=False) if show]
    shown.stack = traceback.StackSummary.from_list(frames)
    for link, before in (
        (shown.__cause__, error.__cause__),
        (shown.__context__, error.__context__),
    ):
        if link is not None and before is not None:
            _hide_own_frames(link, before)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _room(frame: FrameType) -> str:
    """Return the room of mpimesh that a frame is of, such as ``mpimesh.nn``; empty for others."""
    module = str(frame.f_globals.get("__name__", ""))
    return ".".join(module.split(".")[:2]) if module.startswith(_PACKAGE) else ""


# -- stacks of threads, as another thread sees them ------------------------------------------------


def user_line(thread_id: int | None) -> str:
    """Return ``file:line`` of the innermost frame outside mpimesh; empty if there is none."""
    frame = _frame_of(thread_id)
    while frame is not None and _room(frame):
        frame = frame.f_back
    return _line(frame)


def innermost_line(thread_id: int | None) -> str:
    """Return ``file:line`` of the innermost frame; empty if there is none."""
    return _line(_frame_of(thread_id))


def handled_exception(thread_id: int | None) -> str:
    """Return the traceback of the exception that a thread deals with; empty if there is none."""
    active: Any = None if thread_id is None else sys._current_exceptions().get(thread_id)
    error = active[1] if isinstance(active, tuple) else active  # a tuple before Python 3.12
    return readable(error) if isinstance(error, Exception) else ""


def main_thread_stack() -> str:
    """Return the stack of the main thread: the program's own frames, and the innermost of all."""
    frame = _frame_of(threading.main_thread().ident)
    if frame is None:
        return ""
    frames = list(traceback.walk_stack(frame))
    shown = [frames[0], *(step for step in frames[1:] if not _room(step[0]))]
    return "".join(traceback.StackSummary.extract(reversed(shown)).format())


def _frame_of(thread_id: int | None) -> FrameType | None:
    return None if thread_id is None else sys._current_frames().get(thread_id)


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
