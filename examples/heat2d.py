"""Solve the heat equation on a 2-D mesh, and train a surrogate on other ranks of the same world.

    mpiexec -n 5 python examples/heat2d.py
    python examples/heat2d.py                        one rank, which does both
    python examples/heat2d.py --virtual 5            five ranks as threads of one process

         the simulation: y=2, x=2            the surrogate: rows=1
        +---------+ +---------+
        | rank 0  |:| rank 1  |  field       +-----------------+
        +---------+ +---------+  every       | rank 4: u, Lu,  |
         ..halo..    ..halo..    20 steps    | LLu -> u later  |
        +---------+ +---------+  -------->   +-----------------+
        | rank 2  |:| rank 3  |
        +---------+ +---------+

Each step reads the edges of the neighbours' blocks in place, while the inside is worked out. Every
20 steps the field is handed to the surrogate's mesh, in another layout, while the simulation goes
on. The surrogate learns, by least squares over all that it has seen, to tell the field 20 steps
ahead in one: u + a Lu + b LLu, where L is the sum of the four neighbours less four times the point.
Its last prediction goes back to the simulation's mesh, and is compared with what comes out there.

It prints the largest error against the exact solution on two grids, the order that they show (2),
the weights learned, and the error of the prediction beside that of predicting no change:

    simulation on y=2,x=2, surrogate on rows=1
    periodic ends, 32 x 32 points, 100 steps to t = 0.0195: largest error 1.61e-03
    periodic ends, 64 x 64 points, 400 steps to t = 0.0195: largest error 4.01e-04
    order 2.00
    the surrogate learned u + 3.98 Lu + 6.69 LLu
    20 steps ahead it is 1.3e-05 off; no change would be 1.8e-02 off
    wrote out/heat2d.png
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from argparse import Namespace
from collections.abc import Callable, Sequence
from math import isqrt, log2
from typing import Any

import numpy as np
from common.figure import OUT, save_figure
from common.program import DEFAULT, Parser, file_named, positive, run_program
from common.report import MeshReport
from rich.progress import Progress

import mpimesh as mm

MODES = ((1, 1, 1.0), (2, 1, 0.5), (1, 3, 0.25))
"""Waves along y and x, and their height at the start."""

RATE = 0.2
"""dt / h^2: the step in time over the square of the step in space. Above 0.25 it would blow up."""


class Waves:
    """The heat equation du/dt = div grad u with known solution, on a grid of points.

    Args:
        points: How many steps of h an axis has. Fixed ends are points that never change, so
            there is one less on the grid.
        ends: "periodic", or "fixed": 0 all around, half a wave where periodic ends have a whole.
    """

    def __init__(self, points: int, ends: str) -> None:
        self.boundary = "periodic" if ends == "periodic" else 0.0
        self.first = 0 if ends == "periodic" else 1
        self.shape = (points - self.first, points - self.first)
        self.h = 1 / points
        self.dt = RATE * self.h**2
        self.wave = 2 * np.pi if ends == "periodic" else np.pi

    def exact(self, index: tuple[slice, ...], time: float) -> np.ndarray:
        """Return the solution at the points of a block."""
        y, x = ((np.arange(part.start, part.stop) + self.first) * self.h for part in index)
        field = np.zeros((y.size, x.size))
        for in_y, in_x, height in MODES:
            decay = np.exp(-(self.wave**2) * (in_y**2 + in_x**2) * time)
            field += (
                height
                * decay
                * np.outer(np.sin(in_y * self.wave * y), np.sin(in_x * self.wave * x))
            )
        return field


def make_meshes(ranks: int) -> tuple[mm.DeviceMesh, mm.DeviceMesh]:
    """Share the world out: a quarter of it, one rank at least, is for the surrogate."""
    surrogates = max(1, ranks // 4)
    solvers = max(1, ranks - surrogates)
    rows = next(n for n in range(isqrt(solvers), 0, -1) if solvers % n == 0)
    simulation = mm.Mesh({"y": rows, "x": solvers // rows}, list(range(solvers)))
    surrogate = mm.Mesh({"rows": surrogates}, list(range(ranks - surrogates, ranks)))
    return mm.DeviceMesh(simulation), mm.DeviceMesh(surrogate)


class Simulation:
    """The field on the ranks of one mesh; on others it has no block, and moves nothing.

    Args:
        waves: The problem.
        mesh: The ranks.
    """

    def __init__(self, waves: Waves, mesh: mm.DeviceMesh) -> None:
        self.waves, self.mesh, self.time = waves, mesh, 0.0
        start = mm.from_callback(
            waves.shape, mesh, "y=S0, x=S1", lambda index: waves.exact(index, 0.0), dtype=float
        )
        self.halo = mm.Halo(start, 1, waves.boundary)
        self.now, self.then = self.halo.field(start), self.halo.field()
        self.runs_here = mesh.contains_rank(mesh.rank)

    def step(self) -> None:
        """Do one step in time."""
        self.time += self.waves.dt
        if not self.runs_here:
            return
        coming = self.halo.start(self.now)
        self.update(self.halo.inner)  # needs no neighbour
        coming.resolve()
        for box in self.halo.rim:
            self.update(box)
        self.now, self.then = self.then, self.now

    def update(self, box: tuple[slice, ...]) -> None:
        """Work out the next values in a box of the padded block."""
        u = self.now.padded
        np.multiply(neighbours_less_self(u, box), RATE, out=self.then.padded[box])
        self.then.padded[box] += u[box]

    def error(self, other: mm.DTensor | None = None) -> float:
        """Return the largest difference from `other`, or from the exact solution."""
        if not self.runs_here:
            return 0.0
        field = self.now.tensor
        if other is None:
            (rows, columns) = field.layout.box(field.shape, self.mesh.rank)
            values = self.waves.exact((slice(*rows), slice(*columns)), self.time)
        else:
            values = other.local
        most = np.abs(field.local - values).max(initial=0.0)
        return float(self.mesh.group().all_reduce(np.array(most), "max").resolve())


def neighbours_less_self(u: np.ndarray, box: tuple[slice, ...]) -> np.ndarray:
    """Return the sum of the four neighbours of each point of a box, less four times the point."""
    rows, columns = box
    total = -4 * u[box]
    for by in (-1, 1):
        total += u[rows.start + by : rows.stop + by, columns]
        total += u[rows, columns.start + by : columns.stop + by]
    return total


class Surrogate:
    """A linear model of the field some steps ahead, which learns from each field that comes.

    Args:
        waves: The problem.
        mesh: Its ranks, which share the rows out; on others it does nothing.
    """

    def __init__(self, waves: Waves, mesh: mm.DeviceMesh) -> None:
        self.waves, self.mesh = waves, mesh
        self.runs_here = mesh.contains_rank(mesh.rank)
        self.seen: list[mm.DTensor] = []  # the last field, and what L makes of it once and twice
        self.products = np.zeros((2, 3))
        self.weights = np.zeros(2)

    def learn(self, field: mm.DTensor) -> None:
        """Take a field, which is what the one before it has become."""
        if not self.runs_here:
            return
        if self.seen:
            u, lu, llu = (x.local for x in self.seen)
            columns = np.stack([lu.ravel(), llu.ravel(), (field.local - u).ravel()])
            self.products += self.mesh.group().all_reduce(columns[:2] @ columns.T).resolve()
            self.weights = np.linalg.solve(self.products[:, :2], self.products[:, 2])
        once = self.neighbours(field)
        self.seen = [field, once, self.neighbours(once)]

    def neighbours(self, x: mm.DTensor) -> mm.DTensor:
        """Return Lx: the sum of the neighbours of each point, less four times the point."""
        halo = mm.Halo(x, 1, self.waves.boundary)
        padded = halo.exchange(x)
        block = neighbours_less_self(padded, halo.interior)
        return mm.DTensor.from_local(block, self.mesh, x.placement, shape=x.shape)

    def predict(self) -> mm.DTensor:
        """Return what the last field will become."""
        if not self.runs_here:
            return mm.empty(self.waves.shape, self.mesh, "rows=S0")
        once, twice = self.weights
        model = mm.local_map(lambda u, lu, llu: u + once * lu + twice * llu, "rows=S0")
        return model(*self.seen)


def simulate(
    simulation: Simulation, steps: int, tick: Callable[[], None], surrogate: Surrogate, every: int
) -> mm.DTensor:
    """Simulate, and hand each `every`-th field but the last to the surrogate; return what it got.

    While a field travels, and while the surrogate learns from it, the simulation goes on.
    """
    coming = None
    for step in range(1, steps + 1):
        simulation.step()
        tick()
        if step % every == 0 and step < steps:
            if coming is not None:
                surrogate.learn(coming.resolve())
            handed = simulation.now.tensor.copy()  # the field itself changes meanwhile
            coming = handed.start_redistribute("rows=S0", mesh=surrogate.mesh)
    surrogate.learn(coming.resolve())
    return handed


def run(options: Namespace) -> None:
    """Run the program of one rank."""
    with mm.DeviceMesh("all=-1") as world:
        report = MeshReport(world, [options.picture])
        mesh, other = make_meshes(world.size)
    with mesh, other:
        shows, console = mesh.rank == 0, report.console
        report.say(f"simulation on {mesh.dims_text}, surrogate on {other.dims_text}")
        coarse = Simulation(Waves(options.points // 2, options.ends), mesh)
        fine = Simulation(Waves(options.points, options.ends), mesh)
        surrogate = Surrogate(fine.waves, other)
        coarse_steps, steps = options.steps // 4, options.steps
        with Progress(console=console, disable=not (shows and console.is_terminal)) as progress:
            task = progress.add_task("simulating", total=coarse_steps + steps)
            for _ in range(coarse_steps):
                coarse.step()
                progress.advance(task)
            handed = simulate(fine, steps, lambda: progress.advance(task), surrogate, options.every)
        errors = []
        for one, count in ((coarse, coarse_steps), (fine, steps)):
            errors.append(one.error())
            report.say(
                f"{options.ends} ends, {one.waves.shape[0]} x {one.waves.shape[1]} points, "
                f"{count} steps to t = {one.time:.4f}: largest error {errors[-1]:.2e}"
            )
        guess = surrogate.predict().redistribute("y=S0, x=S1", mesh=mesh)
        weights = mm.from_callback(
            (2,), other, "rows=R", lambda index: surrogate.weights[index], dtype=float
        ).redistribute("y=R, x=R", mesh=mesh)
        off, change = fine.error(guess), fine.error(handed)
        whole = [x.full(root=0) for x in (fine.now.tensor, guess)]
        if not shows:
            return
        report.say(f"order {log2(errors[0] / errors[1]):.2f}")
        once, twice = weights.local
        report.say(f"the surrogate learned u + {once:.2f} Lu + {twice:.2f} LLu")
        report.say(
            f"{options.every} steps ahead it is {off:.1e} off; no change would be {change:.1e} off"
        )
        save_figure(options.picture, lambda axes: draw(axes, whole), columns=2)


def draw(axes: Any, fields: list[np.ndarray]) -> None:
    """Draw the simulation and the surrogate's prediction in one scale."""
    most = max(np.abs(field).max() for field in fields)
    for ax, field, title in zip(axes, fields, ("simulation", "surrogate"), strict=True):
        ax.imshow(field, cmap="RdBu_r", vmin=-most, vmax=most, extent=(0, 1, 0, 1), origin="lower")
        ax.set_title(title)


