"""Data parallelism on virtual ranks, against the model in one process."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    DTypeError,
    MismatchError,
    ModuleError,
    ModuleStateError,
    ScheduleError,
    StageError,
    UnknownNameError,
)
from mpimesh.parallel import DataParallel
from tests.helpers import tensor_models
from tests.helpers.parallel_models import (
    CLASSES,
    FEATURES,
    SEED,
    assert_equal,
    batch,
    check_replicas_train_like_one,
    cut,
    layers,
    make_pipeline,
    make_replicas,
    on_ranks,
    train_alone,
)
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.raises import names, raises


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [13, 2])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_it_trains_like_one(size, rows, num_microbatches):
    def body(mesh):
        model = make_replicas(mesh, num_microbatches=num_microbatches, bucket_bytes=300)
        check_replicas_train_like_one(model, rows)

    on_ranks(f"dp={size}", body, rendezvous=True)


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 7])
def test_rows_come_back_in_order(rows):
    """shrew's own example is 6 rows of 2; here also uneven ones, and fewer than ranks."""
    x = np.arange(rows * 2.0).reshape(rows, 2)

    def body(mesh):
        model = DataParallel(nn.Sequential(nn.ReLU()), mesh)
        assert np.array_equal(model.forward(x), x)
        return model.num_replicas

    assert on_ranks("dp=3", body) == [3, 3, 3]


def test_models_along_other_dims_are_others():
    """Two models side by side, each over its own ranks and with batches of its own."""

    def body(mesh):
        which = mesh.coord("model")
        model = DataParallel(nn.Sequential(layers()), mesh, seed=which, dtype="float64")
        losses = [
            model.train_step(*batch(step, 8 + which), loss=nn.cross_entropy)
            for step in range(1 + which)
        ]
        return which, losses

    expected = {}
    for which in (0, 1):
        alone = nn.Sequential(layers())
        alone.materialize(seed=which, dtype=np.float64)
        expected[which] = [
            nn.cross_entropy(alone.forward(x, nn.Context(step=step)), target)
            for step in range(1 + which)
            for x, target in [batch(step, 8 + which)]
        ]
    for which, losses in on_ranks("model=2,dp=2", body):
        np.testing.assert_allclose(losses, expected[which], rtol=1e-12)


def test_any_layer_can_be_the_model():
    def body(mesh):
        layer = nn.Linear(FEATURES, CLASSES)
        model = DataParallel(layer, mesh, seed=SEED, dtype="float64")
        x, target = batch(0, 8)
        loss = model.train_step(x, target, loss=nn.cross_entropy)
        assert model.inner is layer
        assert layer.weight.grad is not None
        return loss

    alone = nn.Linear(FEATURES, CLASSES)
    alone.materialize(seed=SEED, dtype=np.float64)
    x, target = batch(0, 8)
    expected = nn.cross_entropy(alone.forward(x), target)
    np.testing.assert_allclose(on_ranks("dp=2", body), [expected] * 2, rtol=1e-12)


def test_it_is_a_module_and_gives_its_module_back():
    def body(mesh):
        inner = nn.Sequential(layers())
        model = DataParallel(inner, mesh, loss=nn.cross_entropy, seed=SEED, dtype="float64")
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in inner.named_parameters()
        ]
        assert model.parameters() == inner.parameters()
        assert model.eval() is model
        assert not model.is_training()
        assert not inner.is_training()
        assert not inner[2].is_training()
        without_dropout = model.train_step(*batch(0, 8))
        assert model.train().is_training()
        assert model.train_step(*batch(0, 8)) != without_dropout
        assert model.into_inner() is inner
        assert inner.input_grad
        assert all(parameter.on_ready is None for parameter in inner.parameters())
        assert all(parameter.grad is None or mesh.size == 1 for parameter in inner.parameters())
        again = DataParallel(inner, mesh, loss=nn.cross_entropy, seed=SEED)
        assert again.train_step(*batch(0, 8)) == pytest.approx(train_alone(1, 8).losses[0])

    on_ranks("dp=1", body)
    on_ranks("dp=2", body)


