"""Train a small GPT of PyTorch on a mesh of ranks: replicas of a pipeline of its blocks.

    mpiexec -n 4 python examples/train_torch.py --mesh dp=2,pp=2
    python examples/train_torch.py --check           one rank, beside plain PyTorch

PyTorch needs no MPI of its own, and no torch.distributed. With --check, rank 0 trains the same
model by plain PyTorch, too, and both losses are printed. The text to learn is this program.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
from pathlib import Path

import numpy as np

import mpimesh as mm

try:
    import torch
    from torch import nn

    from mpimesh.interop import torch as mt
except ImportError:
    print("train_torch.py needs PyTorch: pip install torch")
    raise SystemExit(0) from None

LETTERS, WIDTH, HEADS, LENGTH = 128, 64, 4, 32


class Embedding(nn.Module):
    """Letters and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return (rows, LENGTH, WIDTH) for (rows, LENGTH) letters."""
        return self.letters(text) + self.places.weight


class Block(nn.Module):
    """Each letter looks at those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what goes to the next block, of the same shape."""
        rows, length, width = x.shape
        qkv = self.to_qkv(self.norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(x)


class Head(nn.Module):
    """Scores for the next letter; the weight is the embedding's, on whatever rank that is."""

    def __init__(self, letters: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = letters.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, LENGTH, LETTERS)."""
        return self.norm(x) @ self.weight.T


def make_model(blocks: int, seed: int) -> nn.Sequential:
    """Make the model, the same on every rank."""
    torch.manual_seed(seed)
    embedding = Embedding()
    nn.init.normal_(embedding.letters.weight, std=0.02)
    return nn.Sequential(embedding, *(Block() for _ in range(blocks)), Head(embedding.letters))


def next_letter_loss(scores: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())


def batch(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pieces of the text, and the same one letter on; the same on every rank."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int64) % LETTERS
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, rows)
    pieces = text[starts[:, None] + np.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def train_plainly(model: nn.Module, options: argparse.Namespace) -> list[float]:
    """Train by PyTorch alone, on whole batches; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        x, target = map(torch.from_numpy, batch(step, options.rows))
        optimizer.zero_grad()
        loss = next_letter_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train(mesh: mm.DeviceMesh, model: nn.Sequential, options: argparse.Namespace) -> list[float]:
    """Train over the mesh; return the losses, the same on every rank."""
    num_stages = mesh.dim_size("pp")
    stages = [mm.PipelineStage(number) for number in range(num_stages)]
    layers = mt.wrap_each(model)
    for place, layer in enumerate(layers):
        stages[place * num_stages // len(layers)].add_layer(layer)
    pipe = mm.PipelineParallel(stages, options.microbatches, mesh=mesh)
    # The parameters are of PyTorch, and so may be their optimizer; mm.optim's would do, too.
    optimizer = torch.optim.AdamW(mt.tensors(pipe), lr=options.lr)
    loss = mt.wrap_loss(next_letter_loss)
    return [
        pipe.train_step(*batch(step, options.rows), loss=loss, optimizer=optimizer)
        for step in range(options.steps)
    ]


def show(what: str, losses: list[float]) -> None:
    """Print the first and the last loss."""
    print(f"{what}: loss {losses[0]:.6f}, after {len(losses)} steps {losses[-1]:.6f}")


def main() -> None:
    """Train, and with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="dp=-1,pp=1", help="for instance dp=2,pp=2")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="of the whole batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="train by plain PyTorch, too")
    options = parser.parse_args()

    with mm.DeviceMesh(options.mesh) as mesh:
        model = make_model(options.blocks, options.seed)
        plain = copy.deepcopy(model)
        losses = train(mesh, model, options)
        if mesh.rank == 0:
            show(mesh.dims_text, losses)
            if options.check:
                expected = train_plainly(plain, options)
                show("plain PyTorch", expected)
                np.testing.assert_allclose(losses, expected, rtol=1e-3)
        mesh.barrier()


if __name__ == "__main__":
    main()
