"""What ranks are told when another one has left, and when their memory is theirs again."""

from __future__ import annotations

import pytest

CASES = "pending", "told", "in_place", "both", "probed", "no_memory", "answered"


@pytest.fixture(scope="module")
def failures(driver):
    return driver("failures.c")


@pytest.mark.parametrize("case", CASES)
def test_who_needs_a_rank_that_has_left_learns_it(failures, case):
    failures.succeeds(case)
