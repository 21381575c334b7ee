"""The command line of an example, and its run on all ranks: an error is one line, from one rank."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import numpy as np

import mpimesh as mm
from mpimesh.errors import LaunchError, MeshError, MpimeshError, StoreError, WorldSizeError
from mpimesh.mesh.dims import parse_dims
from mpimesh.schedule import schedule_names

WRONG = 2
"""The exit code where the command line asks for what cannot be done."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

Result = TypeVar("Result")


class ProgramError(MpimeshError):
    """A request that cannot be met. Raised on every rank, with the same text."""

    agreed = True


def run_program(
    name: str, program: Callable[..., int | None], options: Namespace, *rest: Any
) -> int:
    """Run `program` on the ranks of mpiexec, or on virtual ones; return the exit code.

    Args:
        name: The name of the script.
        program: Called on each rank with `options` and `rest`; returns the exit code, None for 0.
        options: The command line; ``options.virtual`` says how many threads are ranks, if any.
        rest: More arguments.
    """
    try:
        if options.virtual:
            return mm.run_virtual(options.virtual, program, options, *rest)[0] or 0
        return program(options, *rest) or 0
    except (WorldSizeError, LaunchError, ProgramError, StoreError) as error:
        # All ranks raise it: one of them tells.
        if mm.runtime.Launch.detect().rank == 0:
            print(f"{name}: error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        if mm.runtime.Launch.detect().size > 1:
            raise  # the other ranks are to end, too: the mesh sees to that
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def on_all_ranks(mesh: mm.DeviceMesh, action: Callable[[], Result], what: str) -> Result:
    """Collective: return what `action` gives on this rank, if it fails on none.

    Args:
        mesh: The ranks.
        action: Must not be collective: a rank on which it fails would be missed.
        what: What it does, such as "read FILE".

    Raises:
        ProgramError: On every rank, with the reason of the first on which it failed.
    """
    problem = b""
    try:
        result = action()
    except Exception as error:  # a damaged file may raise anything, and the other ranks wait
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"cannot {what}: {reason or error} (rank {mesh.rank})".encode()
    group = mesh.group()
    lengths = group.all_gather(np.array([len(problem)])).resolve()
    failed = np.flatnonzero(lengths)
    if failed.size:
        mine = np.frombuffer(problem, np.uint8) if mesh.rank == failed[0] else None
        # root=None: whoever has an array is the root, and the others need not know its shape.
        raise ProgramError(group.broadcast(mine, root=None).resolve().tobytes().decode())
    return result


DEFAULT = "(default %(default)s)"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and everything once for all ranks."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, on all ranks: they have the same arguments."""
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        if mm.runtime.Launch.detect().size > 1:
            # Some launchers end a job with the first rank that fails: not before rank 0 has spoken.
            with mm.DeviceMesh("ranks=-1") as mesh:
                mesh.barrier()
            mm.exit_all(WRONG)
        sys.exit(WRONG)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Read the command line, that of the process if None."""
        options = self.parse_args(arguments)
        if options.virtual and mm.runtime.Launch.detect().size > 1:
            self.error("argument --virtual: is for running without mpiexec")
        return options

    def add_virtual(self, group: argparse._ActionsContainer | None = None) -> None:
        """Describe the option that makes ranks of threads."""
        (group or self).add_argument(
            "--virtual",
            type=positive,
            metavar="N",
            help="run on N threads as ranks, without mpiexec",
        )

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        # MPI has not started: the launcher's word for the rank is enough.
        if mm.runtime.Launch.detect().rank == 0:
            print(message, end="", file=file, flush=True)


def add_mesh(parser: Parser, dims: Mapping[str, str], *, example: str, default: str) -> Any:
    """Describe how a model is spread over ranks; return the group, for more of that.

    Args:
        parser: Where to.
        dims: The dims that the program knows, and what they are.
        example: A mesh of them.
        default: What it takes where none is given, in words.
    """
    group = parser.add_argument_group("how it is spread over ranks")
    group.add_argument(
        "--mesh",
        type=mesh_reader(dims),
        metavar="DIMS",
        help=f"{', '.join(dims.values())}, such as {example}; one size may be -1: whatever fits "
        f"the ranks (default {default})",
    )
    parser.add_virtual(group)
    group.add_argument(
        "--schedule",
        choices=[name for name in schedule_names() if name != "forward"],
        default="1f1b",
        help=f"the order in which a stage works on its microbatches {DEFAULT}",
    )
    return group


def add_checkpoint(group: Any, unit: str, default: int) -> None:
    """Describe when to save, as :class:`~common.checkpoint.RunCheckpoints` does."""
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=f"go on from what is saved there; save there after {unit} and on SIGUSR1 or SIGTERM, "
        "after which the exit code is 85",
    )
    group.add_argument(
        f"--checkpoint-{unit}",
        type=positive,
        default=default,
        metavar="N",
        help=f"how often to save {DEFAULT}",
    )


def ranks_of(options: argparse.Namespace) -> int:
    """Return how many ranks there will be: MPI has not started."""
    return options.virtual or mm.runtime.Launch.detect().size


def mesh_reader(known: Mapping[str, str]) -> Callable[[str], str]:
    """Return what reads dims such as "dp=2,tp=2" and returns them with all `known` ones named."""

    def mesh_dims(text: str) -> str:
        try:
            dims = dict(parse_dims(text))
        except MeshError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        unknown = [name for name in dims if name not in known]
        if unknown:
            meanings = ", ".join(f"{name} ({meaning})" for name, meaning in known.items())
            raise argparse.ArgumentTypeError(
                f"this program knows the dims {meanings}, got {', '.join(unknown)}"
            )
        sizes = dict.fromkeys(known, 1) | dims
        if [name for name in known if name in dims] != list(dims):
            sizes = dims | sizes  # another order of the ranks, which counts
        return ",".join(f"{name}={size}" for name, size in sizes.items())

    return mesh_dims


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return at_least(1, text)


def file_named(ending: str) -> Callable[[str], Path]:
    """Return what reads the name of a file that is written in one format, which its end names."""

    def named_so(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() != ending:
            raise argparse.ArgumentTypeError(
                f"writes {ending[1:].upper()}: needs a name that ends with {ending}, got {text!r}"
            )
        return path

    return named_so


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
    return number(text, "above 0", lambda value: 0 < value < float("inf"))


def not_negative(text: str) -> float:
    """Read a finite number of at least 0."""
    return number(text, "of at least 0", lambda value: 0 <= value < float("inf"))


def share(text: str) -> float:
    """Read a number of at least 0 and below 1."""
    return number(text, "of at least 0 and below 1", lambda value: 0 <= value < 1)


def number(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    """Read a number for which a rule holds."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"needs a number {rule}, got {text!r}")
    return value
