"""Measured times of layers and messages, on virtual ranks and by a clock of our own."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import (
    DTypeError,
    MismatchError,
    StageError,
)
from mpimesh.parallel import PipelineParallel, measure_layers
from mpimesh.parallel.layer_costs import measure_link
from mpimesh.schedule import Costs
from tests.devices.fake_cuda import installed
from tests.helpers.parallel_models import batch, layers, on_ranks
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.raises import names
from tests.helpers.timed_layers import NO_COST, Timed, X, install_clock, wide_mlp


@pytest.fixture
def clock(monkeypatch):
    return install_clock(monkeypatch)


class Alone:
    """The least that is a layer: it doubles, has no memory to ask for and no halves."""

    def forward(self, x, ctx=None):
        return 2 * x

    def backward(self, dy, ctx):
        return 2 * dy

    def parameters(self):
        return []


# -- what is measured -------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [3, 5])
def test_the_median_of_runs_and_ranks_counts(clock, repeats):
    paces = [1, 3, 64]

    def body(mesh):
        clock.pace = paces[mesh.rank]
        made = [Timed(clock, 1, 2, 4), Timed(clock, 8, 16, 32), Timed(clock, 5)]
        return measure_layers(made, X, mesh=mesh, latency_s=0.5, bytes_per_s=16, repeats=repeats)

    found = on_ranks("pp=3", body)
    message_s = 0.5 + X.nbytes / 16
    assert found == [Costs((3, 24, 15), (6, 48, 0), (12, 96, 0), (message_s, message_s))] * 3


def test_layers_before_the_first_that_is_trained_have_no_backward(clock):
    def body(mesh):
        frozen = Timed(clock, 1, 2, 4)
        frozen.freeze()
        made = [Timed(clock, 1, 2, 4, trains=False), frozen, Timed(clock, 1, 2, 4)]
        made.append(Timed(clock, 1, 2, 4, trains=False))
        return measure_layers(made, X, mesh=mesh, **NO_COST)

    (costs,) = on_ranks("pp=1", body)
    assert costs == Costs((1, 1, 1, 1), (0, 0, 2, 2), (0, 0, 4, 4), (0, 0, 0))


def test_messages_have_the_bytes_of_outputs():
    def body(mesh):
        made = [nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(2, 1)]
        x = np.zeros((5, 3))
        return measure_layers(made, x, mesh=mesh, dtype=np.float64, latency_s=1, bytes_per_s=8)

    for costs in on_ranks("pp=2", body):
        assert costs.message_s == (1 + 5 * 8, 1 + 5 * 2)


@pytest.mark.parametrize("given", [{}, {"latency_s": 7.0}, {"bytes_per_s": 2.0}])
def test_messages_are_measured_where_they_are_not_given(given):
    def body(mesh):
        return measure_layers(wide_mlp(), X, mesh=mesh, **given)

    found = on_ranks("dp=2,pp=2", body)
    assert found == found[:1] * 4
    assert all(0 < one < 100_000 for one in found[0].message_s)
    if "latency_s" in given:
        assert min(found[0].message_s) >= 7
    if "bytes_per_s" in given:
        assert found[0].message_s[1] - found[0].message_s[0] == pytest.approx(4 * 4 * 497 / 2)


@pytest.mark.parametrize(("nbytes", "sent"), [(0, 1 << 16), (100_000, 100_000), (1 << 40, 1 << 24)])
def test_the_rate_is_what_a_large_message_takes_longer(monkeypatch, nbytes, sent):
    sizes = set()

    def shift_s(message, pipe, repeats):
        assert (pipe.name, repeats) == ("pp", 3)
        sizes.add(message.nbytes)
        return (1 + pipe.world_rank % 3) * (message.nbytes + 99) / 1000

    monkeypatch.setattr("mpimesh.parallel.layer_costs._shift_s", shift_s)

    def body(mesh):
        return measure_link(mesh, mesh.group("pp"), nbytes, xp=np, repeats=3)

    found = on_ranks("pp=3", body)
    assert sizes == {1, sent}
    for link in found:
        # The rank in the middle takes twice as long as the first.
        assert link.latency_s == pytest.approx(0.2)
        assert link.bytes_per_s == pytest.approx(500)
        assert link.message_s(1000) == pytest.approx(2.2)


def test_messages_that_all_take_as_long_have_any_rate(monkeypatch):
    monkeypatch.setattr("mpimesh.parallel.layer_costs._shift_s", lambda *_: 0.25)
    found = on_ranks("pp=2", lambda mesh: measure_layers(wide_mlp(), X, mesh=mesh))
    assert [costs.message_s for costs in found] == [(0.25,) * 4] * 2


def test_one_rank_has_no_messages_unless_told():
    def body(mesh):
        free = measure_layers(wide_mlp(), X, mesh=mesh)
        told = measure_layers(wide_mlp(), X, mesh=mesh, latency_s=2)
        return free.message_s, told.message_s

    assert on_ranks("dp=2", body) == [((0,) * 4, (2,) * 4)] * 2


def test_integers_and_layers_of_any_kind():
    ids = np.array([[1, 2], [3, 1], [0, 0]])

    def body(mesh):
        made: list[Any] = [
            nn.Embedding(4, 3),
            Alone(),
            nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)),
        ]
        costs = measure_layers(made, ids, mesh=mesh, latency_s=0, bytes_per_s=1)
        assert all(time_s > 0 for time_s in costs.forward_s)
        assert costs.backward_weight_s[0] > 0
        assert costs.message_s == (3 * 2 * 3 * 4, 3 * 2 * 3 * 4)

    on_ranks("pp=2", body)


def test_on_a_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", None)
    with installed() as device:

        def body(mesh):
            return measure_layers(wide_mlp(), X, mesh=mesh, xp=device)

        found = on_ranks("pp=2", body)
    assert found[0] == found[1]
    assert all(one_s > 0 for one_s in (*found[0].total_s, *found[0].message_s))


# -- layers stay as they are ------------------------------------------------------------------


def test_layers_with_memory_keep_it():
    def body(mesh):
        model = nn.Sequential(layers())
        model.materialize(seed=1, dtype=np.float64)
        first, second, *rest = model.parameters()
        first.attach_grad(np.zeros(first.shape))
        first.grad[...] = 1
        second.grad = np.full(second.shape, 2.0)
        first.on_ready = lambda _: pytest.fail("the layer itself was run")
        before = [(one.data, one.data.copy()) for one in model.parameters()]
        measure_layers(model, batch(0, 4)[0], mesh=mesh, dtype=np.float32)
        for one, (data, values) in zip(model.parameters(), before, strict=True):
            assert one.data is data
            np.testing.assert_array_equal(data, values)
        assert first.is_attached
        np.testing.assert_array_equal(first.grad, 1)
        np.testing.assert_array_equal(second.grad, 2)
        assert all(one.grad is None for one in rest)

    on_ranks("pp=2", body)


class Spy(nn.Linear):
    """Tells what the copies of it have when they run first."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def forward(self, x, ctx=None):
        Spy.seen.append((self.weight.data, self.weight.grad is None, self.input_grad))
        return super().forward(x, ctx)


