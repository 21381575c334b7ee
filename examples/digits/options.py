"""The command line of train_digits.py: every wrong argument is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

import mpimesh as mm
from mpimesh.errors import MeshError
from mpimesh.mesh.dims import parse_dims
from mpimesh.schedule import schedule_names

DIMS = ("dp", "pp")
"""Data parallel: replicas of the model. Pipeline parallel: its stages."""
DEFAULT = "(default %(default)s)"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and everything once for all ranks."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, on all ranks: they have the same arguments."""
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        if mm.Launch.detect().size > 1:
            # Some launchers end a job with the first rank that fails: not before rank 0 has spoken.
            with mm.DeviceMesh("ranks=-1") as mesh:
                mesh.barrier()
            mm.exit_all(2)
        sys.exit(2)

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        # MPI has not started: the launcher's word for the rank is enough.
        if mm.Launch.detect().rank == 0:
            print(message, end="", file=file, flush=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, that of the process if None."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.virtual and mm.Launch.detect().size > 1:
        parser.error("argument --virtual: is for running without mpiexec")
    if options.mesh is None:
        ranks = options.virtual or mm.Launch.detect().size
        options.mesh = "dp=-1,pp=2" if ranks % 2 == 0 else "dp=-1,pp=1"
    if options.lr is None:
        options.lr = 0.05 if options.optimizer == "sgd" else 0.001
    return options


def make_parser() -> Parser:
    """Describe the options."""
    parser = Parser(
        prog="train_digits.py",
        description="Train a classifier of handwritten digits on a mesh of ranks.",
    )
    parallel = parser.add_argument_group("how it is spread over ranks")
    parallel.add_argument(
        "--mesh",
        type=mesh_dims,
        metavar="DIMS",
        help="replicas and stages, such as dp=2,pp=2; one size may be -1: whatever fits the ranks "
        "(default two stages where the number of ranks is even, else one)",
    )
    parallel.add_argument(
        "--virtual", type=positive, metavar="N", help="run on N threads as ranks, without mpiexec"
    )
    parallel.add_argument(
        "--schedule",
        choices=[name for name in schedule_names() if name != "forward"],
        default="1f1b",
        help=f"the order in which a stage works on its microbatches {DEFAULT}",
    )
    parallel.add_argument(
        "--microbatches",
        type=positive,
        default=8,
        metavar="N",
        help=f"parts of a replica's batch {DEFAULT}",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=30, metavar="N", help=DEFAULT)
    training.add_argument(
        "--batch-size",
        type=positive,
        default=128,
        metavar="ROWS",
        help=f"of all replicas {DEFAULT}",
    )
    training.add_argument(
        "--hidden",
        type=positive,
        default=256,
        metavar="UNITS",
        help=f"width of the layers {DEFAULT}",
    )
    training.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help=DEFAULT)
    training.add_argument(
        "--lr",
        type=above_zero,
        metavar="RATE",
        help="learning rate (default 0.001 for adamw, 0.05 for sgd)",
    )
    training.add_argument(
        "--clip",
        type=above_zero,
        metavar="NORM",
        help="limit of the gradient's norm (default none)",
    )
    training.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help=DEFAULT
    )
    training.add_argument(
        "--seed", type=natural, default=0, metavar="N", help=f"of weights and order {DEFAULT}"
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help=f"where pictures and trace go {DEFAULT}",
    )
    files.add_argument("--json", type=Path, metavar="FILE", help="write settings and results")
    files.add_argument(
        "--trace-step",
        type=positive,
        metavar="N",
        help="the step to draw as a timeline (default the first of the last epoch)",
    )
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="go on from what is saved there; save there after epochs and on SIGUSR1 or SIGTERM, "
        "after which the exit code is 85",
    )
    files.add_argument(
        "--checkpoint-epochs",
        type=positive,
        default=5,
        metavar="N",
        help=f"how often to save {DEFAULT}",
    )
    return parser


def mesh_dims(text: str) -> str:
    """Read dims such as "dp=2,pp=2"; return them with dp and pp both named."""
    try:
        dims = dict(parse_dims(text))
    except MeshError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    unknown = [name for name in dims if name not in DIMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"this program knows the dims dp (replicas) and pp (stages), got {', '.join(unknown)}"
        )
    for name in DIMS:
        dims.setdefault(name, 1)
    return ",".join(f"{name}={size}" for name, size in dims.items())


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return at_least(1, text)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return at_least(0, text)


def at_least(least: int, text: str) -> int:
    """Read a whole number of at least `least`."""
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number above 0, got {text!r}")
    return number