def test_what_was_given_back_is_trained_no_more():
    """It trained on, each rank its own copy, without a reduction."""

    def body(mesh):
        model = make_replicas(mesh)
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        x, target = batch(0, 8)
        model.train_step(x, target, optimizer=optimizer)
        state = model.full_state_dict()
        inner = model.into_inner()
        assert model.into_inner() is inner
        before = [one.data.copy() for one in inner.parameters()]
        for call in (
            lambda: model.train_step(x, target),
            lambda: model.evaluate(x, target),
            lambda: model(x),
            lambda: model.clip_grad_norm(1.0),
            lambda: model.load_state_dict(state),
            model.check_replicas,
            model.full_state_dict,
            model.no_sync,
            model.rebuild_buckets,
            model.tune_buckets,
            model.zero_grad,
            optimizer.step,
            optimizer.zero_grad,
            optimizer.full_state_dict,
        ):
            with raises(ModuleStateError, "into_inner()", f"rank {mesh.rank}"):
                call()
        for one, values in zip(inner.parameters(), before, strict=True):
            assert np.array_equal(one.data, values)
        assert make_replicas(mesh).train_step(x, target) > 0

    on_ranks("dp=2", body)


def test_a_mesh_without_the_dim_is_told_what_to_do():
    def body(mesh):
        for dim in ("dp", "data"):
            with raises(UnknownNameError, repr(dim), "x=2", "dim="):
                make_replicas(mesh, dim=dim)
        assert make_replicas(mesh, dim="x").num_replicas == 2
        with raises(ScheduleError, "'pp'", "x=2", "dim="):
            make_pipeline(mesh, stages=cut(2))
        with raises(UnknownNameError, "'stages'", "x=2", "dim="):
            make_pipeline(mesh, stages=cut(2), dim="stages")
        with raises(UnknownNameError, "'rows'", "x=2", "data_dim="):
            make_pipeline(mesh, stages=cut(2), dim="x", data_dim="rows")
        assert make_pipeline(mesh, stages=cut(2), dim="x").num_stages == 2

    on_ranks("x=2", body)


def test_a_model_that_is_split_over_the_whole_mesh_has_one_replica():
    def body(mesh):
        tp = mesh.group("tp") if mesh.contains_dim("tp") else None
        model = DataParallel(
            nn.Sequential(tensor_models.layers("plain", tp=tp)),
            mesh,
            seed=tensor_models.SEED,
            dtype=np.float64,
        )
        vocabulary = tensor_models.VOCAB
        loss = (
            nn.cross_entropy
            if tp is None
            else mm.parallel.VocabParallelCrossEntropy(vocabulary, group=tp)
        )
        assert model.num_replicas == 1
        return model.train_step(*tensor_models.batch(0), loss=loss)

    expected = on_ranks("dp=1", body)[0]
    assert on_ranks("tp=2", body) == [pytest.approx(expected, rel=1e-12)] * 2


@pytest.mark.parametrize("wrong", [1j, "x", None])
def test_a_state_that_is_no_real_numbers_changes_nothing(wrong):
    """The imaginary parts were dropped."""

    def body(mesh):
        model = make_replicas(mesh)
        state = model.full_state_dict()
        name = next(iter(state))
        odd = np.full(state[name].shape, wrong)
        with raises(DTypeError, name, odd.dtype):
            model.load_state_dict({**state, name: odd})
        assert_equal(model.full_state_dict(), state)

    on_ranks("dp=1", body)


def test_a_wrong_option_on_one_rank_is_raised_on_all():
    def body(mesh):
        with raises(MismatchError, "rank 1", "ModuleError"):
            make_replicas(mesh, bucket_bytes=float("nan") if mesh.rank else 1000)
        assert make_replicas(mesh).train_step(*batch(0, 8)) > 0

    on_ranks("dp=2", body)


def test_replicas_must_start_alike_or_be_made_so():
    def odd_model(mesh):
        model = nn.Sequential(layers())
        model.materialize(seed=SEED + (mesh.rank == 1), dtype=np.float64)
        return model

    def body(mesh):
        with raises(MismatchError, "0.weight", "rank 0", "rank 1", "broadcast=True", "seed"):
            DataParallel(odd_model(mesh), mesh)
        model = DataParallel(odd_model(mesh), mesh, broadcast=True)
        assert model.train_step(*batch(0, 8), loss=nn.cross_entropy) > 0
        model.parameters()[2].data[0] += mesh.rank
        with raises(MismatchError, "parameter 2", "3.weight", "rank 0", "rank 1", "rank 2"):
            model.check_replicas()
        return model.parameters()[0].data

    first, *others = on_ranks("dp=3", body)
    expected = nn.Sequential(layers())
    expected.materialize(seed=SEED, dtype=np.float64)
    assert np.array_equal(first, expected[0].weight.data)
    assert all(np.array_equal(first, other) for other in others)


