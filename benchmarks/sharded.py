"""Sharded training: a step at each stage beside PyTorch's FSDP2 over gloo, and what ranks hold.

Two programs: four linear layers of 1024 features with ReLU on 16 rows, and a GPT of 97 million
parameters on two rows of 64 tokens for each rank; both in float32 with AdamW, one thread a rank.
The same processes are ranks of both libraries. Every way begins with the same weights; that it does
the same sums is checked: the losses of the first steps must agree. FSDP2 has what its manual says:
each linear layer, or each block, is a unit, and so is the whole.

``mpiexec -n 2 python -m benchmarks.sharded 3`` prints the bytes that each rank holds at stage 3:
arrays by what they are for, and the memory of the process by the system, in which a page that
several processes have counts for each in part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks import gloo
from benchmarks.measure import FULL, TINY, Effort, in_turns
from benchmarks.rows import make_rows
from mpimesh import nn, optim

__all__ = ["available", "run"]

STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-4
_LR, _DECAY = 1e-4, 0.01
_ROUNDS = 7
_COMPARED_STEPS = 2
_MIB = 1 << 20

available = gloo.available


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of both programs."""

    layers: int = 4
    width: int = 1024
    rows: int = 16
    blocks: int = 12
    features: int = 768
    heads: int = 12
    vocabulary: int = 16_000
    tokens: int = 64
    lines: int = 2


_TINY_SIZES = Sizes(2, 32, 8, 1, 32, 2, 64, 8, 1)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way; none without PyTorch."""
    if available():
        return []
    sizes = _TINY_SIZES if effort is TINY else Sizes()
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    with gloo.opened(comm) as (torch, _):
        return _rows(mesh, sizes, effort, torch)


def _rows(mesh: mm.DeviceMesh, sizes: Sizes, effort: Effort, torch: Any) -> list[dict[str, Any]]:
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    rows = []
    for what, layers, batch, loss, stages in (
        (
            f"{sizes.layers} Linear({sizes.width}, {sizes.width}), {sizes.rows} rows",
            lambda: perceptron(sizes),
            _rows_of(mesh, sizes),
            nn.mse_loss,
            STAGES,
        ),
        (
            f"GPT, {sizes.lines} x {sizes.tokens} tokens a rank",
            lambda: gpt(sizes),
            _lines_of(mesh, sizes),
            nn.cross_entropy,
            (0, 3),  # of all there would be no room
        ),
    ):
        models = {stage: _sharded(mesh, layers(), loss, stage) for stage in stages}
        number = sum(parameter.size for parameter in models[0][0].parameters())
        ways: dict[str, Callable[[], float]] = {
            f"stage {stage}": _step(*made, *batch) for stage, made in models.items()
        }
        state = nn_state(layers())
        ways["FSDP2 over gloo"] = _fsdp(mesh, torch, sizes, state, loss, batch)
        _compare(ways)
        timings = in_turns(comm, ways, calls=1, rounds=min(_ROUNDS, effort.rounds))
        rows += make_rows(f"a step, {number:,} parameters, {what}", timings)
    return rows


def perceptron(sizes: Sizes) -> nn.Sequential:
    """Return the linear layers."""
    pairs = [(nn.Linear(sizes.width, sizes.width), nn.ReLU()) for _ in range(sizes.layers)]
    return nn.Sequential([layer for pair in pairs for layer in pair][:-1])


def gpt(sizes: Sizes) -> nn.Sequential:
    """Return the GPT, whose output layer has the embedding's weight."""
    return nn.Sequential(
        mm.parallel.gpt_layers(
            sizes.vocabulary, sizes.features, sizes.blocks, sizes.heads, max_tokens=sizes.tokens
        )
    )


def nn_state(model: nn.Sequential) -> dict[str, Any]:
    """Return the first values of a model by name."""
    model.materialize(seed=0, dtype=np.float32)
    return model.state_dict()


def _rows_of(mesh: mm.DeviceMesh, sizes: Sizes) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shape = (sizes.rows, sizes.width)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def _lines_of(mesh: mm.DeviceMesh, sizes: Sizes) -> tuple[Any, Any]:
    shape = (sizes.lines * mesh.size, sizes.tokens + 1)
    ids = np.random.default_rng(0).integers(0, sizes.vocabulary, shape)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def _sharded(
    mesh: mm.DeviceMesh, model: nn.Sequential, loss: nn.Loss, stage: int
) -> tuple[mm.DataParallel, mm.ParallelOptimizer]:
    sharded = mm.fully_shard(model, mesh, stage=stage, loss=loss)
    adam = optim.AdamW(sharded.parameters(), lr=_LR, weight_decay=_DECAY)
    return sharded, mm.ParallelOptimizer(adam, sharded, zero=stage)


def _step(
    model: mm.DataParallel, optimizer: mm.ParallelOptimizer, x: Any, target: Any
) -> Callable[[], float]:
    return lambda: model.train_step(x, target, optimizer=optimizer)


