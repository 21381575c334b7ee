"""Steps of replicas that meet in their status only, and ranks that do different things there."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mpimesh.errors import MismatchError
from mpimesh.parallel.header import StepExchanges
from tests.helpers.parallel_models import assert_equal, on_ranks, state_of
from tests.helpers.parallel_status import OddModel, check_any_two_calls
from tests.helpers.raises import names


@pytest.fixture(autouse=True)
def no_checks(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


@pytest.mark.parametrize("zero", [None, 0, 1, 3])
def test_any_two_different_calls_end_alike(zero):
    first, second = on_ranks("dp=2", partial(check_any_two_calls, zero=zero))
    assert first == second


def test_what_differs_is_said_in_full():
    def body(mesh):
        one = OddModel(mesh, None)
        one.train()
        calls, texts = one.calls(), []
        for name in ("evaluate", "without sync", "own rows", "fewer rows", "at another rate"):
            with pytest.raises(MismatchError) as caught:
                calls["train" if mesh.rank == 0 else name]()
            texts.append(str(caught.value))
            one.mend()
        return texts

    texts = on_ranks("dp=3", body)[0]
    assert on_ranks("dp=3", body)[1] == texts
    for text, values in zip(
        texts,
        [
            ("ranks [0]: train_step 1", "ranks [1, 2]: evaluate"),
            ("ranks [1, 2]: train_step 1", "without reducing gradients"),
            ("ranks [1, 2]: none, they are the replica's own rows",),
            ("ranks [0]: 16", "ranks [1, 2]: 9"),
            ("ranks [0]: Adam", "lr=0.01", "ranks [1, 2]: Adam", "lr=0.5"),
        ],
        strict=True,
    ):
        names(text, *values)


def test_a_rank_that_says_more_of_the_same_does_not_disagree():
    """One that has loaded values compares them and its batch with nobody's."""

    def body(mesh):
        odd, plain = OddModel(mesh, 1), OddModel(mesh, 1)
        for one in (odd, plain):
            one.train()
        if mesh.rank == 1:
            odd.model._engine.first_values = True
        for one in (odd, plain):
            one.train()
        assert_equal(state_of(odd.model), state_of(plain.model))
        assert odd.model.step == 2

    on_ranks("dp=3", body)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_codes_are_told_apart_at_any_bit(size):
    """Also by the sums of squares, whose largest numbers are just exact."""

    def body(mesh):
        exchanges = StepExchanges(mesh.group(), 1, 1, size, 0, codes=True)
        odd = []
        for code in (0, 5, (1 << 50) - 1):
            for bit in range(48):
                for rank in range(size):
                    mine = code ^ (1 << bit if mesh.rank == rank else 0)
                    failed, loss, alike = exchanges.meet(failed=False, loss=0.5, code=mine)
                    assert (failed, loss) == (False, size / 2)
                    if alike:
                        odd.append((code, bit, rank))
            assert exchanges.meet(failed=mesh.rank == 1, loss=np.nan, code=code)[::2] == (
                True,
                True,
            )
        return odd

    assert on_ranks(f"dp={size}", body) == [[]] * size
