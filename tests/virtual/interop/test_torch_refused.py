"""Refusals of the adapter of PyTorch, and their words."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError, StageError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises
from tests.helpers.torch_models import CLASSES, FEATURES, Two, batch, deal, make_model, mt, torch

LOSS = mt.wrap_loss(torch.nn.functional.cross_entropy)


class Inplace(torch.nn.Module):
    def forward(self, x):
        return x.add_(1.0)


@pytest.mark.parametrize("context", [None, nn.Context()])
@pytest.mark.parametrize("writeable", [True, False])
def test_a_module_that_writes_into_its_input_is_refused(context, writeable):
    layer = mt.wrap(Inplace())
    layer.input_grad = False
    x = np.ones((2, 3))
    x.flags.writeable = writeable
    with raises(ModuleError, layer, "input", "inplace=True"):
        layer(x, context)
    assert writeable or (x == 1).all()
    layer.input_grad = True
    with pytest.raises((RuntimeError, ModuleError), match=r"in-place|inplace=True"):
        layer(np.ones((2, 3)), nn.Context())


def test_what_is_not_wrapped_is_told_how_to_be():
    """The errors told what a layer and a loss have, and not where PyTorch's get it."""
    module = torch.nn.Linear(FEATURES, CLASSES)

    number: Any = 3

    class Mine(torch.nn.Linear):
        pass

    for make in (nn.Sequential, mm.PipelineStage(0).add_layer):
        for one in (module, Mine(2, 2)):
            with raises(ModuleError, "mpimesh.interop.torch.wrap"):
                make(one)
        with pytest.raises(ModuleError, match=r"got 3$"):
            make(number)
    with raises(ModuleError, "wrap_each", "torch.nn.Sequential", module, "wrap"):
        mt.wrap_each(module)
    line = nn.Linear(3, 3)
    line.materialize(seed=0)
    with raises(DTypeError, "torch.float32", "x.numpy()"):
        line(torch.ones(2, 3))
    table = nn.Embedding(3, 3)
    table.materialize(seed=0)
    with raises(DTypeError, "torch.int64", "x.numpy()"):
        table(torch.ones(2, dtype=torch.int64))

    with raises(DTypeError, "torch.int64", "target.numpy()"):
        nn.cross_entropy(np.zeros((2, 3)), torch.ones(2, dtype=torch.int64))

    def body(mesh):
        with raises(ModuleError, "mpimesh.interop.torch.wrap"):
            mm.DataParallel(module, mesh)
        model = mm.DataParallel(mt.wrap(module), mesh)
        x = np.ones((2, FEATURES), np.float32)
        with raises(mm.MpimeshError, "mpimesh.interop.torch.wrap_loss"):
            model.train_step(x, np.zeros(2, int), loss=torch.nn.CrossEntropyLoss())

    on_ranks("dp=2", body)


def test_an_output_that_is_the_read_only_input_stays_read_only():
    x = np.ones((2, 3))
    x.flags.writeable = False
    y = mt.wrap(torch.nn.Identity())(x, nn.Context())
    assert np.shares_memory(x, y)
    assert not y.flags.writeable


class Gives(torch.nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        (lambda x: [x], ("list", "tuple")),
        (lambda x: None, ("NoneType",)),
        (lambda x: x.numpy(), ("ndarray", "tensor")),
        (lambda x: x.to_sparse(), ("torch.sparse_coo", "cpu")),
    ],
)
def test_outputs_of_other_types_are_refused(what, values):
    with raises(ModuleError, *values):
        mt.wrap(Gives(what))(np.ones((2, 3)))


def test_modules_that_cannot_be_wrapped_are_refused():
    with pytest.raises(ModuleError, match=r"torch\.nn\.Module"):
        mt.wrap(torch.relu)
    with pytest.raises(ModuleError, match="lazy"):
        mt.wrap(torch.nn.LazyLinear(3))
    whole = torch.nn.Module()
    whole.number = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(DTypeError, match="complex64"):
        mt.wrap(whole)
    with torch.device("meta"):
        made = Two()
    with raises(ModuleError, "Two", "reset_parameters"):
        mt.wrap(made).materialize(seed=0)
    with pytest.raises(ModuleStateError, match="no memory"):
        mt.wrap(made).parameters()[0].value()


