"""Layers cut into stages: against every cut there is, and where the best is known."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import ScheduleError
from mpimesh.schedule import Costs, Partition, auto, partition, simulate
from tests.helpers.raises import raises

# Small whole numbers have many ties, fractions few.
WHOLE = st.integers(0, 5)
SECONDS = st.one_of(WHOLE, st.fractions(0, 5, max_denominator=7))


@st.composite
def rows(draw, seconds=SECONDS):
    layers = draw(st.lists(seconds, min_size=1, max_size=9))
    edges = len(layers) - 1
    messages = draw(st.lists(seconds, min_size=edges, max_size=edges))
    return layers, messages, draw(st.integers(1, len(layers)))


def best_of_all(layers, messages, num_stages):
    """Try every cut: the slowest stage, then all messages, then the bounds, in this order."""
    edges = [0, *messages, 0]

    def key(cuts):
        bounds = (0, *cuts, len(layers))
        stages = [sum(layers[a:b]) + edges[a] + edges[b] for a, b in pairwise(bounds)]
        return max(stages), sum(edges[cut] for cut in cuts), bounds, tuple(stages)

    return min(map(key, combinations(range(1, len(layers)), num_stages - 1)))


@given(rows())
def test_no_cut_is_better(row):
    layers, messages, num_stages = row
    slowest_s, _, bounds, stage_s = best_of_all(layers, messages, num_stages)
    found = partition(layers, num_stages, message_s=messages)
    assert found == Partition(bounds, stage_s)
    assert found.slowest_s == slowest_s
    assert found.num_stages == num_stages == len(found.sizes)
    assert found.split(layers) == [layers[a:b] for a, b in pairwise(bounds)]
    mean_s = Fraction(sum(stage_s)) / num_stages
    assert found.imbalance == pytest.approx(float(slowest_s / mean_s) if mean_s else 1)


@given(rows(st.floats(0, 1e300, allow_subnormal=True)))
def test_floats_are_compared_as_the_numbers_that_they_are(row):
    layers, messages, num_stages = row
    exact = best_of_all(list(map(Fraction, layers)), list(map(Fraction, messages)), num_stages)
    found = partition(layers, num_stages, message_s=messages)
    assert found.bounds == exact[2]
    assert found.stage_s == tuple(map(float, exact[3]))
    assert all(type(one) is float for one in found.stage_s)
    assert partition(np.array(layers), num_stages, message_s=np.array(messages)) == found


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 0.1, Fraction(1, 3)]))
def test_equal_layers_are_dealt_as_evenly_as_goes(num_layers, num_stages, layer_s):
    if num_layers < num_stages:
        num_layers, num_stages = num_stages, num_layers
    found = partition([layer_s] * num_layers, num_stages)
    most = -(-num_layers // num_stages)
    assert max(found.sizes) == most
    assert found.slowest_s == pytest.approx(float(most * layer_s))
    # The earliest cuts: whatever goes to the last stages is there first.
    rest, sizes = num_layers, []
    for stages_left in reversed(range(num_stages)):
        sizes.append(max(1, rest - stages_left * most))
        rest -= sizes[-1]
    assert found.sizes == tuple(sizes)


@given(rows(WHOLE), st.integers(1, 9))
def test_a_slower_layer_makes_no_step_faster(row, more):
    layers, messages, num_stages = row
    before = partition(layers, num_stages, message_s=messages).slowest_s
    for place in range(len(layers)):
        slower = [*layers[:place], layers[place] + more, *layers[place + 1 :]]
        after = partition(slower, num_stages, message_s=messages).slowest_s
        assert before <= after <= before + more


def test_a_wide_boundary_is_kept_whole():
    layers = [2, 2, 2, 2]
    assert partition(layers, 2).bounds == (0, 2, 4)
    assert partition(layers, 2, message_s=[1, 4, 1]).bounds == (0, 1, 4)
    assert partition(layers, 2, message_s=[1, 2, 1]).bounds == (0, 2, 4)
    # As fast either way, but with less to send.
    assert partition([2, 1, 0, 2], 2, message_s=[9, 1, 0]).bounds == (0, 3, 4)


def test_to_take_what_fits_is_not_best_where_messages_cost():
    """The first stage could have three layers, but then the second could not send."""
    found = partition([1, 1, 1, 4], 2, message_s=[0, 0, 3])
    assert found.bounds == (0, 2, 4)
    assert found.stage_s == (2, 5)


def test_what_there_is_one_cut_for():
    assert partition([3, 0, 2], 3, message_s=1).stage_s == (4, 2, 3)
    assert partition([3, 0, 2], 1, message_s=1).stage_s == (5,)
    assert partition([0, 0], 1) == Partition((0, 2), (0,))
    assert partition([0, 0], 1).imbalance == 1


def test_a_thousand_layers_in_64_stages():
    """Without messages it is known what the best is: to take as much as fits, which goes once."""
    draw = np.random.default_rng(0)
    layers = draw.integers(1, 1000, 1000)
    found = partition(layers, 64)
    assert found.bounds == greedy_bounds(layers, 64, int(found.slowest_s))
    assert greedy_bounds(layers, 64, int(found.slowest_s) - 1) is None
    messages = draw.random(999)
    slowest_s = partition(layers, 64, message_s=messages).slowest_s
    assert found.slowest_s < slowest_s <= found.slowest_s + 2


def greedy_bounds(layers, num_stages, limit):
    """From the end, as much as fits, which is right without messages; None if it is too little."""
    bounds = [len(layers)]
    while bounds[-1] and len(bounds) <= num_stages:
        start = end = bounds[-1]
        stages_before = num_stages - len(bounds)
        while start > stages_before and sum(layers[start - 1 : end]) <= limit:
            start -= 1
        if start == end:
            return None
        bounds.append(start)
    return None if bounds[-1] else tuple(reversed(bounds))


@pytest.mark.parametrize(
    ("layers", "num_stages", "message_s", "message"),
    [
        ([], 1, 0, (0, 1)),
        ([1, 2], 3, 0, (2, 3)),
        ([1, 2], 0, 0, ("num_stages", 1, 0)),
        ([1, 2], 1.0, 0, ("num_stages", "1.0")),
        ([1, -1], 1, 0, ("layer_s", -1, 1)),
        ([1, float("nan")], 1, 0, ("layer_s", "nan at index 1")),
        ([1, "2"], 1, 0, ("layer_s", "'2'")),
        ([1, 2], 1, float("inf"), ("message_s", 0)),
        ([1, 2, 3], 2, [1], ("message_s", 2, 3, 1)),
    ],
)
def test_what_cannot_be_cut(layers, num_stages, message_s, message):
    with raises(ScheduleError, *message):
        partition(layers, num_stages, message_s=message_s)


def test_the_text_says_how_even_it_is():
    assert str(partition([0.001, 0.002, 0.005], 2)) == (
        "2 stages of 2, 1 layers take 3 ms, 5 ms: the slowest 1.25 times the mean"
    )


# -- costs of layers become those of stages ---------------------------------------------------


@given(rows())
def test_costs_of_stages_are_sums_of_their_layers(row):
    layers, messages, num_stages = row
    costs = Costs.of(len(layers), forward_s=layers, backward_weight_s=layers, message_s=messages)
    assert costs.total_s == tuple(2 * one + 1 for one in layers)
    cut = partition(costs.total_s, num_stages, message_s=costs.message_s)
    joined = costs.joined(cut.sizes)
    assert joined.forward_s == tuple(sum(layers[a:b]) for a, b in pairwise(cut.bounds))
    assert joined.backward_input_s == cut.sizes
    edges = [0, *joined.message_s, 0]
    paid = [one + a + b for one, (a, b) in zip(joined.total_s, pairwise(edges), strict=True)]
    assert tuple(paid) == cut.stage_s
    assert costs.joined([1] * len(layers)) == costs


def test_schedules_take_the_costs_of_stages():
    """With many microbatches a step takes as long as the slowest stage for each, and no other."""
    costs = Costs.of(6, forward_s=[1, 4, 1, 1, 1, 2], message_s=[0, 0, 0, 0, 0])
    cut = partition(costs.total_s, 3)
    arguments = costs.joined(cut.sizes).as_arguments()
    steps = [simulate(auto(3, count, **arguments), **arguments).step_s for count in (20, 21)]
    assert steps[1] - steps[0] == cut.slowest_s
    assert list(arguments) == ["forward_s", "backward_input_s", "backward_weight_s", "message_s"]


@pytest.mark.parametrize("sizes", [[], [2], [1, 1, 1, 1], [3, 0], [4, -1]])
def test_sizes_must_be_those_of_all_layers(sizes):
    with raises(ScheduleError, "sizes"):
        Costs.of(3).joined(sizes)
