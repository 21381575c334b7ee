"""Collectives in shared memory without the cost of steps, where that counts.

The same sums as in `team_reduce.py`, as requests with a state instead of
generators, and with all views of memory kept from the last time: a training loop
reduces the same arrays again and again. It saves half of the 20 us that the steps
take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import MismatchError, MpimeshError, on_all_ranks
from mpimesh.transport.base import Request
from mpimesh.transport.board import Entry
from mpimesh.transport.engine import Engine, Moved
from mpimesh.transport.team import Team
from mpimesh.transport.team_reduce import reduce_into
from mpimesh.transport.team_work import Work, do_at_once
from mpimesh.transport.what import EXCHANGE, operation_text

__all__ = ["InPlaces", "OneShot", "Plans", "Quick", "mismatch"]

_MOST_PLANS = 64
_MOST_PARTS = 64


class Plans:
    """The work of operations in place, kept from one time to the next.

    Arrays come back, and so do the places in the arenas where they lie. Nothing that is kept refers
    to the arrays themselves, only to the memory of the arenas.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Sequence[Work]] = {}

    def find(self, key: tuple[int, ...]) -> Sequence[Work] | None:
        """Return the work that was kept under `key`."""
        return self._kept.get(key)

    def keep(self, key: tuple[int, ...], parts: Sequence[Work]) -> None:
        """Keep work. Of larger arrays, working it out costs nothing beside doing it."""
        if len(parts) <= _MOST_PARTS:
            if len(self._kept) >= _MOST_PLANS:
                self._kept.clear()
            self._kept[key] = parts


class Quick(Moved):
    """A request with a state. Making it does nothing yet.

    A signal handler may raise anywhere in here, as Ctrl-C does, and end a test but not the
    operation: every piece of work can be done again as long as it is not noted as done, and is
    noted by one assignment.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
    """

    __slots__ = ("_team", "_what")

    def __init__(self, team: Team, engine: Engine, what: int) -> None:
        super().__init__(engine)
        self._team = team
        self._what = what


class OneShot(Quick):
    """An all-reduce in which every rank stages its array, and reads those of all.

    Takes one meeting, and nothing is shared any more when it is over: also the best way for
    small arrays that lie in shared memory.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
        op: Which reduction.
        source: This rank's array, no larger than a stage.
        target: Where the result goes; may be `source`.
    """

    __slots__ = ("_inputs", "_number", "_op", "_source", "_target")

    def __init__(
        self,
        team: Team,
        engine: Engine,
        what: int,
        op: str,
        source: HostArray,
        target: HostArray,
    ) -> None:
        super().__init__(team, engine, what)
        self._op = op
        self._source = source
        self._target = target
        self._number = team.met + 1
        self._inputs = team.inputs(source.dtype, source.size, coming=1)

    def _move(self) -> bool:
        team, number = self._team, self._number
        if team.met < number:
            np.copyto(self._inputs[team.rank], self._source)
            team.say_what(self._what)
            team.come(number)
        if not team.have_come(number):
            return False
        self._engine.steps += 1
        said = team.agree_on(self._what)
        if said is not None:
            raise mismatch(said)
        reduce_into(team, self._op, self._inputs, self._target)
        return True


class InPlaces(Quick):
    """An operation on arrays that lie in shared memory on all ranks, or else another way.

    Takes a look at all boards, where the ranks say where their arrays lie, and a meeting, after
    which they may write them again.

    Args:
        team: The ranks, of which none has an unfinished operation.
        engine: Moves it along until it is settled.
        what: The operation's number.
        places: Where this rank's input and result lie, as far as others need to know.
        plan: Gives what this rank is to do, once it is known where all arrays lie; what it raises,
            it has to raise on all ranks.
        otherwise: Begins what follows if they do not all lie in shared memory.
        plans: Where the work is kept.
        key: What the work depends on beside the ranks' notes; None if it is not to be kept, for
            it refers to an array of this rank's own.
    """

    __slots__ = (
        "_done_parts",
        "_key",
        "_meeting",
        "_number",
        "_otherwise",
        "_parts",
        "_places",
        "_plan",
        "_plans",
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
        plans: Plans,
        key: tuple[int, ...] | None,
    ) -> None:
        super().__init__(team, engine, what)
        self._places = places
        self._plan = plan
        self._otherwise = otherwise
        self._plans = plans
        self._key = key
        self._number = team.board.posted + 1
        self._parts: Sequence[Work] | None = None
        self._done_parts = 0
        self._meeting = 0
        self._rest: Request | None = None
        self._refusal: MpimeshError | None = None

    def _move(self) -> bool:
        if self._rest is not None:
            return self._rest.test()
        team = self._team
        if not self._meeting:
            if self._parts is None:
                placed = self._read()
                if not placed:
                    return placed is False and self._go_otherwise()
                self._parts = self._found()
            team.board.pass_by(self._number)
            if self._done_parts < len(self._parts):
                self._work(self._parts)
            self._meeting = team.met + 1
        # All ranks have to have done their parts.
        if team.met < self._meeting:
            team.come(self._meeting)
        if not team.have_come(self._meeting):
            return False
        self._engine.steps += 1
        if self._refusal is not None:
            raise self._refusal
        return True

    def _read(self) -> bool | None:
        """Tell whether all arrays lie in shared memory; None as long as it is not known."""
        team, number = self._team, self._number
        board = team.board
        if board.posted < number:
            board.post(number, self._what, *self._places)
            team.ring()
        placed = board.read(number)
        if placed is None:
            team.look_elsewhere()
        else:
            self._engine.steps += 1
        return placed

    def _go_otherwise(self) -> bool:
        self._team.board.pass_by(self._number)
        self._rest = self._otherwise()
        return self._rest.test()

    def _found(self) -> Sequence[Work]:
        """Return this rank's parts, now that all have said where their arrays lie.

        Raises:
            MismatchError: If they are in different operations.
        """
        board, number = self._team.board, self._number
        key = None if self._key is None else self._key + board.told(number)
        parts = None if key is None else self._plans.find(key)
        if parts is not None:
            return parts
        entry = board.entry(number)
        if entry.what.count(self._what) != self._team.size:
            board.pass_by(number)
            # A rank in an exchange looks at those only of which it takes something.
            raise mismatch(entry.what, on_all=EXCHANGE not in entry.what)
        try:
            parts = self._plan(entry)
        except MpimeshError as error:
            # The others have yet to read what it was found in.
            self._refusal = error
            return ()
        if key is not None:
            self._plans.keep(key, parts)
        return parts

    def _work(self, parts: Sequence[Work]) -> None:
        """Do this rank's parts, from the first that is not done."""
        while self._done_parts < len(parts):
            note = partial(setattr, self, "_done_parts", self._done_parts + 1)
            do_at_once(self._team.quietly, parts[self._done_parts], note)


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
