"""Tracebacks without mpimesh's own frames, where these say nothing about the error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from itertools import takewhile
from types import FrameType, TracebackType

__all__ = ["from_user_on", "up_to_user"]

_PACKAGE = __name__.split(".", 1)[0] + "."


def from_user_on(error: BaseException) -> str:
    """Return the traceback of `error` from the first frame outside mpimesh on.

    Where there is none the last of mpimesh's rooms stays, which is the one that refused.
    """
    modules = _modules(error.__traceback__)
    start = _length(modules, _is_own)
    if start == len(modules):
        room = ".".join(modules[-1].split(".")[:2]) if modules else ""
        start -= _length(reversed(modules), lambda module: module.startswith(room))
    return _formatted(error, slice(start, None))


def up_to_user(error: BaseException) -> str:
    """Return the traceback of `error` up to the last frame outside mpimesh.

    That is where the program called what raised; for an error that tells itself what failed
    inside, and where.
    """
    modules = _modules(error.__traceback__)
    end = len(modules) - _length(reversed(modules), _is_own)
    return _formatted(error, slice(end or None))


def _modules(trace: TracebackType | None) -> list[str]:
    return [_module(frame) for frame, _ in traceback.walk_tb(trace)]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_own(module: str) -> bool:
    return module.startswith(_PACKAGE)


def _length(modules: Iterable[str], test: Callable[[str], bool]) -> int:
    return sum(1 for _ in takewhile(test, modules))


def _formatted(error: BaseException, frames: slice) -> str:
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[frames])
    return "".join(shown.format())
