"""Bubble and memory of every schedule against the formulas of the papers, by the simulator.

Times are whole numbers, so equal means equal. A rank's stages together take F, I and W, so with v
stages on it each takes a v-th. M is one microbatch on one rank: v activations of a stage.
"""

from __future__ import annotations

from itertools import product

import pytest

from mpimesh.schedule import Schedule, ScheduleName, Timetable, make_schedule, simulate
from mpimesh.schedule.costs import Seconds
from tests.helpers.depth import deep

# F, I and W of one stage. In all of them W is no longer than F and I.
TIMES = [(1, 1, 1), (3, 3, 3), (4, 5, 3), (5, 4, 4), (2, 3, 1), (3, 2, 1)]
RANKS = range(1, 9)


def timed(name: ScheduleName, num_ranks: int, chunks: int, count: int, times: tuple[int, int, int]):
    schedule = make_schedule(name, chunks * num_ranks, count, num_ranks=num_ranks)
    forward_s, input_s, weight_s = times
    return simulate(
        schedule, forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s
    )


def bubbles(outcome: Timetable) -> set[Seconds]:
    return {outcome.bubble_s(rank) for rank in range(outcome.schedule.num_ranks)}


def longest_rest(outcome: Timetable) -> Seconds:
    """The most that a rank is idle between its first action and its last."""
    rests = []
    for rank in range(outcome.schedule.num_ranks):
        done = outcome.computing(rank)
        rests.append(done[-1][2] - done[0][1] - outcome.busy_s(rank))
    return max(rests)


def peaks(schedule: Schedule) -> list[int]:
    return [schedule.peak_in_flight(rank) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b(name, times):
    for p, count in product(RANKS, (1, 3, 8, 24)):
        outcome = timed(name, p, 1, count, times)
        assert bubbles(outcome) == {(p - 1) * sum(times)}
        expected = [count if name == "gpipe" else min(p - rank, count) for rank in range(p)]
        assert peaks(outcome.schedule) == expected


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
@pytest.mark.parametrize("chunks", [*deep(1, 2), 3])
def test_looped(name, chunks, times):
    """A bubble v times shorter, for every number of microbatches from that of the ranks on."""
    for p in RANKS:
        for count in {p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 24}:
            outcome = timed(name, p, chunks, count, times)
            assert bubbles(outcome) == {(p - 1) * sum(times)}
            if name == "looped_bfs":
                assert peaks(outcome.schedule) == [chunks * count] * p


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_keeps_a_little_more_than_1f1b(chunks):
    """p M (1 + (p - 1) / (p v)), and as much more as groups are larger than p."""
    for p, count in product(RANKS, range(1, 25)):
        kept = peaks(make_schedule("interleaved", p * chunks, count, num_ranks=p))
        group = -(-count // max(1, count // p))
        expected = [
            min((chunks - 1) * group + 2 * (p - rank) - 1, chunks * count) for rank in range(p)
        ]
        if count >= 2 * p:
            assert kept == expected
            if count % p == 0:
                assert kept[0] == p * chunks + p - 1
        assert all(one <= most for one, most in zip(kept, expected, strict=True))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zb1p(times, extra):
    forward_s, input_s, weight_s = times
    for p in RANKS:
        outcome = timed("zb1p", p, 1, p + extra, times)
        assert bubbles(outcome) == {(p - 1) * (forward_s + input_s - weight_s)}
        assert peaks(outcome.schedule) == [p] * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zb2p(times, extra):
    forward_s, input_s, weight_s = times
    for p in RANKS:
        outcome = timed("zb2p", p, 1, 2 * p - 1 + extra, times)
        assert longest_rest(outcome) == max(0, (p - 1) * (forward_s + input_s - 2 * weight_s))
        assert peaks(outcome.schedule) == [2 * p - 1] * p


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zbv(extra):
    for p in RANKS:
        outcome = timed("zbv", p, 2, 2 * p - 1 + extra, (1, 1, 1))
        assert longest_rest(outcome) == 0
        assert bubbles(outcome) == {p - 1}
        assert peaks(outcome.schedule) == [2 * p] * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_dualpipev(times, extra):
    forward_s, input_s, weight_s = times
    backward_s = input_s + weight_s
    for p in RANKS:
        outcome = timed("dualpipev", p, 2, 2 * p + extra, times)
        pair_s = forward_s + backward_s  # one after the other
        (bubble_s,) = bubbles(outcome)
        assert bubble_s <= (p - 1) * (pair_s + backward_s - 3 * weight_s)
        if forward_s == input_s == weight_s:
            assert bubble_s == (p - 1) * forward_s
        assert peaks(outcome.schedule) == [2 * p + 1] * p


@pytest.mark.parametrize("count_of", [lambda p: p, lambda p: p + 3, lambda p: 3 * p])
def test_vhalf(count_of):
    """The paper's rate is p / (2 m), which is 3 p units: half of 1F1B's, in half of its memory."""
    for p in RANKS:
        outcome = timed("vhalf", p, 2, count_of(p), (1, 1, 1))
        assert longest_rest(outcome) <= 3 * p
        assert max(peaks(outcome.schedule)) == min(2 * ((p + 2) // 2), 2 * count_of(p))


@pytest.mark.parametrize("count_of", [lambda p: 1, lambda p: p, lambda p: p + 3, lambda p: 3 * p])
def test_vmin(count_of):
    """The paper's rate is 2 p / (3 m), which is 4 p units: two thirds of 1F1B's."""
    for p in RANKS:
        outcome = timed("vmin", p, 2, count_of(p), (1, 1, 1))
        assert longest_rest(outcome) == (4 * p - 5 if p > 1 else 0)
        assert max(peaks(outcome.schedule)) <= 2 * ((p + 4) // 3)


@pytest.mark.parametrize("name", ["vhalf", "vmin"])
def test_caps_hold_for_every_number_of_microbatches(name):
    for p, count in product(RANKS, range(1, 25)):
        cap = (p + 2) // 2 if name == "vhalf" else (p + 4) // 3
        assert max(peaks(make_schedule(name, 2 * p, count))) <= 2 * cap


@pytest.mark.parametrize(
    "times", [(4, 5, 3), (5, 4, 4), (3, 2, 2), (3, 3, 2), (2, 2, 3), (5, 3, 4), (3, 4, 3)]
)
def test_vhalf_has_no_bubble_in_its_steady_state(times):
    """W + 2I is at least 2F and W + 2F at least 2I: more microbatches add no idle time."""
    forward_s, input_s, weight_s = times
    assert weight_s + 2 * input_s >= 2 * forward_s
    assert weight_s + 2 * forward_s >= 2 * input_s
    for p in RANKS:
        rests = {longest_rest(timed("vhalf", p, 2, count, times)) for count in (4 * p, 6 * p)}
        assert len(rests) == 1


@pytest.mark.parametrize(
    "name",
    [
        *deep("zb1p"),
        "zb2p",
        *deep("zbv", "vhalf"),
        "vmin",
        *deep("dualpipev"),
        "interleaved",
        *deep("looped_bfs"),
    ],
)
def test_few_microbatches_take_no_longer_than_more(name):
    """Also below the numbers that a schedule is made for."""
    chunks = 1 if name in ("zb1p", "zb2p") else 2
    for p in RANKS:
        steps = [timed(name, p, chunks, count, (2, 2, 2)).step_s for count in range(1, 25)]
        assert steps == sorted(steps)
        # One microbatch goes through alone; at the end some W may be left to do.
        alone = 2 * 2 * chunks * p
        assert alone + 2 <= steps[0] <= alone + 2 * chunks * p
