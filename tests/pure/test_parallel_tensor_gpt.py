"""A GPT split over ranks, trained like the whole one in one process."""

from __future__ import annotations

import pytest

from tests.pure.parallel_models import on_ranks
from tests.pure.tensor_models import assert_same, trained, trained_alone


@pytest.mark.parametrize(
    ("dims", "kind", "sequence_parallel"),
    [
        ("tp=1", "plain", True),
        ("tp=2", "plain", True),
        ("tp=3", "plain", False),
        ("tp=3", "llama", True),
        ("tp=4", "llama", True),
        ("dp=2,tp=2", "plain", True),
        ("dp=2,tp=2", "llama", False),
        ("pp=2,tp=2", "plain", True),
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
