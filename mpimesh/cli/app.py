"""The command line: ``python -m mpimesh COMMAND``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpimesh.cli import checkpoint
from mpimesh.cli.doctor import run_clean, run_doctor
from mpimesh.cli.flight import run_flight
from mpimesh.cli.quantities import InputError
from mpimesh.cli.simulate import ALL, Request, run_simulate
from mpimesh.cli.step_times import StepTimes
from mpimesh.cli.ucx_env import run_ucx_env
from mpimesh.errors import MpimeshError
from mpimesh.schedule import schedule_names

__all__ = ["app"]

app = typer.Typer(
    name="python -m mpimesh",
    help="A device mesh for MPI.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(checkpoint.app)


@app.callback()
def main() -> None:
    """A device mesh for MPI."""


@app.command()
def doctor(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object and nothing else.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="First forget what earlier jobs have measured and proven here, and do it anew.",
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
    """Say what this machine and its MPI can do, what is wrong, and what mends it.

    Run it alone, under mpiexec or under srun, as the program that is to run:
    `mpiexec -n 4 python -m mpimesh doctor`. It exits with 1 if something is wrong that makes
    programs fail, else with 0.
    """
    if dry_run and not clean:
        raise typer.BadParameter("--dry-run goes with --clean")
    if fresh and clean:
        raise typer.BadParameter("--fresh does not go with --clean, which measures nothing")
    if clean:
        run_clean(as_json=as_json, dry_run=dry_run)
    else:
        run_doctor(as_json=as_json, fresh=fresh, limit_s=limit_s)


@app.command()
def simulate(
    *,
    schedule: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(schedule_names())}, {ALL}, or a file that holds one as text."
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
    svg: Annotated[Path | None, typer.Option(help="Draw the step into this file.")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print what each rank does, step by step.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object and nothing else.")
    ] = False,
) -> None:
    """Say what a step of a pipeline takes and where its ranks are idle, without running it.

    `all` compares the schedules on as many ranks as there are stages. Needs no MPI.
    """
    try:
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
        run_simulate(Request(schedule, stages, microbatches, ranks, svg, table, as_json), times)
    except (InputError, MpimeshError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def flight(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The MPIMESH_RECORD_DIR of the job that failed.")
    ],
) -> None:
    """Say where the ranks of a failed job first differ, and who waits for whom.

    Reads what each rank has left in DIR: `rank-N.json`, or `rank-N.ring` if it was killed. Needs no
    MPI. It exits with 2 if there is none.
    """
    try:
        run_flight(folder)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def ucx_env() -> None:
    """Print what makes MPI use the UCX of libucx-cu13 or libucx-cu12, which can reach a GPU.

    For a POSIX shell such as bash, before mpiexec or srun: `eval "$(python -m mpimesh ucx-env)"`.
    Starts no MPI. If none of them is installed or this MPI cannot use it, it exits with 2, and
    prints `false`, so that the eval fails, too.
    """
    try:
        run_ucx_env()
    except InputError as error:
        typer.echo("false;")
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