def test_a_replica_that_fails_ends_the_step_on_all():
    def body(mesh):
        trap = Trap()
        model = DataParallel(
            nn.Sequential([*layers(), trap]), mesh, loss=nn.cross_entropy, dtype="float64"
        )
        losses = []
        for step in range(4):
            if step in (1, 3):
                if mesh.rank == 1:
                    trap.arm("FB"[step // 2], 0)
                error = error_of(lambda: model.train_step(*batch(0, 9)))
                assert type(error) is StageError
                assert "failed on rank 1" in str(error)
                trap.disarm()
            model.step = 0
            losses.append(model.train_step(*batch(0, 9)))
        assert losses == losses[:1] * 4

    on_ranks("dp=3", body)


def test_replicas_that_are_given_their_own_shares_only(monkeypatch):
    """Of equal sizes, so that nothing but the values tells."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def body(mesh):
        x, target = batch(0, 12)
        mine = slice(4 * mesh.rank, 4 * mesh.rank + 4)
        model = make_replicas(mesh)
        error = error_of(lambda: model.train_step(x[mine], target[mine]))
        assert type(error) is MismatchError
        assert error.agreed
        names(str(error), "batch", "x", "None", "CRC-32")
        assert str(error).count("\n  ranks [") == mesh.size
        assert model.train_step(x, target) == pytest.approx(train_alone(1, 12).losses[0])
        return str(error)

    assert len(set(on_ranks("dp=3", body))) == 1


def test_wrong_use():
    def body(mesh):
        with pytest.raises(UnknownNameError):
            DataParallel(nn.Linear(2, 2), mesh, "qq")
        model = DataParallel(nn.Linear(FEATURES, CLASSES), mesh, dtype="float64")
        error = error_of(lambda: model.train_step(*batch(0, 4)))
        assert isinstance(error, ModuleError)
        assert "needs loss=" in str(error)

    on_ranks("dp=2", body)


# -- the state of a whole model ------------------------------------------------------------


def test_a_state_fits_any_mesh():
    """One mesh trains, another goes on with it, as the unsplit model does."""

    def save(mesh):
        pipe = make_pipeline(mesh)
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        for parameter in pipe.parameters():
            parameter.data -= 0.1 * parameter.grad
        return pipe.full_state_dict()

    states = on_ranks("dp=2,pp=2", save)
    alone = nn.Sequential(layers())
    alone.materialize(seed=SEED, dtype=np.float64)
    alone.load_state_dict(states[0])
    expected = nn.cross_entropy(alone.forward(batch(1, 8)[0], nn.Context()), batch(1, 8)[1])

    def load(mesh):
        pipe = make_pipeline(mesh, seed=SEED)
        pipe.load_state_dict(states[mesh.rank])
        odd = dict(states[0])
        odd["x"] = odd.pop("7.bias")
        with raises(ModuleError, ["7.bias"], ["x"]):
            pipe.load_state_dict(odd)
        return pipe.train_step(*batch(1, 8), loss=nn.cross_entropy)

    def load_data_parallel(mesh):
        model = make_replicas(mesh)
        model.load_state_dict(states[0])
        return model.train_step(*batch(1, 8))

    np.testing.assert_allclose(on_ranks("pp=4", load), [expected] * 4, rtol=1e-12)
    np.testing.assert_allclose(on_ranks("dp=3", load_data_parallel), [expected] * 3, rtol=1e-12)


def test_the_trace_shows_forward_backward_and_reduction():
    def body(mesh):
        tracer = mm.Tracer(mesh.rank)
        model = make_replicas(mesh, tracer=tracer)
        model.train_step(*batch(0, 8))
        return {event.category for event in tracer.events()}

    assert on_ranks("dp=2", body) == [{"forward", "backward", "collective", "wait"}] * 2
