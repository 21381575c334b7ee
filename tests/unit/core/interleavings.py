"""All interleavings of small programs of 2 and 3 ranks, over store buffers.

A protocol is a header of `mpimesh/core` in Python: `node_model.py` and `mail_model.py`. It gives a
`Scenario`, which knows the places in shared memory, and a `Rank`, whose functions have the header's
names. Here are what the headers share, bells and sleep, and the checker. Left out are

- spins and yields: a wait looks once, then goes to sleep; to look more often adds nothing;
- naps that end by themselves, but where a rank has left: one that nobody wakes is a fault;
- the lock between threads of one rank.

Where `sleeps` is False, waits look again and again, and nobody rings. A sleep is a delay with more
looks, so all that can be read or written is in that, with far fewer states.

A function yields each access to shared memory. Between two of them a rank is its fields and a stack
of frames with their locals; equal ones are one node of the rank's automaton, which is built as far
as it is needed by running the functions again. `explore` visits all states of the memory, the
ranks' nodes and their store buffers, and looks whether all ranks can come to their end from each. A
rank that may be `killed` is, before each of its accesses; what it has stored by then is seen, and
what it was writing without a release stays half written.

Memory orders. A rank's stores wait in its buffer; its later loads overtake them. Under "tso" (x86)
they leave it in order, and a fence or an atomic read-modify-write waits until it is empty. Under
"arm" (aarch64) only a fence, an exchange and a compare-and-exchange wait, other read-modify-writes
queue as releases; a store that is no release may leave before older ones, and says nothing about
the data written before it; and data may be read as they were at the last acquire. Since the headers
store each word and counter with release and load it with acquire, both machines show stores in
order and load in order; what differs is what happens where a rule is left out.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# What a run may leave out, to see that it is needed; a protocol has more of them.
BELL_RULES = {
    "ring fence": "a fence between a store and the look at who waits for it",
    "sleep fence": "a fence between the sleeper's bit and its second look",
    "second look": "who has set its bit looks again before it sleeps",
    "bell before look": "the bell is taken before the second look",
    "asleep": "who sleeps is counted before its bits, and looked for after a change of the bell",
    "naps end": "a nap ends by itself: who leaves, or is killed, may ring nobody",
}

LISTENING, RUNG, ASLEEP, MISSED = 1, 2, 3, 4  # see Explorer
LOADS = ("load", "exchange", "or", "add", "claim")
READ = -1  # in place of a value: an access that reads
DEAD, SEEN_DEAD = -1, -2  # nodes of who was killed

Place = tuple[Any, ...]
Steps = Generator[tuple[Any, ...], Any, Any]
# Of a load: what it gives, and whether no other rank can change that.
Kind = Callable[[Any, Any], tuple[Any, bool]]

KINDS: dict[str, Kind] = {
    "reached": lambda value, at: (value >= at, value >= at),
    "up to": lambda value, at: (min(value, at), value >= at),
    "any": lambda value, _: (value != 0, value != 0),
    "value": lambda value, _: (value, False),
    "sc": lambda value, _: (value, False),  # waits for the buffer
}


class Fault(Exception):
    """What a program must not come to."""


@dataclass(frozen=True)
class Scenario(ABC):
    programs: tuple[tuple[Any, ...], ...]
    sleeps: bool = True  # else who waits looks again and again, and nobody rings
    counts_sleepers: bool = False  # else each ring wakes by a system call
    killed: tuple[int, ...] = ()  # who may be

    @abstractmethod
    def rank(self, me: int, without: frozenset[str]) -> Rank:
        """Return a rank at its begin."""

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Return all of shared memory, but for `left`, `bell` and `asleep` of each rank."""

    @abstractmethod
    def at_end(self) -> dict[Place, tuple[int, Any]]:
        """Return which rank must have written what at last."""

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of loads."""
        return KINDS

    def first_value(self, place: Place) -> Any:
        """Return what is in a place at first."""
        return 0

    def is_quiet(self, place: Place) -> bool:
        """Tell whether nobody ever stores there."""
        return place[0] == "left" and not self.may_leave(place[1])

    def may_leave(self, rank: int) -> bool:
        return rank in self.killed or LEAVE in self.programs[rank]

    def relaxed(self, without: frozenset[str]) -> frozenset[str]:
        """Return the kinds of loads that are no acquires."""
        return frozenset()

    @abstractmethod
    def look_at(self, place: Place, old: Any, own: Callable[[int, Place], Any]) -> None:
        """Before a store: raise Fault if others look at `old`; `own(r, at)` is r's newest."""


LEAVE = "leave"


