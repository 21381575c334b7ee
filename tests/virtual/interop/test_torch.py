"""Modules of PyTorch trained over virtual ranks, against plain PyTorch in one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import optim
from mpimesh.errors import ModuleError, ModuleStateError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises
from tests.helpers.torch_models import (
    CLASSES,
    FEATURES,
    adamw,
    assert_state,
    batch,
    deal,
    make_model,
    mt,
    torch,
    train_alone,
)

LOSS = mt.wrap_loss(torch.nn.functional.cross_entropy)


def own_adamw(parameters):
    return optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        ("dp=1,pp=1", "1f1b"),
        ("dp=3", "1f1b"),
        ("pp=2", "gpipe"),
        ("pp=3", "zb1p"),
        ("pp=2", "zbv"),
        ("dp=2,pp=2", "1f1b"),
        ("dp=2,pp=2", "interleaved"),
    ],
)
@pytest.mark.parametrize("by", ["torch", "mpimesh"])
def test_it_trains_like_plain_pytorch(dims, schedule, by):
    template = make_model()
    batches = [batch(step, 13) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        per_rank = 2 if schedule in ("zbv", "interleaved") else 1
        num_stages = per_rank * (mesh.dim_size("pp") if mesh.contains_dim("pp") else 1)
        stages = deal(mt.wrap_each(model), num_stages)
        pipe = mm.PipelineParallel(stages, 4, mesh=mesh, schedule=schedule, bucket_bytes=300)
        optimizer = adamw(mt.tensors(pipe)) if by == "torch" else own_adamw(pipe.parameters())
        losses = [pipe.train_step(*one, loss=LOSS, optimizer=optimizer) for one in batches]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        pipe.check_replicas()
        assert_state(mt.full_state_dict(pipe, model), expected.state)
        # In one pipeline the names are those of the torch Sequential.
        state = {name: torch.from_numpy(one) for name, one in pipe.full_state_dict().items()}
        assert_state(state, expected.state)

    on_ranks(dims, body, rendezvous=True)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("by", ["torch", "mpimesh"])
def test_replicas_train_like_one_also_without_rows_of_their_own(rows, by):
    """With one row one replica has nothing to do, and PyTorch's zero_grad takes its gradients."""
    template = make_model()
    batches = [batch(step, rows) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS, bucket_bytes=300)
        optimizer = adamw(model.parameters()) if by == "torch" else own_adamw(replicas.parameters())
        losses = []
        for one in batches:
            optimizer.zero_grad()
            losses.append(replicas.train_step(*one))
            optimizer.step()
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        replicas.check_replicas()
        assert_state(model.state_dict(), expected.state)
        y = replicas.forward(batch(9, 7)[0])
        with torch.no_grad():
            np.testing.assert_allclose(y, model(torch.from_numpy(batch(9, 7)[0])).numpy())

    on_ranks("dp=2", body)


@pytest.mark.parametrize("size", [1, 2])
def test_values_and_gradients_are_one_memory(size):
    template = make_model()

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        replicas.train_step(*batch(0, 6))
        flats = [bucket.flat for bucket in replicas.buckets.buckets]
        assert len(flats) == (size > 1)
        for parameter, tensor in zip(replicas.parameters(), model.parameters(), strict=True):
            assert tensor.data_ptr() == parameter.data.ctypes.data
            assert tensor.grad.data_ptr() == parameter.grad.ctypes.data
            assert size == 1 or np.shares_memory(flats[0], tensor.grad.numpy())

    on_ranks(f"dp={size}", body)


def test_gradients_of_several_steps_add_up():
    template = make_model()
    x, target = batch(0, 8)
    expected = copy.deepcopy(template)
    for part in (slice(0, 4), slice(4, 8)):
        y = expected(torch.from_numpy(x[part]))
        loss = torch.nn.functional.cross_entropy(y, torch.from_numpy(target[part]), reduction="sum")
        (loss / 8).backward()

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        with replicas.no_sync():
            replicas.train_step(x[:4], target[:4], denominator=8)
        replicas.train_step(x[4:], target[4:], denominator=8)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    on_ranks("dp=2", body)


def train_layers(template, layers_of, dims, *, steps=2, rows=8, by=adamw):
    """Train copies of `template` over ranks; they come to what plain PyTorch comes to."""
    batches = [batch(step, rows) for step in range(steps)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        stages = deal(layers_of(model), mesh.dim_size("pp"))
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh, bucket_bytes=300)
        optimizer = by(mt.tensors(pipe))
        losses = [pipe.train_step(*one, loss=LOSS, optimizer=optimizer) for one in batches]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        state = mt.full_state_dict(pipe, model)
        assert_state(state, expected.state)
        return model, pipe, state

    return on_ranks(dims, body)


