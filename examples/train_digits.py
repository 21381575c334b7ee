"""Train a classifier of handwritten digits on a mesh of ranks: replicas of a pipeline of stages.

    mpiexec -n 4 python examples/train_digits.py --mesh dp=2,pp=2 --microbatches 8
    python examples/train_digits.py                  one rank, without mpiexec
    python examples/train_digits.py --virtual 4      four ranks as threads of one process
    mpiexec -n 2 python examples/train_digits.py --device auto    on GPUs, if each rank has one

On dp=2,pp=2 a stage passes each microbatch on to the next, and two replicas add up their gradients:

                               stage 0: two blocks       stage 1: two blocks
    replica 0, rows 0-63       rank 0      activations >      rank 1
                                 |         < gradients          |
                                 dp                             dp
                                 |         activations >        |
    replica 1, rows 64-127     rank 2      < gradients        rank 3

It prints the mesh, the loss of the epochs, how many digits it recognises of those that training
never sees, and what each rank has sent; out/ has pictures of a step and of the losses:

    epoch   1/30  loss 2.2149  1,598 images/s
    ...
    epoch  30/30  loss 0.0171  1,352 images/s
    test accuracy 0.9861: 355 of 360 digits are right

Whatever the mesh, the schedule and the number of microbatches, the training is the same, up to
rounding: with --dtype float64 the losses of all steps agree to ten digits. With --checkpoint DIR a
run that was stopped goes on, also on another mesh. --help shows all options. Beside this file,
digits/ holds what has little to do with meshes, and common/ what all examples share.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from argparse import Namespace
from collections.abc import Sequence
from statistics import median
from typing import Any

from common.checkpoint import RunCheckpoints
from common.device import array_library
from common.program import run_program
from common.report import gather_json
from digits.console import Report, parse_options
from digits.data import CLASSES, PIXELS, Batches, load_digits

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.runtime.events import gather_events
from mpimesh.schedule import stages_per_rank

NUM_BLOCKS = 4


def make_stages(num_stages: int, hidden: int) -> list[mm.PipelineStage]:
    """Cut a multilayer perceptron into stages.

    Every rank makes all stages, which costs nothing: layers get their memory later, and only
    on the ranks that run them.
    """
    blocks: list[list[nn.Module]] = [[nn.Linear(PIXELS, hidden), nn.ReLU()]]
    blocks += [[nn.Linear(hidden, hidden), nn.ReLU()] for _ in range(NUM_BLOCKS - 2)]
    blocks += [[nn.Linear(hidden, CLASSES)]]
    stages = [mm.PipelineStage(number) for number in range(num_stages)]
    for number, block in enumerate(blocks):
        # In order, evenly; a stage beyond the number of blocks stays empty and passes things on.
        stage = stages[number * num_stages // NUM_BLOCKS]
        for layer in block:
            stage.add_layer(layer)
    return stages


def make_optimizer(pipe: mm.PipelineParallel, options: Namespace) -> optim.Optimizer:
    """Make the optimizer of this rank's stages."""
    if options.optimizer == "sgd":
        return optim.SGD(pipe.parameters(), lr=options.lr, momentum=0.9)
    return optim.AdamW(pipe.parameters(), lr=options.lr)


def run_settings(options: Namespace) -> dict[str, Any]:
    """Return what two runs must have in common to be one training: the mesh is not among it."""
    names = ("batch_size", "hidden", "optimizer", "lr", "clip", "dtype", "seed")
    return {name: getattr(options, name) for name in names}