def _compare(ways: dict[str, Callable[[], float]]) -> None:
    """Raise if the losses of the first steps differ."""
    for number in range(_COMPARED_STEPS):
        losses = {name: step() for name, step in ways.items()}
        first = next(iter(losses.values()))
        if any(abs(loss - first) > TOLERANCE * max(1.0, abs(first)) for loss in losses.values()):
            raise RuntimeError(f"step {number}: the ways differ in their losses: {losses}")


# -- PyTorch --------------------------------------------------------------------------------------


def _fsdp(
    mesh: mm.DeviceMesh, torch: Any, sizes: Sizes, state: Any, loss: nn.Loss, batch: Any
) -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if loss is nn.mse_loss:
        model = _torch_perceptron(torch, sizes)
        units = [layer for layer in model if list(layer.parameters())]
    else:
        model = _torch_gpt(torch, sizes)
        units = list(model.blocks)
    weights = {name: torch.from_numpy(values.copy()) for name, values in state.items()}
    with torch.no_grad():
        # The layers of both stand in one order, and so do the parameters of each.
        for parameter, values in zip(model.parameters(), weights.values(), strict=True):
            parameter.copy_(values)
    ranks = init_device_mesh("cpu", (mesh.size,))
    for unit in units:
        fully_shard(unit, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=_DECAY, fused=True)
    x, target = (torch.from_numpy(part).chunk(mesh.size)[mesh.rank] for part in batch)
    functions = torch.nn.functional

    def step() -> float:
        optimizer.zero_grad()
        y = model(x)
        if loss is nn.mse_loss:
            value = functions.mse_loss(y, target)
        else:
            value = functions.cross_entropy(y.flatten(0, 1), target.flatten())
        value.backward()
        optimizer.step()
        total = value.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / mesh.size

    return step


def _torch_perceptron(torch: Any, sizes: Sizes) -> Any:
    layers: list[Any] = []
    for _ in range(sizes.layers):
        layers += [torch.nn.Linear(sizes.width, sizes.width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _torch_gpt(torch: Any, sizes: Sizes) -> Any:
    functions = torch.nn.functional

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            width = sizes.features
            self.attention_norm = torch.nn.LayerNorm(width)
            self.query, self.key, self.value, self.output = (
                torch.nn.Linear(width, width) for _ in range(4)
            )
            self.mlp_norm = torch.nn.LayerNorm(width)
            self.up, self.down = (
                torch.nn.Linear(width, 4 * width),
                torch.nn.Linear(4 * width, width),
            )

        def forward(self, x: Any) -> Any:
            y = self.attention_norm(x)
            q, k, v = (
                part(y).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            read = functions.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(read.transpose(1, 2).flatten(2))
            inner = functions.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
            return x + self.down(inner)

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(sizes.vocabulary, sizes.features)
            self.positions = torch.nn.Embedding(sizes.tokens, sizes.features)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(sizes.blocks))
            self.norm = torch.nn.LayerNorm(sizes.features)

        def forward(self, x: Any) -> Any:
            y = self.embedding(x) + self.positions.weight
            for block in self.blocks:
                y = block(y)
            return functions.linear(self.norm(y), self.embedding.weight)

    return Model()


# -- memory ---------------------------------------------------------------------------------------


def held(mesh: mm.DeviceMesh, stage: int, sizes: Sizes) -> dict[str, float]:
    """Train the GPT for some steps; return the MiB that this rank holds. Collective."""
    before = _process_mib()
    model, optimizer = _sharded(mesh, gpt(sizes), nn.cross_entropy, stage)
    x, target = _lines_of(mesh, sizes)
    for _ in range(3):
        model.train_step(x, target, optimizer=optimizer)
    buckets = model.buckets.buckets
    whole = 4 * sum(parameter.size for parameter in model.parameters())
    shards = [bucket.shard for bucket in buckets if bucket.shard is not None]
    mine = sum(shard.memory.nbytes for shard in shards)
    flat = sum(bucket.flat.nbytes for bucket in buckets if bucket.flat is not None)
    state = optimizer.optimizers[0].state_dict()["params"]
    mesh.barrier()
    return {
        "the whole model": whole / _MIB,
        "parameters": (mine if stage == 3 else whole) / _MIB,
        "layers under way": model._engine.layer_values.nbytes / _MIB,
        "gradients": (flat + mine) / _MIB,
        "memory of reductions": model.buckets.packed_bytes / _MIB,
        "state": sum(
            array.nbytes for one in state for name, array in one.items() if name != "steps"
        )
        / _MIB,
        "process": _process_mib() - before,
    }


def _process_mib() -> float:
    """Return the proportional memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main() -> None:
    """Print what each rank holds at the stage of the command line."""
    stage = int(sys.argv[1])
    with mm.DeviceMesh("dp=-1") as mesh:
        found = held(mesh, stage, Sizes())
        for rank in range(mesh.size):
            mesh.barrier()
            if rank == mesh.rank:
                text = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                print(f"stage {stage}, rank {rank} of {mesh.size}, MiB: {text}", flush=True)


if __name__ == "__main__":
    main()
