"""The node window's protocol: `mpimesh/core/node.h` in Python, for `interleavings`.

Functions, stages and fields have its names. A value is a token that says whose contribution it is,
of which operation, piece and part. Left out are `seen_read`, a cache of counters that only grow,
and the texts of a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    "word last": "the word of an entry is stored after what it speaks of",
    "word release": "and with release: aarch64 may store it before",
    "word acquire": "and loaded with acquire: aarch64 may read the entry before",
    "counter release": "so are put, summed and read",
    "room for entries": "an entry is written again only when all have read past it",
    "room for smalls": "so is a small slot",
    "room for pieces": "so is the slot of a piece",
    "read last": "`read` moves when all of that is read and written",
    "put first": "a piece is read when its rank has put it",
    "own piece first": "a part is summed into a slot that holds the rank's own piece by then",
    "all summed": "the others' parts are read when all have summed theirs",
    "in place": "memory that others read in place is in use until they have read past it",
    "in place, refused": "where that fails, too, unless they have refused it themselves, or left",
    "first in first out": "only the first operation of a window moves: `read` speaks of all before",
    "every window": "a wait moves every window of the rank",
    "read rings": "`read` rings as a word does",
    "refused rings": "a refusal rings, too",
    "left twice": "who has left is looked at once more: it may have posted between the two looks",
    "left for each rank": "that is noted for each rank: one pass lacks several",
    "rolling total": "a word has the signatures so far: who compares none at n sees it at n + 1",
    "refused tells": "a refusal is told to those who lack this rank",
    "refused says why": "and whether of a mismatch or a loss",
    "refused last": "and when this rank touches nothing of what it refuses any more",
    "refused stops": "from there on nothing is posted",
    "before a mismatch": "what is before it goes on",
    "owners only": "in an exchange of boxes a rank needs the words of its owners",
    "readers only": "and its memory is in use until its readers have read past it",
    "reads on": "and what it has read does not wait for its own pieces, nor they for that",
    "fewer pieces": "and an owner may give fewer pieces than another",
    "kept aside": "of which what is reduced when all have come is kept until then",
}

NOTHING, INLINE, SMALL = "NOTHING", "INLINE", "SMALL"
PIECED, SHARED, REMOTE = "PIECED", "SHARED", "REMOTE"
UNDER_WAY, DONE, MISMATCH, LOST = 0, 1, -1, -2
STAGE_NEW, STAGE_MOVE, STAGE_AFTER = range(3)
USERS = "the user's"  # what is in its array after resolve()


def AT(number: int, piece: int) -> int:
    return number * 8 + piece


@dataclass(frozen=True)
class Start:
    kind: str = "ALL_REDUCE"
    source: str = INLINE
    pieces: int = 1
    root: int = 0
    window: int = 0
    digest: int = 0
    state: tuple[int, ...] = (DONE,)  # how it may end on this rank
    owners: tuple[int, ...] = ()  # of BOXES: which ranks this one takes of
    reduces: bool = False  # and whether it reduces what it takes, when all is there


@dataclass(frozen=True)
class Wait:
    start: int  # for which of the program's starts


@dataclass(frozen=True)
class NodeScenario(Scenario):
    windows: tuple[tuple[int, ...], ...] = ()  # the ranks of each; one of all by default
    entries: int = 2
    smalls: int = 1
    pieces: int = 2

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return self.windows or (tuple(range(len(self.programs))),)

    def rank(self, me: int, without: frozenset[str]) -> Rank:
        return NodeRank(self, me, without)

    def starts(self, rank: int, window: int) -> list[Start]:
        steps = self.programs[rank]
        return [s for s in steps if isinstance(s, Start) and s.window == window]

    def places(self) -> Iterator[Place]:
        for w, members in enumerate(self.members):
            ranks = range(len(members))
            for q in ranks:
                for name in ("put", "summed", "read", "refused", "waiters"):
                    yield name, w, q
                for slot in range(self.entries):
                    yield "word", w, q, slot
                    yield "entry", w, q, slot
                for part in ranks:
                    for name, slots in (("small", self.smalls), ("piece", self.pieces)):
                        for slot in range(slots):
                            yield name, w, q, slot, part
                for n, start in enumerate(self.starts(members[q], w), 1):
                    if start.source in (SHARED, REMOTE) and contributes(start, q):
                        for k in range(start.pieces):
                            for part in ranks:
                                yield "x", w, q, n, k, part

    def first_value(self, place: Place) -> Any:
        return ("in", *place[2:]) if place[0] == "x" else 0

    def at_end(self) -> dict[Place, tuple[int, Any]]:
        """What is resolved is the user's."""
        resolved = set()  # rank, window and number
        for rank, program in enumerate(self.programs):
            starts = [step for step in program if isinstance(step, Start)]
            for step in program:
                if isinstance(step, Wait):
                    window = starts[step.start].window
                    earlier = [s for s in starts[: step.start] if s.window == window]
                    resolved.add((rank, window, len(earlier) + 1))
        found = {}
        for place in self.places():
            if place[0] == "x":
                rank = self.members[place[1]][place[2]]
                if (rank, place[1], place[3]) in resolved:
                    found[place] = rank, USERS
        return found

    def kinds(self) -> dict[str, Kind]:
        return KINDS | {"word": word_kind, "refused": refused_kind}

    def is_quiet(self, place: Place) -> bool:
        if place[0] != "refused":
            return super().is_quiet(place)
        steps = [step for program in self.programs for step in program]
        differ = any(isinstance(s, Start) and s.digest for s in steps)
        return not differ and not any(self.may_leave(r) for r in range(len(self.programs)))

    def relaxed(self, without: frozenset[str]) -> frozenset[str]:
        return frozenset(["word"] if "word acquire" in without else [])

    def look_at(self, place: Place, old: Any, own: Callable[[int, Place], Any]) -> None:
        """Before an entry is written again, all have read it."""
        if place[0] != "word" or not old:
            return
        _, w, q, _ = place
        number = old >> 8
        for p, r in enumerate(self.members[w]):
            if p != q and own(r, ("read", w, p)) < AT(number + 1, 0):
                raise Fault(
                    f"rank {q} posts over its operation {number}, which rank {p} has not read"
                )