class Training:
    """The training on one rank. Every rank makes one, and calls the same methods in the same order.

    Args:
        mesh: The ranks.
        options: The command line.
        report: What rank 0 shows.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace, report: Report) -> None:
        self.mesh = mesh
        self.options = options
        self.report = report
        # Every rank holds the data set and knows all stages, but gives memory to its own only.
        self.xp, self.computes = array_library(mesh, options.device)
        self.digits = load_digits(mesh, options.dtype)
        self.batches = Batches(len(self.digits.train_x), options.batch_size, options.seed)
        self.tracer = mm.Tracer(mesh.rank)
        num_stages = mesh.dim_size("pp") * stages_per_rank(options.schedule)
        self.stages = make_stages(num_stages, options.hidden)
        self.pipe = mm.PipelineParallel(
            self.stages,
            options.microbatches,
            mesh=mesh,
            schedule=options.schedule,
            seed=options.seed,
            dtype=options.dtype,
            xp=self.xp,
            tracer=self.tracer,
        )
        self.optimizer = make_optimizer(self.pipe, options)
        self.checkpoints = RunCheckpoints(
            options.checkpoint,
            mesh,
            run_settings(options),
            every=options.checkpoint_epochs * self.batches.per_epoch,
        )
        self.state = {"model": self.pipe, "optimizer": self.optimizer, "losses": []}
        self.resumed_at = self.checkpoints.load(self.state)
        self.losses: list[float] = self.state["losses"]
        self.last_step = options.epochs * self.batches.per_epoch
        self.seconds = 0.0
        self.rates: list[float] = []  # images per second of each step
        self.rates_alone: list[float] = []

    def run(self, guard: mm.store.RunGuard) -> bool:
        """Train up to the last step, or until a signal. Returns whether it came to the end."""
        traced_step = self.options.trace_step or self.last_step - self.batches.per_epoch + 1
        if traced_step > self.last_step:
            self.report.say(f"No step is drawn: there are {self.last_step}, not {traced_step}.")
        with self.report.progress(self.resumed_at, self.batches) as progress:
            for step in range(self.resumed_at + 1, self.last_step + 1):
                if step == traced_step:
                    self.traced_step(step)
                else:
                    self.step(step)
                progress.step(self.losses, self.seconds)
                stopping = guard.stopping(self.mesh)  # the same on every rank
                last = stopping or step == self.last_step
                self.checkpoints.save(step, self.state, force=last)
                if stopping and step < self.last_step:
                    break
        self.checkpoints.close()
        return len(self.losses) == self.last_step

    def step(self, number: int) -> None:
        """Do one training step."""
        start_s = time.perf_counter()
        x, target = self.batch(number)
        # Every rank passes the whole batch; the pipeline takes what is for this rank.
        loss = self.pipe.train_step(x, target, loss=nn.cross_entropy)
        if self.options.clip:
            self.pipe.clip_grad_norm(self.options.clip)
        with self.tracer.span("optimizer", "optimizer"):
            self.optimizer.step()
        self.losses.append(loss)
        seconds = time.perf_counter() - start_s
        self.seconds += seconds
        self.rates.append(len(x) / seconds)

    def batch(self, number: int) -> tuple[Any, Any]:
        """Return the images and digits of a step, on the device that computes."""
        rows = self.batches[number]
        x, target = self.digits.train_x[rows], self.digits.train_y[rows]
        return self.xp.asarray(x), self.xp.asarray(target)

    def traced_step(self, number: int) -> None:
        """Do one training step; draw what every rank did when, and what its schedule predicts."""
        self.mesh.barrier()  # the picture is to show a step, not who came late to it
        self.tracer.clear()
        self.step(number)
        self.report.draw_timeline(gather_events(self.mesh, self.tracer), number)
        self.report.draw_step(self.pipe.step_report())

    def measure_alone(self, seconds: float = 1.0) -> None:
        """Measure the same training on rank 0 by itself, while the others wait. Collective."""
        options = self.options
        with mm.DeviceMesh(mm.Mesh({"dp": 1, "pp": 1}, [0])) as one:
            if self.mesh.rank == 0:
                stages = make_stages(1, options.hidden)
                pipe = mm.PipelineParallel(stages, 1, mesh=one, dtype=options.dtype, xp=self.xp)
                optimizer = make_optimizer(pipe, options)
                end_s = time.perf_counter() + seconds
                while time.perf_counter() < end_s or len(self.rates_alone) < 3:
                    start_s = time.perf_counter()
                    x, target = self.batch(len(self.rates_alone) + 1)
                    pipe.train_step(x, target, loss=nn.cross_entropy)
                    if options.clip:
                        pipe.clip_grad_norm(options.clip)
                    optimizer.step()
                    self.rates_alone.append(len(x) / (time.perf_counter() - start_s))
            self.mesh.barrier()

    def gain(self) -> tuple[float, float] | None:
        """Return images per second of all ranks and of one alone, in a step in the middle of all.

        A median: a step during which other programs had the cores counts as any other.
        """
        if not (self.rates and self.rates_alone):
            return None
        return median(self.rates), median(self.rates_alone)

    def accuracy(self) -> float:
        """Return the share of the test images whose digit the model finds."""
        scores = self.pipe.forward(self.xp.asarray(self.digits.test_x), everywhere=True)
        right = scores.argmax(axis=1) == self.xp.asarray(self.digits.test_y)
        return float(right.mean())


def show_results(training: Training, report: Report) -> None:
    """Test the model; show and write what came out. Collective."""
    mesh, options = training.mesh, training.options
    accuracy = training.accuracy()
    mine = mesh.traffic()
    traffic = gather_json(mesh.group(), {"calls": mine.calls, "bytes": mine.bytes})
    steps_here = range(training.resumed_at + 1, training.last_step + 1)
    images = sum(len(training.batches[step]) for step in steps_here)
    images_per_s = images / training.seconds if images else None
    results = {
        "mesh": mesh.dims_text,
        "ranks": mesh.size,
        "schedule": options.schedule,
        "microbatches": options.microbatches,
        "epochs": options.epochs,
        **run_settings(options),
        "steps_per_epoch": training.batches.per_epoch,
        "resumed_at_step": training.resumed_at,
        "test_accuracy": accuracy,
        "images_per_s": images_per_s,
        "median_images_per_s": training.gain(),
        "seconds": training.seconds,
        "losses": training.losses,
        "traffic": traffic,
    }
    report.show_results(accuracy, len(training.digits.test_y), training.seconds, images_per_s)
    report.show_gain(training.gain())
    report.show_traffic(traffic)
    report.show_saved(options.checkpoint, training.last_step)
    report.write(results)


def train(options: Namespace, guard: mm.store.RunGuard) -> int:
    """Run the program of one rank, and return its exit code."""
    with mm.DeviceMesh(options.mesh) as mesh:
        report = Report(mesh, options)
        training = Training(mesh, options, report)
        report.show_mesh()
        report.say(training.computes)
        report.show_stages(training.stages)
        if options.compare and mesh.size > 1:
            training.measure_alone()
        if training.run(guard):
            show_results(training, report)
            return 0
        report.say(f"stopped after step {len(training.losses)}, saved in {options.checkpoint}")
        return guard.code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    options = parse_options(arguments)
    # Without a folder to save in, signals end the program as ever.
    guard = mm.run_guard() if options.checkpoint else mm.run_guard(signals=())
    return run_program("train_digits.py", train, options, guard)


if __name__ == "__main__":
    # All ranks end with the same code; a batch system is to see it, whatever the launcher.
    mm.exit_all(main())
