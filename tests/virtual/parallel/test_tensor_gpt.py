"""A GPT split over ranks, trained like the whole one in one process."""

from __future__ import annotations

from typing import Any

import pytest

import mpimesh as mm
from tests.helpers.depth import deep
from tests.helpers.parallel_models import on_ranks
from tests.helpers.tensor_models import assert_same, trained, trained_alone


@pytest.mark.parametrize(
    ("dims", "kind", "sequence_parallel"),
    [
        *deep(("tp=1", "plain", True), ("tp=2", "plain", True), ("tp=3", "plain", False)),
        ("tp=3", "llama", True),
        *deep(("tp=4", "llama", True)),
        ("dp=2,tp=2", "plain", True),
        *deep(("dp=2,tp=2", "llama", False), ("pp=2,tp=2", "plain", True)),
        ("pp=2,tp=2", "llama", False),
    ],
)
def test_a_split_gpt_trains_like_the_whole_one(dims, kind, sequence_parallel):
    """Three steps: losses, norms, and all weights, with dropout, tied weights, shared key heads."""
    expected = trained_alone(kind)

    def body(mesh):
        got = trained(mesh, kind, sequence_parallel=sequence_parallel)
        assert_same(got, expected)

    on_ranks(dims, body, rendezvous=True)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_all_norms_of_a_gpt_have_one_eps(norm):
    """The last of the root mean squares had another one than those in the blocks."""
    made = mm.parallel.gpt_layers(5, 4, 2, 2, max_tokens=3, norm=norm)
    block: Any
    last: Any
    *_, block, last, _ = made
    assert {block.mlp_norm.eps, block.attention_norm.eps, last.eps} == {1e-5}
