"""Without checks, too, virtual ranks that start different operations learn so."""

from __future__ import annotations

import re
from itertools import permutations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError
from tests.helpers.raises import raises


@pytest.mark.parametrize(
    "start",
    [
        lambda g: g.all_reduce(np.ones(3 + (g.rank == 1))),
        lambda g: g.all_reduce(np.ones((2, 3) if g.rank == 1 else (3, 2))),
        lambda g: g.all_reduce(np.ones(3), "max" if g.rank == 1 else "sum"),
        lambda g: g.start_barrier() if g.rank == 1 else g.all_gather(np.ones(3)),
    ],
    ids=["length", "shape", "reduction", "operation"],
)
def test_every_rank_learns_who_started_what(start, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        with mm.DeviceMesh("a=3") as mesh:
            group = mesh.group()
            group.all_reduce(np.ones(2)).resolve()
            with pytest.raises(MismatchError) as caught:
                start(group).resolve()
            text = str(caught.value)
            with pytest.raises(MismatchError) as caught:
                group.all_reduce(np.ones(2)).resolve()
            assert "operation 2:" in str(caught.value)
            return text

    texts = mm.run_virtual(3, main)
    for text in texts:  # who has not started by then is not named
        assert re.search(r"rank 0: |rank 2: |ranks 0, 2: ", text)
        assert "rank 1: " in text
        assert "operation 2:" in text


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "broadcast"])
@pytest.mark.parametrize("names", list(permutations(["centralized", "tree(2)", "ring", "node"], 2)))
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_ask_for_different_algorithms_learn_so(operation, names, size, monkeypatch):
    """Also where each waits for messages that the others never send."""
    monkeypatch.setenv("MPIMESH_CHECKS", "0")

    def main():
        with mm.DeviceMesh(f"a={size}") as mesh:
            algorithm = names[mesh.rank % 2]
            getattr(mesh.group(), operation)(np.ones(4), algorithm=algorithm).resolve()

    with pytest.raises(MismatchError) as caught:
        mm.run_virtual(size, main)
    assert "operation 1: rank" in str(caught.value)
    for name in names:
        assert f"algorithm {name})" in str(caught.value)


@pytest.mark.parametrize("later", ["all_gather", "shift", "scatter"])
def test_who_waits_behind_steps_that_never_end_learns_it(later):
    """Steps that some ranks have given up never end on the others, nor does what is behind them."""

    def main():
        mesh = mm.DeviceMesh("a=3")
        group, ones = mesh.group(), np.ones(30_000)
        handles = [
            group.all_to_all(ones.astype("f4") if mesh.rank == 2 else ones),
            group.all_reduce(np.ones(3), algorithm="ring"),
            group.shift(ones) if later == "shift" else None,
            group.all_gather(ones) if later == "all_gather" else None,
            group.scatter(ones, out=np.empty(10_000)) if later == "scatter" else None,
        ]
        handles = [handle for handle in handles if handle is not None]
        if mesh.rank == 0:
            handles.insert(0, handles.pop())
        for handle in handles:
            assert handle is not None
            with raises(MismatchError, "all_to_all", "float32"):
                handle.resolve(timeout_s=5)

    mm.run_virtual(3, main)