class Window:
    """The ranks that ring each other, as one of them sees them."""

    def __init__(self, index: int, ranks: Sequence[int], me: int):
        self.id, self.node_rank = index, tuple(ranks)
        self.rank, self.size = self.node_rank.index(me), len(ranks)
        self.moved = False
        self.named = ("window", index)


class Rank(ABC):
    """What one rank does: a header, each access to shared memory a `yield`."""

    def __init__(self, scenario: Scenario, me: int, without: frozenset[str]):
        self.scenario: Any = scenario
        self.me, self.without = me, without

    def has(self, rule: str) -> bool:
        return rule not in self.without

    @abstractmethod
    def key(self) -> Any:
        """Return all that the rank remembers, beside its frames."""

    @abstractmethod
    def user(self) -> Steps:
        """Run the program."""

    @abstractmethod
    def node_pass(self, only: Any = None) -> Steps:
        """Move what can be moved; the result tells whether anything was."""

    @abstractmethod
    def node_await(self) -> Steps:
        """Set this rank's bits, where it waits for others."""

    def node_lacks_others(self) -> bool:
        """Tell whether the second look lacks somebody else than the first."""
        return False

    # -- bells

    def node_wake(self, q: int) -> Steps:
        asleep, counts = True, self.scenario.counts_sleepers
        if counts and not self.has("asleep"):  # either of its two halves would do
            asleep = yield ("load", ("asleep", q), "sc", 0)
        yield ("add", ("bell", q), 1)
        if counts and self.has("asleep"):
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

    def node_wait(self, o: Any, only: Any = None) -> Steps:
        while not o.state:
            yield from self.node_pass(only)
            if self.scenario.sleeps and not o.state:
                if self.has("bell before look"):
                    yield ("listen",)
                yield from self.node_sleep_since(o, only)

    def node_sleep_since(self, o: Any, only: Any = None) -> Steps:
        """Sleep until `o` (or nothing) is over, or the bell has rung since ("listen",)."""
        counts, counted = self.scenario.counts_sleepers, False
        if counts and self.has("asleep"):
            yield ("add", ("asleep", self.me), 1)
            counted = True
        yield from self.node_await()
        if self.has("sleep fence"):
            yield ("fence",)
        moved = False
        if self.has("second look"):
            moved = yield from self.node_pass(only)
        lacks_others = self.node_lacks_others()
        moved = moved or lacks_others
        if not self.has("bell before look"):
            yield ("listen",)
        if not moved and not (o and o.state):
            if counts and not counted:
                yield ("add", ("asleep", self.me), 1)
                counted = True
            yield ("futex",)
        if counted:
            yield ("add", ("asleep", self.me), -1)

    def node_leave(self) -> Steps:
        yield ("store", ("left", self.me), 1, True)


# -- automata ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(plain(one) for one in value)
    return getattr(value, "named", value)


class Automaton:
    """The steps of one rank: nodes with the next access, and edges by its result."""

    def __init__(self, scenario: Scenario, me: int, without: frozenset[str]):
        self.begin = partial(scenario.rank, me, without)
        self.access: list[tuple[Any, ...]] = []
        self.edges: dict[tuple[int, Any], int] = {}
        self.came: list[tuple[int, Any] | None] = []
        self.ids: dict[Any, int] = {}
        self.parked: dict[int, tuple[Rank, Steps]] = {}
        rank = self.begin()
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
        rank = self.begin()
        steps = rank.user()
        next(steps)
        for result in reversed(results):
            steps.send(result)
        return rank, steps


# -- all interleavings -------------------------------------------------------------------------


