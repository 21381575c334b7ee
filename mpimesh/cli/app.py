"""The command line, ``mpimesh COMMAND``: every command with its options.

A command's own module is imported when the command runs, so that help and completion are quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import mpimesh
from mpimesh.cli.console import InputError
from mpimesh.errors import MpimeshError
from mpimesh.schedule import schedule_names

__all__ = ["app"]

app = typer.Typer(
    name="mpimesh",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
checkpoint = typer.Typer(
    help="Look into checkpoints, without MPI: are they whole?",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(checkpoint, name="checkpoint")

Json = Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")]
CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="Folder of a checkpoint, or a .safetensors file.")
]


@contextmanager
def _errors(
    printed: str = "", *, quiet: bool = False, leave: Callable[[int], object] | None = None
) -> Iterator[None]:
    """End with exit code 2 and a line if something cannot be done.

    Args:
        printed: Goes to standard output before.
        quiet: Write no line: another rank does.
        leave: Ends all ranks together, where they all end so.
    """
    try:
        yield
    except (InputError, MpimeshError, OSError) as error:
        text: object = error
        if isinstance(error, OSError) and not isinstance(error, MpimeshError):
            text = f"{error.filename}: {error.strerror}"
        if printed:
            typer.echo(printed)
        if not quiet:
            typer.echo(f"error: {text}", err=True)
        if leave is not None and (isinstance(error, InputError) or getattr(error, "agreed", False)):
            leave(2)
        raise typer.Exit(2) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpimesh {mpimesh.__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """A device mesh for MPI."""


@app.command()
def doctor(
    *,
    as_json: Json = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="First forget what earlier jobs have proven here, and do it anew.",
        ),
    ] = False,
    limit_s: Annotated[
        float, typer.Option("--limit", min=1, help="Seconds after which it ends the job.")
    ] = 180.0,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Only remove what aborted MPI jobs have left in /dev/shm."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --clean: only say what would be removed.")
    ] = False,
) -> None:
    """Say what this machine and its MPI can do, and what is wrong.

    Run it alone, under mpiexec or under srun, as the program that is to run:
    `mpiexec -n 4 mpimesh doctor`. Each finding comes with what mends it. It exits with 1 if
    something is wrong that makes programs fail, else with 0.
    """
    from mpimesh.cli.doctor import run_clean, run_doctor

    if dry_run and not clean:
        raise typer.BadParameter("--dry-run goes with --clean")
    if fresh and clean:
        raise typer.BadParameter("--fresh does not go with --clean, which measures nothing")
    if clean:
        run_clean(as_json=as_json, dry_run=dry_run)
    else:
        run_doctor(as_json=as_json, fresh=fresh, limit_s=limit_s)


def _schedules() -> list[str]:
    return [*schedule_names(), "all"]


@app.command()
def simulate(
    *,
    schedule: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(_schedules())}, or a file that holds one as text.",
            autocompletion=_schedules,
        ),
    ] = "1f1b",
    stages: Annotated[int | None, typer.Option(help="Number of stages.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Number of microbatches.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks, if not as many as the schedule takes.")
    ] = None,
    forward: Annotated[
        str | None,
        typer.Option(help="Time of a forward: 5ms, or one for each stage, 5ms,6ms,5ms,9ms."),
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="Time of a backward, both halves together; likewise.")
    ] = None,
    backward_input: Annotated[
        str | None, typer.Option(help="Time of the half that the stage before waits for.")
    ] = None,
    backward_weight: Annotated[
        str | None, typer.Option(help="Time of the other half, the gradients of the weights.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(help="Time of a message, or one for each pair of neighbour stages."),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Instead of --message: the time that any message takes.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="With --activation-bytes: of an edge, such as 12.5GB/s.")
    ] = None,
    activation_bytes: Annotated[
        str | None, typer.Option(help="Size of a message, such as 8MiB; or one for each pair.")
    ] = None,
    kept_bytes: Annotated[
        str | None,
        typer.Option(help="What a microbatch leaves in a stage until its backward, such as 1GiB."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the step into this file, .svg or .png.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the step as a trace for ui.perfetto.dev into this .json."),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print what each rank does, step by step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a step of a pipeline takes, without running it.

    It also shows where its ranks are idle, and how many activations they keep. For example:
    `mpimesh simulate --stages 4 --microbatches 8 --forward 5ms --backward 10ms`.
    `--schedule all` compares the schedules on as many ranks as there are stages. Needs no MPI.
    """
    from mpimesh.cli.simulate import Request, StepTimes, run_simulate

    with _errors():
        times = StepTimes.read(
            forward=forward,
            backward=backward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            message=message,
            latency=latency,
            bandwidth=bandwidth,
            activation_bytes=activation_bytes,
            kept_bytes=kept_bytes,
        )
        request = Request(schedule, stages, microbatches, ranks, svg, trace, table, as_json)
        run_simulate(request, times)