@pytest.mark.parametrize("dims", ["dp=2,pp=1", "dp=2,pp=2"])
def test_replicas_divide_the_state_of_the_optimizer(dims):
    """The values move into flat memory; it was taken for that of somebody else."""
    template = make_model()
    batches = [batch(step, 12) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches)

    def body(mesh):
        model = copy.deepcopy(template)
        pipe = mm.PipelineParallel(
            deal(mt.wrap_each(model), mesh.dim_size("pp")), 2, mesh=mesh, bucket_bytes=300
        )
        adam = optim.AdamW(pipe.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = mm.ParallelOptimizer(adam, pipe, zero=1)
        losses = [pipe.train_step(*one, loss=LOSS, optimizer=optimizer) for one in batches]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        state = mt.full_state_dict(pipe, model)
        assert_state(state, expected.state)
        model.load_state_dict(state)  # into that memory
        pipe.train_step(*batch(3, 12), loss=LOSS)
        if mesh.rank == 0:
            next(iter(mt.tensors(pipe))).data = torch.zeros(8, FEATURES, dtype=torch.float64)
        with raises(ModuleStateError, "rank 0", "parameter.data[...]"):
            optimizer.step()

    on_ranks(dims, body)


class Twice(torch.nn.Module):
    """One module under two names, and its weight under a third."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, FEATURES)
        self.mid = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, FEATURES), torch.nn.BatchNorm1d(FEATURES)
        )
        self.act = torch.nn.Tanh()
        self.again = self.mid
        self.last = torch.nn.Linear(FEATURES, CLASSES)
        self.weight = self.mid[0].weight

    def forward(self, x):
        return self.last(self.again(self.act(self.mid(self.first(x)))))

    def layers(self):
        return [mt.wrap(one) for one in (self.first, self.mid, self.act, self.again, self.last)]


@pytest.mark.parametrize("dims", ["dp=1,pp=1", "dp=1,pp=3"])
def test_a_module_with_two_names_has_one_state(dims):
    torch.manual_seed(0)
    template = Twice().double()

    def body(mesh):
        model = copy.deepcopy(template)
        pipe = mm.PipelineParallel(deal(model.layers(), mesh.dim_size("pp")), 2, mesh=mesh)
        optimizer = adamw(mt.tensors(pipe))
        for step in range(2):
            pipe.train_step(*batch(step, 8), loss=LOSS, optimizer=optimizer)
        state = mt.full_state_dict(pipe, model)
        assert state.keys() == template.state_dict().keys()
        for name, values in state.items():
            trained = values.is_floating_point() and not name.endswith("running_var")
            assert not trained or not torch.equal(values, template.state_dict()[name]), name
            if name.startswith("mid."):
                assert torch.equal(values, state[name.replace("mid", "again")])
        assert torch.equal(state["weight"], state["mid.0.weight"])
        plain = copy.deepcopy(template)
        plain.load_state_dict(state)
        y = pipe.forward(batch(5, 4)[0], everywhere=True)
        if mesh.size == 1:  # elsewhere the ranks of the two places have seen other rows
            with torch.no_grad():
                plain.eval()
                np.testing.assert_allclose(y, plain(torch.from_numpy(batch(5, 4)[0])).numpy())
        # And back again, where PyTorch loads the last of several names last.
        other = {name: values + 1 for name, values in state.items()}
        other["mid.0.weight"] = other["mid.0.weight"] * 0
        other["weight"] = other["weight"] * 0
        mt.load_full_state_dict(pipe, model, other)
        plain.load_state_dict(other)
        assert_state(mt.full_state_dict(pipe, model), plain.state_dict())

    on_ranks(dims, body)


def test_a_compiled_module_is_part_of_the_root():
    """The module of torch.compile stands nowhere in the model; its tensors do."""
    template = make_model()

    def layers(model):
        return [
            mt.wrap(torch.compile(model[:3], backend="eager")),
            *map(mt.wrap, model[3:]),
        ]

    train_layers(template, layers, "dp=1,pp=2")


def test_what_does_not_travel_is_refused_in_a_state():
    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    def body(mesh):
        model = Extra(FEATURES, CLASSES)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        with pytest.raises(ModuleError, match="'_extra_state' is a dict"):
            mt.full_state_dict(replicas, model)
        with pytest.raises(ModuleError, match="'_extra_state' is a dict"):
            mt.load_full_state_dict(replicas, model, model.state_dict())

    on_ranks("dp=1", body)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(torch.nn.Linear(5, 5)),
        lambda model: model.__setitem__(5, torch.nn.Linear(8, 5).double()),
        lambda model: model.__delitem__(5),
        lambda model: model[5].register_parameter("bias", None),
        lambda model: model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True),
    ],
)
def test_parameters_that_come_go_or_are_swapped_after_wrapping_are_noticed(change):
    model = make_model()
    layer = mt.wrap(model)
    layer(batch(0, 4)[0])
    change(model)
    with pytest.raises(ModuleStateError, match=r"'[56]\.(bias|weight)'"):
        layer(batch(0, 4)[0])


def test_another_dtype_is_noticed_where_gradients_have_memory():
    template = make_model()

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        model.float()
        x, target = batch(0, 8)
        with raises(ModuleStateError, "torch.float32", "torch.float64"):
            replicas.train_step(x.astype(np.float32), target)

    on_ranks("dp=2", body)


def test_activations_in_place_get_a_copy():
    """Alone in a stage one would write into what the stage before has kept for its backward."""
    torch.manual_seed(4)
    template = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 7),
        torch.nn.Tanh(),
        torch.nn.ELU(inplace=True),
        torch.nn.Sequential(torch.nn.LeakyReLU(inplace=True), torch.nn.Linear(7, CLASSES)),
    ).double()
    # Tanh keeps its output, and plain PyTorch refuses to have that overwritten.
    plain = copy.deepcopy(template)
    plain[2].inplace = False
    expected = train_alone(plain, [batch(0, 8)])

    for dims in ("pp=1", "pp=2"):

        def body(mesh):
            model = copy.deepcopy(template)
            pipe = mm.PipelineParallel(deal(mt.wrap_each(model), mesh.size), 2, mesh=mesh)
            loss = pipe.train_step(*batch(0, 8), loss=LOSS, optimizer=adamw(mt.tensors(pipe)))
            assert loss == pytest.approx(expected.losses[0], rel=1e-12)
            assert_state(mt.full_state_dict(pipe, model), expected.state)
            x = batch(1, 4)[0]
            before = x.copy()
            mt.wrap(torch.nn.ReLU(inplace=True))(x)
            np.testing.assert_array_equal(x, before)

        on_ranks(dims, body)


class Both(torch.nn.Module):
    """Gives one tensor twice, and its input."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        h = self.inner(x)
        return h, h, x


class Three(torch.nn.Module):
    """Its weight lies in memory by columns."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(FEATURES, CLASSES).t())

    def forward(self, a, b, x):
        return (a * b + x) @ self.weight.t()


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.both = Both()
        self.three = Three()

    def forward(self, x):
        return self.three(*self.both(x))


@pytest.mark.parametrize("dims", ["dp=1,pp=1", "dp=2,pp=2"])
def test_one_tensor_twice_the_input_itself_and_memory_by_columns(dims):
    torch.manual_seed(1)
    template = Joined().double()
    train_layers(template, lambda model: [mt.wrap(model.both), mt.wrap(model.three)], dims)


def test_batches_may_be_tensors():
    template = make_model()
    x, target = batch(0, 8)
    (expected,) = train_alone(copy.deepcopy(template), [(x, target)]).losses

    def body(mesh):
        model = copy.deepcopy(template)
        pipe = mm.PipelineParallel(deal(mt.wrap_each(model), 2), 2, mesh=mesh)
        given = torch.from_numpy(x), torch.from_numpy(target)
        assert pipe.train_step(*given, loss=LOSS) == pytest.approx(expected, rel=1e-12)
        y = pipe.forward(given[0], everywhere=True)
        np.testing.assert_array_equal(y, pipe.forward(x, everywhere=True))

    on_ranks("dp=2,pp=2", body)


class Cast(torch.nn.Module):
    """Computes in bfloat16, with parameters of float32."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize(
    ("dtype", "wrapped"),
    [(torch.float16, mt.wrap), (torch.float32, lambda one: mt.wrap(Cast(one)))],
)
def test_float16_and_autocast(dtype, wrapped):
    """Outputs of float32 in bfloat16 travel so, and gradients come back in it."""
    pytest.importorskip("ml_dtypes")
    template = make_model(dtype)
    x, target = batch(0, 8)
    exact = make_model()(torch.from_numpy(x))
    loss = torch.nn.functional.cross_entropy(exact, torch.from_numpy(target)).item()

    def body(mesh):
        layers = [wrapped(one) for one in copy.deepcopy(template)]
        pipe = mm.PipelineParallel(deal(layers, 2), 2, mesh=mesh)
        optimizer = torch.optim.SGD(mt.tensors(pipe), lr=0.1)
        given = torch.from_numpy(x).to(dtype)
        losses = [pipe.train_step(given, target, loss=LOSS, optimizer=optimizer) for _ in range(4)]
        assert {one.dtype for one in mt.tensors(pipe)} == {dtype}
        assert losses[0] == pytest.approx(loss, rel=0.02)
        assert losses[-1] < losses[0]

    on_ranks("dp=2,pp=2", body)


def test_what_is_computed_again_in_backward_draws_the_same():
    """`torch.utils.checkpoint` in a module, with dropout."""
    from torch.utils.checkpoint import checkpoint

    class Again(torch.nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.reentrant = reentrant
            self.inner = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, CLASSES), torch.nn.Dropout(0.5)
            )

        def forward(self, x):
            if self.reentrant is None:
                return self.inner(x)
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def losses(reentrant):
        torch.manual_seed(0)
        template = Again(reentrant).double()

        def body(mesh):
            model = copy.deepcopy(template)
            layers = [mt.wrap(torch.nn.Identity()), mt.wrap(model)]  # a rank has no parameters
            pipe = mm.PipelineParallel(deal(layers, 2), 2, mesh=mesh)
            optimizer = adamw([{"params": mt.tensors(pipe)}])
            return [
                pipe.train_step(*batch(step, 8), loss=LOSS, optimizer=optimizer)
                for step in range(2)
            ]

        return on_ranks("pp=2", body)[1]

    plain = losses(None)
    assert losses(False) == plain == losses(True)
