"""Calls of replicas that meet in their status only, each rank another one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MpimeshError
from tests.helpers.parallel_models import SEED, assert_equal, batch, layers, state_of
from tests.helpers.parallel_traps import Trap, assert_nothing_left

__all__ = ["OddModel", "check_any_two_calls"]

X, TARGET = batch(0, 16)


class OddModel:
    """A model in one bucket, with an optimizer, and the calls that a rank may make."""

    def __init__(self, mesh: mm.DeviceMesh, zero: int | None) -> None:
        self.trap = Trap()
        net = nn.Sequential(*layers(), self.trap)
        self.model = mm.DataParallel(
            net, mesh, loss=nn.cross_entropy, seed=SEED, dtype="float64", num_microbatches=2
        )
        assert len(self.model.buckets.buckets) == 1
        adam = optim.Adam(self.model.parameters(), lr=0.01)
        self.adam, self.optimizer = adam, adam
        if zero is not None:
            self.optimizer = mm.ParallelOptimizer(adam, self.model, zero=zero)  # type: ignore[assignment]
        mine = slice(mesh.rank, None, mesh.world_size)
        self.mine = X[mine], TARGET[mine]

    def train(self, x: Any = X, target: Any = TARGET, **options: Any) -> float:
        return self.model.train_step(x, target, **{"optimizer": self.optimizer, **options})

    def at_another_rate(self) -> None:
        self.adam.lr = 0.5
        self.train()

    def without_sync(self) -> None:
        with self.model.no_sync():
            self.train(optimizer=None)

    def trapped(self, kind: str) -> None:
        self.trap.arm(kind, 1)
        self.train()

    def counted_on(self) -> None:
        self.model.step = 7
        self.train()

    def calls(self) -> dict[str, Callable[[], object]]:
        model, cuts = self.model, [slice(0, 6), slice(6, 16)]
        return {
            "train": self.train,
            "train without the optimizer": lambda: self.train(optimizer=None),
            "at another rate": self.at_another_rate,
            "at another step": self.counted_on,
            "without sync": self.without_sync,
            "evaluate": lambda: model.evaluate(X, TARGET),
            "forward": lambda: model.forward(X),
            "own rows": lambda: self.train(*self.mine, rows="local"),
            "evaluate own rows": lambda: model.evaluate(*self.mine, rows="local"),
            "fewer rows": lambda: self.train(X[:9], TARGET[:9]),
            "microbatches": lambda: self.train(
                *(mm.Microbatches([one[cut] for cut in cuts]) for one in (X, TARGET))
            ),
            "another loss": lambda: self.train(loss=nn.CrossEntropy(ignore_index=1)),
            "another denominator": lambda: self.train(denominator=3),
            "no batch": lambda: self.train(None, TARGET),
            "fails in its forward": lambda: self.trapped("F"),
            "fails in its backward": lambda: self.trapped("B"),
        }

    def mend(self) -> None:
        self.trap.disarm()
        self.adam.lr, self.model.step = 0.01, 1
        self.model.zero_grad()


def check_any_two_calls(mesh: mm.DeviceMesh, zero: int | None) -> list[tuple[str, str, str]]:
    """Have every second rank make another call than the first; return what they raise.

    Nothing is summed, changed or left, and the next step gives what it gives without that.
    """
    odd, plain = OddModel(mesh, zero), OddModel(mesh, zero)
    assert odd.train() == plain.train()
    before = state_of(odd.model)
    calls, texts = odd.calls(), []
    for pair in permutations(calls, 2):
        with pytest.raises(MpimeshError) as caught:
            calls[pair[mesh.rank % 2]]()
        assert caught.value.agreed
        assert "the same collective" not in str(caught.value)
        texts.append((*pair, str(caught.value)))
        assert_equal(state_of(odd.model), before)
        odd.mend()
    assert_nothing_left(mesh)
    for one in (odd, plain):
        one.train()
    assert_equal(state_of(odd.model), state_of(plain.model))
    return texts
