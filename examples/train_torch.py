"""Train a small GPT of PyTorch on a mesh of ranks: replicas of a pipeline of its blocks.

    pip install torch ml_dtypes
    mpiexec -n 4 python examples/train_torch.py --mesh dp=2,pp=2
    python examples/train_torch.py --check           one rank, beside plain PyTorch
    python examples/train_torch.py --virtual 4       four ranks as threads of one process

On dp=2,pp=2 a stage passes on to the next, and two replicas add up their gradients:

                             stage 0: letters to       stage 1: block,
                             vectors, block            scores of letters
    replica 0, rows 0-15         rank 0        pp >        rank 1
                                   |                         |
                                   dp                        dp
                                   |                         |
    replica 1, rows 16-31        rank 2        pp >        rank 3

The scores' weight is that of the vectors: one parameter, in stages of two ranks. PyTorch needs no
MPI of its own, and no torch.distributed. The text to learn is this program. It prints, with --check
beside what plain PyTorch gets for the same model and the same batches, such as

    dp=2,pp=2: loss 4.873547, after 20 steps 3.472227
    plain PyTorch: loss 4.873547, after 20 steps 3.472227

and ends with exit code 1 if the losses of a step differ by more than rounding. With --checkpoint
DIR a run that was stopped goes on, also on another mesh. --help shows all options. Beside this
file, common/ holds what all examples share.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common.checkpoint import RunCheckpoints
from common.program import (
    DEFAULT,
    Parser,
    above_zero,
    add_checkpoint,
    mesh_reader,
    natural,
    positive,
    ranks_of,
    run_program,
)

import mpimesh as mm
from mpimesh.errors import MissingPackageError

try:
    from mpimesh.interop import torch as mt
except MissingPackageError as error:
    # No failure: `make examples` runs what can be run.
    if mm.runtime.Launch.detect().rank == 0:
        print(f"SKIPPED train_torch.py: {error}")
    sys.exit(0)

import torch
from torch import nn

LETTERS, WIDTH, HEADS, LENGTH = 128, 64, 4, 32
DIMS = {"dp": "replicas", "pp": "stages"}


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


def train_plainly(model: nn.Module, options: Namespace) -> list[float]:
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


def train(
    mesh: mm.DeviceMesh, model: nn.Sequential, options: Namespace, guard: mm.store.RunGuard
) -> list[float]:
    """Train over the mesh, up to the last step or a signal; return the losses, alike on all."""
    num_stages = mesh.dim_size("pp")
    stages = [mm.PipelineStage(number) for number in range(num_stages)]
    layers = mt.wrap_each(model)
    for place, layer in enumerate(layers):
        stages[place * num_stages // len(layers)].add_layer(layer)
    pipe = mm.PipelineParallel(stages, options.microbatches, mesh=mesh)
    # The parameters are of PyTorch, and so may be their optimizer; mm.optim's would do, too.
    # A rank beyond the number of layers has none, which PyTorch takes only in a group.
    optimizer = torch.optim.AdamW([{"params": mt.tensors(pipe)}], lr=options.lr)
    loss = mt.wrap_loss(next_letter_loss)
    names = ("blocks", "rows", "lr", "seed")
    settings = {name: getattr(options, name) for name in names}
    checkpoints = RunCheckpoints(options.checkpoint, mesh, settings, every=options.checkpoint_steps)
    state = {"model": pipe, "optimizer": optimizer, "losses": []}
    done = checkpoints.load(state)
    losses: list[float] = state["losses"]
    for step in range(done, options.steps):
        x, target = batch(step, options.rows)
        losses.append(pipe.train_step(x, target, loss=loss, optimizer=optimizer))
        stopping = guard.stopping(mesh)
        checkpoints.save(step + 1, state, force=stopping or step + 1 == options.steps)
        if stopping:
            break
    checkpoints.close()
    return losses


def show(what: str, losses: list[float]) -> None:
    """Print the first and the last loss."""
    print(f"{what}: loss {losses[0]:.6f}, after {len(losses)} steps {losses[-1]:.6f}", flush=True)


def run(options: Namespace, template: nn.Sequential, guard: mm.store.RunGuard) -> int:
    """Run the program of one rank, and return its exit code."""
    with mm.DeviceMesh(options.mesh) as mesh:
        losses = train(mesh, copy.deepcopy(template), options, guard)
        if len(losses) < options.steps:
            if mesh.rank == 0:
                print(f"stopped after step {len(losses)}, saved in {options.checkpoint}")
            return guard.code
        is_alike = np.ones(1, bool)
        if mesh.rank == 0:
            show(mesh.dims_text, losses)
            if options.check:
                expected = train_plainly(copy.deepcopy(template), options)
                show("plain PyTorch", expected)
                is_alike[0] = np.allclose(losses, expected, rtol=1e-3)
        # The others wait: a launcher may end the job with the first rank that is done.
        is_alike = mesh.group().broadcast(is_alike, root=0).resolve()
    if not is_alike[0] and mesh.rank == 0:
        print("train_torch.py: error: the losses differ", file=sys.stderr)
    return 0 if is_alike[0] else 1


def parse_options(arguments: Sequence[str] | None = None) -> Namespace:
    """Read the command line, that of the process if None."""
    parser = Parser(prog="train_torch.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mesh",
        type=mesh_reader(DIMS),
        metavar="DIMS",
        help="replicas and stages, such as dp=2,pp=2; one size may be -1: whatever fits the ranks "
        "(default two stages where the number of ranks is even, else one)",
    )
    parser.add_virtual()
    numbers = {
        "blocks": (2, "blocks of the model"),
        "microbatches": (4, "parts of a replica's rows"),
        "rows": (32, "rows of a batch, of all replicas"),
        "steps": (20, "steps to train"),
    }
    for name, (number, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=positive, default=number, metavar="N", help=f"{text} {DEFAULT}"
        )
    parser.add_argument(
        "--lr", type=above_zero, default=3e-3, metavar="RATE", help=f"learning rate {DEFAULT}"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help=f"of the first values {DEFAULT}"
    )
    parser.add_argument("--check", action="store_true", help="train by plain PyTorch, too")
    add_checkpoint(parser, "steps", 10)
    options = parser.parse(arguments)
    if options.mesh is None:
        options.mesh = "dp=-1,pp=2" if ranks_of(options) % 2 == 0 else "dp=-1,pp=1"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    options = parse_options(arguments)
    # Here, as PyTorch draws from one generator of the process, which virtual ranks would share.
    template = make_model(options.blocks, options.seed)
    # Without a folder to save in, signals end the program as ever.
    guard = mm.run_guard() if options.checkpoint else mm.run_guard(signals=())
    return run_program("train_torch.py", run, options, template, guard)


if __name__ == "__main__":
    # All ranks end with the same code; a batch system is to see it, whatever the launcher.
    mm.exit_all(main())
