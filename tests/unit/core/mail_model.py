"""The messages' protocol: `mpimesh/core/mail.h` in Python, for `interleavings`.

Functions and fields have its names. A value is a token that says whose message it is, and which
piece of it. Left out are

- heads and texts, which go the way of the bytes; a receive that expects another head, or has no
  memory yet, is one that is not `known`;
- messages to oneself, those that do not fit, and malloc() that fails;
- who reads by calls into another process: they read in place.

The data of a ring are counted in units: a small message takes some of them, a piece takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from tests.unit.core.interleavings import (
    BELL_RULES,
    KINDS,
    Fault,
    Kind,
    Place,
    Rank,
    Scenario,
    Steps,
    Window,
)

# What a run may leave out, to see that it is needed.
RULES = {
    **BELL_RULES,
    "number last": "the number of a cell is stored after the cell and its bytes",
    "number release": "and with release: aarch64 may store it before",
    "number acquire": "and loaded with acquire: aarch64 may read the cell before",
    "number compared": "it must be the next one: another is of a cell that was taken",
    "zero cells": "the cells of new memory are zero before others look there",
    "ring release": "where a ring lies is stored with release: aarch64 may store it before that",
    "room for cells": "a cell is written again only when it is taken",
    "room for data": "so are the bytes of one",
    "room for a link": "a cell is kept for the link to another ring",
    "link taken": "a ring is used again only when its link is taken",
    "taken last": "`taken` moves when the cell and its bytes are read",
    "taken release": "and with release: aarch64 may store it before",
    "taken rings": "who waits for room is rung",
    "cell rings": "and who waits for a cell",
    "asks all": "a sleeper asks all with whom it has something under way",
    "in place": "what others read in place is in use until they have answered",
    "answer last": "they answer when they have read it",
    "answers wait": "an answer without room is not lost",
    "over when answered": "what is answered is over then: its owner may move nothing any more",
    "accepted when answered": "so is what a pass has read: its receive is over only then",
    "sender takes": "who waits for an answer takes cells",
    "receiver takes": "so does who waits for pieces",
    "takes in": "a message without memory is read by a pass: its sender may wait for that",
    "claim": "one of two threads has the user's memory: who reads it, or who has copied it",
    "claim, copied": "the copy is made before that is claimed",
    "left twice": "who has left is looked at once more: it may have sent between the two looks",
    "left is no move": "who has left moves nothing: else others that have are not looked at",
    "noted rings": "who has probed is rung, by this rank, when a message is noted",
    "cancelled": "a receive that was taken back gets no message",
}

INLINE, SMALL, SHARED, PIECED = "INLINE", "SMALL", "SHARED", "PIECED"
LINK, ANSWER, ASK, PIECE = "LINK", "ANSWER", "ASK", "PIECE"
UNDER_WAY, DONE, MATCHED, LOST, CANCELLED = 0, 1, 2, -2, -11
NOBODY, READER, OWNER = range(3)  # who has claimed
USERS, FREED = "the user's", "freed"


@dataclass(frozen=True)
class Send:
    to: int
    source: str = INLINE
    tag: int = 0
    units: int = 1  # of the ring's data, if it is small; pieces, if it comes in those
    state: tuple[int, ...] = (DONE,)  # how it may end
    detach: bool = False  # do not wait for its receiver, where that is a thread


@dataclass(frozen=True)
class Receive:
    source: int
    tag: int = 0
    known: bool = True  # where to, and of what head
    large: bool = False
    state: tuple[int, ...] = (DONE,)


@dataclass(frozen=True)
class Wait:
    start: int  # for which of the program's sends and receives


@dataclass(frozen=True)
class Cancel:
    start: int


@dataclass(frozen=True)
class Probe:
    tag: int = 0
    waits: bool = True


@dataclass(frozen=True)
class MailScenario(Scenario):
    cells: int = 3
    data: int = 2
    rings: int = 1
    is_near: bool = False  # the ranks are threads

    def rank(self, me: int, without: frozenset[str]) -> Rank:
        return MailRank(self, me, without)

    def starts(self, rank: int) -> list[Send | Receive]:
        return [step for step in self.programs[rank] if isinstance(step, (Send, Receive))]

    def sends(self, rank: int, to: int, tag: int) -> list[int]:
        """Return which of a rank's starts send there."""
        steps = enumerate(self.starts(rank))
        return [i for i, s in steps if isinstance(s, Send) and (s.to, s.tag) == (to, tag)]

    def writes(self, rank: int, to: int) -> bool:
        steps = self.starts(rank)
        return any((s.to if isinstance(s, Send) else s.source) == to for s in steps)

    def places(self) -> Iterator[Place]:
        ranks = range(len(self.programs))
        for me in ranks:
            yield "waiters", 0, me
            for i, start in enumerate(self.starts(me)):
                if isinstance(start, Send) and start.source in (SHARED, PIECED):
                    for name in ("x", "copy", "claim") if self.is_near else ("x",):
                        yield name, me, i
        for me, q in permutations(ranks, 2):
            yield "ring", me, q
            yield "taken", q, me
            if self.writes(me, q):
                for ring in range(self.rings):
                    for i in range(self.cells):
                        yield "number", me, q, ring, i
                        yield "cell", me, q, ring, i
                    for i in range(self.data):
                        yield "data", me, q, ring, i

    def first_value(self, place: Place) -> Any:
        if place[0] == "x":
            return ("in", *place[1:])
        # A ring's memory was used before.
        return place[4] + 1 if place[0] == "number" else 0

    def at_end(self) -> dict[Place, tuple[int, Any]]:
        """What was waited for is the user's."""
        waits = {
            ("x", rank, step.start): (rank, USERS)
            for rank, program in enumerate(self.programs)
            for step in program
            if isinstance(step, Wait)
        }
        places = set(self.places())
        return {place: value for place, value in waits.items() if place in places}

    def kinds(self) -> dict[str, Kind]:
        return KINDS | {"number": lambda value, number: (value == number, value == number)}

    def is_quiet(self, place: Place) -> bool:
        return super().is_quiet(place) or (place[0] == "ring" and not self.writes(*place[1:]))

    def relaxed(self, without: frozenset[str]) -> frozenset[str]:
        return frozenset(["number"] if "number acquire" in without else [])

    def look_at(self, place: Place, old: Any, own: Callable[[int, Place], Any]) -> None:
        """Before a cell is posted again, it is taken."""
        if place[0] == "number" and old:
            _, me, q, _, _ = place
            if own(q, ("taken", q, me)) < old:
                raise Fault(f"rank {me} posts over its cell {old}, which rank {q} has not taken")