def test_copies_share_values_and_no_gradients(monkeypatch):
    monkeypatch.setattr(Spy, "seen", [])
    made = [Spy(3, 3), Spy(3, 3)]
    for layer in made:
        layer.materialize(seed=0)
        layer.weight.grad = np.ones((3, 3), np.float32)
    on_ranks("pp=1", lambda mesh: measure_layers(made, X, mesh=mesh, repeats=1))
    first = Spy.seen[::2]
    assert all(data is layer.weight.data for (data, _, _), layer in zip(first, made, strict=True))
    assert [no_gradient for _, no_gradient, _ in first] == [True, True]
    # As in a pipeline, whose first layer spares the gradient that nobody reads.
    assert [input_grad for _, _, input_grad in first] == [False, True]


class Counted(nn.Linear):
    """Notes how many of its kind have memory at once."""

    alive: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()
    most = 0

    def materialize(self, **options):
        super().materialize(**options)
        Counted.alive.add(self)
        Counted.most = max(Counted.most, len(Counted.alive))


def test_one_layer_at_a_time_has_memory(monkeypatch):
    monkeypatch.setattr(Counted, "most", 0)
    on_ranks("pp=1", lambda mesh: measure_layers([Counted(3, 3) for _ in range(4)], X, mesh=mesh))
    assert Counted.most == 1
    assert not Counted.alive


