"""Modules of PyTorch that are taken, and those that are refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import ModuleStateError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises
from tests.helpers.torch_models import (
    CLASSES,
    FEATURES,
    Two,
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


class Embed(torch.nn.Module):
    """Numbers of words in, and with them on, as what follows needs them, too."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, words):
        return {"h": self.words(words) * self.scale, "words": words}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, h, words):
        return {"h": h + torch.tanh(self.inner(h)) * (words % 2)[..., None], "words": words}


class Head(torch.nn.Module):
    """Its weight is the embedding's."""

    def __init__(self, embed):
        super().__init__()
        self.weight = embed.words.weight

    def forward(self, h, words):
        return h @ self.weight.T


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embed()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = Head(self.embed)

    def forward(self, words):
        tree = self.embed(words)
        for block in self.blocks:
            tree = block(**tree)
        return self.head(**tree)


def language():
    torch.manual_seed(5)
    return Language().double()


def words(step, rows):
    rng = np.random.default_rng([step, 79])
    x = rng.integers(0, 11, (rows, 4))
    return x, np.roll(x, -1, axis=1)


def sequence_loss(y, target):
    return torch.nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("dims", ["pp=2", "dp=2,pp=2"])
def test_integers_dicts_and_weights_tied_over_stages(dims):
    template = language()
    batches = [words(step, 6) for step in range(3)]
    expected = train_alone(copy.deepcopy(template), batches, loss=sequence_loss)

    def body(mesh):
        model = copy.deepcopy(template)
        layers = [mt.wrap(one) for one in (model.embed, *model.blocks, model.head)]
        pipe = mm.PipelineParallel(deal(layers, 2), 3, mesh=mesh)
        optimizer = adamw(mt.tensors(pipe))
        losses = [
            pipe.train_step(*one, loss=mt.wrap_loss(sequence_loss), optimizer=optimizer)
            for one in batches
        ]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        state = mt.full_state_dict(pipe, model)
        assert_state(state, expected.state)
        model.load_state_dict(state)  # into the memory that the pipeline trains
        pipe.check_replicas()

    on_ranks(dims, body)


def test_several_arguments_frozen_and_unused_parameters():
    torch.manual_seed(1)
    template = Two().double()
    x, target = batch(0, 6)
    mask = np.random.default_rng(0).normal(size=(6, 1))
    given = [((x, mask), target)] * 3

    def sgd(parameters):
        return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.5)

    expected = train_alone(copy.deepcopy(template), given, sgd)

    def body(mesh):
        model = copy.deepcopy(template)
        layer = mt.wrap(model)
        replicas = mm.DataParallel(layer, mesh, loss=LOSS, num_microbatches=2)
        optimizer = sgd(model.parameters())
        losses = [replicas.train_step(*one, optimizer=optimizer) for one in given]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
        assert_state(model.state_dict(), expected.state)
        assert [p.name for p in layer.frozen_parameters()] == ["frozen"]
        assert not model.unused.grad.any()
        assert not layer.frozen_parameters()[0].grad
        model.a.requires_grad_(False)
        assert len(layer.frozen_parameters()) == 3
        layer.unfreeze()
        assert model.frozen.requires_grad
        replicas.rebuild_buckets()
        replicas.train_step(*given[0])
        assert model.frozen.grad.any()

    on_ranks("dp=2", body)


def test_on_the_meta_device_a_rank_gives_memory_to_its_own_stages_only():
    def layers():
        with torch.device("meta"):
            model = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Linear(8, 8, bias=False),
                torch.nn.Linear(8, 8),
                torch.nn.Linear(8, CLASSES),
            ).double()
            model[3].weight = model[2].weight
        return model

    def body(mesh):
        model = layers()
        pipe = mm.PipelineParallel(deal(mt.wrap_each(model), mesh.size), 2, mesh=mesh, seed=4)
        memory = [not one.is_meta for one in model.parameters()]
        state = pipe.full_state_dict()
        loss = pipe.train_step(*batch(0, 6), loss=LOSS, optimizer=adamw(mt.tensors(pipe)))
        # A state of PyTorch's is loaded on any mesh, and read again.
        plain = layers().to_empty(device="cpu")
        plain.load_state_dict(
            {name: torch.full_like(v, 0.1) for name, v in plain.state_dict().items()}
        )
        mt.load_full_state_dict(pipe, model, plain.state_dict())
        assert_state(mt.full_state_dict(pipe, model), plain.state_dict())
        return memory, state, loss, pipe.train_step(*batch(0, 6), loss=LOSS)

    before = torch.get_rng_state()
    ((memory, expected, loss, again),) = on_ranks("pp=1", body)
    assert all(memory)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < np.abs(expected["0.weight"]).max() <= FEATURES**-0.5
    trained = {name for name in expected if name.endswith(("weight", "bias"))}
    assert len({expected[name].tobytes() for name in trained}) == len(trained)
    for memory, state, same, same_again in on_ranks("pp=3", body):
        assert again == pytest.approx(same_again, rel=1e-12)
        assert not all(memory)
        assert same == pytest.approx(loss, rel=1e-12)
        assert state.keys() == expected.keys()
        for name, values in state.items():
            np.testing.assert_array_equal(values, expected[name])


