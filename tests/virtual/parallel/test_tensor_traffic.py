"""Traffic of split layers: counted, and held to a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from tests.helpers.parallel_models import on_ranks
from tests.helpers.tensor_models import SEED, VOCAB, batch, layers, trained_alone

ROWS, TOKENS, FEATURES = 2, 12, 8
BYTES = ROWS * TOKENS * FEATURES * 8


def all_reduced(size: int, nbytes: int) -> int:
    return 2 * (size - 1) * nbytes // size


def made(
    group: mm.ProcessGroup, kind: str, sequence: mm.parallel.SequenceSplit | None
) -> nn.Module:
    options: dict[str, Any] = {"group": group, "sequence": sequence}
    if kind == "pair":
        return nn.Sequential(
            mm.parallel.ColumnParallelLinear(FEATURES, 24, **options),
            nn.GELU(),
            mm.parallel.RowParallelLinear(24, FEATURES, **options),
        )
    if kind == "attention":
        return mm.parallel.ParallelAttention(FEATURES, 4, num_kv_heads=2, **options)
    if kind == "swiglu":
        return mm.parallel.ParallelSwiGLU(FEATURES, 24, **options)
    return mm.parallel.ParallelFeedForward(FEATURES, 24, **options)


@pytest.mark.parametrize("kind", ["pair", "attention", "mlp", "swiglu"])
@pytest.mark.parametrize("size", [2, 4])
def test_one_all_reduce_in_each_direction(size, kind):
    """Of all queries, keys and values together, and of a gate and what it lets through."""

    def body(mesh):
        group = mesh.group("tp")
        layer = made(group, kind, None)
        layer.materialize(seed=0, dtype=np.float64)
        x = np.ones((ROWS, TOKENS, FEATURES))
        ctx = nn.Context()
        budget = all_reduced(size, BYTES)
        with mesh.budget(bytes=budget, messages=2 * (size - 1)) as forward:
            y = layer(x, ctx)
        with mesh.budget(bytes=budget, messages=2 * (size - 1)) as backward:
            layer.backward(y, ctx)
        assert forward.used_bytes == backward.used_bytes == budget
        assert mesh.traffic().calls == {"all_reduce": 2}

    on_ranks(f"tp={size}", body)


@pytest.mark.parametrize("kind", ["pair", "attention", "mlp", "swiglu"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_split_sequence_moves_as_much_and_once_more_to_keep_less(size, kind):
    """A gather and a reduce-scatter are an all-reduce; backward gathers the input again."""

    def body(mesh):
        group = mesh.group("tp")
        layer = made(group, kind, mm.parallel.SequenceSplit(group))
        layer.materialize(seed=0, dtype=np.float64)
        x = np.ones((ROWS, TOKENS // size, FEATURES))
        ctx = nn.Context()
        half = (size - 1) * BYTES // size
        with mesh.budget(bytes=2 * half, messages=2 * (size - 1)) as forward:
            y = layer(x, ctx)
        with mesh.budget(bytes=3 * half, messages=3 * (size - 1)) as backward:
            layer.backward(y, ctx)
        assert (forward.used_bytes, backward.used_bytes) == (2 * half, 3 * half)
        assert mesh.traffic().calls == {"all_gather": 3, "reduce_scatter": 2}

    on_ranks(f"tp={size}", body)


def test_logits_are_never_gathered():
    def body(mesh):
        group = mesh.group("tp")
        loss = mm.parallel.VocabParallelCrossEntropy(1000, group=group)
        target = np.zeros((ROWS, TOKENS), int)
        rows = target.size * 8
        with mesh.budget(bytes=all_reduced(2, 3 * rows), messages=4) as budget:
            loss.value_and_grad(np.ones((ROWS, TOKENS, 500)), target, denominator=1)
        assert budget.used_bytes == all_reduced(2, 3 * rows)

    on_ranks("tp=2", body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_of_a_gpt(sequence_parallel):
    """Two collectives for each block and direction, and what stands around the blocks."""

    def body(mesh):
        group = mesh.group("tp")
        made = layers("plain", tp=group, sequence_parallel=sequence_parallel)
        stage = mm.PipelineStage(0)
        for layer in made:
            stage.add_layer(layer)
        model = mm.PipelineParallel([stage], 1, mesh=mesh, seed=SEED, dtype=np.float64)
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=group)
        before = mesh.traffic().snapshot()
        model.train_step(*batch(0), loss=loss)
        calls = (mesh.traffic() - before).calls
        blocks = 2
        around_step = 2  # the header, and the status
        if sequence_parallel:
            # Forward: the attention's and mlp's inputs, the head's. Backward: those again, and
            # the gradients of their results and of the embedding's.
            assert calls["all_gather"] == (2 * blocks + 1) + (2 * blocks + 1) + (2 * blocks + 1)
            assert calls["reduce_scatter"] == (1 + 2 * blocks) + (2 * blocks + 1)
            assert calls["all_reduce"] == around_step + 2 + 1  # loss, shared gradients
        else:
            assert calls["all_reduce"] == around_step + 2 + (1 + 2 * blocks) + (2 * blocks + 1)

    on_ranks("tp=2", body)


def test_a_mask_is_gathered_once_a_pass():
    """Not by each of the layers that it passes through."""

    def body(mesh):
        group = mesh.group("tp")
        cut = mm.parallel.SequenceSplit(group)
        blocks = nn.Sequential([nn.BertBlock(FEATURES, 2) for _ in range(3)])
        model = mm.tensor_parallel(blocks, group, sequence=cut)
        model.materialize(seed=0, dtype=np.float64)
        x = np.ones((ROWS, TOKENS // 2, FEATURES))
        mask = np.ones((ROWS, TOKENS // 2), bool)
        for _ in range(2):
            before = mesh.traffic().snapshot()
            y, _ = model((x, mask), nn.Context())
            calls = (mesh.traffic() - before).calls
            assert calls["all_gather"] == 2 * 3 + 1
        alone, _ = model((x, mask))
        np.testing.assert_array_equal(alone, y)

    on_ranks("tp=2", body)


@pytest.mark.parametrize("dims", ["pp=2,tp=2", "dp=2,pp=2,tp=2", "dp=2,tp=2", "other=2,pp=2,tp=2"])
def test_a_norm_takes_one_all_reduce(dims):
    """Over stages and split layers together, where there are no dims of somebody else's."""
    norms = {}

    def body(mesh):
        made = layers("plain", tp=mesh.group("tp"))
        pp = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
        stages = [mm.PipelineStage(number) for number in range(pp)]
        for number, layer in enumerate(made):
            stages[number * pp // len(made)].add_layer(layer)
        model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype=np.float64)
        loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=mesh.group("tp"))
        model.train_step(*batch(0), loss=loss)
        before = mesh.traffic().snapshot()
        norms[mesh.rank] = model.clip_grad_norm(1e9)
        calls = (mesh.traffic() - before).calls["all_reduce"]
        assert calls == (3 if mesh.contains_dim("other") else 1)

    on_ranks(dims, body)
    assert len(set(norms.values())) == 1
    assert norms[0] == pytest.approx(trained_alone("plain")[1][0], rel=1e-10)
