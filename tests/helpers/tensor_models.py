"""A small GPT, whole in one process or split over ranks: the oracle of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh import nn, optim
from tests.helpers.parallel_traps import Trap

SEED = 5
VOCAB = 13
TOKENS = 12
ROWS = 6
STEPS = 3

PLAIN = {"features": 12, "num_heads": 6, "dropout": 0.2, "attention_dropout": 0.3}
LLAMA = {
    "features": 16,
    "num_heads": 8,
    "num_kv_heads": 2,
    "hidden": 11,
    "norm": "rms",
    "mlp": "swiglu",
    "rotary": True,
    "bias": False,
    "tied": False,
}
KINDS: dict[str, dict[str, Any]] = {"plain": PLAIN, "llama": LLAMA}


def layers(kind: str, **options: Any) -> list[nn.Module]:
    given = {**KINDS[kind], **options}
    return mm.parallel.gpt_layers(VOCAB, num_layers=2, max_tokens=TOKENS + 2, **given)


def batch(step: int, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng([step, 11]).integers(0, VOCAB, (ROWS, tokens + 1))
    return ids[:, :-1], ids[:, 1:]


@cache
def trained_alone(
    kind: str, tokens: int = TOKENS
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses and norms of the steps, and the parameters after them."""
    model = nn.Sequential(layers(kind))
    model.materialize(seed=SEED, dtype=np.float64)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = batch(step, tokens)
        model.zero_grad()
        ctx = nn.Context(step=step)
        loss, dy = nn.cross_entropy.value_and_grad(model(x, ctx), target, denominator=ROWS)
        model.backward(dy, ctx)
        losses.append(loss)
        norms.append(optim.clip_grad_norm(model.parameters(), 0.5))
        optimizer.step()
    return losses, norms, model.state_dict()


def trained(
    mesh: mm.DeviceMesh,
    kind: str,
    *,
    sequence_parallel: bool,
    schedule: Any = "1f1b",
    tokens: int = TOKENS,
    uneven: bool = False,
    per_rank: int = 1,
    change: Callable[[Any], Any] = lambda layer: layer,
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """As `trained_alone`, over the ranks of a mesh with a dim tp; `change` makes other layers."""
    tp = mesh.group("tp")
    made = layers(
        kind,
        tp=tp,
        sequence_parallel=sequence_parallel,
        tokens=tokens if uneven else None,
    )
    count = per_rank * (mesh.dim_size("pp") if mesh.contains_dim("pp") else 1)
    stages = [mm.PipelineStage(number) for number in range(count)]
    for number, layer in enumerate(made):
        stages[number * count // len(made)].add_layer(change(layer))
    model = mm.PipelineParallel(
        stages, 3, mesh=mesh, schedule=schedule, seed=SEED, dtype=np.float64, bucket_bytes=4000
    )
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    loss = mm.parallel.VocabParallelCrossEntropy(VOCAB, group=tp)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(model.train_step(*batch(step, tokens), loss=loss))
        norms.append(model.clip_grad_norm(0.5))
        optimizer.step()
    model.check_replicas()
    return losses, norms, model.full_state_dict()


class TrappedLoss(mm.parallel.VocabParallelCrossEntropy):
    """Fails between its two all-reduces on one rank."""

    armed = False

    def _compute(self, y, target, denominator, *, grad):
        if self.armed and self.ranks.rank == 1:
            self.ranks.start("all_reduce", np.zeros(target.size), op="max")  # never resolved
            raise ValueError("boom in the loss")
        return super()._compute(y, target, denominator, grad=grad)


def trapped(
    mesh: mm.DeviceMesh, sequence_parallel: bool
) -> tuple[mm.PipelineParallel, list[dict[str, Trap]], TrappedLoss]:
    """The plain model with traps in the mlp of each block, and before it."""
    tp = mesh.group("tp")
    made = layers("plain", tp=tp, sequence_parallel=sequence_parallel)
    traps = []
    for block in (layer for layer in made if isinstance(layer, nn.GptBlock)):
        inside, outside = Trap(), Trap()
        block.mlp.activation = nn.Sequential(block.mlp.activation, inside)  # type: ignore[union-attr]
        block.mlp_norm = nn.Sequential(block.mlp_norm, outside)  # type: ignore[assignment]
        traps.append({"inside": inside, "outside": outside})
    pp = mesh.dim_size("pp") if mesh.contains_dim("pp") else 1
    stages = [mm.PipelineStage(number) for number in range(pp)]
    for number, layer in enumerate(made):
        stages[number * pp // len(made)].add_layer(layer)
    model = mm.PipelineParallel(stages, 3, mesh=mesh, seed=SEED, dtype=np.float64)
    return model, traps, TrappedLoss(VOCAB, group=tp)


def assert_same(
    got: tuple[list[float], list[float], dict[str, np.ndarray]],
    expected: tuple[list[float], list[float], dict[str, np.ndarray]],
) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-11)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-10)
    assert got[2].keys() == expected[2].keys()
    for name, values in expected[2].items():
        np.testing.assert_allclose(got[2][name], values, rtol=1e-7, atol=1e-9, err_msg=name)
