"""The command line of train_gpt.py, and what rank 0 prints and draws."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.program import (
    DEFAULT,
    Parser,
    above_zero,
    add_checkpoint,
    add_mesh,
    file_named,
    natural,
    not_negative,
    positive,
    ranks_of,
    share,
)
from common.report import MeshReport, WorkProgress

import mpimesh as mm
from mpimesh import optim
from mpimesh.mesh.dims import parse_dims
from mpimesh.trace import Event

LOWEST_RATE = 0.1
"""Share of the learning rate that is left at the end."""
SCHEDULES: dict[str, Callable[[int, int], optim.LRSchedule]] = {
    "constant": lambda warmup, steps: optim.WarmupLR(warmup),
    "linear": lambda warmup, steps: optim.WarmupLR(
        warmup, optim.LinearLR(max(steps - warmup, 1), end=LOWEST_RATE)
    ),
    "cosine": lambda warmup, steps: optim.WarmupLR(
        warmup, optim.CosineLR(max(steps - warmup, 1), LOWEST_RATE)
    ),
    "one-cycle": lambda warmup, steps: optim.OneCycleLR(
        steps + 1, (warmup + 1) / (steps + 1), start=0.0, end=LOWEST_RATE
    ),
}
"""Learning rates by name: of the steps of the warm-up, and of the one from which the rate stays."""
DIMS = {"dp": "replicas", "pp": "stages", "tp": "ranks that share each layer"}
"""Data, pipeline and tensor parallel."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, that of the process if None."""
    parser = make_parser()
    options = parser.parse(arguments)
    if options.features % options.heads:
        parser.error(
            f"argument --heads: must divide --features: {options.heads} heads cannot share "
            f"{options.features} features evenly"
        )
    if options.accumulate > options.batch_size:
        parser.error(
            f"argument --accumulate: {options.batch_size} rows (--batch-size) cannot be cut into "
            f"{options.accumulate} parts"
        )
    name = "--decay-steps" if options.decay_steps else "--steps"
    if options.decay_steps is None:
        options.decay_steps = options.steps
    if options.warmup is None:
        options.warmup = options.decay_steps // 10
    if options.warmup > options.decay_steps:
        parser.error(
            f"argument --warmup: {options.warmup} steps of warm-up, but {name} "
            f"{options.decay_steps}"
        )
    if options.trace_step is None:
        options.trace_step = options.steps
    if options.trace_step > options.steps:
        parser.error(f"argument --trace-step: there are {options.steps} steps")
    if options.mesh is None:
        options.mesh = f"dp=-1,pp=1,tp={2 if ranks_of(options) % 2 == 0 else 1}"
    tp = dict(parse_dims(options.mesh))["tp"]
    if options.heads < tp:
        parser.error(
            f"argument --heads: {options.heads} heads are too few for the {tp} ranks that share "
            f"each layer (--mesh {options.mesh}): each needs one at least"
        )
    if options.sequence_parallel and tp == 1:
        parser.error(
            "argument --sequence-parallel: there is nothing to split, as no ranks share a layer: "
            f"--mesh {options.mesh}"
        )
    return options


def make_parser() -> Parser:
    """Describe the options."""
    parser = Parser(
        prog="train_gpt.py", description="Train a GPT that reads bytes, on a mesh of ranks."
    )
    _add_parallel(parser)
    _add_model(parser)
    _add_training(parser)
    _add_files(parser)
    return parser


def _add_parallel(parser: Parser) -> None:
    group = add_mesh(
        parser,
        DIMS,
        example="dp=2,pp=2,tp=2",
        default="tp=2 where the number of ranks is even",
    )
    group.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help="parts of a replica's rows (default 4 with several stages, else 1)",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split what is between the layers that tp ranks share along the sequence, too",
    )
    group.add_argument(
        "--shard",
        "--zero",
        type=int,
        choices=[0, 1, 2, 3],
        default=0,
        help="what replicas divide: 1 the optimizer's state, 2 also gradients, 3 also parameters "
        f"{DEFAULT}",
    )
    group.add_argument(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help=f"add up the gradients of N parts of a batch {DEFAULT}; dropout draws by them",
    )


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    sizes = {
        "layers": (3, "blocks"),
        "features": (96, "length of a byte's vector"),
        "heads": (4, "heads of each attention"),
        "context": (64, "bytes that it reads at once"),
    }
    for name, (size, text) in sizes.items():
        group.add_argument(
            f"--{name}", type=positive, default=size, metavar="N", help=f"{text} {DEFAULT}"
        )
    group.add_argument(
        "--dropout",
        type=share,
        default=0.0,
        metavar="SHARE",
        help=f"of the values that training sets to 0, behind each part of a block {DEFAULT}",
    )
    group.add_argument(
        "--tied",
        action="store_true",
        help="let the output layer have the vectors of the bytes for its weight: learns slower",
    )
    group.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        default="float32",
        help=f"{DEFAULT[:-1]}; bfloat16 and float16 save memory, not time: on a CPU NumPy is "
        "slower with bfloat16, and tens of times slower with float16)",
    )


