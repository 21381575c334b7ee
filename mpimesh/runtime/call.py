"""Calls of a rank with their places in the user's program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from mpimesh.arguments import digest_bits, shown
from mpimesh.core.call import OWN, CallRecord, Ledger, Site, call_site
from mpimesh.errors import GroupError

__all__ = [
    "Call",
    "Message",
    "RecordedGroup",
    "Site",
    "call_site",
    "call_stack",
    "last_words",
    "site_line",
    "site_text",
]


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
        if not frame.f_globals.get("__name__", "").startswith(OWN):
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(places)


class Call(CallRecord):
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
        posted: What its ranks compare it by, if that is not the request itself; None if they do
            not, or it is over.
        hint: What messages say of it besides.
    """

    __slots__ = ()

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
        self.site = call_site()

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

    __slots__ = ("count", "peer", "tag")

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


# -- records of calls -----------------------------------------------------------------------------


class RecordedGroup(Protocol):
    """The part of a process group that stands in a record."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks."""
        ...

    @property
    def ledger(self) -> Ledger | None:
        """That of its communicator; None if this rank is not in it."""
        ...


def last_words(calls: Sequence[Call]) -> str:
    """Return the last calls of a rank, the latest last, for stderr."""
    lines: list[list[Any]] = []
    for call in list(calls):
        number = f" as number {call.number}" if call.number else ""
        text = str(call)
        state = "" if call.ended else ", not ended"
        if lines and lines[-1][0] == text and not state:
            lines[-1][1:] = [number, lines[-1][2] + 1, state]
        else:
            lines.append([text, number, 1, state])
    rows = [
        f"  {text}{number}{f', {times} times' if times > 1 else ''}{state}"
        for text, number, times, state in lines
    ]
    return "\n".join(["last operations of this rank:", *rows])