# What is in a cell behind its number, and a message as its receiver sees it.
Item = tuple[Any, ...]  # kind, handle, tag, units, place; of a message then its ring


class Op:
    """MailOp, as far as it decides anything."""

    def __init__(self, step: Send | Receive, index: int):
        self.step, self.index, self.sends = step, index, isinstance(step, Send)
        self.peer = step.to if isinstance(step, Send) else step.source
        self.state = UNDER_WAY
        self.at, self.handle = 0, -1
        self.note: Note | None = None
        self.taken = -1  # a receive's message
        self.detached = False
        self.named = ("op", index)

    def key(self) -> Any:
        return self.state, self.at, self.handle, self.taken, self.detached


class Note:
    def __init__(self, item: Item):
        self.item, self.op, self.passes = item, -1, 0
        self.named = ("note", *item[:3])

    def key(self) -> Any:
        return self.item, self.op, self.passes


def is_elsewhere(item: Item) -> bool:
    return item[0] in (SHARED, PIECED)


class Peer:
    """MailPeer."""

    def __init__(self, q: int, cells: int):
        self.q, self.named = q, ("peer", q)
        self.out = self.into = -1  # rings
        self.rings = 0  # how many there are
        self.put = self.seen = self.first = self.data_put = 0
        self.data_end = [0] * cells
        self.taken = self.in_first = 0
        self.old: list[tuple[int, int]] = []
        self.posted: list[Op] = []
        self.unanswered: list[Op] = []
        self.asked: list[Op] = []
        self.coming: list[Op] = []
        self.notes: list[Note] = []
        self.matched: list[Note] = []
        self.answers: list[tuple[Any, ...]] = []
        self.gone = False

    @property
    def unread(self) -> bool:
        return any(is_elsewhere(n.item) for n in self.matched)

    def key(self) -> Any:
        out = self.out, self.rings, self.put, self.seen, self.first, self.data_put
        into = self.into, self.taken, self.in_first, self.gone
        lists = self.posted, self.unanswered, self.asked, self.coming
        ops = tuple(tuple(o.index for o in ops) for ops in lists)
        notes = tuple(tuple(n.key() for n in notes) for notes in (self.notes, self.matched))
        return out, into, ops, notes, tuple(self.data_end), tuple(self.old), tuple(self.answers)


