"""Tracebacks and stacks as users see them: their own places, and no others."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from mpimesh.arguments import rank_names
from mpimesh.errors import MpimeshError, RemoteError, SettingsError
from mpimesh.settings import Settings

__all__ = [
    "handled_exception",
    "has_unshown_cause",
    "innermost_line",
    "main_thread_stack",
    "readable",
    "user_line",
    "write_error",
]

_PACKAGE = __name__.split(".", 1)[0] + "."


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
