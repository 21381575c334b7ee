"""Pipelines and split layers that compute activations again: bits of those that keep them."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.schedule import schedule_names
from tests.helpers.depth import deep
from tests.helpers.parallel_models import batch, layers, make_pipeline, on_ranks
from tests.helpers.tensor_models import trained

VEES = ("zbv", "vhalf", "vmin", "dualpipev")
SEVERAL = ("interleaved", "looped_bfs", "auto")


def stages_of(count, wrap):
    stages = [mm.PipelineStage(number) for number in range(count)]
    made = layers()
    for place, layer in enumerate(made):
        stages[place * count // len(made)].add_layer(wrap(layer))
    return stages


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
def test_every_schedule_gives_the_bits_of_activations_that_are_kept(name):
    count = 4 if name in (*VEES, *SEVERAL) else 2

    def body(mesh):
        found = []
        for wrap in (lambda layer: layer, nn.Checkpoint):
            pipe = make_pipeline(mesh, 5, schedule=name, stages=stages_of(count, wrap))
            losses = [pipe.train_step(*batch(step, 13), loss=nn.cross_entropy) for step in (0, 1)]
            found.append((losses, {n: p.grad.copy() for n, p in pipe.named_parameters()}))
        np.testing.assert_equal(found[1], found[0])
        return len(found[0][1])

    assert sum(on_ranks("pp=2", body, rendezvous=True))


@pytest.mark.parametrize(
    ("dims", "kind", "sequence_parallel", "schedule"),
    [
        *deep(("tp=2", "plain", True, "1f1b")),
        ("tp=3", "llama", False, "gpipe"),
        *deep(("dp=2,tp=2", "plain", False, "1f1b")),
        ("pp=2,tp=2", "plain", True, "zb1p"),
        *deep(("pp=2,tp=2", "llama", True, "1f1b")),
    ],
)
def test_a_split_gpt_trains_to_the_same_bits(dims, kind, sequence_parallel, schedule):
    """With dropout, tied weights and collectives in the forward that runs again."""

    def wrapped(layer):
        return nn.Checkpoint(layer) if isinstance(layer, nn.GptBlock | nn.Dropout) else layer

    def body(mesh):
        options = {"sequence_parallel": sequence_parallel, "schedule": schedule}
        plain = trained(mesh, kind, **options)
        np.testing.assert_equal(trained(mesh, kind, **options, change=wrapped), plain)

    on_ranks(dims, body, rendezvous=True)


def test_blocks_in_a_checkpoint_are_split_like_others():
    def body(mesh):
        tp = mesh.group("tp")
        sequence = mm.parallel.SequenceSplit(tp)
        whole = nn.Sequential(nn.GptBlock(8, 2, dropout=0.2), nn.GptBlock(8, 2))
        whole.materialize(seed=1, dtype="float64")
        found = []
        for wrap in (lambda layer: layer, nn.Checkpoint):
            for given in (None, sequence):
                blocks = nn.Sequential(
                    wrap(nn.GptBlock(8, 2, dropout=0.2)), wrap(nn.GptBlock(8, 2))
                )
                model = mm.tensor_parallel(blocks, tp, sequence=given)
                model.materialize(seed=1, dtype="float64")
                x = np.random.default_rng(0).normal(size=(3, 4, 8))
                expected = whole(x, nn.Context(step=1))
                places = slice(None) if given is None else slice(2 * tp.rank, 2 * tp.rank + 2)
                ctx = nn.Context(step=1)
                y = model(x[:, places], ctx)
                np.testing.assert_allclose(y, expected[:, places], rtol=1e-12)
                dx = model.backward(np.cos(y), ctx)
                found.append((y, dx, [one.grad for one in model.parameters()]))
        np.testing.assert_equal(found[2:], found[:2])

    on_ranks("tp=2", body, rendezvous=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_divided_among_replicas_train_to_the_same_bits(stage, dtype):
    def body(mesh):
        found = []
        for wrap in (lambda layer: layer, nn.Checkpoint):
            stages = [mm.PipelineStage(0), mm.PipelineStage(1)]
            for place, layer in enumerate(
                mm.parallel.gpt_layers(16, 24, 2, 4, max_tokens=8, dropout=0.1)
            ):
                one = wrap(layer) if isinstance(layer, nn.GptBlock) else layer
                stages[place // 4].add_layer(one)
            pipe = mm.PipelineParallel(stages, 2, mesh=mesh, seed=0, dtype=dtype)
            mm.fully_shard(pipe, mesh, stage=stage)
            optimizer = mm.ParallelOptimizer(optim.AdamW(pipe.parameters(), lr=0.01), pipe)
            rates = optim.LRScheduler(optimizer, optim.WarmupLR(1, optim.LinearLR(3)))
            losses = []
            for step in range(3):
                ids = np.random.default_rng(step).integers(0, 16, (8, 9))
                losses.append(pipe.train_step(ids[:, :-1], ids[:, 1:], loss=nn.cross_entropy))
                pipe.clip_grad_norm(0.5)
                optimizer.step()
                rates.step()
            found.append((losses, pipe.full_state_dict()))
        np.testing.assert_equal(found[1], found[0])
        return found[0][0]

    losses = on_ranks("dp=2,pp=2", body, rendezvous=True)
    assert all(one == losses[0] for one in losses)
    assert losses[0][2] != losses[0][0]


def test_a_first_layer_that_stands_again_outside_its_checkpoint_passes_the_gradient_on():
    def body(mesh):
        found = []
        for wrap in (lambda layer: layer, nn.Checkpoint):
            one = nn.Linear(6, 6)
            stage = mm.PipelineStage(0).add_layer(wrap(one)).add_layer(nn.Linear(6, 6))
            stage.add_layer(one)
            pipe = mm.PipelineParallel([stage], 2, mesh=mesh, seed=0, dtype="float64")
            x = np.linspace(-1, 1, 48).reshape(8, 6)
            pipe.train_step(x, np.cos(x), loss=nn.mse_loss)
            found.append({name: one.grad.copy() for name, one in pipe.named_parameters()})
        np.testing.assert_equal(found[1], found[0])

    on_ranks("dp=1", body)