def _add_training(parser: Parser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=positive, default=300, metavar="N", help=DEFAULT)
    group.add_argument(
        "--batch-size",
        type=positive,
        default=16,
        metavar="ROWS",
        help=f"of all replicas and all parts {DEFAULT}",
    )
    group.add_argument(
        "--lr", type=above_zero, default=3e-3, metavar="RATE", help=f"highest one {DEFAULT}"
    )
    group.add_argument(
        "--warmup",
        type=natural,
        metavar="STEPS",
        help="in which the rate rises (default a tenth of --decay-steps)",
    )
    group.add_argument(
        "--lr-schedule",
        choices=[*SCHEDULES],
        default="cosine",
        help=f"how the rate goes on after the warm-up; one-cycle also rises as a cosine {DEFAULT}",
    )
    group.add_argument(
        "--decay-steps",
        type=positive,
        metavar="N",
        help="the step from which the rate stays, at a tenth if it falls (default the last): that "
        "of the run before where a --checkpoint is to go on for more --steps",
    )
    group.add_argument(
        "--weight-decay",
        type=not_negative,
        default=0.1,
        metavar="SHARE",
        help="that a rate of 1 would take off the weights of linear layers and off the vectors of "
        f"bytes, not off norms and biases {DEFAULT}",
    )
    group.add_argument(
        "--clip",
        type=above_zero,
        default=1.0,
        metavar="NORM",
        help=f"limit of the gradient's norm {DEFAULT}",
    )
    group.add_argument(
        "--evaluate",
        type=positive,
        default=100,
        metavar="STEPS",
        help=f"how often to compute the loss on text that is held out {DEFAULT}",
    )
    group.add_argument(
        "--seed", type=natural, default=0, metavar="N", help=f"of weights, order, sample {DEFAULT}"
    )
    sample = parser.add_argument_group("sample")
    sample.add_argument(
        "--sample", type=natural, default=200, metavar="BYTES", help=f"length of it {DEFAULT}"
    )
    sample.add_argument("--prompt", type=some_text, default="The ", help='(default "The ")')
    sample.add_argument(
        "--temperature",
        type=above_zero,
        default=0.8,
        metavar="T",
        help=f"below 1 likely bytes become likelier {DEFAULT}",
    )


def _add_files(parser: Parser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what to learn (default the help on Python's language that comes with Python)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write settings and results")
    group.add_argument(
        "--plot", type=file_named(".svg"), metavar="SVG", help="draw the loss of every step"
    )
    group.add_argument(
        "--timeline",
        type=file_named(".svg"),
        metavar="SVG",
        help="draw what every rank did when in a step",
    )
    group.add_argument(
        "--trace-step", type=positive, metavar="N", help="the step to draw (default the last)"
    )
    add_checkpoint(group, "steps", 100)


def some_text(text: str) -> str:
    """Read a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("needs at least one character to go on from")
    return text


class Report(MeshReport):
    """Prints and draws on rank 0. Making it is collective.

    Args:
        mesh: The ranks.
        options: As `gpt.console` read them.

    Raises:
        ProgramError: On every rank, if a file cannot be written.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace) -> None:
        self._options = options
        super().__init__(mesh, [options.json, options.plot, options.timeline])

    def show_model(self, pipe: mm.PipelineParallel) -> None:
        """Show who computes what, where, and how the model is cut."""
        self.show_mesh()
        for number in range(pipe.num_stages):
            stage = pipe.stage(number)
            names = [type(layer).__name__ for layer in stage.layers] if stage else []
            self.say(f"stage {number}: {', '.join(names)}")
        shard, replicas = self._options.shard, self.mesh.dim_size("dp")
        parts = ("", "the optimizer's state", "gradients and the optimizer's state")
        parts += ("parameters, gradients and the optimizer's state",)
        if shard and replicas > 1:
            self.say(f"--shard {shard}: {replicas} replicas have {parts[shard]} once among them")
        elif shard:
            self.say(
                f"--shard {shard}: nothing to divide, there is one replica: give --mesh dp=..."
            )

    def progress(self, done: int, told: int) -> StepProgress:
        """Return what shows the progress, to be used as a context manager.

        Args:
            done: Steps that were done before.
            told: Losses on the text held out that a run before has shown.
        """
        return StepProgress(self, self._options, done, told)

    def show_sample(self, text: str) -> None:
        """Show what the model writes: what a terminal would obey is shown by its name.

        The replacement character of bytes that are no text is its own name.
        """
        shown = "".join(
            one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text
        )
        self.say(f"the model writes:\n{shown}")

    # -- files -----------------------------------------------------------------------------------

    def draw_timeline(self, events: Sequence[Event], step: int) -> None:
        """Draw the events of a step."""
        title = f"Training step {step} on {self.mesh.dims_text}: {self._options.schedule}"
        self.draw_events(self._options.timeline, events, title)

    def write(self, results: dict[str, Any]) -> None:
        """Draw the losses, write settings and results, where the options say, and tell of it."""
        self.draw_losses(self._options.plot, results["losses"])
        self.write_json(self._options.json, results)
        self.show_written()


class StepProgress(WorkProgress):
    """Shows the loss of steps, and what they were done with."""

    def __init__(self, report: Report, options: Namespace, done: int, told: int) -> None:
        self._bytes_per_step = options.batch_size * options.context
        self._told = told  # losses on the text held out that were shown
        self._told_s = 0.0
        super().__init__(report.console, "step", options.steps, unit="bytes", done=done)

    def step(
        self,
        losses: Sequence[float],
        seconds: float,
        held_out: Mapping[int, float],
        lr: float,
        norm: float,
    ) -> None:
        """Tell the losses of all steps so far, what those of this run took, and the last one's."""
        # That on the text that is held out may be older than the last step, but is told once.
        new = [*held_out.items()][-1:] if len(held_out) > self._told else []
        shown = "".join(f"  held out {loss:.3f} ({at})" for at, loss in new)
        text = f"loss {losses[-1]:.3f}{shown}  norm {norm:.2f}  rate {lr:.5f}"
        step_s, self._told_s = seconds - self._told_s, seconds
        if self.tell(len(losses), self._bytes_per_step, step_s, text):
            self._told = len(held_out)
