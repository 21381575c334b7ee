"""Reductions by messages: what is worked out without any rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.comm.reductions import by_messages, segments
from tests.contract.cases import same
from tests.contract.oracle import reduced
from tests.helpers.depth import examples


@given(st.integers(0, 200), st.integers(1, 20))
def test_segments_follow_each_other_and_are_balanced(size, ranks):
    parts = segments(size, ranks)
    assert len(parts) == ranks
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast"])
def test_names_by_messages(name):
    ranks: Any = SimpleNamespace(size=3, rank=0)
    for algorithm in ("centralized", "tree(2)", "tree(17)", "ring"):
        assert by_messages(ranks, name, algorithm) is not None
        assert by_messages(ranks, "all_gather", algorithm) is None
    for algorithm in ("tree(1)", "tree(0)", "tree(02)", "tree(-2)", "tree()", "ring ", "mpi", ""):
        assert by_messages(ranks, name, algorithm) is None


@settings(max_examples=examples(150))
@given(
    ranks=st.integers(1, 7),
    size=st.integers(0, 23),
    algorithm=st.sampled_from(["centralized", "tree(2)", "tree(3)", "tree(9)", "ring"]),
    dtype=st.sampled_from(["f4", "f8", "i4", "i8", "u1"]),
    op=st.sampled_from(["sum", "prod", "min", "max"]),
    rendezvous=st.booleans(),
    data=st.data(),
)
def test_b19_any_number_of_ranks_and_elements(ranks, size, algorithm, dtype, op, rendezvous, data):
    root = data.draw(st.integers(0, ranks - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = [rng.integers(0, 9, size).astype(dtype) for _ in range(ranks)]
    expected = reduced(inputs, op)

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            group = mesh.group()
            mine = inputs[mesh.rank]
            x = mine.copy()
            how = {"algorithm": algorithm}
            handles = [
                group.all_reduce(x, op, **how),
                group.reduce(x, op, root=root, **how),
                group.broadcast(x, root=root, **how),
            ]
            all_reduced, at_root, sent = [handle.resolve() for handle in handles]
            assert at_root is None or group.rank == root
            same(x, mine)
            return all_reduced, at_root, sent

    found = mm.run_virtual(ranks, main, rendezvous=rendezvous)
    for all_reduced, _, sent in found:
        same(all_reduced, expected)
        same(sent, inputs[root])
        assert all_reduced.tobytes() == found[0][0].tobytes()
    same(found[root][1], expected)
