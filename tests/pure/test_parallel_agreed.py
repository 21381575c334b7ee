"""What is wrong on some ranks only is raised on all of them, and nobody waits for ever."""

from __future__ import annotations

import re

import pytest

import mpimesh as mm
from mpimesh import optim
from mpimesh.errors import MismatchError
from tests.pure import tensor_models
from tests.pure.parallel_models import on_ranks
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
    loss = tensor_models.nn.cross_entropy
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