class Explorer:
    """The states of a scenario: the memory, and each rank.

    A rank is its node, its store buffer, its accesses to data that no release covers yet, its bell,
    and the data that have changed since its last acquire. The bell is 0 where the rank does not
    sleep, LISTENING since it was taken, RUNG when it has changed since, ASLEEP in the futex, MISSED
    there when it has changed and the wake-up is still to come.
    """

    def __init__(self, scenario: Scenario, without: frozenset[str], order: str):
        self.scenario, self.without, self.arm = scenario, without, order == "arm"
        self.ranks = range(len(scenario.programs))
        doors = [(name, me) for me in self.ranks for name in ("left", "bell", "asleep")]
        self.place = [*doors, *scenario.places()]
        self.index = {place: i for i, place in enumerate(self.place)}
        self.automata = [Automaton(scenario, me, without) for me in self.ranks]
        self.quiet = {i for i, place in enumerate(self.place) if scenario.is_quiet(place)}
        self.kinds, self.at_end = scenario.kinds(), scenario.at_end()
        self.relaxed = scenario.relaxed(without) if self.arm else frozenset()
        self.accesses = [
            [self.numbered(a) for a in automaton.access] for automaton in self.automata
        ]

    def numbered(self, access: tuple[Any, ...]) -> tuple[Any, ...]:
        """The access with its place as a number."""
        if len(access) > 1 and isinstance(access[1], tuple):
            return access[0], self.index[access[1]], *access[2:]
        return access

    def initial(self) -> tuple[Any, ...]:
        memory = [self.scenario.first_value(place) for place in self.place]
        return self.settled(memory, [[0, (), (), 0, frozenset()] for _ in self.ranks])

    # -- one step of a rank

    def access(self, r: int, node: int) -> tuple[Any, ...]:
        if node < 0:
            return ("end",) if node == SEEN_DEAD else ("dead",)
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
                result = self.touch(memory, ranks, r, access)
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
        result, lasts = self.kinds[kind](memory[place], argument)
        return result, lasts or place in self.quiet

    def acquire(self, rank: list[Any], access: tuple[Any, ...]) -> None:
        if rank[4] and access[2] not in self.relaxed:
            rank[4] = frozenset()

    def touch(self, memory: list[Any], ranks: list[Any], r: int, access: tuple[Any, ...]) -> Any:
        """Read or write data: nobody else may be at it, and what is read must be right.

        What is read is the result where nothing is expected.
        """
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
            return None
        if place in rank[4]:
            raise Fault(f"rank {r} may have read {self.place[place]} before the word")
        found = memory[place]
        for item in (*(a for i in rank[1] for a in i[4]), *rank[2]):
            if item[0] == place and item[1] != READ:
                found = item[1]
        if value is not None and found != value:
            raise Fault(f"rank {r} reads {found} in {self.place[place]} for {value}")
        if (place, READ) not in rank[2]:
            rank[2] = (*rank[2], (place, READ))
        return found if value is None else None

    def put_in_buffer(self, rank: list[Any], item: tuple[Any, ...], release: bool) -> None:
        data: tuple[Any, ...] = ()
        if release or not self.arm:
            data, rank[2] = rank[2], ()
        rank[1] = (*rank[1], (*item, data))

    def publish(self, memory: list[Any], ranks: list[Any], r: int, data: tuple[Any, ...]) -> None:
        for place, value in data:
            if value != READ:
                memory[place] = value
                for q in self.ranks if self.relaxed else ():
                    if q != r:
                        ranks[q][4] = ranks[q][4] | {place}

    def change(self, memory: list[Any], ranks: list[Any], r: int, item: tuple[Any, ...]) -> None:
        """Make a store, or an atomic OR or ADD, visible to all."""
        kind, place, value, _, data = item
        self.publish(memory, ranks, r, data)
        name = self.place[place][0]

        def own(r: int, place: Place) -> Any:
            at = self.index[place]
            return max(memory[at], *(i[2] for i in ranks[r][1] if i[1] == at), 0)

        if name == "bell":
            q = self.place[place][1]
            ranks[q][3] = {LISTENING: RUNG, ASLEEP: MISSED}.get(ranks[q][3], ranks[q][3])
        elif kind == "store":
            self.scenario.look_at(self.place[place], memory[place], own)
            memory[place] = value
        elif kind == "or":
            memory[place] |= value
        else:
            memory[place] += value

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
            if r in self.scenario.killed and state[1][r][0] >= 0:
                memory, ranks = list(state[0]), [list(rank) for rank in state[1]]
                ranks[r][0], ranks[r][3] = DEAD, 0
                yield f"rank {r} is killed", self.settled(memory, ranks)

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
            case "or" | "add" | "exchange" | "claim" | "futex" | "dead" if rank[1]:
                return ""
            case "dead":
                memory[self.index["left", r]], rank[0] = 1, SEEN_DEAD
                rank[2] = tuple(a for a in rank[2] if a[1] != READ)  # what it wrote stays torn
                return "is seen to be dead"
            case "or" | "add":
                self.change(memory, ranks, r, (*access, True, rank[2]))
                rank[2], rank[4] = (), frozenset()
            case "exchange":
                result, memory[access[1]] = memory[access[1]], 0
                self.publish(memory, ranks, r, rank[2])
                rank[2], rank[4] = (), frozenset()
            case "claim":
                result = memory[access[1]] == 0
                memory[access[1]] = access[2] if result else memory[access[1]]
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
        for place, (r, value) in self.at_end.items():
            i, (node, _, data, *_) = self.index[place], state[1][r]
            if node >= 0 and state[0][i] != value and (i, value) not in data:
                raise Fault(f"{place} has {state[0][i]} at the end, not {value}")
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


def holds(scenario: Scenario, order: str, limit: int = 10**7) -> None:
    """Assert that nothing is found, with all rules."""
    fault = explore(scenario, order=order, limit=limit)[1]
    assert not fault, f"{scenario}\n{fault}"