def test_what_is_drawn_depends_on_seed_place_step_and_row():
    # The first has values of its own, and draws, too.
    first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    template = torch.nn.Sequential(first, torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)).double()
    with torch.no_grad():
        first[0].weight.copy_(torch.eye(4))
        first[0].bias.zero_()

    def draws(dims, seed=0, steps=2):
        def body(mesh):
            stages = deal(mt.wrap_each(copy.deepcopy(template)), mesh.dim_size("pp"))
            pipe = mm.PipelineParallel(stages, 4 // mesh.dim_size("dp"), mesh=mesh, seed=seed)
            x = np.ones((8, 4))
            losses = [pipe.train_step(x, x, loss=Sum()) for _ in range(steps)]
            assert (pipe.forward(x, everywhere=True) == x).all()  # no dropout
            return losses

        return on_ranks(dims, body)[0]

    class Sum(nn.MeanSquaredError):
        def value_and_grad(self, y, target, *, denominator):
            weights = np.arange(y.size).reshape(y.shape) + 1.0
            return float((y * weights).sum() / denominator), weights / denominator

    before = torch.get_rng_state()
    one = draws("dp=1,pp=1")
    assert torch.equal(torch.get_rng_state(), before)
    assert one[0] != one[1]
    assert draws("dp=1,pp=3") == one
    np.testing.assert_allclose(draws("dp=2,pp=1"), one)
    assert draws("dp=1,pp=1", seed=1) != one


def test_batchnorm_keeps_what_each_rank_saw_and_evaluates_by_it():
    template = torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES), torch.nn.Linear(FEATURES, 5))
    template = template.double()
    x, target = batch(0, 8)

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        replicas.train_step(x, target)
        half = x[mesh.rank * 4 : mesh.rank * 4 + 4]
        np.testing.assert_allclose(model[0].running_mean.numpy(), 0.1 * half.mean(axis=0))
        whole = mt.full_state_dict(replicas, model)
        np.testing.assert_allclose(whole["0.running_mean"].numpy(), 0.1 * x[:4].mean(axis=0))
        assert whole["0.num_batches_tracked"].item() == 1
        model.load_state_dict(whole)
        replicas.forward(x)  # in training, too, a forward alone changes nothing
        assert model.training
        assert model[0].num_batches_tracked.item() == 1
        replicas.eval()
        assert not model.training
        y = replicas.forward(x)
        with torch.no_grad():
            np.testing.assert_allclose(y, model(torch.from_numpy(x)).numpy())

    on_ranks("dp=2", body)


def test_bfloat16_travels_and_is_trained():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    template = make_model(torch.bfloat16)
    x, target = batch(0, 8)
    x = x.astype(ml_dtypes.bfloat16)

    def body(mesh):
        model = copy.deepcopy(template)
        pipe = mm.PipelineParallel(deal(mt.wrap_each(model), 2), 2, mesh=mesh)
        losses: list[float] = []
        for optimizer in (adamw(mt.tensors(pipe)), mm.optim.AdamW(pipe.parameters(), lr=0.01)):
            losses += [pipe.train_step(x, target, loss=LOSS, optimizer=optimizer) for _ in range(4)]
        pipe.check_replicas()
        assert pipe.clip_grad_norm(0.1) > 0
        assert pipe.full_state_dict()["0.weight"].dtype == ml_dtypes.bfloat16
        return losses

    losses = on_ranks("dp=2,pp=2", body)[0]
    plain = template(mt_tensor(x))
    loss = torch.nn.functional.cross_entropy(plain, torch.from_numpy(target))
    assert losses[0] == pytest.approx(loss.item(), rel=0.02)
    assert losses[-1] < 0.9 * losses[0]


