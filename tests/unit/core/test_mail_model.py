"""The messages' protocol in every interleaving: it holds, but without none of its rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.helpers.depth import deep, is_deep
from tests.unit.core.interleavings import LEAVE, explore, holds
from tests.unit.core.mail_model import (
    CANCELLED,
    DONE,
    INLINE,
    LOST,
    PIECED,
    RULES,
    SHARED,
    SMALL,
    Cancel,
    MailScenario,
    Probe,
    Receive,
    Send,
    Wait,
)


def from_0_to_1(sends, receives, **options):
    """Rank 0 starts the sends, rank 1 the receives; then each waits for its own, in order."""
    waits = [tuple(Wait(i) for i in range(len(starts))) for starts in (sends, receives)]
    return MailScenario(((*sends, *waits[0]), (*receives, *waits[1])), **options)


TO, FROM = Send(1), Receive(0)
IN_PLACE, UNKNOWN = Send(1, SHARED), Receive(0, known=False)
MAYBE = (DONE, LOST)

ONE = from_0_to_1([TO], [FROM])
ONE_IN_PLACE = from_0_to_1([IN_PLACE], [FROM])
# A ring of two cells holds one message, and a link to the next ring.
RINGS = MailScenario(((TO,) * 4, (FROM, Wait(0), FROM, Wait(1))), cells=2, rings=4)
SMALLS = from_0_to_1([Send(1, SMALL)] * 3, [FROM] * 3, cells=4, rings=2)
# The second does not fit behind the first: it goes to the front, when that is free.
WRAPPED = from_0_to_1(
    [Send(1, SMALL, units=2), Send(1, SMALL, units=2), Send(1, SMALL)],
    [FROM] * 3,
    cells=4,
    data=3,
    rings=3,
)
PIECES = from_0_to_1([Send(1, PIECED, units=2)], [FROM], cells=2, data=1)
# More answers than a ring has cells for, by a rank that takes both messages at once.
ANSWERS = MailScenario(
    ((IN_PLACE, IN_PLACE, Wait(1)), (*[replace(FROM, large=True)] * 2, Wait(1))), cells=2, rings=2
)
# A pass reads the first, and finds no cell for its answer.
READ_BY_A_PASS = MailScenario(
    ((IN_PLACE, IN_PLACE, Wait(1), Wait(0)), (UNKNOWN, FROM, Wait(1), Wait(0))),
    cells=2,
    rings=2,
    sleeps=False,
)
# Rank 0 waits until its large message is read, rank 1 for what comes after that.
TAKEN_IN = MailScenario(
    (
        (IN_PLACE, Wait(0), Send(1, tag=1)),
        (UNKNOWN, Receive(0, tag=1), Wait(1), Wait(0)),
    )
)
THREADS = from_0_to_1([replace(IN_PLACE, detach=True)], [FROM], is_near=True)
# Rank 2 sends when rank 0 has got what rank 1 sends.
OF_TWO = MailScenario(
    (
        (Receive(1), Receive(2), Wait(0), Send(2), Wait(1)),
        (Send(0),),
        (Receive(0), Wait(0), Send(0)),
    )
)
TAKEN_BACK = MailScenario(
    (
        (TO, TO),
        (replace(FROM, state=(DONE, CANCELLED)), Cancel(0), FROM, Wait(1), Wait(0)),
    )
)
PROBED = MailScenario(((TO,), (Probe(), FROM, Wait(0))))
LEFT = MailScenario(((TO, LEAVE), (FROM, replace(FROM, state=(LOST,)), Wait(0), Wait(1))))
BOTH_LEFT = MailScenario(
    (
        (Probe(waits=False), *(Receive(q, state=(LOST,)) for q in (1, 2)), Wait(0), Wait(1)),
        (LEAVE,),
        (LEAVE,),
    )
)

# A scenario for each rule that fails without it; under "arm" where x86 does not need it.
NEEDED = {
    "ring fence": ONE,
    "sleep fence": ONE,
    "second look": ONE,
    "bell before look": ONE,
    "asleep": replace(ONE, counts_sleepers=True),
    "naps end": LEFT,
    "number last": ONE_IN_PLACE,
    "number release": ONE,
    "number acquire": ONE_IN_PLACE,
    "number compared": RINGS,
    "zero cells": ONE,
    "ring release": ONE,
    "room for cells": RINGS,
    "room for data": SMALLS,
    "room for a link": RINGS,
    "link taken": RINGS,
    "taken last": PIECES,
    "taken release": PIECES,
    "taken rings": PIECES,
    "cell rings": ONE,
    "asks all": OF_TWO,
    "in place": ONE_IN_PLACE,
    "answer last": ONE_IN_PLACE,
    "answers wait": ANSWERS,
    "over when answered": ANSWERS,
    "accepted when answered": READ_BY_A_PASS,
    "sender takes": ONE_IN_PLACE,
    "receiver takes": PIECES,
    "takes in": TAKEN_IN,
    "claim": THREADS,
    "claim, copied": THREADS,
    "left twice": LEFT,
    "left is no move": BOTH_LEFT,
    "noted rings": PROBED,
    "cancelled": TAKEN_BACK,
}
OF_ARM = ("number release", "number acquire", "ring release", "taken release", "sleep fence")
SCENARIOS = list(dict.fromkeys([*NEEDED.values(), WRAPPED]))


def fails_without(rule, order):
    return explore(NEEDED[rule], without=rule, order=order)[1]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    assert fails_without(rule, "arm" if rule in OF_ARM else "tso")


@pytest.mark.parametrize("rule", OF_ARM)
def test_what_aarch64_alone_needs(rule):
    assert not fails_without(rule, "tso")


@pytest.mark.parametrize("order", ["arm", *deep("tso")])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_all_rules_nothing_is_found(scenario, order):
    holds(scenario, order, limit=10**7 if is_deep() else 1_500)


WAYS = {
    "small": Send(1, SMALL),
    "in place": IN_PLACE,
    "in pieces": Send(1, PIECED, units=2),
}


@pytest.mark.parametrize("order", ["tso", *deep("arm")])
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_a_killed_rank_comes_to_its_end(way, killed, order):
    send, receive = replace(WAYS[way], state=MAYBE), replace(FROM, state=MAYBE)
    receive_unknown = replace(receive, known=False)
    scenario = from_0_to_1([send], [receive], cells=2, rings=2, data=1, killed=(killed,))
    unknown = replace(scenario, programs=(scenario.programs[0], (receive_unknown, Wait(0))))
    for one in (scenario, unknown):
        holds(one, order, limit=100_000 if is_deep() else 1_500)


def both_ways(way, **options):
    """Two ranks, each of which sends the other a message, and waits for that first."""
    programs = [(replace(WAYS[way], to=1 - me), Receive(1 - me)) for me in (0, 1)]
    waits = Wait(0), Wait(1)
    return MailScenario(tuple((*program, *waits) for program in programs), **options)


def around(way, **options):
    """Three ranks, each of which sends the next one a message."""
    programs = [(replace(WAYS[way], to=(me + 1) % 3), Receive((me + 2) % 3)) for me in range(3)]
    waits = Wait(0), Wait(1)
    return MailScenario(tuple((*program, *waits) for program in programs), **options)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_that_send_at_once(way):
    limit = 200_000 if is_deep() else 1_500
    holds(both_ways(way, cells=2, data=1, rings=3), "arm", limit=limit)


@pytest.mark.deep
@pytest.mark.parametrize("way", WAYS)
def test_three_ranks(way):
    holds(around(way, cells=2, data=1, rings=3, sleeps=False), "arm", limit=40_000)


def random_scenario(rng):
    """Two or three ranks, that send each other messages of two tags; in some a rank is killed."""
    ranks = rng.choice([2, 2, 3])
    killed = rng.choice([(), (), *((rank,) for rank in range(ranks))])
    is_near = not killed and rng.random() < 0.3
    state = MAYBE if killed else (DONE,)
    starts: list[list[Send | Receive]] = [[] for _ in range(ranks)]
    for _ in range(rng.randint(1, 4)):
        me, q = rng.sample(range(ranks), 2)
        source, tag = rng.choice([INLINE, SMALL, SHARED, SHARED, PIECED]), rng.choice([0, 0, 1])
        detach = is_near and source == SHARED and rng.random() < 0.5
        starts[me].append(Send(q, source, tag, rng.choice([1, 2]), state, detach))
        starts[q].append(Receive(me, tag, rng.random() < 0.6, rng.random() < 0.3, state))
    programs = []
    for steps in starts:
        # Which message is whose is decided by the order of each pair and tag, on both ends.
        order = sorted(range(len(steps)), key=lambda _: rng.random())
        waits = [Wait(i) for i in sorted(range(len(steps)), key=lambda _: rng.random())]
        programs.append((*(steps[i] for i in order), *waits))
    return MailScenario(
        tuple(programs),
        ranks == 2,
        killed=killed,
        is_near=is_near,
        cells=rng.choice([2, 3]),
        data=2,
        rings=6,
    )


def test_random_programs():
    for seed in range(40 if is_deep() else 10):
        rng = random.Random(seed)
        scenario, order = random_scenario(rng), rng.choice(["tso", "arm"])
        fault = explore(scenario, order=order, limit=8_000 if is_deep() else 1_000)[1]
        assert not fault, f"seed {seed}: {scenario}\n{fault}"
