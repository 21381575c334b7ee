"""Without checks, too, virtual ranks that start different operations learn so."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError


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
    assert len(set(texts)) == 1
    assert "ranks 0, 2: " in texts[0]
    assert "rank 1: " in texts[0]
    assert "operation 2:" in texts[0]
