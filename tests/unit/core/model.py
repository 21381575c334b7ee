"""The node window's protocol in every interleaving: small programs of 2 and 3 ranks.

`Rank` is `mpimesh/core/node.h` in Python: functions, stages and fields have its names. A value is a
token that says whose contribution it is, of which operation, piece and part. Left out are

- spins and yields: a wait looks once, then goes to sleep; to look more often adds nothing;
- naps that end by themselves, but where a rank has left: one that nobody wakes is a fault;
- `seen_read`, a cache of counters that only grow;
- the lock between threads of one rank, and the texts of a mismatch.

Where `sleeps` is False, waits look again and again, and nobody rings. A sleep is a delay with more
looks, so all that can be read or written is in that, with far fewer states.

A function yields each access to shared memory. Between two of them a rank is its fields and a stack
of frames with their locals; equal ones are one node of the rank's automaton, which is built as far
as it is needed by running the functions again. `explore` visits all states of the memory, the
ranks' nodes and their store buffers, and looks whether all ranks can come to their end from each.

Memory orders. A rank's stores wait in its buffer; its later loads overtake them. Under "tso" (x86)
they leave it in order, and a fence or an atomic read-modify-write waits until it is empty. Under
"arm" (aarch64) only a fence and an exchange wait, other read-modify-writes queue as releases; a
store that is no release may leave before older ones, and says nothing about the data written before
it; and data may be read as they were at the last acquire. Since node.h stores each word and counter
with release and loads it with acquire, both machines show stores in order and load in order; what
differs is what happens where a rule is left out.

Data (all that is not atomic) are not interleaved: to step through a copy would find no more than
this. An access lasts from where it stands in the program until the next release has left the
buffer. If another rank accesses the same place meanwhile, and one of the two writes, that is a race
in C11's sense, and a fault, as is a value other than the expected one. A release may be all that
orders a read before it, so a read lasts as long as a write.

Reduction: a load whose result no other rank can change any more (a counter that has come far
enough, a word that is there, a place that nobody writes in this program) is taken at once, in one
step with what comes before. It commutes with all that others do, and no circle consists of such
loads alone. That a word does not change while it may be looked at is checked when it is written.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

# What a run may leave out, to see that it is needed.
RULES = {
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
    "ring fence": "a fence between a store and the look at who waits for it",
    "sleep fence": "a fence between the sleeper's bit and its second look",
    "second look": "who has set its bit looks again before it sleeps",
    "bell before look": "the bell is taken before the second look",
    "asleep before bell": "who sleeps is counted before the kernel compares the bell",
    "read rings": "`read` rings as a word does",
    "refused rings": "a refusal rings, too",
    "naps end": "a nap ends by itself: who leaves, or is killed, may ring nobody",
    "left twice": "who has left is looked at once more: it may have posted between the two looks",
    "left for each rank": "that is noted for each rank: one pass lacks several",
    "rolling total": "a word has the signatures so far: who compares none at n sees it at n + 1",
    "refused tells": "a refusal is told to those who lack this rank",
    "refused says why": "and whether of a mismatch or a loss",
    "refused last": "and when this rank touches nothing of what it refuses any more",
    "refused stops": "from there on nothing is posted",
    "before a mismatch": "what is before it goes on",
}

NOTHING, INLINE, SMALL = "NOTHING", "INLINE", "SMALL"
PIECED, SHARED, REMOTE = "PIECED", "SHARED", "REMOTE"
UNDER_WAY, DONE, MISMATCH, LOST = 0, 1, -1, -2
STAGE_NEW, STAGE_MOVE, STAGE_AFTER = range(3)
LISTENING, RUNG, ASLEEP, MISSED = 1, 2, 3, 4  # see Explorer
LOADS = ("load", "exchange", "or", "add")
USERS = "the user's"  # what is in its array after resolve()
READ = -1  # in place of a value: an access that reads

Place = tuple[Any, ...]
Steps = Generator[tuple[Any, ...], Any, Any]


def AT(number: int, piece: int) -> int:
    return number * 8 + piece


class Fault(Exception):
    """What a program must not come to."""


@dataclass(frozen=True)
class Start:
    kind: str = "ALL_REDUCE"
    source: str = INLINE
    pieces: int = 1
    root: int = 0
    window: int = 0
    digest: int = 0
    state: tuple[int, ...] = (DONE,)  # how it may end on this rank


@dataclass(frozen=True)
class Wait:
    start: int  # for which of the program's starts


LEAVE = "leave"
Program = tuple[Start | Wait | str, ...]


@dataclass(frozen=True)
class Scenario:
    programs: tuple[Program, ...]
    windows: tuple[tuple[int, ...], ...] = ()  # the ranks of each; one of all by default
    entries: int = 2
    smalls: int = 1
    pieces: int = 2
    sleeps: bool = True  # else who waits looks again and again, and nobody rings
    counts_sleepers: bool = False  # else each ring wakes by a system call

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return self.windows or (tuple(range(len(self.programs))),)


class Op:
    """NodeOp, as far as it decides anything."""

    def __init__(self, start: Start, rank: int, number: int, first: int):
        self.kind, self.root = start.kind, start.root
        self.source = start.source if contributes(start, rank) else NOTHING
        self.digest, self.start, self.number, self.first = start.digest, start, number, first
        self.state, self.culprit, self.stage = UNDER_WAY, -1, STAGE_NEW
        self.put = self.summed = self.read = self.pieces = self.written = 0
        self.named = ("op", start.window, number)

    def key(self) -> Any:
        if self.state:
            return self.state
        return self.stage, self.put, self.summed, self.read, self.pieces, self.written


class Window:
    """NodeWindow. Its list of operations is `ops`, by number; `head` and `unposted` are numbers."""

    def __init__(self, scenario: Scenario, index: int, me: int):
        self.id, self.node_rank = index, scenario.members[index]
        self.rank, self.size = self.node_rank.index(me), len(self.node_rank)
        self.ops: list[Op] = []
        self.head = self.unposted = 1
        self.over = self.shown = self.over_state = self.smalls = self.pieces = self.read = 0
        self.culprit = -1
        self.small_used = [0] * scenario.smalls
        self.piece_used = [0] * scenario.pieces
        self.lacks, self.moved = [-1, -1, -1], False
        self.awaited: tuple[int, ...] = ()
        self.gone: set[Any] = set()
        self.named = ("window", index)

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


def needs(w: Window, o: Op, q: int) -> bool:
    if q == w.rank or not takes(o, w.rank):
        return False
    if o.kind == "BARRIER":
        return True
    if o.kind == "SHIFT":
        return q == (w.rank - o.root) % w.size
    return contributes(o, q)


class Rank:
    """What one rank does: node.h, each access to shared memory a `yield`."""

    def __init__(self, scenario: Scenario, me: int, without: frozenset[str]):
        self.scenario, self.me, self.without = scenario, me, without
        self.window = {
            i: Window(scenario, i, me) for i, ranks in enumerate(scenario.members) if me in ranks
        }
        self.ops: list[Op] = []
        self.starts = {
            (rank, w): [s for s in program if isinstance(s, Start) and s.window == w]
            for rank, program in enumerate(scenario.programs)
            for w in range(len(scenario.members))
        }

    def has(self, rule: str) -> bool:
        return rule not in self.without

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
        yield from self.node_wait(o)
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
                    if o.state == DONE and k < o.pieces:
                        yield ("read", place, value)
                    yield ("write", place, USERS)

    # -- bells ----------------------------------------------------------------------------------

    def node_wake(self, q: int) -> Steps:
        yield ("add", ("bell", q), 1)
        asleep = True
        if self.scenario.counts_sleepers:
            asleep = yield ("load", ("asleep", q), "sc", 0)
        if asleep:
            yield ("wake", q)

    def node_ring(self, w: Window) -> Steps:
        if not self.scenario.sleeps:
            return
        if self.has("ring fence"):
            yield ("fence",)
        m = yield ("load", ("waiters", w.id, w.rank), "any", 0)
        if not m:
            return
        m = yield ("exchange", ("waiters", w.id, w.rank))
        for q in range(w.size):
            if m >> q & 1:
                yield from self.node_wake(w.node_rank[q])

    # -- what the ranks have posted -------------------------------------------------------------

    def node_refuse(self, w: Window, number: int, state: int, q: int) -> Steps:
        if not w.over or number < w.over:
            w.over, w.over_state, w.culprit = number, state, q
            w.moved = w.moved or self.has("refused rings")
            if not self.has("refused last"):
                yield from self.node_show_refused(w)

    def node_show_refused(self, w: Window) -> Steps:
        if w.shown != w.over:
            w.shown = w.over
            why = w.culprit * 2 + (w.over_state == LOST)
            if self.has("refused tells"):
                yield ("store", ("refused", w.id, w.rank), AT(w.over, why), True)
            w.moved = w.moved or self.has("refused rings")

    def node_lacks(self, w: Window, what: int, q: int, number: int) -> Steps:
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

    def node_posted(self, w: Window, q: int, number: int) -> Steps:
        own = self.word(w, number)
        found = yield ("load", self.entry("word", w, q, number), "word", own)
        if found == "same":
            return True
        if found == "other":
            yield from self.node_refuse(w, number, MISMATCH, q)
        else:
            yield from self.node_lacks(w, 2, q, number)
        return False

    def node_all_at(self, w: Window, counter: str, at: int, what: int, number: int) -> Steps:
        for q in w.others():
            there = yield ("load", (counter, w.id, q), "reached", at)
            if not there:
                yield from self.node_lacks(w, what, q, number)
                return False
        return True

    def node_room(self, w: Window, at: int, what: int, number: int) -> Steps:
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

    def node_post(self, w: Window) -> Steps:
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

    def may_post(self, w: Window) -> bool:
        if not w.over or not self.has("refused stops"):
            return True
        return self.has("before a mismatch") and w.unposted < w.over

    def entry(self, field: str, w: Window, q: int, number: int) -> Place:
        return field, w.id, q, number % self.scenario.entries

    def word(self, w: Window, number: int) -> int:
        total = 0
        for o in w.ops[:number]:
            total = total * 2 + o.digest if self.has("rolling total") else o.digest
        return number << 8 | total

    # -- reading and writing --------------------------------------------------------------------

    def source(self, w: Window, q: int, number: int) -> str:
        """What entry[number] of rank q says."""
        start = self.starts[w.node_rank[q], w.id][number - 1]
        return start.source if contributes(start, q) else NOTHING

    def slot(self, w: Window, q: int, o: Op, k: int) -> Place | None:
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

    def earlier(self, w: Window, q: int, o: Op) -> list[Start]:
        """What rank q has sent before operation o the same way."""
        starts, source = self.starts[w.node_rank[q], w.id], self.source(w, q, o.number)
        return [starts[n - 1] for n in range(1, o.number) if self.source(w, q, n) == source]

    def node_read(self, w: Window, o: Op, q: int, k: int, part: int, what: str) -> Steps:
        token = ("in", q, o.number, k, part) if what == "in" else ("sum", o.number, k, part)
        slot = self.slot(w, q, o, k)
        if q == w.rank and what == "in" and o.source == PIECED:
            return  # from the user's own
        if slot is None:
            yield ("read", self.entry("entry", w, q, o.number), ("entry", o.number))
        else:
            yield ("read", (*slot, part), token)

    def node_sum(self, w: Window, o: Op, k: int, part: int) -> Steps:
        for q in range(w.size):
            yield from self.node_read(w, o, q, k, part, "in")

    def node_take(self, w: Window, o: Op, k: int) -> Steps:
        for q in range(w.size):
            if contributes(o, q) and (needs(w, o, q) or (q == w.rank and o.kind != "SHIFT")):
                for part in range(w.size):
                    yield from self.node_read(w, o, q, k, part, "in")

    # -- one operation --------------------------------------------------------------------------

    def node_decide(self, w: Window, o: Op) -> Steps:
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

    def node_pieces_there(self, w: Window, o: Op, k: int) -> Steps:
        if not self.has("put first"):
            return True
        for q in range(w.size):
            if not needs(w, o, q) or self.source(w, q, o.number) != PIECED:
                continue
            there = yield ("load", ("put", w.id, q), "reached", AT(o.number, k + 1))
            if not there:
                yield from self.node_lacks(w, 2, q, o.number)
                return False
        return True

    def node_put_pieces(self, w: Window, o: Op) -> Steps:
        while o.put < o.pieces:
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

    def count(self, counter: str, w: Window, at: int) -> Steps:
        if counter == "read":
            w.read = at
        yield ("store", (counter, w.id, w.rank), at, self.has("counter release"))
        w.moved = w.moved or counter != "read" or self.has("read rings")

    def node_sum_parts(self, w: Window, o: Op) -> Steps:
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
                all_at = yield from self.node_all_at(w, "summed", at, 2, o.number)
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

    def node_advance(self, w: Window, o: Op) -> Steps:
        taking = takes(o, w.rank)
        if o.stage == STAGE_NEW:
            if w.unposted <= o.number:
                return False
            for q in w.others():
                if needs(w, o, q):
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
                if not taking and o.put < o.pieces:
                    return False
            if taking and o.written:
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
                if pieced and o.put < o.pieces:
                    return False
            o.stage = STAGE_AFTER
            yield from self.count("read", w, AT(o.number + 1, 0))
        if o.source in (SHARED, REMOTE) and o.written != 2 and self.has("in place"):
            at = AT(o.number + 1, 0)
            through = yield from self.node_all_at(w, "read", at, 2, o.number)
            return through
        return True

    def node_out(self, w: Window, o: Op) -> Steps:
        if o.source not in (SHARED, REMOTE) or w.unposted <= o.number:
            return True
        if not self.has("in place, refused"):
            return True
        for q in w.others():
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

    def node_over(self, w: Window, o: Op, state: int) -> None:
        o.state, o.culprit = state, w.culprit
        while w.head <= len(w.ops) and w.ops[w.head - 1].state:
            w.head += 1

    def node_pass_window(self, w: Window) -> Steps:
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

    def may_go_on(self, w: Window) -> bool:
        return not w.over or (w.head < w.over and self.has("before a mismatch"))

    def node_pass(self, only: Window | None = None) -> Steps:
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

    def active(self) -> list[Window]:
        return [w for w in self.window.values() if w.head <= len(w.ops)]

    def node_await(self) -> Steps:
        for w in self.active():
            w.awaited = tuple(w.lacks)
        asked = sorted({(w.id, q, w.rank) for w in self.active() for q in w.lacks if q >= 0})
        for window, q, me in asked:
            yield ("or", ("waiters", window, q), 1 << me)
        if self.has("sleep fence"):
            yield ("fence",)

    def node_lacks_others(self) -> bool:
        return any(w.awaited != tuple(w.lacks) for w in self.active())

    def node_wait(self, o: Op) -> Steps:
        only = None if self.has("every window") else self.window[o.start.window]
        while not o.state:
            yield from self.node_pass(only)
            if self.scenario.sleeps and not o.state:
                yield from self.node_sleep_since(o, only)

    def node_sleep_since(self, o: Op, only: Window | None) -> Steps:
        if self.has("bell before look"):
            yield ("listen",)
        if self.scenario.counts_sleepers and self.has("asleep before bell"):
            yield ("add", ("asleep", self.me), 1)
        yield from self.node_await()
        moved = False
        if self.has("second look"):
            moved = yield from self.node_pass(only)
        moved = moved or self.node_lacks_others()
        for w in self.active():
            w.awaited = ()  # nobody reads it before the next node_await()
        if not self.has("bell before look"):
            yield ("listen",)
        if not moved and not o.state:
            if self.scenario.counts_sleepers and not self.has("asleep before bell"):
                yield ("add", ("asleep", self.me), 1)
            yield ("futex",)
        if self.scenario.counts_sleepers:
            yield ("add", ("asleep", self.me), -1)

    def node_leave(self) -> Steps:
        yield ("store", ("left", self.me), 1, True)


# -- automata ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return getattr(value, "named", value)


class Automaton:
    """The steps of one rank: nodes with the next access, and edges by its result."""

    def __init__(self, scenario: Scenario, me: int, without: frozenset[str]):
        self.arguments = scenario, me, without
        self.access: list[tuple[Any, ...]] = []
        self.edges: dict[tuple[int, Any], int] = {}
        self.came: list[tuple[int, Any] | None] = []
        self.ids: dict[Any, int] = {}
        self.parked: dict[int, tuple[Rank, Steps]] = {}
        rank = Rank(*self.arguments)
        self.at(rank, rank.user(), None, None)

    def at(self, rank: Rank, steps: Steps, came: tuple[int, Any] | None, result: Any) -> int:
        """Run to the next access, and return its node."""
        try:
            access = steps.send(result)
        except StopIteration:
            access = ("end",)
        frames = []
        inner: Any = steps
        while inner is not None and inner.gi_frame is not None:
            frame = inner.gi_frame
            values = frame.f_locals.items()
            found = tuple((name, plain(v)) for name, v in values if v is not rank)
            frames.append((frame.f_code.co_name, frame.f_lasti, found))
            inner = inner.gi_yieldfrom
        key = access, tuple(frames), rank.key()
        node = self.ids.setdefault(key, len(self.access))
        if node == len(self.access):
            self.access.append(access)
            self.came.append(came)
        self.parked[node] = rank, steps
        return node

    def follow(self, node: int, result: Any) -> int:
        to = self.edges.get((node, result))
        if to is None:
            rank, steps = self.parked.pop(node) if node in self.parked else self.again(node)
            to = self.edges[node, result] = self.at(rank, steps, (node, result), result)
        return to

    def again(self, node: int) -> tuple[Rank, Steps]:
        results = []
        while (came := self.came[node]) is not None:
            node = came[0]
            results.append(came[1])
        rank = Rank(*self.arguments)
        steps = rank.user()
        next(steps)
        for result in reversed(results):
            steps.send(result)
        return rank, steps


# -- all interleavings -------------------------------------------------------------------------


def places(scenario: Scenario) -> Iterator[Place]:
    for me in range(len(scenario.programs)):
        for name in ("left", "bell", "asleep"):
            yield name, me
    for w, members in enumerate(scenario.members):
        ranks = range(len(members))
        for q in ranks:
            for name in ("put", "summed", "read", "refused", "waiters"):
                yield name, w, q
            for slot in range(scenario.entries):
                yield "word", w, q, slot
                yield "entry", w, q, slot
            for part in ranks:
                for name, slots in (("small", scenario.smalls), ("piece", scenario.pieces)):
                    for slot in range(slots):
                        yield name, w, q, slot, part
            steps = scenario.programs[members[q]]
            starts = [s for s in steps if isinstance(s, Start) and s.window == w]
            for n, start in enumerate(starts, 1):
                if start.source in (SHARED, REMOTE) and contributes(start, q):
                    for k in range(start.pieces):
                        for part in ranks:
                            yield "x", w, q, n, k, part


class Explorer:
    """The states of a scenario: the memory, and each rank.

    A rank is its node, its store buffer, its accesses to data that no release covers yet, its bell,
    and the data that have changed since its last acquire. The bell is 0 where the rank does not
    sleep, LISTENING since it was taken, RUNG when it has changed since, ASLEEP in the futex, MISSED
    there when it has changed and the wake-up is still to come.
    """

    def __init__(self, scenario: Scenario, without: frozenset[str], order: str):
        self.scenario, self.without, self.arm = scenario, without, order == "arm"
        self.index = {place: i for i, place in enumerate(places(scenario))}
        self.place = list(self.index)
        self.ranks = range(len(scenario.programs))
        self.automata = [Automaton(scenario, me, without) for me in self.ranks]
        steps = [step for program in scenario.programs for step in program]
        disturbed = LEAVE in steps or any(isinstance(s, Start) and s.digest for s in steps)
        self.quiet = {
            i
            for place, i in self.index.items()
            if (place[0] == "refused" and not disturbed)
            or (place[0] == "left" and LEAVE not in scenario.programs[place[1]])
        }
        self.accesses = [
            [self.numbered(a) for a in automaton.access] for automaton in self.automata
        ]
        self.resolved = set()  # rank, window and number
        for rank, program in enumerate(scenario.programs):
            starts = [step for step in program if isinstance(step, Start)]
            for step in program:
                if isinstance(step, Wait):
                    window = starts[step.start].window
                    earlier = [s for s in starts[: step.start] if s.window == window]
                    self.resolved.add((rank, window, len(earlier) + 1))
        self.keeps_stale = self.arm and "word acquire" in without

    def numbered(self, access: tuple[Any, ...]) -> tuple[Any, ...]:
        """The access with its place as a number."""
        if len(access) > 1 and isinstance(access[1], tuple):
            return access[0], self.index[access[1]], *access[2:]
        return access

    def initial(self) -> tuple[Any, ...]:
        memory = [("in", *place[2:]) if place[0] == "x" else 0 for place in self.place]
        return self.settled(memory, [[0, (), (), 0, frozenset()] for _ in self.ranks])

    # -- one step of a rank

    def access(self, r: int, node: int) -> tuple[Any, ...]:
        known, automaton = self.accesses[r], self.automata[r]
        while len(known) <= node:
            known.append(self.numbered(automaton.access[len(known)]))
        return known[node]

    def settled(self, memory: list[Any], ranks: list[list[Any]]) -> tuple[Any, ...]:
        """The state when every rank has done what commutes with all that others do."""
        for r in self.ranks:
            while self.does_alone(memory, ranks, r):
                pass
        return tuple(memory), tuple(tuple(rank) for rank in ranks)

    def does_alone(self, memory: list[Any], ranks: list[list[Any]], r: int) -> bool:
        rank = ranks[r]
        access = self.access(r, rank[0])
        result = None
        match access[0]:
            case "load":
                result, lasts = self.loaded(memory, access)
                if not lasts or (access[2] == "sc" and rank[1]):
                    return False
                self.acquire(rank, access)
            case "read" | "write":
                self.touch(memory, ranks, r, access)
            case "store":
                _, place, value, release = access
                if place in self.quiet:
                    raise Fault(f"rank {r} stores {self.place[place]} = {value} without a cause")
                self.put_in_buffer(rank, ("store", place, value, release), release)
            case "or" | "add" if self.arm:
                self.put_in_buffer(rank, (*access, True), True)
            case "fence" if not rank[1]:
                self.publish(memory, ranks, r, rank[2])
                rank[2], rank[4] = (), frozenset()
            case "wake" if not rank[1]:
                if ranks[access[1]][3] == MISSED:
                    ranks[access[1]][3] = RUNG
            case _:
                return False
        rank[0] = self.automata[r].follow(rank[0], result)
        return True

    def loaded(self, memory: list[Any], access: tuple[Any, ...]) -> tuple[Any, bool]:
        """What a load gives, and whether no other rank can change that."""
        _, place, kind, argument = access
        value = memory[place]
        if kind == "reached":
            return value >= argument, value >= argument
        if kind == "up to":
            return min(value, argument), value >= argument
        if kind == "word":
            if value == argument:
                return "same", True
            other = value >> 8 == argument >> 8
            return ("other" if other else "older"), other
        if kind == "refused":
            value = 0 < value < AT(argument + 1, 0)
            return value, value
        if kind == "any":
            return value != 0, value != 0 or place in self.quiet
        return value, place in self.quiet

    def acquire(self, rank: list[Any], access: tuple[Any, ...]) -> None:
        if rank[4] and access[2] != "word":
            rank[4] = frozenset()

    def touch(self, memory: list[Any], ranks: list[Any], r: int, access: tuple[Any, ...]) -> None:
        """Read or write data: nobody else may be at it, and what is read must be right."""
        kind, place, value = access
        for q in self.ranks:
            if q != r:
                for item in (*ranks[q][2], *(a for i in ranks[q][1] for a in i[4])):
                    if item[0] == place and (kind == "write" or item[1] != READ):
                        does = "reads" if item[1] == READ else f"writes for {item[1]}"
                        mine = f"rank {r} {kind}s {self.place[place]} for {value}"
                        raise Fault(f"race: {mine}, which rank {q} {does}")
        rank = ranks[r]
        if kind == "write":
            rank[2] = (*rank[2], (place, value))
            return
        if place in rank[4]:
            raise Fault(f"rank {r} may have read {self.place[place]} before the word")
        found = memory[place]
        for item in (*(a for i in rank[1] for a in i[4]), *rank[2]):
            if item[0] == place and item[1] != READ:
                found = item[1]
        if found != value:
            raise Fault(f"rank {r} reads {found} in {self.place[place]} for {value}")
        if (place, READ) not in rank[2]:
            rank[2] = (*rank[2], (place, READ))

    def put_in_buffer(self, rank: list[Any], item: tuple[Any, ...], release: bool) -> None:
        data: tuple[Any, ...] = ()
        if release or not self.arm:
            data, rank[2] = rank[2], ()
        rank[1] = (*rank[1], (*item, data))

    def publish(self, memory: list[Any], ranks: list[Any], r: int, data: tuple[Any, ...]) -> None:
        for place, value in data:
            if value != READ:
                memory[place] = value
                for q in self.ranks if self.keeps_stale else ():
                    if q != r:
                        ranks[q][4] = ranks[q][4] | {place}

    def change(self, memory: list[Any], ranks: list[Any], r: int, item: tuple[Any, ...]) -> None:
        """Make a store, or an atomic OR or ADD, visible to all."""
        kind, place, value, _, data = item
        self.publish(memory, ranks, r, data)
        name = self.place[place][0]
        if name == "bell":
            q = self.place[place][1]
            ranks[q][3] = {LISTENING: RUNG, ASLEEP: MISSED}.get(ranks[q][3], ranks[q][3])
        elif kind == "store":
            if name == "word":
                self.look_at_readers(memory, ranks, place)
            memory[place] = value
        elif kind == "or":
            memory[place] |= value
        else:
            memory[place] += value

    def look_at_readers(self, memory: list[Any], ranks: list[Any], place: int) -> None:
        """Before an entry is written again."""
        number = memory[place] >> 8
        _, w, q, _ = self.place[place]
        for p, r in enumerate(self.scenario.members[w]):
            read = self.index["read", w, p]
            stored = [memory[read], *(i[2] for i in ranks[r][1] if i[1] == read)]
            if number and p != q and max(stored) < AT(number + 1, 0):
                raise Fault(
                    f"rank {q} posts over its operation {number}, which rank {p} has not read"
                )

    # -- all next states

    def successors(self, state: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for r in self.ranks:
            buffer = state[1][r][1]
            for i, item in enumerate(buffer):
                if i and not self.leaves_early(buffer[:i], item):
                    continue
                memory, ranks = list(state[0]), [list(rank) for rank in state[1]]
                ranks[r][1] = buffer[:i] + buffer[i + 1 :]
                self.change(memory, ranks, r, item)
                yield f"rank {r} shows {self.place[item[1]]} {item[2]}", self.settled(memory, ranks)
            memory, ranks = list(state[0]), [list(rank) for rank in state[1]]
            label = self.does(memory, ranks, r)
            if label:
                yield f"rank {r}: {label}", self.settled(memory, ranks)

    def leaves_early(self, older: tuple[Any, ...], item: tuple[Any, ...]) -> bool:
        return self.arm and not item[3] and all(other[1] != item[1] for other in older)

    def does(self, memory: list[Any], ranks: list[Any], r: int) -> str:
        """The next access of rank r, if it can be now."""
        rank = ranks[r]
        access = self.access(r, rank[0])
        result: Any = None
        match access[0]:
            case "load":
                if access[2] == "sc" and rank[1]:
                    return ""
                result, _ = self.loaded(memory, access)
                self.acquire(rank, access)
            case "listen":
                rank[3], rank[4] = LISTENING, frozenset()
            case "or" | "add" | "exchange" | "futex" if rank[1]:
                return ""
            case "or" | "add":
                self.change(memory, ranks, r, (*access, True, rank[2]))
                rank[2], rank[4] = (), frozenset()
            case "exchange":
                result, memory[access[1]] = memory[access[1]], 0
                self.publish(memory, ranks, r, rank[2])
                rank[2], rank[4] = (), frozenset()
            case "futex":
                if rank[3] == LISTENING:
                    rank[3] = ASLEEP
                    return "falls asleep"
                if rank[3] != RUNG and not self.nap_ends(memory):
                    return ""
                rank[3] = 0
            case _:
                return ""
        node = self.automata[r].follow(rank[0], result)
        rank[0] = node
        return (
            f"{access[0]} {self.place[access[1]] if access[0] in LOADS else access[1:]} -> {result}"
        )

    def nap_ends(self, memory: list[Any]) -> bool:
        """All naps do, but they are here to sleep through what must not be missed."""
        left = any(memory[self.index["left", me]] for me in self.ranks)
        return left and "naps end" not in self.without

    def is_last(self, state: tuple[Any, ...]) -> bool:
        if any(rank[1] or self.access(r, rank[0])[0] != "end" for r, rank in enumerate(state[1])):
            return False
        for i, place in enumerate(self.place):
            if place[0] != "x":
                continue
            rank = self.scenario.members[place[1]][place[2]]
            is_users = state[0][i] == USERS or (i, USERS) in state[1][rank][2]
            if (rank, place[1], place[3]) in self.resolved and not is_users:
                raise Fault(f"{place} has been written after resolve(): {state[0][i]}")
        return True


def explore(
    scenario: Scenario, *, without: str = "", order: str = "tso", limit: int = 10**7
) -> tuple[int, str]:
    """Return how many states there are, and "", or the first fault and the way to it.

    It stops at `limit` states, without a look at whether all come to an end.
    """
    explorer = Explorer(scenario, frozenset([without] if without else ()), order)
    first = explorer.initial()
    ids, came, todo = {first: 0}, [(0, "start")], [first]
    edges: list[tuple[int, int]] = []
    ends = bytearray(1)

    def way(n: int) -> str:
        steps = []
        while n:
            n, label = came[n]
            steps.append(label)
        return "\n".join(reversed(steps))

    while todo:
        state = todo.pop()
        n = ids[state]
        try:
            if explorer.is_last(state):
                ends[n] = 1
                continue
            for label, after in explorer.successors(state):
                m = ids.setdefault(after, len(came))
                if m == len(came):
                    came.append((n, label))
                    todo.append(after)
                    ends.append(0)
                if m != n:
                    edges.append((n, m))
        except Fault as fault:
            return len(came), f"{fault}\n{way(n)}"
        if len(came) > limit:
            return len(came), ""
    changed = True
    while changed:
        changed = False
        for n, m in reversed(edges):
            if ends[m] and not ends[n]:
                ends[n] = changed = True
    stuck = ends.rfind(0)
    if stuck < 0:
        return len(came), ""
    return len(came), f"from here not all ranks come to their end, whatever they do\n{way(stuck)}"
