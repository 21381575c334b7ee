"""Collectives in shared memory without the cost of steps, where that counts.

The same sums as in `team_reduce.py`, as requests with a state instead of
generators, and with all views of memory kept from the last time: a training loop
reduces the same arrays again and again. It saves half of the 20 us that the steps
take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError, MpimeshError, on_all_ranks
from mpimesh.transport.base import Request
from mpimesh.transport.board import Entry
from mpimesh.transport.engine import Engine
from mpimesh.transport.team import Team
from mpimesh.transport.team_reduce import reduce_into
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import EXCHANGE, operation_text

__all__ = ["InPlaces", "OneShot", "Staging", "mismatch"]


class Staging:
    """One rank's array on its way through the stage, as a whole."""

    __slots__ = ("_op", "_source", "_target", "_team")

    def __init__(self, team: Team, op: str, source: HostArray, target: HostArray) -> None:
        self._team = team
        self._op = op
        self._source = source
        self._target = target

    def put(self) -> None:
        """Stage the array for the next meeting."""
        source = self._source
        np.copyto(self._team.inputs(source.dtype, source.size, coming=1)[self._team.rank], source)

    def reduce(self) -> None:
        """Reduce what all ranks have staged for the last meeting."""
        inputs = self._team.inputs(self._source.dtype, self._source.size)
        reduce_into(self._team, self._op, inputs, self._target)


class Quick(ABC):
    """A request with a state. Making it does nothing yet.

    A signal handler may raise anywhere in here, as Ctrl-C does, and end a test but not the
    operation: every piece of work can be done again as long as it is not noted as done, and is
    noted by one assignment.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
    """

    __slots__ = ("_engine", "_error", "_team", "_what", "done")

    def __init__(self, team: Team, engine: Engine, what: int) -> None:
        self._team = team
        self._engine = engine
        self._what = what
        self._error: MpimeshError | None = None
        self.done = False

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen."""
        return self.done or self._error is not None

    def test(self) -> bool:
        """Do what can be done, and tell whether all is."""
        if self.done:
            return True
        with self._engine.lock:
            if self._error is not None:
                raise self._error
            try:
                # Another thread may have come first.
                self.done = self.done or self._move()
            except MpimeshError as error:
                self._error = error
                raise
            return self.done

    @abstractmethod
    def _move(self) -> bool:
        """Do what can be done, and tell whether all is."""


class OneShot(Quick):
    """An all-reduce in which every rank stages its array, and reads those of all.

    Takes one meeting, and nothing is shared any more when it is over: also the best way for
    small arrays that lie in shared memory.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
        staging: This rank's array, no larger than a stage.
    """

    __slots__ = ("_number", "_staging")

    def __init__(self, team: Team, engine: Engine, what: int, staging: Staging) -> None:
        super().__init__(team, engine, what)
        self._staging = staging
        self._number = team.met + 1

    def _move(self) -> bool:
        team = self._team
        if team.met < self._number:
            self._staging.put()
            team.say_what(self._what)
            team.come(self._number)
        if not team.have_come(self._number):
            return False
        self._engine.steps += 1
        said = team.agree_on(self._what)
        if said is not None:
            raise mismatch(said)
        self._staging.reduce()
        return True


class InPlaces(Quick):
    """An operation on arrays that lie in shared memory on all ranks, or else another way.

    Takes a look at all boards, where the ranks say where their arrays lie, and a meeting, after
    which they may write them again.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
        places: Where this rank's input and result lie.
        plan: Gives what this rank is to do, once it is known where all arrays lie; what it raises,
            it has to raise on all ranks.
        otherwise: Begins what follows if they do not all lie in shared memory.
    """

    __slots__ = (
        "_done_parts",
        "_meeting",
        "_number",
        "_otherwise",
        "_parts",
        "_placed",
        "_places",
        "_plan",
        "_refusal",
        "_rest",
    )

    def __init__(
        self,
        team: Team,
        engine: Engine,
        what: int,
        places: tuple[int, int],
        plan: Callable[[Entry], Sequence[Work]],
        otherwise: Callable[[], Request],
    ) -> None:
        super().__init__(team, engine, what)
        self._places = places
        self._plan = plan
        self._otherwise = otherwise
        self._number = team.board.posted + 1
        self._placed: bool | None = None
        self._parts: Sequence[Work] | None = None
        self._done_parts = 0
        self._meeting = 0
        self._rest: Request | None = None
        self._refusal: MpimeshError | None = None

    def _move(self) -> bool:
        if self._meeting:
            return self._over()
        if self._rest is not None:
            return self._rest.test()
        if self._placed is None and not self._read():
            return False
        board = self._team.board
        if not self._placed:
            board.pass_by(self._number)
            self._rest = self._otherwise()
            return self._rest.test()
        if self._parts is None:
            entry = board.entry(self._number)
            if entry.what.count(self._what) != self._team.size:
                board.pass_by(self._number)
                # A rank in an exchange looks at those only of which it takes something.
                raise mismatch(entry.what, on_all=EXCHANGE not in entry.what)
            try:
                parts = self._plan(entry)
            except MpimeshError as error:
                # The others have yet to read what it was found in.
                self._refusal, parts = error, ()
            self._parts = parts
        if not self._worked(self._parts):
            return False
        self._meeting = self._team.met + 1
        return self._over()

    def _worked(self, parts: Sequence[Work]) -> bool:
        """Do this rank's parts; tell whether all are done."""
        self._team.board.pass_by(self._number)
        return self._work(parts)

    def _read(self) -> bool:
        """Tell whether it is known where all arrays lie."""
        board = self._team.board
        if board.posted < self._number:
            board.post(self._number, self._what, *self._places)
            self._team.ring()
        self._placed = board.read(self._number)
        if self._placed is None:
            self._team.look_elsewhere()
            return False
        self._engine.steps += 1
        return True

    def _over(self) -> bool:
        """Tell whether all ranks have done their parts."""
        team = self._team
        if team.met < self._meeting:
            team.come(self._meeting)
        if not team.have_come(self._meeting):
            return False
        self._engine.steps += 1
        if self._refusal is not None:
            raise self._refusal
        return True

    def _work(self, parts: Sequence[Work]) -> bool:
        """Do this rank's parts, from the first that is not done; tell whether all are."""
        with np.errstate(all="ignore"):  # overflow and NaN pass silently, as in MPI
            while self._done_parts < len(parts):
                note = partial(setattr, self, "_done_parts", self._done_parts + 1)
                do_at_once(parts[self._done_parts], note)
        return True


def mismatch(
    what: Sequence[int], *, ranks: Sequence[int] = (), on_all: bool = True
) -> MismatchError:
    """Return the error of ranks that are in different operations.

    Args:
        what: The operation of each rank of a node.
        ranks: Which ranks these are; all of the node if empty.
        on_all: Whether all ranks raise it alike.
    """
    rows = list(zip(ranks or range(len(what)), what, strict=True))
    each = "; ".join(f"rank {rank}: {operation_text(one)}" for rank, one in rows[:16])
    error = MismatchError(
        f"the ranks of a group started different collectives, or with different arrays: {each}"
    )
    return on_all_ranks(error) if on_all else error
