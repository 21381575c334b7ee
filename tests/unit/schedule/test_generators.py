"""The generators, and their lowering, over stages and microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from mpimesh.errors import ScheduleError, UnknownNameError
from mpimesh.schedule import (
    ActionKind,
    Schedule,
    dualpipev,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    lower,
    make_schedule,
    one_f_one_b,
    schedule_names,
    stages_per_rank,
    validate,
    vhalf,
    vmin,
    zb1p,
    zb2p,
    zbv,
)
from tests.helpers.depth import deep_but
from tests.helpers.raises import raises

K = ActionKind

# Stages on each rank that a schedule can do with; most have one answer.
CHUNKS = {
    "interleaved": (1, 2, 3),
    "looped_bfs": (1, 2, 3),
    "zbv": (2,),
    "vhalf": (2,),
    "vmin": (2,),
    "dualpipev": (2,),
    "auto": (1, 2, 3),
}
VEES = ("zbv", "vhalf", "vmin", "dualpipev")


def grid(name: str, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Give stages on each rank and microbatches: all pairs.

    For auto, which tries them all itself, an eighth: each number with three of the 24 others.
    """
    for chunks, num_microbatches in product(CHUNKS.get(name, (1,)), range(1, 25)):
        if name != "auto" or num_microbatches % 8 == (3 * num_ranks + chunks) % 8:
            yield chunks, num_microbatches


@pytest.mark.parametrize("num_ranks", deep_but(range(1, 9), 3, 4))
@pytest.mark.parametrize("name", schedule_names())
def test_every_size_is_proved(name, num_ranks):
    directions = 1 if name == "forward" else 2
    for chunks, num_microbatches in grid(name, num_ranks):
        num_stages = chunks * num_ranks
        schedule = make_schedule(name, num_stages, num_microbatches, num_ranks=num_ranks)
        proof = validate(schedule)
        edges = sum(a != b for a, b in pairwise(schedule.placement))
        assert proof.num_messages == directions * edges * num_microbatches
        assert schedule.num_ranks == num_ranks
        if num_microbatches % 5 == 0:
            assert proof == validate(lower(schedule))


@pytest.mark.parametrize("name", schedule_names())
def test_every_stage_takes_the_microbatches_in_order(name):
    """So gradients are added up in one order under every schedule."""
    for num_ranks, num_microbatches in ((1, 3), (3, 7), (4, 2), (5, 24)):
        for chunks in CHUNKS.get(name, (1,)):
            schedule = make_schedule(
                name, chunks * num_ranks, num_microbatches, num_ranks=num_ranks
            )
            done: dict[tuple[int, str], list[int]] = defaultdict(list)
            for action in schedule.actions():
                done[action.stage, action.kind].append(action.microbatch)
                if action.kind in (K.B, K.W):
                    done[action.stage, "weights"].append(action.microbatch)
            assert all(numbers == sorted(numbers) for numbers in done.values())
            if name != "forward":
                assert done[0, "weights"] == list(range(num_microbatches))


# Unfinished sends that each needs without buffering, once two ranks send to each other: a 1F1B
# neighbour gives its gradient while it is given an activation; the others fill or drain.
@pytest.mark.parametrize(("name", "window"), [("gpipe", 0), ("1f1b", 1), ("forward", 0)])
def test_few_sends_need_to_be_unfinished(name, window):
    for num_stages, num_microbatches in product(range(1, 9), range(1, 25)):
        crossing = num_stages > 1 and num_microbatches > 1
        proof = validate(make_schedule(name, num_stages, num_microbatches))
        assert proof.send_window == (window if crossing else 0)


def texts(schedule):
    return [",".join(map(str, actions)) for actions in schedule.ranks]


def test_lists_of_small_schedules():
    assert texts(gpipe(2, 3)) == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]
    assert texts(one_f_one_b(3, 4)) == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]
    assert texts(forward_only(2, 3)) == ["0F0,0F1,0F2", "1F0,1F1,1F2"]


def test_lists_of_small_schedules_with_several_stages_on_a_rank():
    assert texts(interleaved(4, 3)) == [
        "0F0,0F1,0F2,2F0,2F1,2F2,2B0,2B1,2B2,0B0,0B1,0B2",
        "1F0,1F1,1F2,3F0,3B0,3F1,3B1,3F2,3B2,1B0,1B1,1B2",
    ]
    assert texts(interleaved(4, 4))[1] == (
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3"
    )
    assert texts(looped_bfs(4, 2)) == [
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1",
        "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1",
    ]


