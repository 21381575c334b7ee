"""The command line of train_digits.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common.device import CHOICES
from common.options import (
    DEFAULT,
    Parser,
    above_zero,
    add_checkpoint,
    add_mesh,
    natural,
    positive,
    ranks_of,
)

DIMS = {"dp": "replicas", "pp": "stages"}
"""Data parallel: replicas of the model. Pipeline parallel: its stages."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, that of the process if None."""
    options = make_parser().parse(arguments)
    if options.mesh is None:
        options.mesh = "dp=-1,pp=2" if ranks_of(options) % 2 == 0 else "dp=-1,pp=1"
    if options.lr is None:
        options.lr = 0.05 if options.optimizer == "sgd" else 0.001
    return options


def make_parser() -> Parser:
    """Describe the options."""
    parser = Parser(
        prog="train_digits.py",
        description="Train a classifier of handwritten digits on a mesh of ranks.",
    )
    parallel = add_mesh(
        parser,
        DIMS,
        example="dp=2,pp=2",
        default="two stages where the number of ranks is even, else one",
    )
    parallel.add_argument(
        "--microbatches",
        type=positive,
        default=8,
        metavar="N",
        help=f"parts of a replica's batch {DEFAULT}",
    )
    parallel.add_argument(
        "--device",
        choices=CHOICES,
        default="cpu",
        help=f"what computes: auto takes CuPy where every rank has a GPU, else NumPy {DEFAULT}",
    )
    parallel.add_argument(
        "--compare",
        action="store_true",
        help="train for a second on one rank alone first, and say how much faster all are",
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
    add_checkpoint(files, "epochs", 5)
    return parser
