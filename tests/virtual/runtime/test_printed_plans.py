"""A planned collective, printed, says what its start does."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.arguments import size_text

PLANS = {
    "all_reduce": lambda group, x: group.all_reduce_init(x, out=x),
    "all_reduce into a new array": lambda group, x: group.all_reduce_init(x),
    "all_reduce by ring": lambda group, x: group.all_reduce_init(x, algorithm="ring"),
    "mean of halves": lambda group, x: group.all_reduce_init(x.astype("f2"), "mean"),
    "all_gather": lambda group, x: group.all_gather_init(x),
    "all_gather of columns": lambda group, x: group.all_gather_init(x, axis=1),
    "reduce": lambda group, x: group.reduce_init(x, root=1),
    "reduce_scatter": lambda group, x: group.reduce_scatter_init(x, axis=1),
    "all_to_all": lambda group, x: group.all_to_all_init(x, split_axis=1, concat_axis=0),
    "broadcast": lambda group, x: group.broadcast_init(x, out=x),
    "gather": lambda group, x: group.gather_init(x),
    "scatter": lambda group, x: group.scatter_init(x, axis=1),
    "of another order": lambda group, x: group.all_reduce_init(x.T),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_receives_what_is_counted_and_says_by_what(name):
    def main():
        with mm.DeviceMesh("a=3") as mesh:
            group = mesh.group("a")
            planned = PLANS[name](group, np.ones((4, 6)))
            text = str(planned)
            before = mesh.traffic().snapshot()
            planned.start().resolve()
            moved = mesh.traffic() - before
            (way,) = re.findall(r"^  by (\w+): ", text, re.M)
            asked = "ring" if "ring" in name else "node"
            (received,) = re.findall(r"receives (.*) in \d+ message", text)
            return [
                way == asked,
                received == size_text(moved.received_bytes),
                f"on group 'a' of {mesh.size} ranks" in text,
            ]

    assert mm.run_virtual(3, main) == [[True] * 3] * 3


def test_memory_is_that_of_results_and_copies():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group, x = mesh.group(), np.ones((8, 16))
            plans = {
                group.all_reduce_init(x, out=x): 0,
                group.all_reduce_init(x): 1024,
                group.all_reduce_init(x.T): 2048,
                group.all_gather_init(x, axis=1): 4096,
                group.all_reduce_init([1.0, 2.0]): 32,
            }
            return [f"arrays given: {size_text(size)};" in str(one) for one, size in plans.items()]

    assert mm.run_virtual(2, main) == [[True] * 5] * 2
