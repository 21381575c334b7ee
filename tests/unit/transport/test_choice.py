"""From which size on a collective goes through shared memory."""

from __future__ import annotations

import pytest

from mpimesh.transport.choice import ALWAYS, NEVER, NUMBERS, OPERATIONS, Choice
from mpimesh.transport.choices import Choices
from tests.helpers.raises import raises

SIZES = [1 << 10, 1 << 20, NEVER, 1 << 16, ALWAYS]


def test_each_operation_has_its_size():
    assert Choice(SIZES, "").from_bytes() == {
        "all_reduce": 1 << 10,
        "reduce_scatter": 1 << 20,
        "all_gather": NEVER,
        "broadcast": 1 << 16,
        "all_to_all": ALWAYS,
    }


def test_a_size_for_each_operation_is_needed():
    with raises(ValueError, "zip()"):
        Choice(SIZES[1:], "").from_bytes()


def test_an_all_reduce_begins_at_the_smaller_size_of_its_two_ways():
    assert Choice(SIZES, "", staged_from=1 << 9).from_bytes()["all_reduce"] == 1 << 9
    assert Choice(SIZES, "", staged_from=1 << 12).from_bytes()["all_reduce"] == 1 << 10
    assert Choice(SIZES, "", chunks_from=1 << 8).from_bytes()["all_reduce"] == 1 << 8


def test_a_choice_is_made_again_from_its_numbers():
    choice = Choice(SIZES, "why", staged_from=77, chunks_from=88)
    assert len(choice.numbers) == NUMBERS
    assert Choice.of_numbers(choice.numbers, "why") == choice


def test_everything():
    choice = Choice.everything("asked for")
    assert choice.from_bytes() == dict.fromkeys(OPERATIONS, ALWAYS)
    assert choice.staged


def test_what_was_measured_is_kept_for_the_next_job(tmp_path):
    path = tmp_path / "folder" / "choices.json"
    numbers = Choice(SIZES, "", staged_from=77).numbers
    first = Choices("auto", path).learn(3, numbers, measured=True, keep=True)
    choices = Choices("auto", path)
    again = choices.of_ranks(3)
    assert again is not None
    assert (again.numbers, again.why != first.why) == (first.numbers, True)


def test_another_group_does_not_change_when_it_was_measured():
    numbers = Choice(SIZES, "", staged_from=77).numbers
    choices = Choices("auto", None)
    first = choices.learn(3, numbers, measured=True, keep=False)
    assert choices.learn(3, numbers, measured=False, keep=False).why == first.why


def test_no_array_is_as_large_as_never():
    assert NEVER > 1 << 57, "the address space of a process"
    assert NEVER < 1 << 63, "ranks send it as a signed number of 64 bits"


@pytest.mark.parametrize(
    "text",
    [
        '{"2 on 1": [Infinity, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1e30, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [0, 1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1, 1, 1, 1, 1, 1]}',
        '{"2 on 1": [1, 1]}',
        '{"2 on 1": 3}',
        '{"2": [1, 1, 1, 1, 1, 1, 1]}',
        "[" * 100_000,
        "",
    ],
)
def test_a_file_that_says_nonsense_counts_as_none(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    assert Choices("auto", path).of_ranks(2) is None


def test_ranks_on_other_nodes_are_another_group(tmp_path):
    path = tmp_path / "choices.json"
    choices = Choices("auto", path)
    rows = {(4, 1): 5, (4, 2): 6, (8, 2): 7}
    for (ranks, nodes), number in rows.items():
        choices.learn(ranks, [number] * NUMBERS, nodes=nodes, measured=True, keep=True)
    again = Choices("auto", path)
    for (ranks, nodes), number in rows.items():
        found = again.of_ranks(ranks, nodes)
        assert found is not None
        assert found.numbers == [number] * NUMBERS
    assert again.of_ranks(8) is None