# -- one rank fails, or is told something else ------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("boom"), StageError), (DTypeError("boom"), DTypeError)]
)
@pytest.mark.parametrize("when", ["F", "B"])
def test_what_fails_on_a_rank_is_raised_on_all(error, kind, when):
    def body(mesh):
        trap = Trap()
        if mesh.rank == 2:
            trap.arm(when, 3, error)
        made = [nn.Linear(3, 2), trap, nn.Linear(2, 2)]
        caught = error_of(lambda: measure_layers(made, X, mesh=mesh))
        assert type(caught) is kind
        assert caught.agreed
        assert repr(caught.__context__) == repr(error if mesh.rank == 2 else None)
        assert_nothing_left(mesh)
        trap.disarm()
        PipelineParallel.partition(made, 2, mesh=mesh, x=X)
        return str(caught)

    texts = on_ranks("dp=2,pp=2", body)
    assert texts == texts[:1] * 4
    # The class that is raised stands before the text anyway.
    name = "" if kind is type(error) else f"{type(error).__name__}: "
    assert texts[0].startswith(f"rank 2: {name}layer 1, Trap: boom")


def test_an_input_that_does_not_fit_is_told_with_its_layer():
    def body(mesh):
        return error_of(lambda: measure_layers(layers(), batch(0, 4)[0], mesh=mesh))

    for error in on_ranks("pp=2", body):
        assert type(error) is DTypeError
        assert str(error).startswith("rank 0: layer 0, Linear: ")


@pytest.mark.parametrize("other", [X[:2], X.astype(float), None])
def test_ranks_that_measure_with_different_microbatches(other):
    def body(mesh):
        with pytest.raises(MismatchError, match="measure_layers"):
            measure_layers(wide_mlp(), other if mesh.rank else X, mesh=mesh)

    on_ranks("pp=2", body)


class Split:
    """Gives two arrays of which one is of integers, and takes the gradient of the other."""

    def forward(self, x, ctx=None):
        return {
            "wide": np.concatenate([x["a"], x["b"]], axis=1),
            "count": np.ones(len(x["a"]), int),
        }

    def backward(self, dy, ctx):
        assert dy["count"] is None
        assert dy["wide"].shape[1] == 5

    def parameters(self):
        return []


def test_trees_are_measured_as_they_are():
    """The boundary behind the first layer has the bytes of both its arrays."""

    def body(mesh):
        made: Any = [Split(), Merge(), nn.Linear(5, 2)]
        x = {"a": np.ones((4, 2), np.float32), "b": np.ones((4, 3), np.float32)}
        return measure_layers(made, x, mesh=mesh, latency_s=0, bytes_per_s=1)

    for found in on_ranks("pp=2", body):
        assert found.message_s == (4 * 5 * 4 + 4 * 8, 4 * 5 * 4)


class Merge(Alone):
    """Takes one of two arrays."""

    def forward(self, x, ctx=None):
        return x["wide"]

    def backward(self, dy, ctx):
        return {"wide": dy, "count": None}


def test_microbatches_of_several_shapes_are_no_sample():
    def body(mesh):
        x = mm.Microbatches([X, X])
        return str(error_of(lambda: measure_layers([nn.Linear(2, 2)], x, mesh=mesh)))

    for text in on_ranks("pp=2", body):
        names(text, "x", "microbatch")
