"""With ``MPIMESH_CHECKS`` on: ranks that wait ask each other what they wait in, and find circles.

A rank that has waited for half a second asks all ranks of its line; those that wait themselves
answer from within their waits, the others later or never. If what it hears is a circle, it asks
once more: who is in the same wait as before was in it all the time between, so all of them at once,
and the circle is real. It then tells those who wait for it, and all raise the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from mpimesh.errors import DeadlockError
from mpimesh.runtime.lines import Line, Lines
from mpimesh.runtime.progress import Progress, Wait
from mpimesh.runtime.wait_graph import Waiting, circle_of, circle_text, reaching
from mpimesh.transport import Request

__all__ = ["DeadlockSearch"]

_QUESTION_TAG, _ANSWER_TAG, _VERDICT_TAG = 4, 5, 6
_LOOK_EVERY_S = 0.02
_FIRST_S = 0.5
"""Length of a wait after which its rank asks, in seconds."""
_ANSWERS_S = 0.25
"""Limit for answers, in seconds; a rank that is late counts as one that does not wait."""
_LONGEST_PAUSE_S = 8.0


class DeadlockSearch:
    """The questions, answers and verdicts of one process.

    Args:
        rank: This rank in MPI's world.
        progress: Its waits.
        lines: Ways to the other ranks.
    """

    def __init__(self, rank: int, progress: Progress, lines: Lines) -> None:
        self._rank = rank
        self._progress = progress
        self._lines = lines
        self._wait: Wait | None = None
        self._serial = 0
        self._next_look_s = self._next_round_s = self._round_ends_s = 0.0
        self._pause_s = _FIRST_S
        self._round = 0
        self._asked: dict[int, int] = {}
        self._answers: dict[int, tuple[int, Waiting]] = {}
        self._suspects: dict[int, int] = {}
        self._sends: list[Request] = []

    def look(self, wait: Wait) -> None:
        """Listen, answer and ask every now and then during `wait`. Never waits.

        Raises:
            DeadlockError: If this rank waits for a circle of ranks, or is in it.
        """
        now_s = time.monotonic()
        if wait is not self._wait:
            self._begin(wait, now_s)
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_EVERY_S
        for one in self._lines:
            self._listen(one)
        line = self._line_of(wait)
        if line is None:
            return
        if self._round_ends_s and (now_s >= self._round_ends_s or not self._missing()):
            self._end_round(line, now_s)
        elif not self._round_ends_s and now_s >= self._next_round_s:
            self._ask(line, now_s)

    def _begin(self, wait: Wait, now_s: float) -> None:
        self._wait = wait
        self._serial += 1
        self._pause_s = _FIRST_S
        self._next_round_s, self._round_ends_s = now_s + _FIRST_S, 0.0
        self._suspects = {}

    def _line_of(self, wait: Wait) -> Line | None:
        ranks = getattr(wait.communicator, "world_ranks", ())
        return self._lines.find(ranks) if ranks and -1 not in ranks else None

    # -- asking --------------------------------------------------------------------------

    def _ask(self, line: Line, now_s: float) -> None:
        self._round += 1
        self._answers = {}
        self._round_ends_s = now_s + _ANSWERS_S
        # Who has not answered an earlier question yet is not asked another one.
        free = [one for one in line.world_ranks if one != self._rank and one not in self._asked]
        self._asked |= dict.fromkeys(free, self._round)
        self._send(line, _QUESTION_TAG, self._round, free)

    def _missing(self) -> bool:
        return any(number == self._round for number in self._asked.values())

    def _end_round(self, line: Line, now_s: float) -> None:
        self._round_ends_s = 0.0
        mine = self._state()
        states = {rank: state for rank, (_, state) in self._answers.items()}
        circle: list[int] = []
        if mine is not None:
            states[self._rank] = mine
            circle = circle_of(states, self._rank)
        serials = {rank: serial for rank, (serial, _) in self._answers.items()}
        serials[self._rank] = self._serial
        if circle and all(self._suspects.get(rank) == serials[rank] for rank in circle):
            report = circle_text(states, circle)
            told = {rank: serials[rank] for rank in reaching(states, circle)}
            verdict = [report, [[rank, serial] for rank, serial in told.items()]]
            self._send(line, _VERDICT_TAG, verdict, (one for one in told if one != self._rank))
            raise DeadlockError(report)
        self._suspects = {rank: serials[rank] for rank in circle}
        if circle:
            self._next_round_s = now_s
        else:
            self._next_round_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    # -- listening -----------------------------------------------------------------------

    def _listen(self, line: Line) -> None:
        for source, message in line.messages(_QUESTION_TAG):
            number = json.loads(bytes(message))
            state = self._state()
            fields = None if state is None else asdict(state)
            self._send(line, _ANSWER_TAG, [number, self._serial, fields], [source])
        for source, message in line.messages(_ANSWER_TAG):
            number, serial, fields = json.loads(bytes(message))
            if self._asked.get(source) == number:
                del self._asked[source]
            if number == self._round and fields is not None:
                self._answers[source] = serial, Waiting(**fields)
        for _, message in line.messages(_VERDICT_TAG):
            report, told = json.loads(bytes(message))
            if [self._rank, self._serial] in told:
                raise DeadlockError(report)
        self._sends = [send for send in self._sends if not send.test()]

    def _state(self) -> Waiting | None:
        return None if self._wait is None else Waiting.of(self._wait, self._progress)

    def _send(self, line: Line, tag: int, value: Any, ranks: Iterable[int]) -> None:
        message = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
        for rank in ranks:
            self._sends.append(line.communicator.isend(message, line.place(rank), tag))
