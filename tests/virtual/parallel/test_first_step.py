"""Comparisons of replicas in their first step, also with checks off."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError

X = np.random.default_rng(0).normal(size=(8, 4))
TARGET = np.arange(8) % 2


@pytest.fixture(autouse=True)
def no_checks(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


def on_replicas(work, size=2):
    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            model = mm.DataParallel(net, mesh, loss=nn.cross_entropy, dtype="float64")
            work(mesh, model)

    mm.run_virtual(size, main)


def fails(work, error=MismatchError, size=2):
    with pytest.raises(error) as caught:
        on_replicas(work, size)
    assert caught.value.agreed
    return str(caught.value)


@pytest.mark.parametrize("counts", [(4, 4), (5, 3)])
def test_rows_of_each_rank_s_own_are_told_with_the_cure(counts):
    def work(mesh, model):
        first = sum(counts[: mesh.rank])
        rows = slice(first, first + counts[mesh.rank])
        model.train_step(X[rows], TARGET[rows])

    text = fails(work)
    assert 'rows="local"' in text
    assert "from_local" in text
    assert "0:" in text


def test_the_cure_trains_on_all_rows():
    losses = []

    def work(mesh, model):
        rows = slice(5 * mesh.rank, 5 + 3 * mesh.rank)
        x, target = (
            mm.DTensor.from_local(part, mesh, "dp=S0").full() for part in (X[rows], TARGET[rows])
        )
        losses.append(model.train_step(x, target))
        losses.append(model.evaluate(X, TARGET))

    on_replicas(work)
    assert len(set(losses)) == 1


def test_only_the_first_step_compares_batches():
    def work(mesh, model):
        model.train_step(X, TARGET)
        model.train_step(X + mesh.rank, TARGET)

    on_replicas(work)


@pytest.mark.parametrize("kind", ["DTensor", "DVariable"])
def test_a_split_batch_beside_whole_targets_is_refused_with_the_cures(kind):
    def work(mesh, model):
        x = mm.distribute(X, mesh, "dp=S0")
        model.train_step(mm.dtensor.DVariable(x) if kind == "DVariable" else x, TARGET)

    text = fails(work, ModuleError)
    assert "x.full()" in text
    assert 'rows="local"' in text


def test_a_variable_is_taken_as_the_array_in_it():
    losses = []

    def work(mesh, model):
        x, target = (mm.distribute(whole, mesh, "dp=S0") for whole in (X, TARGET))
        losses.append(model.evaluate(mm.dtensor.DVariable(x), target))
        losses.append(model.evaluate(X, TARGET))

    on_replicas(work)
    assert len(set(losses)) == 1


def test_unequal_first_values_are_told():
    def work(mesh, model):
        model.parameters()[0].data[...] = mesh.rank
        model.train_step(X, TARGET)

    text = fails(work)
    assert "0.weight" in text
    assert "broadcast=True" in text


def test_unequal_loaded_values_are_told_in_the_next_step():
    def work(mesh, model):
        model.train_step(X, TARGET)
        state = model.full_state_dict()
        model.load_state_dict({name: value + mesh.rank for name, value in state.items()})
        model.train_step(X, TARGET)

    assert "0.weight" in fails(work)


def test_an_optimizer_given_to_the_step_is_compared():
    def work(mesh, model):
        model.train_step(X, TARGET)
        sgd = optim.SGD(model.parameters(), lr=0.1 * (1 + mesh.rank))
        model.train_step(X, TARGET, optimizer=sgd)

    text = fails(work)
    assert "lr=0.1" in text
    assert "lr=0.2" in text


def test_each_stage_may_have_its_own_optimizer():
    def main():
        with mm.DeviceMesh("dp=2,pp=2") as mesh:
            stages = [mm.PipelineStage(i).add_layer(nn.Linear(4, 4)) for i in range(2)]
            pipe = mm.PipelineParallel(stages, mesh=mesh, num_microbatches=2, dtype="float64")
            sgd = optim.SGD(pipe.parameters(), lr=0.1 * (1 + mesh.coord("pp")))
            for _ in range(2):
                pipe.train_step(X, X, loss=nn.mse_loss, optimizer=sgd)

    mm.run_virtual(4, main)