def parse_options(arguments: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(prog="heat2d.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--points", type=positive, default=64, metavar="N", help=f"along an axis {DEFAULT}"
    )
    parser.add_argument(
        "--ends", choices=("periodic", "fixed"), default="periodic", help=f"of the field {DEFAULT}"
    )
    parser.add_argument(
        "--steps", type=positive, default=400, metavar="N", help=f"in time {DEFAULT}"
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=20,
        metavar="STEPS",
        help=f"between two fields that the surrogate gets {DEFAULT}",
    )
    parser.add_argument(
        "--picture",
        type=file_named(".png"),
        default=OUT / "heat2d.png",
        metavar="PNG",
        help=f"where the last field is drawn {DEFAULT}",
    )
    parser.add_virtual()
    options = parser.parse(arguments)
    if options.points % 2 or options.points < 8:
        parser.error(f"argument --points: must be even, and at least 8, got {options.points}")
    if options.steps % options.every or options.steps < 4 * options.every:
        parser.error(
            f"argument --steps: must be a multiple of --every, at least four times that, got "
            f"{options.steps} and {options.every}"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    return run_program("heat2d.py", run, parse_options(arguments))


if __name__ == "__main__":
    # All ranks end with the same code; a batch system is to see it, whatever the launcher.
    mm.exit_all(main())
