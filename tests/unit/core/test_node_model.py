"""The node window's protocol in every interleaving: it holds, but without none of its rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.helpers.depth import deep, deep_but, is_deep
from tests.unit.core.interleavings import LEAVE, explore, holds
from tests.unit.core.node_model import (
    DONE,
    INLINE,
    LOST,
    MISMATCH,
    NOTHING,
    PIECED,
    REMOTE,
    RULES,
    SHARED,
    SMALL,
    NodeScenario,
    Start,
    Wait,
)


def all_ranks(ranks, *program, **options):
    return NodeScenario((program,) * ranks, **options)


def spinning(scenario):
    return replace(scenario, sleeps=False)


SUM, REDUCE, BROADCAST = Start(), Start("REDUCE"), Start("BROADCAST")
PIECES, SHARED_SUM = Start(source=PIECED, pieces=2), Start(source=SHARED)
SHARED_BROADCAST = Start("BROADCAST", SHARED)

ONE_SUM = all_ranks(2, SUM, Wait(0))
# More pending than there is room for, resolved in another order on each rank.
PENDING = NodeScenario(((SUM, SUM, SUM, Wait(2), Wait(0)), (SUM, SUM, Wait(1), SUM, Wait(2))))
NO_ROOM = replace(PENDING, entries=1)
ONE_SLOT = NodeScenario(
    (
        (replace(SUM, source=SMALL), replace(SUM, source=SMALL), Wait(1), Wait(0)),
        (replace(SUM, source=SMALL), Wait(0), replace(SUM, source=SMALL), Wait(1)),
    )
)
SLOT_OF_ALL_PIECES = spinning(all_ranks(2, PIECES, Wait(0), pieces=1))
PIECES_OF_ROOT = all_ranks(2, Start("BROADCAST", PIECED, pieces=3), Wait(0))
# Each rank waits first for what the other resolves last.
SUMS = SHARED_SUM, replace(SHARED_SUM, window=1)
CROSSED = NodeScenario(
    ((*SUMS, Wait(0), Wait(1)), (*SUMS, Wait(1), Wait(0))), windows=((0, 1), (0, 1)), sleeps=False
)

LOST_SUM, LOST_SMALL = Start(state=(LOST,)), Start(source=SMALL, state=(LOST,))
# The second is there, or not, when its rank is seen to have left.
LEFT = NodeScenario(((SUM, LEAVE), (SUM, LOST_SUM, Wait(0), Wait(1))))
LEFT_WITHOUT_ROOM = NodeScenario(((LEAVE,), (LOST_SMALL, LOST_SMALL, Wait(0), Wait(1))))
LEFT_BEFORE_IT_READ = replace(LEFT, entries=1)
# Rank 2 lacks rank 0, which is told of a loss that rank 2 does not look for.
LOSS_TOLD = spinning(
    NodeScenario(
        (
            (replace(REDUCE, state=(LOST,)), LOST_SUM, Wait(0), Wait(1)),
            (LEAVE,),
            (replace(REDUCE, state=(DONE, LOST)), LOST_SUM, Wait(0), Wait(1)),
        )
    )
)
SHIFT = Start("SHIFT", SHARED, root=1, state=(DONE, LOST))
LEFT_IN_PLACE = spinning(NodeScenario(((SHIFT, Wait(0)), (SHIFT, Wait(0)), (LEAVE,))))
# Rank 1 has put its pieces when it leaves, and summed none: it has waited in a window of its own.
MIXED = Start(source=PIECED, pieces=2, state=(DONE, LOST))
MIXED_SHARED = replace(MIXED, source=SHARED)
LEFT_MIXED = NodeScenario(
    (
        (MIXED_SHARED, Wait(0)),
        (MIXED, Start("BARRIER", window=1), Wait(1), LEAVE),
        (MIXED_SHARED, Wait(0)),
    ),
    windows=((0, 1, 2), (1,)),
    sleeps=False,
)

MAYBE, SEES = (DONE, MISMATCH), (MISMATCH,)
OTHER = replace(REDUCE, digest=1, state=MAYBE)
# Rank 1 compares nothing at 1, and can do nothing without rank 0, which posts no more.
TOLD = NodeScenario(
    (
        (replace(REDUCE, state=SEES), replace(BROADCAST, state=SEES), Wait(0), Wait(1)),
        (OTHER, replace(BROADCAST, state=SEES), Wait(0), Wait(1)),
    ),
    entries=1,
)
# Rank 2 could take what rank 0 had refused.
STOPPED = NodeScenario(
    (
        (replace(REDUCE, state=SEES), Wait(0), replace(BROADCAST, state=SEES), Wait(1)),
        (OTHER, Wait(0)),
        (replace(REDUCE, state=MAYBE), replace(BROADCAST, state=SEES), Wait(0), Wait(1)),
    )
)
SEEN_NEXT = NodeScenario(
    (
        (replace(BROADCAST, state=MAYBE), Start(state=SEES), Wait(0), Wait(1)),
        (replace(BROADCAST, digest=1, state=SEES), Start(state=SEES), Wait(0), Wait(1)),
    )
)

BOXES = Start("BOXES", NOTHING)  # that gives and takes nothing
MUTUAL = replace(BOXES, source=INLINE, owners=(1,)), replace(BOXES, source=INLINE, owners=(0,))
# The third gives them nothing, nor takes of them.
ONCE = [(start, Wait(0)) for start in MUTUAL]
TWO_OF_THREE = spinning(NodeScenario((*ONCE, (LEAVE,))))
IN_PLACE = [(replace(start, source=SHARED), Wait(0)) for start in MUTUAL]
IN_PLACE_OF_THREE = replace(TWO_OF_THREE, programs=(*IN_PLACE, (LEAVE,)))
# The first reads nothing: its second piece waits for no reading of its own.
GIVES_ALONE = NodeScenario(
    (
        (replace(BOXES, source=PIECED, pieces=2), Wait(0)),
        (replace(BOXES, owners=(0,)), Wait(0)),
    ),
    pieces=1,
)
# The second has written over its piece when the third has put its last one.
TAKES_BOTH = replace(BOXES, owners=(1, 2))
GIVE_FEWER = spinning(
    NodeScenario(
        (
            (TAKES_BOTH, Wait(0)),
            (replace(BOXES, source=PIECED), Wait(0)),
            (replace(BOXES, source=PIECED, pieces=2), Wait(0)),
        ),
        pieces=1,
    )
)
REDUCE_FEWER = replace(
    GIVE_FEWER,
    programs=(
        (replace(TAKES_BOTH, reduces=True), BOXES, Wait(0)),
        (replace(BOXES, source=PIECED), replace(BOXES, source=PIECED), Wait(1)),
        (replace(BOXES, source=PIECED, pieces=2), BOXES, Wait(0)),
    ),
)

# A scenario for each rule that fails without it; under "arm" where x86 does not need it.
NEEDED = {
    "word last": ONE_SLOT,
    "word release": ONE_SLOT,
    "word acquire": ONE_SLOT,
    "counter release": SLOT_OF_ALL_PIECES,
    "room for entries": NO_ROOM,
    "room for smalls": ONE_SLOT,
    "room for pieces": SLOT_OF_ALL_PIECES,
    "read last": PIECES_OF_ROOT,
    "put first": SLOT_OF_ALL_PIECES,
    "own piece first": SLOT_OF_ALL_PIECES,
    "all summed": SLOT_OF_ALL_PIECES,
    "in place": all_ranks(2, SHARED_BROADCAST, Wait(0)),
    "in place, refused": LEFT_IN_PLACE,
    "first in first out": PENDING,
    "every window": CROSSED,
    "ring fence": ONE_SUM,
    "sleep fence": ONE_SUM,
    "second look": ONE_SUM,
    "bell before look": ONE_SUM,
    "asleep": replace(ONE_SUM, counts_sleepers=True),
    "read rings": all_ranks(2, SHARED_BROADCAST, Wait(0)),
    "refused rings": TOLD,
    "naps end": LEFT,
    "left twice": LEFT,
    "left for each rank": LEFT_WITHOUT_ROOM,
    "rolling total": SEEN_NEXT,
    "refused tells": TOLD,
    "refused says why": LOSS_TOLD,
    "refused last": LEFT_MIXED,
    "refused stops": STOPPED,
    "before a mismatch": LEFT_BEFORE_IT_READ,
    "owners only": TWO_OF_THREE,
    "readers only": IN_PLACE_OF_THREE,
    "reads on": GIVES_ALONE,
    "fewer pieces": GIVE_FEWER,
    "kept aside": REDUCE_FEWER,
}
OF_ARM = ("word release", "word acquire", "counter release", "sleep fence")


def fails_without(rule, order):
    return explore(NEEDED[rule], without=rule, order=order)[1]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    assert fails_without(rule, "arm" if rule in OF_ARM else "tso")


BOXES_NEED = {
    "in place": IN_PLACE_OF_THREE,
    "put first": GIVE_FEWER,
    "room for pieces": GIVE_FEWER,
    "counter release": GIVE_FEWER,
}


@pytest.mark.parametrize("rule", BOXES_NEED)
def test_exchanges_of_boxes_need_the_rules_of_others(rule):
    assert explore(BOXES_NEED[rule], without=rule, order="arm")[1]


@pytest.mark.parametrize("rule", OF_ARM)
def test_what_aarch64_alone_needs(rule):
    assert not fails_without(rule, "tso")


@pytest.mark.parametrize("order", ["tso", *deep("arm")])
@pytest.mark.parametrize("scenario", list(dict.fromkeys(NEEDED.values())))
def test_with_all_rules_nothing_is_found(scenario, order):
    # LEFT_MIXED alone has more states than these.
    holds(scenario, order, limit=50_000 if is_deep() else 20_000)


@pytest.mark.parametrize("source", [SMALL, *deep(SHARED, PIECED)])
@pytest.mark.parametrize("kind", ["ALL_REDUCE", "BROADCAST", "REDUCE"])
def test_who_needs_a_killed_rank_comes_to_its_end(kind, source):
    start = Start(kind, source, 2 if source == PIECED else 1, state=(DONE, LOST))
    for killed in (0, 1):
        holds(all_ranks(2, start, Wait(0), sleeps=source != PIECED, killed=(killed,)), "arm")


MIXTURES = [(SHARED, SHARED), (SHARED, SMALL), (REMOTE, INLINE), (REMOTE, PIECED), (SHARED, PIECED)]


@pytest.mark.parametrize("ranks", [2, *deep(3)])
@pytest.mark.parametrize("sources", MIXTURES)
def test_sums_of_arrays_that_lie_in_different_places(sources, ranks):
    pieces = 2 if PIECED in sources else 1
    programs = tuple((Start(source=source, pieces=pieces), Wait(0)) for source in sources)
    if ranks == 2:
        holds(NodeScenario(programs, sleeps=pieces == 1), "arm")
    else:
        holds(NodeScenario((programs[0], *programs), sleeps=False), "arm")


def ring_of_boxes(*given, **options):
    """Each rank takes so many pieces of the next one."""
    starts = [
        replace(BOXES, source=PIECED, pieces=n, owners=((q + 1) % len(given),))
        for q, n in enumerate(given)
    ]
    return spinning(NodeScenario(tuple((start, Wait(0)) for start in starts), **options))


THREE_RANKS = {
    "sums": all_ranks(3, SUM, Wait(0)),
    "sums of pieces": spinning(all_ranks(3, PIECES, Wait(0))),
    "broadcasts without room": all_ranks(3, BROADCAST, BROADCAST, Wait(1), Wait(0), entries=1),
    "in place": all_ranks(3, SHARED_BROADCAST, Wait(0)),
    "in place, left": replace(LEFT_IN_PLACE, sleeps=True),
    "one slot of all pieces": spinning(all_ranks(3, PIECES, Wait(0), pieces=1)),
    "a ring of boxes": ring_of_boxes(1, 2, 3, pieces=1),
    "a ring of boxes in place": spinning(
        NodeScenario(
            tuple((replace(BOXES, source=SHARED, owners=(q,)), Wait(0)) for q in (1, 2, 0))
        )
    ),
}


@pytest.mark.parametrize("name", deep_but(THREE_RANKS, "sums", "in place"))
def test_three_ranks(name):
    # The broadcasts without room alone have more states than these.
    holds(THREE_RANKS[name], "arm", limit=160_000)


def with_owners(start, ranks, me, rng):
    """Return an exchange of boxes with some of the other ranks, which give one piece or two."""
    if start.kind != "BOXES":
        return start
    owners = tuple(q for q in range(ranks) if q != me and rng.random() < 0.6)
    pieces = rng.choice([1, 2]) if start.source == PIECED else 1
    return replace(start, pieces=pieces, owners=owners, reduces=rng.random() < 0.5)


def random_scenario(rng):
    """Two ranks that sleep, or three that do not, with two windows; in some, a rank leaves."""
    ranks = rng.choice([2, 3])
    windows = (tuple(range(ranks)), rng.choice([(0, 1), (ranks - 1, 0)]))
    programs: list[list[Start | Wait | str]] = [[] for _ in range(ranks)]
    leaver = rng.choice([None, None, *range(ranks)])
    state = (DONE,) if leaver is None else (DONE, LOST)
    for _ in range(rng.randint(1, 3)):
        window = rng.choice([0, 0, 1])
        kinds = ["ALL_REDUCE"] * 3 + ["BARRIER", "REDUCE", "BROADCAST", "SHIFT"] + ["BOXES"] * 4
        kind = rng.choice(kinds)
        sources = rng.choice([(INLINE,), (SMALL,), (PIECED,), (SHARED, SMALL), (SHARED, PIECED)])
        pieces = rng.choice([1, 2]) if PIECED in sources else 1
        root = rng.randrange(len(windows[window]))
        for rank in windows[window]:
            source = rng.choice(sources)
            start = Start(kind, source, pieces, root, window, state=state)
            programs[rank].append(
                with_owners(start, len(windows[window]), windows[window].index(rank), rng)
            )
    for rank, program in enumerate(programs):
        waits = [Wait(i) for i in range(len(program))]
        rng.shuffle(waits)
        for wait in waits:
            starts = [at for at, step in enumerate(program) if isinstance(step, Start)]
            soon = rng.randint(starts[wait.start] + 1, len(program))
            program.insert(soon if rng.random() < 0.5 else len(program), wait)
        if rank == leaver:
            del program[rng.randrange(len(program) + 1) :]
            program.append(LEAVE)
    slots = {name: rng.choice([1, 2]) for name in ("entries", "smalls", "pieces")}
    return NodeScenario(tuple(map(tuple, programs)), ranks == 2, windows=windows, **slots)


def test_random_programs():
    for seed in range(60 if is_deep() else 10):
        rng = random.Random(seed)
        scenario, order = random_scenario(rng), rng.choice(["tso", "arm"])
        fault = explore(scenario, order=order, limit=5000)[1]
        assert not fault, f"seed {seed}: {scenario}\n{fault}"