def word_kind(value: int, own: int) -> tuple[str, bool]:
    if value == own:
        return "same", True
    other = value >> 8 == own >> 8
    return ("other" if other else "older"), other


def refused_kind(value: int, number: int) -> tuple[Any, bool]:
    refused = 0 < value < AT(number + 1, 0)
    return refused, refused


class Op:
    """NodeOp, as far as it decides anything."""

    def __init__(self, start: Start, rank: int, number: int, first: int):
        self.kind, self.root = start.kind, start.root
        self.source = start.source if contributes(start, rank) else NOTHING
        self.digest, self.start, self.number, self.first = start.digest, start, number, first
        self.state, self.culprit, self.stage = UNDER_WAY, -1, STAGE_NEW
        self.put = self.summed = self.read = self.pieces = self.written = 0
        self.own_pieces = start.pieces if self.source == PIECED else 0
        self.named = ("op", start.window, number)

    def key(self) -> Any:
        if self.state:
            return self.state
        return self.stage, self.put, self.summed, self.read, self.pieces, self.written


class NodeWindow(Window):
    """NodeWindow. Its list of operations is `ops`, by number; `head` and `unposted` are numbers."""

    def __init__(self, scenario: NodeScenario, index: int, me: int):
        super().__init__(index, scenario.members[index], me)
        self.ops: list[Op] = []
        self.head = self.unposted = 1
        self.over = self.shown = self.over_state = self.smalls = self.pieces = self.read = 0
        self.culprit = -1
        self.small_used = [0] * scenario.smalls
        self.piece_used = [0] * scenario.pieces
        self.lacks = [-1, -1, -1]
        self.awaited: tuple[int, ...] = ()
        self.gone: set[Any] = set()

    def others(self) -> list[int]:
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def key(self) -> Any:
        slots = tuple(self.small_used), tuple(self.piece_used)
        over = self.over, self.shown, self.over_state, self.culprit, tuple(sorted(self.gone))
        counts = len(self.ops), self.head, self.unposted, self.read, self.moved
        lacks = tuple(self.lacks), self.awaited
        return counts, over, slots, lacks, tuple(o.key() for o in self.ops)


def contributes(o: Op | Start, q: int) -> bool:
    return q == o.root if o.kind == "BROADCAST" else o.kind != "BARRIER"