@app.command()
def bench(
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="About how long it measures, whatever the ranks.")
    ] = 120.0,
    as_json: Json = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row for each collective, size and way here.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the times over the sizes here, .svg or .png.")
    ] = None,
) -> None:
    """Measure the collectives on these ranks, beside mpi4py's.

    Run it as the program that is to run: `mpiexec -n 4 mpimesh bench`, or `srun mpimesh bench`.
    Each collective of arrays of 8 B to 64 MiB goes by each way that mpimesh has, and by raw mpi4py;
    the ways take turns. Rank 0 prints the medians.
    """
    from mpimesh.cli.bench import run_bench
    from mpimesh.runtime import Launch, exit_all

    with _errors(quiet=bool(Launch.detect().rank), leave=exit_all):
        run_bench(seconds=seconds, as_json=as_json, csv_path=csv, svg_path=svg)


@app.command()
def flight(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The MPIMESH_RECORD_DIR of the job that failed.")
    ],
) -> None:
    """Say where the ranks of a failed job differ.

    It also shows who waits for whom. Reads what each rank has left in DIR: `rank-N.json`, or
    `rank-N.ring` if it was killed. Needs no MPI. It exits with 2 if there is none.
    """
    from mpimesh.cli.flight import run_flight

    with _errors():
        run_flight(folder)


@app.command()
def ucx_env() -> None:
    """Print what makes MPI use a UCX that can reach a GPU.

    That is the UCX of the packages libucx-cu13 or libucx-cu12. For a POSIX shell such as bash,
    before mpiexec or srun: `eval "$(mpimesh ucx-env)"`. Starts no MPI. If none of them is installed
    or this MPI cannot use it, it exits with 2, and prints `false`, so that the eval fails, too.
    """
    from mpimesh.cli.ucx_env import run_ucx_env

    with _errors(printed="false;"):
        run_ucx_env()


# -- checkpoint -----------------------------------------------------------------------------------


@checkpoint.command("ls")
def list_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoints' folder.")],
) -> None:
    """List the checkpoints in a folder, with those that are damaged or were not finished.

    A checkpoint is complete if its manifest is whole, and each of its files is there with its size;
    `verify` reads the files, too.
    """
    from mpimesh.cli.checkpoint import run_ls

    with _errors():
        run_ls(folder)


@checkpoint.command()
def show(path: CheckpointPath) -> None:
    """Show the arrays and the values of a checkpoint."""
    from mpimesh.cli.checkpoint import run_show

    with _errors():
        run_show(path)


@checkpoint.command()
def verify(path: CheckpointPath) -> None:
    """Read all of a checkpoint once and say whether it is whole; it exits with 1 if it is not."""
    from mpimesh.cli.checkpoint import run_verify

    with _errors():
        if not run_verify(path):
            raise typer.Exit(1)


@checkpoint.command()
def export(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Take arrays whose name fits a pattern such as 'model.*'; repeatable."),
    ] = None,
    strip: Annotated[
        str, typer.Option(help="What to leave out where names begin with it, such as 'model.'.")
    ] = "",
) -> None:
    """Write arrays of a checkpoint whole into one safetensors file, for other programs.

    `--only 'model.*' --strip model.` gives the names that a model of PyTorch or Hugging Face has.
    """
    from mpimesh.cli.checkpoint import run_export

    with _errors():
        run_export(path, out, only=only or [], strip=strip)
