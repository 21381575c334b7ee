"""What is wrong on some ranks only is raised on all of them, and nobody waits for ever."""

from __future__ import annotations

import re

import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError
from tests.pure import tensor_models
from tests.pure.parallel_models import assert_equal, batch, make_pipeline, on_ranks
from tests.pure.parallel_traps import assert_nothing_left


def make(mesh, *, zero=None):
    """A small GPT, split where the mesh has a dim for it, and what trains it."""
    tp = mesh.group("tp") if "tp" in mesh.dim_names else None
    stages = [mm.PipelineStage(0)]
    for layer in tensor_models.layers("plain", tp=tp):
        stages[0].add_layer(layer)
    model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=3, dtype="float64")
    inner = optim.SGD(model.parameters(), lr=0.1)
    optimizer = None if zero is None else mm.ParallelOptimizer(inner, model, zero=zero)
    loss: nn.Loss = nn.cross_entropy
    if tp is not None:
        loss = mm.VocabParallelCrossEntropy(tensor_models.VOCAB, group=tp)
    return model, optimizer, lambda: model.train_step(*tensor_models.batch(0), loss=loss)


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_values_of_one_rank_that_differ_are_told_to_all(odd):
    """Only the replicas of the rank raised, and the others went on to their split group."""

    def body(mesh):
        model, _, train = make(mesh)
        name, one = next(found for found in model.named_parameters() if "mlp" in found[0])
        if mesh.rank == odd:
            one.value()[...] += 1
        with pytest.raises(MismatchError, match=re.escape(name)) as caught:
            model.check_replicas()
        assert caught.value.agreed
        if mesh.rank == odd:
            one.value()[...] -= 1
        model.load_state_dict(model.full_state_dict())
        model.check_replicas()
        assert_nothing_left(mesh)
        return str(caught.value), train()

    assert len(set(on_ranks("dp=2,tp=2", body))) == 1


BAD_NORMS = [-1.0, "1", None, float("nan")]


@pytest.mark.parametrize("zero", [None, 0, 1])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,tp=2"])
def test_a_norm_that_one_rank_got_wrong_is_refused_by_all(dims, zero):
    """That rank raised before it had met the others, and they waited for it."""

    def body(mesh):
        model, optimizer, train = make(mesh, zero=zero)
        train()
        for bad in BAD_NORMS:
            with pytest.raises(ModuleError, match=f"^rank 1: max_norm must be .*{bad}") as caught:
                model.clip_grad_norm(bad if mesh.rank == 1 else 1.0)
            assert caught.value.agreed
        norm = model.clip_grad_norm(1.0)
        if optimizer is not None:
            optimizer.step()
        model.check_replicas()
        return norm

    assert len(set(on_ranks(dims, body))) == 1


@pytest.mark.parametrize("zero", [None, 0, 1])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,tp=2"])
def test_gradients_that_one_rank_has_forgotten(dims, zero):
    """Without `zero` the other replicas stepped, and were others from then on."""

    def body(mesh):
        model, optimizer, train = make(mesh, zero=zero)
        train()
        before = model.full_state_dict()
        if mesh.rank == 1:
            model.zero_grad()
        with pytest.raises(ModuleStateError, match=r"^rank 1: there are no sums of gradients"):
            model.clip_grad_norm(1.0)
        if optimizer is not None:
            with pytest.raises(ModuleStateError, match=r"^rank 1: there are no sums of gradients"):
                optimizer.step()
        assert_equal(model.full_state_dict(), before)
        train()
        model.clip_grad_norm(1.0)
        if optimizer is not None:
            optimizer.step()
        model.check_replicas()

    on_ranks(dims, body)


def test_a_refusal_of_all_ranks_is_told_once():
    def body(mesh):
        _, optimizer, _ = make(mesh, zero=0)
        with pytest.raises(ModuleStateError, match=r"^ranks 0, 1: there are no") as caught:
            optimizer.step()
        assert str(caught.value).count("there are no") == 1

    on_ranks("dp=2", body)


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,tp=2"])
def test_a_mode_of_one_rank_is_refused(dims):
    """Its dropout was the identity, and the loss one of two models."""

    def body(mesh):
        model, _, train = make(mesh)
        loss = train()
        model.step = 0
        model.set_training(mesh.rank != 1)
        with pytest.raises(MismatchError, match=r"ranks \[1\]: .* in evaluation mode"):
            train()
        model.train()
        assert train() == loss
        model.eval()
        model.step = 0
        assert train() != loss

    on_ranks(dims, body)


def test_gradients_that_one_rank_has_forgotten_between_steps():
    """What came of it was the gradient of no batch."""

    def body(mesh):
        model, _, train = make(mesh)
        with model.no_sync():
            train()
        if mesh.rank == 1:
            model.zero_grad()
        with pytest.raises(MismatchError, match=r"ranks \[0\]: .*gradients of 1 before"):
            train()
        norms = []
        for _ in range(2):
            model.step = 0
            with model.no_sync():
                train()
                train()
            train()
            norms.append(model.clip_grad_norm(1e9))
        return norms

    for norms in on_ranks("dp=2", body):
        assert norms[0] == norms[1]


@pytest.mark.parametrize("call", ["rebuild_buckets", "tune_buckets"])
def test_new_buckets_do_not_drop_gradients_that_are_kept(call):
    """The step after them reduced its own gradients only."""

    def body(mesh):
        model, _, train = make(mesh)
        norms = []
        for refused in (False, True):
            model.step = 0
            with model.no_sync():
                train()
                if refused:
                    with pytest.raises(ModuleStateError, match=r"^ranks 0, 1: gradients of steps"):
                        getattr(model, call)()
            train()
            norms.append(model.clip_grad_norm(1e9))
        if mesh.rank == 1:
            with model.no_sync():
                model.buckets.begin()
        with pytest.raises(ModuleStateError, match=r"^rank 1: gradients of steps"):
            getattr(model, call)()
        model.zero_grad()
        getattr(model, call)()
        train()
        model.check_replicas()
        return norms

    for norms in on_ranks("dp=2", body):
        assert norms[0] == norms[1]


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,tp=2"])
def test_sequences_of_no_tokens(dims):
    """The backward of learned positions asked NumPy to divide 0 elements by 0."""

    def body(mesh):
        model, _, _ = make(mesh)
        loss: nn.Loss = nn.cross_entropy
        if "tp" in mesh.dim_names:
            loss = mm.VocabParallelCrossEntropy(tensor_models.VOCAB, group=mesh.group("tp"))
        nothing = tensor_models.batch(0, 0)
        assert model.train_step(*nothing, loss=loss) == 0
        assert model.clip_grad_norm(1.0) == 0
        return model.evaluate(*nothing, loss=loss)

    assert set(on_ranks(dims, body)) == {0.0}


@pytest.mark.parametrize("dims", ["dp=2", "dp=1,pp=2"])
def test_a_loss_that_no_rank_was_given(dims):
    """It was a TypeError of the method, where DataParallel has a sentence."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        for call in (pipe.evaluate, pipe.train_step):
            with pytest.raises(ModuleError, match=r"rank \d holds the last stage and needs loss="):
                call(*batch(0, 8))
        return pipe.evaluate(*batch(0, 8), loss=nn.cross_entropy if mesh.rank or not pp else None)

    pp = "pp" in dims
    assert len(set(on_ranks(dims, body))) == 1