def test_a_gradient_that_does_not_fit_is_refused_and_may_come_again():
    layer = mt.wrap(make_model())
    context = nn.Context()
    y = layer(batch(0, 4)[0], context)
    with pytest.raises(ShapeError, match=r"\(4, 5\)"):
        layer.backward(y[:2], context)
    with pytest.raises(DTypeError, match="float64"):
        layer.backward(y.astype(np.float32), context)
    with pytest.raises(ShapeError, match="tuple"):
        layer.backward((y,), context)
    layer.backward(y, context)


def test_an_error_of_pytorch_ends_the_step_on_all_ranks():
    template = make_model()

    def body(mesh):
        model = copy.deepcopy(template)
        pipe = mm.PipelineParallel(deal(mt.wrap_each(model), 2), 2, mesh=mesh)
        x, target = batch(0, 4)
        with pytest.raises(StageError, match="mat1 and mat2"):
            pipe.train_step(x[:, :-1], target, loss=LOSS)
        return pipe.train_step(x, target, loss=LOSS)

    losses = on_ranks("pp=2", body)
    assert losses[0] == losses[1] > 0


def test_tensors_of_a_mixed_model_are_refused():
    def body(mesh):
        model = nn.Sequential(nn.Linear(FEATURES, 4), mt.wrap(torch.nn.Linear(4, CLASSES)))
        replicas = mm.DataParallel(model, mesh, loss=LOSS)
        with pytest.raises(ModuleError, match=r"'0.weight', '0.bias'"):
            mt.tensors(replicas)
        x, target = batch(0, 4)
        return replicas.train_step(x.astype(np.float32), target)

    assert on_ranks("dp=1", body)[0] > 0


def test_a_parameter_that_is_replaced_after_wrapping_is_noticed():
    model = make_model()
    layer = mt.wrap(model)
    model[0].weight = torch.nn.Parameter(torch.zeros(8, FEATURES))
    with raises(ModuleStateError, ["0.weight"]):
        layer(batch(0, 4)[0])


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    def body(mesh):
        model = make_model()
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        state = model.state_dict()
        before = copy.deepcopy(state)
        for wrong, error, values in (
            ({**before, "more": before["0.bias"]}, ModuleError, ("unknown", ["more"])),
            ({"0.bias": before["0.bias"]}, ModuleError, ("missing", "'0.weight'")),
            ({**before, "5.bias": before["0.bias"]}, ShapeError, ("'5.bias'", (5,), (8,))),
        ):
            with raises(error, *values):
                mt.load_full_state_dict(replicas, model, wrong)
        with raises(ModuleError, "stage 0", "root"):
            mt.full_state_dict(replicas, make_model())
        assert all(torch.equal(state[name], before[name]) for name in before)

    on_ranks("dp=1", body)


def test_a_function_of_pytorch_as_a_loss_is_told_how_to_be_wrapped():
    cross_entropy = torch.nn.functional.cross_entropy
    losses: tuple[Any, ...] = (
        cross_entropy,
        torch.nn.CrossEntropyLoss,
        lambda y, t: cross_entropy(y, t),
    )

    def body(mesh):
        model = mm.DataParallel(mt.wrap(torch.nn.Linear(FEATURES, CLASSES)), mesh, broadcast=True)
        x = np.ones((2, FEATURES), np.float32)
        for loss in losses:
            with raises(ModuleError, "loss=", "mpimesh.interop.torch.wrap_loss"):
                mm.DataParallel(mt.wrap(torch.nn.Linear(2, 2)), mesh, loss=loss)
            with raises(mm.MpimeshError, "loss=", "mpimesh.interop.torch.wrap_loss"):
                model.train_step(x, np.zeros(2, int), loss=loss)

    on_ranks("dp=2", body)