def mt_tensor(x):
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def test_a_layer_by_itself_and_its_copy():
    model = make_model()
    layer = mt.wrap(model)
    x, _ = batch(0, 4)
    x.flags.writeable = False
    one, other = nn.Context(), nn.Context()
    y = layer(x, one)
    layer(2 * x, other)
    np.testing.assert_array_equal(layer(x), y)
    twin = copy.deepcopy(layer)
    dx = layer.backward(np.ones_like(y), one)  # in any order
    assert dx.shape == x.shape
    with raises(ModuleStateError, layer, one, "already"):
        layer.backward(np.ones_like(y), one)
    with raises(ModuleStateError, layer, nn.Context(), "not"):
        layer.backward(np.ones_like(y), nn.Context())
    assert model[0].weight.grad is not None
    assert twin.module[0].weight.grad is None
    assert twin.state_dict().keys() == layer.state_dict().keys() == model.state_dict().keys()
    assert not np.shares_memory(twin.parameters()[0].data, layer.parameters()[0].data)
    layer.backward(np.zeros_like(y), other)


@pytest.mark.parametrize("halves", [True, None, False])
def test_the_halves_of_a_backward(halves):
    """A module of several layers goes apart only if it is told to; a single one by itself."""
    for module, apart in ((make_model(), halves is True), (Two().double().a, halves is not False)):
        layer, whole = mt.wrap(copy.deepcopy(module), halves=halves), mt.wrap(module)
        x, _ = batch(0, 4)
        one, two, all_at_once = nn.Context(), nn.Context(), nn.Context()
        y = whole(x, all_at_once)
        dx = whole.backward(y, all_at_once)
        for context in (one, two):
            layer(x, context)
        for context in (one, two):
            np.testing.assert_array_equal(layer.backward_input(y, context), dx)
        parameters = [(p, q) for p, q in zip(layer.parameters(), whole.parameters(), strict=True)]
        assert all((p.grad is None) == apart for p, _ in parameters)
        ready: list[nn.Parameter] = []
        for parameter, _ in parameters:
            parameter.on_ready = ready.append
        for context in (two, one):
            layer.backward_weight(context)
            assert context.is_empty
        assert len(ready) == (2 * len(parameters) if apart else 0)
        for parameter, other in parameters:
            np.testing.assert_allclose(parameter.grad, 2 * other.grad)


def test_layers_are_measured_and_cut():
    template = make_model()

    def body(mesh):
        model = copy.deepcopy(template)
        stages = mm.PipelineParallel.partition(
            mt.wrap_each(model), 2, mesh=mesh, x=batch(0, 4)[0], repeats=1
        )
        pipe = mm.PipelineParallel(stages, 2, mesh=mesh)
        return pipe.train_step(*batch(0, 4), loss=LOSS)

    losses = on_ranks("pp=2", body)
    assert losses[0] == losses[1] > 0


def test_gradients_are_reduced_while_backward_still_runs():
    template = make_model()
    seen = []

    def body(mesh):
        model = copy.deepcopy(template)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS, bucket_bytes=200)
        replicas.train_step(*batch(0, 4))  # counts how often each is added to
        if mesh.rank == 0:
            first = model[0].weight
            first.register_hook(lambda _: seen.append(replicas.buckets.started))
        replicas.train_step(*batch(1, 4))

    on_ranks("dp=2", body)
    assert seen == [True]


def test_gradients_that_pytorch_drops_are_dropped():
    """The next backward added to the old ones: `zero_grad` sets them to None."""
    torch.manual_seed(3)
    module = torch.nn.Linear(3, 2).double()
    plain = copy.deepcopy(module)
    layer = mt.wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    draw = np.random.default_rng(0)
    for _ in range(3):
        x, dy = draw.normal(size=(4, 3)), draw.normal(size=(4, 2))
        for part in (slice(0, 1), slice(1, 4)):  # two backwards add up
            ctx = nn.Context()
            layer.forward(x[part], ctx)
            layer.backward(dy[part], ctx)
            plain(torch.from_numpy(x[part])).backward(torch.from_numpy(dy[part]))
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
        np.testing.assert_allclose(module.weight.detach(), plain.weight.detach(), rtol=1e-12)