def takes(o: Op, q: int) -> bool:
    return q == o.root if o.kind == "REDUCE" else True


def needs(w: NodeWindow, o: Op, q: int) -> bool:
    if q == w.rank or not takes(o, w.rank):
        return False
    if o.kind == "BARRIER":
        return True
    if o.kind == "BOXES":
        return q in o.start.owners
    if o.kind == "SHIFT":
        return q == (w.rank - o.root) % w.size
    return contributes(o, q)


class NodeRank(Rank):
    """What one rank does: node.h, each access to shared memory a `yield`."""

    def __init__(self, scenario: NodeScenario, me: int, without: frozenset[str]):
        super().__init__(scenario, me, without)
        self.window = {
            i: NodeWindow(scenario, i, me)
            for i, ranks in enumerate(scenario.members)
            if me in ranks
        }
        self.ops: list[Op] = []

    def key(self) -> Any:
        return tuple(w.key() for w in self.window.values())

    # -- the program of the user ----------------------------------------------------------------

    def user(self) -> Steps:
        for step in self.scenario.programs[self.me]:
            if isinstance(step, Start):
                yield from self.node_start(step)
            elif isinstance(step, Wait):
                yield from self.resolve(self.ops[step.start])
            else:
                yield from self.node_leave()

    def resolve(self, o: Op) -> Steps:
        """Wait, look at what has come, and use the memory for something else."""
        w = self.window[o.start.window]
        only = None if self.has("every window") else w
        yield from self.node_wait(o, only)
        for one in self.window.values():
            one.lacks, one.moved = [-1, -1, -1], False  # nobody reads them before the next pass
        if o.state not in o.start.state:
            raise Fault(f"operation {o.number} ends with {o.state} by {o.culprit}")
        if o.source in (SHARED, REMOTE):
            for k in range(o.start.pieces):
                for part in range(w.size):
                    value: Place = ("sum", o.number, k, part)
                    if o.kind != "ALL_REDUCE":
                        value = ("in", w.rank, o.number, k, part)
                    place = ("x", w.id, w.rank, o.number, k, part)
                    if o.state == DONE and (o.kind == "BOXES" or k < o.pieces):
                        yield ("read", place, value)
                    yield ("write", place, USERS)

    # -- what the ranks have posted -------------------------------------------------------------

    def node_refuse(self, w: NodeWindow, number: int, state: int, q: int) -> Steps:
        if not w.over or number < w.over:
            w.over, w.over_state, w.culprit = number, state, q
            w.moved = w.moved or self.has("refused rings")
            if not self.has("refused last"):
                yield from self.node_show_refused(w)

    def node_show_refused(self, w: NodeWindow) -> Steps:
        if w.shown != w.over:
            w.shown = w.over
            why = w.culprit * 2 + (w.over_state == LOST)
            if self.has("refused tells"):
                yield ("store", ("refused", w.id, w.rank), AT(w.over, why), True)
            w.moved = w.moved or self.has("refused rings")

    def node_lacks(self, w: NodeWindow, what: int, q: int, number: int) -> Steps:
        w.lacks[what] = q
        refused = yield ("load", ("refused", w.id, q), "value", 0)
        if refused and refused // 8 <= number:
            culprit, state = refused % 8 // 2, LOST if refused & 1 else MISMATCH
            if not self.has("refused says why"):
                culprit, state = q, MISMATCH
            culprit = q if culprit == w.rank else culprit
            yield from self.node_refuse(w, refused // 8, state, culprit)
            return
        left = yield ("load", ("left", w.node_rank[q]), "any", 0)
        if left:
            note = q if self.has("left for each rank") else (q, number)
            if note in w.gone or not self.has("left twice"):
                yield from self.node_refuse(w, number, LOST, q)
                return
            if not self.has("left for each rank"):
                w.gone.clear()
            w.gone.add(note)
            w.moved = True

    def node_posted(self, w: NodeWindow, q: int, number: int) -> Steps:
        own = self.word(w, number)
        found = yield ("load", self.entry("word", w, q, number), "word", own)
        if found == "same":
            return True
        if found == "other":
            yield from self.node_refuse(w, number, MISMATCH, q)
        else:
            yield from self.node_lacks(w, 2, q, number)
        return False

    def node_all_at(self, w: NodeWindow, counter: str, at: int, what: int, o: Op) -> Steps:
        for q in self.readers(w, o) if counter == "read" else w.others():
            there = yield ("load", (counter, w.id, q), "reached", at)
            if not there:
                yield from self.node_lacks(w, what, q, o.number)
                return False
        return True

    def readers(self, w: NodeWindow, o: Op) -> list[int]:
        """Who may read what this rank gives."""
        if o.kind != "BOXES" or not self.has("readers only"):
            return w.others()
        started = {q: self.scenario.starts(w.node_rank[q], w.id)[: o.number] for q in w.others()}
        return [q for q in started if any(w.rank in s.owners for s in started[q][o.number - 1 :])]

    def node_room(self, w: NodeWindow, at: int, what: int, number: int) -> Steps:
        least, last = AT(at + 1, 0), w.rank
        for q in range(w.size):
            v = min(w.read, at)
            if q != w.rank:
                v = yield ("load", ("read", w.id, q), "up to", at)
            if v < least:
                least, last = v, q
        v = 0
        if least >= at:
            return True
        if last != w.rank:
            yield from self.node_lacks(w, what, last, number)
        return False

    def node_post(self, w: NodeWindow) -> Steps:
        entries, posted = self.scenario.entries, False
        while w.unposted <= len(w.ops) and self.may_post(w):
            o = w.ops[w.unposted - 1]
            n, slot, need = o.number, w.smalls % len(w.small_used), 0
            if n > entries and self.has("room for entries"):
                need = AT(n - entries + 1, 0)
            if o.source == SMALL and self.has("room for smalls"):
                need = max(need, w.small_used[slot])
            room = yield from self.node_room(w, need, 0, n)
            if not room:
                break
            if not self.has("word last"):
                yield ("store", self.entry("word", w, w.rank, n), self.word(w, n), True)
            if o.source == SMALL:
                for part in range(w.size):
                    token = ("in", w.rank, n, 0, part)
                    yield ("write", ("small", w.id, w.rank, slot, part), token)
                w.small_used[slot] = AT(n + 1, 0)
                w.smalls += 1
            yield ("write", self.entry("entry", w, w.rank, n), ("entry", n))
            if self.has("word last"):
                release = self.has("word release")
                yield ("store", self.entry("word", w, w.rank, n), self.word(w, n), release)
            w.unposted += 1
            posted = True
        w.moved = w.moved or posted

    def may_post(self, w: NodeWindow) -> bool:
        if not w.over or not self.has("refused stops"):
            return True
        return self.has("before a mismatch") and w.unposted < w.over

    def entry(self, field: str, w: NodeWindow, q: int, number: int) -> Place:
        return field, w.id, q, number % self.scenario.entries

    def word(self, w: NodeWindow, number: int) -> int:
        total = 0
        for o in w.ops[:number]:
            total = total * 2 + o.digest if self.has("rolling total") else o.digest
        return number << 8 | total

    # -- reading and writing --------------------------------------------------------------------

    def start(self, w: NodeWindow, q: int, number: int) -> Start:
        starts: list[Start] = self.scenario.starts(w.node_rank[q], w.id)
        return starts[number - 1]

    def source(self, w: NodeWindow, q: int, number: int) -> str:
        """What entry[number] of rank q says."""
        start = self.start(w, q, number)
        return start.source if contributes(start, q) else NOTHING

    def slot(self, w: NodeWindow, q: int, o: Op, k: int) -> Place | None:
        """Where piece k of rank q's contribution lies, up to the part; None in its entry."""
        source = self.source(w, q, o.number)
        if source == PIECED:
            first = sum(start.pieces for start in self.earlier(w, q, o))
            return "piece", w.id, q, (first + k) % self.scenario.pieces
        if source == SMALL:
            return "small", w.id, q, len(self.earlier(w, q, o)) % self.scenario.smalls
        if source in (SHARED, REMOTE):
            return "x", w.id, q, o.number, k
        return None

    def earlier(self, w: NodeWindow, q: int, o: Op) -> list[Start]:
        """What rank q has sent before operation o the same way."""
        starts = self.scenario.starts(w.node_rank[q], w.id)
        source = self.source(w, q, o.number)
        return [starts[n - 1] for n in range(1, o.number) if self.source(w, q, n) == source]

    def node_read(self, w: NodeWindow, o: Op, q: int, k: int, part: int, what: str) -> Steps:
        token = ("in", q, o.number, k, part) if what == "in" else ("sum", o.number, k, part)
        slot = self.slot(w, q, o, k)
        if q == w.rank and what == "in" and o.source == PIECED:
            return  # from the user's own
        if slot is None:
            yield ("read", self.entry("entry", w, q, o.number), ("entry", o.number))
        else:
            yield ("read", (*slot, part), token)

    def node_sum(self, w: NodeWindow, o: Op, k: int, part: int) -> Steps:
        for q in range(w.size):
            yield from self.node_read(w, o, q, k, part, "in")

    def node_take(self, w: NodeWindow, o: Op, k: int) -> Steps:
        for q in range(w.size):
            if contributes(o, q) and (needs(w, o, q) or (q == w.rank and o.kind != "SHIFT")):
                for part in range(w.size):
                    yield from self.node_read(w, o, q, k, part, "in")

    # -- boxes ----------------------------------------------------------------------------------

    def given_pieces(self, w: NodeWindow, o: Op, q: int) -> int:
        """How many pieces come from rank q: e->in_segment, if it is PIECED."""
        return self.start(w, q, o.number).pieces if self.source(w, q, o.number) == PIECED else 0

    def in_pieces(self, w: NodeWindow, o: Op, q: int) -> bool:
        """Tell whether what is taken of rank q is taken as its pieces come."""
        pieces = [self.given_pieces(w, o, p) for p in o.start.owners]
        most = max(pieces) if self.has("kept aside") else self.given_pieces(w, o, q)
        return self.source(w, q, o.number) == PIECED and most > 1

    def node_take_boxes(self, w: NodeWindow, o: Op) -> Steps:
        reduces = o.start.reduces
        for q in o.start.owners:
            if self.in_pieces(w, o, q):
                if o.read < self.given_pieces(w, o, q):
                    yield from self.node_read(w, o, q, o.read, w.rank, "in")
            elif not reduces and not o.read:
                yield from self.node_read(w, o, q, 0, w.rank, "in")
        for q in o.start.owners if reduces and o.read + 1 == o.pieces else ():
            if not self.in_pieces(w, o, q):
                yield from self.node_read(w, o, q, 0, w.rank, "in")

    def node_decide_boxes(self, w: NodeWindow, o: Op) -> Steps:
        o.pieces = int(o.start.owners != ())
        for q in o.start.owners:
            yield ("read", self.entry("entry", w, q, o.number), ("entry", o.number))
            o.pieces = max(o.pieces, self.given_pieces(w, o, q))

    # -- one operation --------------------------------------------------------------------------

    def node_decide(self, w: NodeWindow, o: Op) -> Steps:
        if o.kind == "BOXES":
            yield from self.node_decide_boxes(w, o)
            return
        pieced, direct, shared = o.source == PIECED, False, True
        for q in range(w.size):
            if q != w.rank and not needs(w, o, q):
                continue
            if q != w.rank:
                yield ("read", self.entry("entry", w, q, o.number), ("entry", o.number))
            source = self.source(w, q, o.number)
            pieced = pieced or source == PIECED
            direct = direct or source in (SHARED, REMOTE)
            shared = shared and source == SHARED
        o.pieces = o.start.pieces if pieced else o.kind != "BARRIER"
        if o.kind == "ALL_REDUCE":
            o.written = 2 if shared else int(pieced or direct)

    def node_pieces_there(self, w: NodeWindow, o: Op, k: int) -> Steps:
        if not self.has("put first"):
            return True
        for q in range(w.size):
            if not needs(w, o, q) or self.source(w, q, o.number) != PIECED:
                continue
            if k >= self.given_pieces(w, o, q) and self.has("fewer pieces"):
                continue
            there = yield ("load", ("put", w.id, q), "reached", AT(o.number, k + 1))
            if not there:
                yield from self.node_lacks(w, 2, q, o.number)
                return False
        return True

    def node_put_pieces(self, w: NodeWindow, o: Op) -> Steps:
        while o.put < o.own_pieces:
            slot = (o.first + o.put) % self.scenario.pieces
            need = w.piece_used[slot] if self.has("room for pieces") else 0
            room = yield from self.node_room(w, need, 1, o.number)
            if not room:
                break
            for part in range(w.size):
                token = ("in", w.rank, o.number, o.put, part)
                yield ("write", ("piece", w.id, w.rank, slot, part), token)
            o.put += 1
            w.piece_used[slot] = AT(o.number, o.put)
            yield from self.count("put", w, AT(o.number, o.put))

    def count(self, counter: str, w: NodeWindow, at: int) -> Steps:
        if counter == "read":
            w.read = at
        yield ("store", (counter, w.id, w.rank), at, self.has("counter release"))
        w.moved = w.moved or counter != "read" or self.has("read rings")

    def node_sum_parts(self, w: NodeWindow, o: Op) -> Steps:
        again = False
        slot_is_its = o.source != PIECED or o.summed < o.put or not self.has("own piece first")
        if o.summed < o.pieces and slot_is_its:
            there = yield from self.node_pieces_there(w, o, o.summed)
            if there:
                yield from self.node_sum(w, o, o.summed, w.rank)
                token = ("sum", o.number, o.summed, w.rank)
                for q in range(w.size):  # node_result(), or the targets
                    if q == w.rank or o.written == 2:
                        place = self.slot(w, q, o, o.summed)
                        if place is not None:
                            yield ("write", (*place, w.rank), token)
                o.summed += 1
                yield from self.count("summed", w, AT(o.number, o.summed))
                again = True
        if o.read < o.summed:
            all_at = True
            if self.has("all summed"):
                at = AT(o.number, o.read + 1)
                all_at = yield from self.node_all_at(w, "summed", at, 2, o)
            if all_at:
                if not self.has("read last"):
                    yield from self.count("read", w, AT(o.number, o.read + 1))
                for q in range(w.size):
                    if o.written == 1 and q != w.rank:
                        yield from self.node_read(w, o, q, o.read, q, "sum")
                        if o.source in (SHARED, REMOTE):
                            place = ("x", w.id, w.rank, o.number, o.read, q)
                            yield ("write", place, ("sum", o.number, o.read, q))
                o.read += 1
                if self.has("read last"):
                    yield from self.count("read", w, AT(o.number, o.read))
                again = True
        return again

    def node_advance(self, w: NodeWindow, o: Op) -> Steps:
        taking = takes(o, w.rank)
        if o.stage == STAGE_NEW:
            if w.unposted <= o.number:
                return False
            for q in w.others():
                if needs(w, o, q) or not self.has("owners only"):
                    there = yield from self.node_posted(w, q, o.number)
                    if not there:
                        return False
            yield from self.node_decide(w, o)
            o.stage = STAGE_MOVE
            if not taking:
                yield from self.count("read", w, AT(o.number + 1, 0))
        if o.stage == STAGE_MOVE:
            pieced = o.source == PIECED
            if pieced:
                yield from self.node_put_pieces(w, o)
                if not taking and o.put < o.own_pieces:
                    return False
            if o.kind == "BOXES":
                while o.read < o.pieces:
                    if pieced:
                        yield from self.node_put_pieces(w, o)
                    there = yield from self.node_pieces_there(w, o, o.read)
                    if not there:
                        return False
                    yield from self.node_take_boxes(w, o)
                    o.read += 1
                    yield from self.count("read", w, AT(o.number, o.read))
                if o.put < o.own_pieces and not self.has("reads on"):
                    return False
            elif taking and o.written:
                while o.read < o.pieces:
                    if pieced:
                        yield from self.node_put_pieces(w, o)
                    again = yield from self.node_sum_parts(w, o)
                    if not again:
                        return False
            elif taking:
                while o.read < o.pieces:
                    if pieced:
                        yield from self.node_put_pieces(w, o)
                    there = yield from self.node_pieces_there(w, o, o.read)
                    if not there:
                        return False
                    if not self.has("read last"):
                        yield from self.count("read", w, AT(o.number, o.read + 1))
                    yield from self.node_take(w, o, o.read)
                    o.read += 1
                    if o.read < o.pieces:
                        yield from self.count("read", w, AT(o.number, o.read))
                if pieced and o.put < o.own_pieces:
                    return False
            o.stage = STAGE_AFTER
            yield from self.count("read", w, AT(o.number + 1, 0))
        if o.kind == "BOXES" and o.source == PIECED:
            yield from self.node_put_pieces(w, o)
            if o.put < o.own_pieces:
                return False
        if o.source in (SHARED, REMOTE) and o.written != 2 and self.has("in place"):
            at = AT(o.number + 1, 0)
            through = yield from self.node_all_at(w, "read", at, 2, o)
            return through
        return True

    def node_out(self, w: NodeWindow, o: Op) -> Steps:
        if o.source not in (SHARED, REMOTE) or w.unposted <= o.number:
            return True
        if not self.has("in place, refused"):
            return True
        for q in self.readers(w, o):
            at = AT(o.number + 1, 0)
            out = yield ("load", ("read", w.id, q), "reached", at)
            if not out:
                out = yield ("load", ("refused", w.id, q), "refused", o.number)
            if not out:
                out = yield ("load", ("left", w.node_rank[q]), "any", 0)
            if not out:
                w.lacks[2] = q
                return False
        return True

    def node_over(self, w: NodeWindow, o: Op, state: int) -> None:
        o.state, o.culprit = state, w.culprit
        while w.head <= len(w.ops) and w.ops[w.head - 1].state:
            w.head += 1

    def node_pass_window(self, w: NodeWindow) -> Steps:
        w.lacks = [-1, -1, -1]
        yield from self.node_post(w)
        while w.head <= len(w.ops) and self.may_go_on(w):
            over = yield from self.node_advance(w, w.ops[w.head - 1])
            if over:
                w.moved = w.moved or self.has("read rings")
                self.node_over(w, w.ops[w.head - 1], DONE)
            elif not self.has("first in first out"):
                later = w.head + 1
                while later <= len(w.ops):
                    if not w.ops[later - 1].state:
                        over = yield from self.node_advance(w, w.ops[later - 1])
                        if over:
                            w.moved = True
                            self.node_over(w, w.ops[later - 1], DONE)
                    later += 1
                break
            else:
                break
            yield from self.node_post(w)
        yield from self.node_show_refused(w)
        if w.over and w.head <= len(w.ops) and not self.may_go_on(w):
            while w.head <= len(w.ops):
                out = yield from self.node_out(w, w.ops[w.head - 1])
                if not out:
                    return
                self.node_over(w, w.ops[w.head - 1], w.over_state)
                w.moved = w.moved or self.has("refused rings")
            if self.has("refused stops"):
                w.unposted = len(w.ops) + 1

    def may_go_on(self, w: NodeWindow) -> bool:
        return not w.over or (w.head < w.over and self.has("before a mismatch"))

    def node_pass(self, only: NodeWindow | None = None) -> Steps:
        moved = False
        for w in self.active() if only is None else [only]:
            w.moved = False
            yield from self.node_pass_window(w)
            if w.moved:
                yield from self.node_ring(w)
                moved = True
        return moved

    # -- what callers use -----------------------------------------------------------------------

    def node_start(self, start: Start) -> Steps:
        w = self.window[start.window]
        o = Op(start, w.rank, len(w.ops) + 1, w.pieces)
        if o.source == PIECED:
            w.pieces += start.pieces
        w.ops.append(o)
        self.ops.append(o)
        w.moved = False
        yield from self.node_post(w)
        yield from self.node_show_refused(w)
        if w.moved:
            yield from self.node_ring(w)
        w.lacks, w.moved = [-1, -1, -1], False

    def active(self) -> list[NodeWindow]:
        return [w for w in self.window.values() if w.head <= len(w.ops)]

    def node_await(self) -> Steps:
        for w in self.active():
            w.awaited = tuple(w.lacks)
        asked = sorted({(w.id, q, w.rank) for w in self.active() for q in w.lacks if q >= 0})
        for window, q, me in asked:
            yield ("or", ("waiters", window, q), 1 << me)

    def node_lacks_others(self) -> bool:
        lacks_others = any(w.awaited != tuple(w.lacks) for w in self.active())
        for w in self.active():
            w.awaited = ()  # nobody reads it before the next node_await()
        return lacks_others