def test_lists_of_small_schedules_with_a_split_backward():
    assert texts(zb1p(3, 3)) == [
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2",
        "1F0,1F1,1I0,1F2,1I1,1W0,1I2,1W1,1W2",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2",
    ]
    assert texts(zb2p(2, 4)) == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3",
    ]


def test_lists_of_small_schedules_on_a_vee():
    assert texts(zbv(4, 3)) == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2",
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2",
    ]
    assert texts(dualpipev(2, 2)) == ["0F0,1F0,0F1,1B0,1F1,0B0,1B1,0I1,0W1"]
    for generator in (vmin, vhalf):
        assert texts(generator(2, 2)) == ["0F0,1F0,1I0,0I0,1W0,0F1,0W0,1F1,1I1,0I1,1W1,0W1"]


def test_fewer_microbatches_than_stages_shorten_the_warm_up():
    assert texts(one_f_one_b(4, 2)) == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1B0,1B1",
        "2F0,2F1,2B0,2B1",
        "3F0,3B0,3F1,3B1",
    ]
    assert texts(one_f_one_b(1, 1)) == ["0F0,0B0"]


def test_an_unknown_name_lists_the_known_ones():
    with raises(UnknownNameError, "'1F1B'"):
        make_schedule("1F1B", 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 2), (-1, 2), (2, 0), (2, -3)])
def test_too_small_numbers_are_refused(name, num_stages, num_microbatches):
    with raises(ScheduleError, name, min(num_stages, num_microbatches)):
        make_schedule(name, num_stages, num_microbatches)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_ranks", "message"),
    [
        ("1f1b", 4, 2, (4, 2)),
        ("zb2p", 2, 4, (2, 4)),
        ("interleaved", 5, None, ("num_ranks", 5)),
        ("interleaved", 4, 3, (4, 3)),
        ("looped_bfs", 4, 0, ("num_ranks", 0)),
        ("zbv", 6, 2, (6, 2)),
        ("vmin", 3, None, (3,)),
        ("vhalf", 4, 4, (4,)),
        ("dualpipev", 4, 1, (4, 1)),
        ("auto", 4, 5, (4, 5)),
        ("auto", 4, 0, (0,)),
    ],
)
def test_ranks_that_do_not_fit_the_stages_are_refused(name, num_stages, num_ranks, message):
    with raises(ScheduleError, *message):
        make_schedule(name, num_stages, 4, num_ranks=num_ranks)


def test_text_of_every_schedule_reads_back():
    for name in schedule_names():
        schedule = make_schedule(name, 4, 5)
        assert Schedule.from_string(schedule.to_string()) == schedule


def test_stages_for_a_number_of_ranks():
    usual = {name: stages_per_rank(name) for name in schedule_names()}
    twice = {"interleaved", "looped_bfs", *VEES}
    assert usual == {name: 2 if name in twice else 1 for name in schedule_names()}
    with raises(UnknownNameError, "'v'"):
        stages_per_rank("v")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VEES)
def test_a_stage_and_its_mirror_lie_on_one_rank(name):
    assert make_schedule(name, 8, 3).placement == (0, 1, 2, 3, 3, 2, 1, 0)


def test_lowering_receives_late_and_sends_at_once():
    assert texts(lower(make_schedule("1f1b", 3, 2))) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1",
        "2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1",
    ]


def test_lowering_a_split_backward_sends_after_the_input_half():
    schedule = Schedule.from_string("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert texts(lower(schedule)) == [
        "0F0,0SEND_F0,0RECV_B0,0I0,0W0",
        "1RECV_F0,1F0,1I0,1SEND_B0,1W0",
    ]


def test_stages_on_one_rank_hand_over_without_a_message():
    schedule = Schedule.from_string("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert texts(lower(schedule)) == [
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0",
        "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0",
    ]
    assert validate(schedule).num_messages == 4


def test_lowering_twice_changes_nothing():
    once = lower(make_schedule("gpipe", 4, 3))
    assert lower(once) == once
    assert once.placement == (0, 1, 2, 3)