class MailRank(Rank):
    """What one rank does: mail.h, each access to shared memory a `yield`."""

    def __init__(self, scenario: MailScenario, me: int, without: frozenset[str]):
        super().__init__(scenario, me, without)
        ranks = range(len(scenario.programs))
        self.window = Window(0, ranks, me)
        self.peer = [Peer(q, scenario.cells) for q in ranks]
        self.ops: list[Op] = []
        self.busy: list[Peer] = []
        self.listening = self.rouse = False

    def key(self) -> Any:
        ops, peers = tuple(o.key() for o in self.ops), tuple(p.key() for p in self.peer)
        busy = tuple(p.q for p in self.busy)
        return ops, peers, busy, self.listening, self.rouse, self.window.moved

    # -- the program of the user ----------------------------------------------------------------

    def user(self) -> Steps:
        for step in self.scenario.programs[self.me]:
            if isinstance(step, (Send, Receive)):
                yield from self.start(step)
            elif isinstance(step, Wait):
                yield from self.resolve(self.ops[step.start])
            elif isinstance(step, Cancel):
                self.mail_cancel(self.ops[step.start])
            elif isinstance(step, Probe):
                yield from self.probe(step)
            else:
                yield from self.node_leave()

    def start(self, step: Send | Receive) -> Steps:
        o, going = Op(step, len(self.ops)), False
        p = self.peer[o.peer]
        self.ops.append(o)
        while not going:
            if o.sends:
                going = yield from self.mail_send(p, o)
            else:
                going = yield from self.mail_receive(p, o)
            yield from self.mail_unlock()
            if not going:
                yield from self.open(p)

    def resolve(self, o: Op) -> Steps:
        """Wait, look at what has come, and use the memory for something else."""
        if o.sends and not o.state and o.step.detach:  # type: ignore[union-attr]
            yield from self.mail_detach(o)
        if not o.detached:
            yield from self.node_wait(o)
            self.window.moved = False  # nobody reads it before the next lock
            while o.state == MATCHED:
                accepted = yield from self.mail_accept(o)
                yield from self.mail_unlock()
                if not accepted:
                    yield from self.open(self.peer[o.peer])
            if o.state not in o.step.state:
                raise Fault(f"start {o.index} ends with {o.state}")
        if o.sends and o.step.source in (SHARED, PIECED):
            yield ("write", ("x", self.me, o.index), USERS)

    def probe(self, step: Probe) -> Steps:
        found = False
        while not found:
            if self.scenario.sleeps:
                yield ("listen",)
            found = yield from self.mail_probe(step.tag)
            yield from self.mail_unlock()
            if not step.waits:
                return
            if not found:
                yield from self.node_pass()
                if self.scenario.sleeps:
                    yield from self.node_sleep_since(None)
                self.window.moved = False

    def open(self, p: Peer) -> Steps:
        """Go on in a ring that is free again, or in a new one."""
        ring = -1
        if p.old:  # mail_reuse_ring()
            p.seen = yield ("load", ("taken", p.q, self.me), "up to", p.put)
            if p.seen >= p.old[0][1] or not self.has("link taken"):
                ring, _ = p.old.pop(0)
        if ring < 0:
            ring, p.rings = p.rings, p.rings + 1
            if ring == self.scenario.rings:
                raise Fault(f"rank {self.me} needs {p.rings} rings")
            if self.has("zero cells"):
                for i in range(self.scenario.cells):
                    yield ("write", ("number", self.me, p.q, ring, i), 0)
        yield from self.mail_add_ring(p, ring)
        yield from self.mail_put_answers(p)
        yield from self.mail_unlock()

    def mail_unlock(self) -> Steps:
        if self.window.moved:
            yield from self.node_ring(self.window)
        self.window.moved = False
        yield from self.node_unlock()

    def node_unlock(self) -> Steps:
        if self.rouse and self.scenario.sleeps:
            yield from self.node_wake(self.me)
        self.rouse = False

    def mail_over(self, o: Op, state: int) -> None:
        if o.state not in (UNDER_WAY, MATCHED):
            raise Fault(f"start {o.index} of rank {self.me} is over twice: {o.state}, {state}")
        o.state, o.note = state, None

    def mail_list(self, p: Peer) -> None:
        if p not in self.busy:
            self.busy.insert(0, p)

    # -- the sender's end of a ring -------------------------------------------------------------

    def mail_room(self, p: Peer, units: int) -> Steps:
        """The result is where the data are, or None."""
        if p.out < 0:
            return None
        cells, data, at = self.scenario.cells, self.scenario.data, p.data_put
        if at % data + units > data:
            at += data - at % data
        for look in range(2):
            begun = max(p.seen, p.first)
            used = p.put - begun
            last = p.data_end[(begun - 1 - p.first) % cells] if begun > p.first else 0
            has_cell = used < cells - self.has("room for a link") or not self.has("room for cells")
            has_data = not units or not used or at + units - last <= data
            if has_cell and (has_data or not self.has("room for data")):
                break
            if look:
                return None
            p.seen = yield ("load", ("taken", p.q, self.me), "up to", p.put)
        if units:
            p.data_put = at + units
        return at % data

    def mail_post(self, p: Peer, *cell: Any) -> Steps:
        i = (p.put - p.first) % self.scenario.cells
        p.data_end[i] = p.data_put
        p.put += 1
        number = ("number", self.me, p.q, p.out, i)
        if not self.has("number last"):
            yield ("store", number, p.put, True)
        yield ("write", ("cell", self.me, p.q, p.out, i), (p.put, *cell))
        if self.has("number last"):
            yield ("store", number, p.put, self.has("number release"))
        self.window.moved = self.window.moved or self.has("cell rings")

    def mail_add_ring(self, p: Peer, ring: int) -> Steps:
        if p.out >= 0:
            yield from self.mail_post(p, LINK, -1, -1, 0, ring)
            p.old.append((p.out, p.put))
        else:
            yield ("store", ("ring", self.me, p.q), 1, self.has("ring release"))
        p.out, p.first, p.data_put = ring, p.put, 0
        p.data_end = [0] * self.scenario.cells

    def mail_put(self, p: Peer, o: Op) -> Steps:
        step: Any = o.step
        units = step.units if step.source == SMALL else 0
        place = yield from self.mail_room(p, units)
        if place is None:
            return False
        for i in range(units):
            token = ("in", self.me, o.index, i)
            yield ("write", ("data", self.me, p.q, p.out, place + i), token)
        yield from self.mail_post(p, step.source, o.index, step.tag, step.units, place)
        if step.source in (INLINE, SMALL):
            self.mail_over(o, DONE)
        else:
            p.unanswered.insert(0, o)
            if not self.has("in place"):
                o.state = DONE
        return True

    def mail_put_pieces(self, p: Peer, o: Op) -> Steps:
        step: Any = o.step
        while o.at < step.units:
            place = yield from self.mail_room(p, 1)
            if place is None:
                return False
            yield ("read", ("x", self.me, o.index), ("in", self.me, o.index))
            token = ("in", self.me, o.index, o.at)
            yield ("write", ("data", self.me, p.q, p.out, place), token)
            yield from self.mail_post(p, PIECE, o.handle, -1, o.at, place)
            o.at += 1
        return True

    def mail_may_answer(self, p: Peer) -> Steps:
        """The result tells whether there is a cell for it."""
        if p.answers:
            return False
        room = yield from self.mail_room(p, 0)
        return room is not None

    def mail_put_answer(self, p: Peer, kind: str, handle: int, place: int, op: int) -> Steps:
        yield from self.mail_room(p, 0)
        yield from self.mail_post(p, kind, handle, -1, 0, place)
        if op >= 0 and not self.ops[op].state:
            self.mail_over(self.ops[op], DONE)

    def mail_put_answers(self, p: Peer) -> Steps:
        while p.answers:
            room = yield from self.mail_room(p, 0)
            if room is None:
                return
            answer = p.answers.pop(0)
            yield from self.mail_put_answer(p, *answer)

    def mail_answer(self, p: Peer, answer: tuple[Any, ...], can: bool) -> Steps:
        if can:
            yield from self.mail_put_answer(p, *answer)
        elif self.has("answers wait"):
            p.answers.append(answer)
        if answer[3] >= 0 and not can and not self.has("over when answered"):
            self.mail_over(self.ops[answer[3]], DONE)

    # -- the receiver's -------------------------------------------------------------------------

    def mail_read(self, p: Peer, item: Item) -> Steps:
        kind, handle, _, units, place, ring = item
        if kind == SHARED:
            name = "x"
            if self.scenario.is_near and self.has("claim"):
                mine = yield ("claim", ("claim", p.q, handle), READER)
                name = "x" if mine else "copy"
            yield ("read", (name, p.q, handle), ("in", p.q, handle))
        if kind == SMALL:
            for i in range(units):
                yield ("read", ("data", p.q, self.me, ring, place + i), ("in", p.q, handle, i))

    def take(self, p: Peer, o: Op, item: Item) -> None:
        """Messages of one tag come in the order in which they were sent, to receives in theirs."""
        of_tag = [r for r in self.ops if not r.sends and (r.peer, r.step.tag) == (p.q, item[2])]
        sent = self.scenario.sends(p.q, self.me, item[2])
        if item[1] != sent[sum(r.taken >= 0 for r in of_tag)]:
            raise Fault(f"rank {self.me} takes message {item[1]} of rank {p.q} out of turn")
        if any(r.taken < 0 and not r.state for r in of_tag if r.index < o.index):
            raise Fault(f"receive {o.index} of rank {self.me} has a message before an earlier one")
        o.taken = item[1]

    def mail_ask(self, p: Peer, o: Op, item: Item) -> Steps:
        can = yield from self.mail_may_answer(p)
        o.at = 0
        p.coming.append(o)
        yield from self.mail_answer(p, (ASK, item[1], o.index, -1), can)

    def mail_deliver(self, p: Peer, o: Op, item: Item) -> Steps:
        self.take(p, o, item)
        if item[0] == PIECED:
            yield from self.mail_ask(p, o, item)
            return
        if not is_elsewhere(item):
            yield from self.mail_read(p, item)
            self.mail_over(o, DONE)
            return
        can = yield from self.mail_may_answer(p)
        if self.has("answer last"):
            yield from self.mail_read(p, item)
        yield from self.mail_answer(p, (ANSWER, item[1], -1, o.index), can)
        if not self.has("answer last"):
            yield from self.mail_read(p, item)

    def mail_match(self, p: Peer, o: Op, n: Note) -> Steps:
        o.note, n.op = n, o.index
        if n.item[0] == PIECED:
            yield from self.mail_ask(p, o, n.item)
        else:
            n.passes = 0
            p.matched.append(n)
            o.state = MATCHED

    def mail_note(self, p: Peer, item: Item) -> Steps:
        if not is_elsewhere(item):
            yield from self.mail_read(p, item)
            item = (INLINE, *item[1:])
        return Note(item)

    def mail_open_piece(self, p: Peer, cell: Item) -> Steps:
        _, op, _, k, place = cell
        o = self.ops[op]
        if o not in p.coming or k != o.at:
            raise Fault(f"receive {op} of rank {self.me} gets piece {k} after {o.at}")
        yield ("read", ("data", p.q, self.me, p.into, place), ("in", p.q, o.taken, k))
        o.at += 1
        sent: Any = self.scenario.starts(p.q)[o.taken]
        if o.at == sent.units:
            p.coming.remove(o)
            if o.note is None:
                self.mail_over(o, DONE)
            else:
                o.note.item = (INLINE, *o.note.item[1:])
                yield from self.mail_match(p, o, o.note)

    def mail_open_answer(self, p: Peer, cell: Item) -> Steps:
        kind, op, _, _, place = cell
        o = self.ops[op]
        if o not in p.unanswered:
            raise Fault(f"send {op} of rank {self.me} gets an answer too much")
        p.unanswered.remove(o)
        if kind == ASK:
            o.handle, o.at = place, 0
            p.asked.append(o)
            return
        if o.detached:
            yield ("write", ("copy", self.me, op), FREED)
        if self.has("in place"):
            self.mail_over(o, DONE)

    def mail_open(self, p: Peer, cell: Item) -> Steps:
        item = (*cell, p.into)
        o = next((o for o in p.posted if o.step.tag == item[2]), None)
        if o is None:
            n = yield from self.mail_note(p, item)
            p.notes.append(n)
            self.rouse = self.rouse or (self.listening and self.has("noted rings"))
        elif o.step.known:  # type: ignore[union-attr]
            p.posted.remove(o)
            yield from self.mail_deliver(p, o, item)
        else:
            p.posted.remove(o)
            self.take(p, o, item)
            n = yield from self.mail_note(p, item)
            yield from self.mail_match(p, o, n)

    def mail_take(self, p: Peer) -> Steps:
        if p.into < 0:
            there = yield ("load", ("ring", p.q, self.me), "any", 0)
            if not there:
                return
            p.into = 0
        while True:
            place = (p.q, self.me, p.into, (p.taken - p.in_first) % self.scenario.cells)
            kind = "number" if self.has("number compared") else "any"
            there = yield ("load", ("number", *place), kind, p.taken + 1)
            if not there:
                return
            taken = ("taken", self.me, p.q)
            if not self.has("taken last"):
                yield ("store", taken, p.taken + 1, True)
            cell = yield ("read", ("cell", *place), None)
            if not cell or cell[0] != p.taken + 1:
                raise Fault(f"rank {self.me} takes {cell} of rank {p.q} for cell {p.taken + 1}")
            cell = cell[1:]
            if cell[0] == PIECE:
                yield from self.mail_open_piece(p, cell)
            elif cell[0] == LINK:
                p.into, p.in_first = cell[4], p.taken + 1
            elif cell[0] in (ANSWER, ASK):
                yield from self.mail_open_answer(p, cell)
            else:
                yield from self.mail_open(p, cell)
            p.taken += 1
            if self.has("taken last"):
                yield ("store", taken, p.taken, self.has("taken release"))
            self.window.moved = self.window.moved or self.has("taken rings")

    def mail_take_in(self, p: Peer) -> Steps:
        matched = tuple(p.matched)
        for n in matched:
            if not is_elsewhere(n.item):
                continue
            n.passes += 1
            if n.passes == 1:
                continue
            can = yield from self.mail_may_answer(p)
            yield from self.mail_read(p, n.item)
            yield from self.mail_answer(p, (ANSWER, n.item[1], -1, -1), can)
            n.item = (INLINE, *n.item[1:])
            self.window.moved = True

    def mail_is_busy(self, p: Peer) -> bool:
        lists = p.posted, p.unanswered, p.asked, p.coming, p.answers
        return self.listening or any(lists) or p.unread

    def mail_end(self, p: Peer, state: int) -> None:
        for ops in (p.posted, p.unanswered, p.asked, p.coming):
            for o in ops:
                self.mail_over(o, state)
            ops.clear()
        for *_, op in p.answers:
            if op >= 0:
                self.mail_over(self.ops[op], DONE)
        p.answers.clear()

    def mail_pass_peer(self, p: Peer) -> Steps:
        w = self.window
        sends = p.unanswered and self.has("sender takes")
        if self.listening or p.posted or sends or (p.coming and self.has("receiver takes")):
            yield from self.mail_take(p)
        yield from self.mail_put_answers(p)
        while not p.answers and p.asked:
            o = p.asked[0]
            all_put = yield from self.mail_put_pieces(p, o)
            if not all_put:
                break
            p.asked.pop(0)
            self.mail_over(o, DONE)
        if p.unread and self.has("takes in"):
            yield from self.mail_take_in(p)
        if p.gone and self.has("left is no move"):
            self.mail_end(p, LOST)
        elif not w.moved:
            left = yield ("load", ("left", p.q), "any", 0)
            if left:
                if p.gone or not self.has("left twice"):
                    self.mail_end(p, LOST)
                p.gone = w.moved = True

    # -- what callers use -----------------------------------------------------------------------

    def node_pass(self, only: Any = None) -> Steps:
        w, busy = self.window, tuple(self.busy)
        w.moved = False
        for p in busy:
            yield from self.mail_pass_peer(p)
            if not self.mail_is_busy(p):
                self.busy.remove(p)
        moved = w.moved
        if moved:
            yield from self.node_ring(w)
        yield from self.node_unlock()
        return moved

    def node_await(self) -> Steps:
        busy = tuple(self.busy if self.has("asks all") else self.busy[:1])
        for p in busy:
            yield ("or", ("waiters", 0, p.q), 1 << self.me)

    def mail_send(self, p: Peer, o: Op) -> Steps:
        going = yield from self.mail_put(p, o)
        if going and not o.state:
            self.mail_list(p)
        return going

    def mail_detach(self, o: Op) -> Steps:
        copy = ("copy", self.me, o.index)
        if self.has("claim, copied"):
            yield ("write", copy, ("in", self.me, o.index))
        mine = yield ("claim", ("claim", self.me, o.index), OWNER)
        if not self.has("claim, copied"):
            yield ("write", copy, ("in", self.me, o.index))
        o.detached = mine or not self.has("claim")

    def mail_receive(self, p: Peer, o: Op) -> Steps:
        can = yield from self.mail_may_answer(p)
        if not can:
            return False
        n = next((n for n in p.notes if n.item[2] == o.step.tag), None)
        if n is not None:
            p.notes.remove(n)
            if o.step.known:  # type: ignore[union-attr]
                yield from self.mail_deliver(p, o, n.item)
            else:
                self.take(p, o, n.item)
                yield from self.mail_match(p, o, n)
        else:
            p.posted.append(o)
            if not o.step.large:  # type: ignore[union-attr]
                yield from self.mail_take(p)
        if self.mail_is_busy(p):
            self.mail_list(p)
        return True

    def mail_accept(self, o: Op) -> Steps:
        p, n = self.peer[o.peer], o.note
        assert n is not None
        answers = is_elsewhere(n.item)
        if p.answers and self.has("accepted when answered"):
            return False
        if answers:
            can = yield from self.mail_may_answer(p)
            if not can:
                return False
        p.matched.remove(n)
        yield from self.mail_read(p, n.item)
        if answers:
            yield from self.mail_answer(p, (ANSWER, n.item[1], -1, -1), True)
        self.mail_over(o, DONE)
        return True

    def mail_cancel(self, o: Op) -> None:
        p = self.peer[o.peer]
        if o in p.posted:
            if self.has("cancelled"):
                p.posted.remove(o)
            self.mail_over(o, CANCELLED)

    def mail_probe(self, tag: int) -> Steps:
        found = False
        for p in self.peer:
            if p.q != self.me and not found:
                yield from self.mail_take(p)
                found = any(n.item[2] == tag for n in p.notes)
        self.listening = not found
        for p in self.peer:
            if self.listening and p.q != self.me:
                self.mail_list(p)
        return found
