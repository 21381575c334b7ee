"""The proof: what it refuses, and that it agrees with a slow checker made another way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import (
    Action,
    ActionKind,
    Edges,
    Schedule,
    lower,
    make_schedule,
    validate,
)
from mpimesh.schedule.validate import Rules
from tests.helpers.depth import examples
from tests.helpers.random_schedules import random_schedules, skips_of

K = ActionKind


def split_backward(schedule: Schedule) -> Schedule:
    """Put I and W in the place of each B."""
    halves = tuple(
        tuple(
            Action(action.stage, kind, action.microbatch)
            for action in actions
            for kind in ((K.I, K.W) if action.kind is K.B else (action.kind,))
        )
        for actions in schedule.ranks
    )
    return replace(schedule, name="split", ranks=halves)


def fold(schedule: Schedule) -> Schedule:
    """Put a gpipe schedule of 2p stages on p ranks, in the shape of a V."""
    half = schedule.num_stages // 2
    placement = tuple(min(stage, 2 * half - 1 - stage) for stage in range(2 * half))

    def merged(rank: int) -> tuple[Action, ...]:
        first, second = schedule.ranks[rank], schedule.ranks[2 * half - 1 - rank]
        count = schedule.num_microbatches
        return first[:count] + second + first[count:]

    return Schedule(
        "vee", 2 * half, schedule.num_microbatches, tuple(map(merged, range(half))), placement
    )


# ---- the slow checker: counts, places in the lists, and one graph of everything ----


def graph_is_acyclic(edges: set[tuple[object, object]]) -> bool:
    sorter: TopologicalSorter[object] = TopologicalSorter()
    for before, after in edges:
        sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError:
        return False
    return True


def remote_neighbours(schedule: Schedule) -> list[int]:
    return [
        s
        for s in range(schedule.num_stages - 1)
        if schedule.placement[s] != schedule.placement[s + 1]
    ]


def slow_says_correct(schedule: Schedule) -> bool:
    place = {
        action: (rank, step)
        for rank, actions in enumerate(schedule.ranks)
        for step, action in enumerate(actions)
    }
    if any(count > 1 for count in Counter(schedule.actions()).values()):
        return False
    kinds: dict[tuple[int, int], str] = {}
    for action, (rank, _) in place.items():
        if action.stage >= schedule.num_stages or schedule.placement[action.stage] != rank:
            return False
        if action.kind.computes:
            key = (action.stage, action.microbatch)
            kinds[key] = "".join(sorted(kinds.get(key, "") + action.kind))
    wanted = {(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)}
    trains = any(kind != "F" for kind in kinds.values())
    if set(kinds) != wanted or not set(kinds.values()) <= ({"BF", "FIW"} if trains else {"F"}):
        return False
    if not all(slow_whole_is_right(schedule, place, action) for action in place):
        return False
    needs, messages = slow_needs(schedule, kinds, trains)
    if any(action.kind.is_message for action in place):
        if {action for action in place if action.kind.is_message} != messages:
            return False
        if not all(place[a][0] != place[b][0] or place[a] < place[b] for a, b in needs):
            return False
    for stage in remote_neighbours(schedule):
        for ends in ((stage, (K.F,), stage + 1), (stage + 1, (K.B, K.I), stage)):
            # Messages cannot overtake each other, so both ends go in one order.
            source, computing, sink = ends
            send, recv = (K.SEND_F, K.RECV_F) if K.F in computing else (K.SEND_B, K.RECV_B)
            lowered = schedule.is_lowered
            orders = [
                [
                    a.microbatch
                    for a in schedule.ranks[schedule.placement[s]]
                    if a.stage == s and a.kind in k
                ]
                for s, k in (
                    (source, (send,) if lowered else computing),
                    (sink, (recv,) if lowered else computing),
                )
            ]
            if orders[0] != orders[1]:
                return False
    lists = {edge for actions in schedule.ranks for edge in pairwise(actions)}
    return graph_is_acyclic(lists | needs)


def slow_whole_is_right(schedule, place, action):
    """Whether what is done once for a stage comes when it may, in a step that is complete."""
    rank, step = place[action]
    before = schedule.ranks[rank][:step]
    if action.kind is K.REDUCE_GRAD:
        ends = [one for one in before if one.stage == action.stage and one.kind in (K.B, K.W)]
        return len(ends) == schedule.num_microbatches
    return action.kind is not K.STEP or Action(action.stage, K.REDUCE_GRAD, 0) in before


def slow_needs(schedule, kinds, trains):
    """Every (before, after) of a correct step, and the messages it takes."""
    lowered = schedule.is_lowered
    needs: set[tuple[Action, Action]] = set()
    messages: set[Action] = set()

    def hand_over(before: Action, after: Action, forward: bool) -> None:
        if not lowered or schedule.placement[before.stage] == schedule.placement[after.stage]:
            needs.add((before, after))
            return
        m = before.microbatch
        send = Action(before.stage, K.SEND_F if forward else K.SEND_B, m)
        recv = Action(after.stage, K.RECV_F if forward else K.RECV_B, m)
        messages.update((send, recv))
        needs.update(((before, send), (send, recv), (recv, after)))

    def backward(s: int, m: int) -> Action:
        return Action(s, K.B if "B" in kinds[s, m] else K.I, m)

    for s, m in kinds:
        if s + 1 < schedule.num_stages:
            hand_over(Action(s, K.F, m), Action(s + 1, K.F, m), True)
        if trains:
            needs.add((Action(s, K.F, m), backward(s, m)))
            if "W" in kinds[s, m]:
                needs.add((Action(s, K.I, m), Action(s, K.W, m)))
            if s > 0:
                hand_over(backward(s, m), backward(s - 1, m), False)
    return needs, messages


def slow_blocking_sends_are_safe(lowered: Schedule) -> bool:
    """A blocking send and its receive are one moment: the graph with both as one node."""

    def node(action: Action) -> Action:
        return action.partner if action.kind.is_recv else action

    return graph_is_acyclic(
        {(node(a), node(b)) for actions in lowered.ranks for a, b in pairwise(actions)}
    )


def slow_smallest_send_window(lowered: Schedule) -> int:
    """Step every rank in turn, with sets of messages, for each window from 0 on."""

    def ends(window: int) -> bool:
        at = [0] * lowered.num_ranks
        begun: set[Action] = set()
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(lowered.ranks):
                if at[rank] == len(actions):
                    continue
                action = actions[at[rank]]
                begun.add(action)
                unfinished = sum(
                    one.kind.is_send and one in begun and one.partner not in begun
                    for one in actions
                )
                waits = action.kind.is_recv and action.partner not in begun
                if not waits and not (action.kind.is_send and unfinished > window):
                    at[rank] += 1
                    moved = True
        return all(step == len(actions) for step, actions in zip(at, lowered.ranks, strict=True))

    return next(window for window in range(10**6) if ends(window))


@st.composite
def correct_schedules(draw):
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    form = draw(st.sampled_from(["gpipe", "1f1b", "forward", "split", "vee"]))
    if form == "split":
        schedule = split_backward(make_schedule("1f1b", num_stages, num_microbatches))
    elif form == "vee":
        schedule = fold(make_schedule("gpipe", 2 * num_stages, num_microbatches))
    else:
        schedule = make_schedule(form, num_stages, num_microbatches)
    if draw(st.booleans()):
        return schedule
    return lower(schedule, reduce_grad=draw(st.booleans()), step=draw(st.booleans()))


def mutate(draw, schedule: Schedule) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    rank = draw(st.sampled_from([rank for rank, actions in enumerate(ranks) if actions]))
    actions = ranks[rank]
    step = draw(st.integers(0, len(actions) - 1))
    what = draw(st.sampled_from(["drop", "double", "swap", "move", "kind", "microbatch", "rank"]))
    action = actions[step]
    if what == "drop":
        del actions[step]
    elif what == "double":
        actions.insert(draw(st.integers(0, len(actions))), action)
    elif what == "swap":
        other = draw(st.integers(0, len(actions) - 1))
        actions[step], actions[other] = actions[other], action
    elif what == "move":
        actions.insert(draw(st.integers(0, len(actions) - 1)), actions.pop(step))
    elif what == "kind":
        kinds = [kind for kind in K if not (kind.is_whole and action.microbatch)]
        actions[step] = replace(action, kind=draw(st.sampled_from(kinds)), other=None)
    elif what == "microbatch" and not action.kind.is_whole:
        actions[step] = replace(action, microbatch=draw(st.integers(0, schedule.num_microbatches)))
    else:
        ranks[draw(st.integers(0, len(ranks) - 1))].append(actions.pop(step))
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


@given(correct_schedules())
def test_correct_schedules_are_proved(schedule):
    assert slow_says_correct(schedule)
    proof = validate(schedule)
    assert (proof.send_window == 0) == slow_blocking_sends_are_safe(lower(schedule))


@settings(max_examples=examples(600))
@given(st.data(), correct_schedules(), st.integers(1, 3))
def test_mutated_schedules_are_refused_or_still_correct(data, schedule, times):
    for _ in range(times):
        assume(any(schedule.ranks))
        schedule = mutate(data.draw, schedule)
    if slow_says_correct(schedule):
        proof = validate(schedule)
        assert (proof.send_window == 0) == slow_blocking_sends_are_safe(lower(schedule))
    else:
        with pytest.raises(ScheduleError, match="<-- here"):
            validate(schedule)


@settings(max_examples=examples(400))
@given(st.data(), correct_schedules(), st.integers(0, 3))
def test_the_bits_of_the_rules_say_what_their_words_say(data, schedule, times):
    """Whatever was done before, right or wrong: most schedules are refused at their first fault."""
    skips = data.draw(st.none() | skips_of(schedule.num_stages))
    if skips:
        schedule = lower(schedule, skips=skips)
    for _ in range(times):
        assume(any(schedule.ranks))
        schedule = mutate(data.draw, schedule)
    edges = Edges.of(schedule) if skips is None else Edges(schedule.num_stages, skips)
    rules = Rules(schedule, edges)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            expected = rules.in_words(rank, action)
            assert rules.why_wrong(rank, action) == expected


# ---- how many sends may be unfinished ----


@settings(max_examples=examples(200))
@given(random_schedules(), st.data())
def test_the_smallest_send_window_is_that_of_a_slow_model(schedule, data):
    lowered = lower(schedule, skips=data.draw(skips_of(schedule.num_stages)))
    try:
        proof = validate(lowered)
    except ScheduleError:
        assume(False)
    assert proof.send_window == slow_smallest_send_window(lowered)
    assert proof.num_messages == sum(action.kind.is_send for action in lowered.actions())


@pytest.mark.parametrize("num_microbatches", range(1, 10))
def test_the_smallest_send_window_is_that_of_the_formula(num_microbatches):
    # Rank 0 gives all M activations before it takes a gradient; rank 1 answers each at once.
    # With w gradients left behind, rank 1 has taken w + 1 activations, so rank 0 comes to
    # its first receive if M - (w + 1) <= w.
    gpipe = make_schedule("gpipe", 2, num_microbatches)
    one_f_one_b = make_schedule("1f1b", 2, num_microbatches)
    schedule = replace(gpipe, ranks=(gpipe.ranks[0], one_f_one_b.ranks[1]))
    assert validate(schedule).send_window == num_microbatches // 2
