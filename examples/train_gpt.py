"""Train a GPT that reads bytes, on the help texts that come with Python, and let it write.

    mpiexec -n 4 python examples/train_gpt.py --mesh dp=2,tp=2
    mpiexec -n 8 python examples/train_gpt.py --mesh dp=2,pp=2,tp=2 --shard 3 --sequence-parallel
    python examples/train_gpt.py --text FILE        one rank, without mpiexec
    python examples/train_gpt.py --virtual 4        four ranks as threads of one process

On dp=2,pp=2,tp=2 a layer is shared by two ranks, a stage passes on to the next, and two replicas
add up their gradients:

                         stage 0: bytes to vectors,      stage 1: blocks, norm,
                                  blocks                          vectors to bytes
    replica 0, rows 0-7     rank 0 -- tp -- rank 1   pp >   rank 2 -- tp -- rank 3
                               |               |               |               |
                               dp              dp              dp              dp
                               |               |               |               |
    replica 1, rows 8-15    rank 4 -- tp -- rank 5   pp >   rank 6 -- tp -- rank 7

It prints the mesh, the losses, of steps and on text that training never sees, and what the model
writes, which has begun to look like its texts:

    step    1/300  loss 5.587  norm 6.57  rate 0.00010  3,978 bytes/s
    ...
    step  300/300  loss 1.900  held out 1.692 (300)  norm 1.10  rate 0.00030  3,639 bytes/s
    loss on 8,192 bytes held out 1.6918: 2.44 bits a byte; guessing takes 8
    the model writes:
    ... an names the used a conten the litermatho definime forred trigvalue uses and functions ...
    the weights are not kept: --checkpoint DIR saves them

norm is that of the gradients before they are clipped, rate the learning rate; bytes/s are those of
all ranks together, of training alone.

It takes about a minute and a half on two cores. Whatever the mesh, the training is the same, up to
rounding: with --dtype float64 the losses of all steps agree to 1e-9. float16 and bfloat16 save
memory, not time: on a CPU NumPy is tens of times slower with the first, and slower with the second.
With --checkpoint DIR a run that was stopped goes on, also on another mesh; and a finished one goes
on for more --steps, with the --decay-steps of before: the rate then stays where it ended. --help
shows all options. Beside this file, gpt/ holds what has little to do with meshes, and common/ what
all examples share.
"""

from __future__ import annotations

import os

# The cores are for the ranks: more threads than cores would make all of them slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from common.checkpoint import RunCheckpoints
from common.program import ProgramError, run_program
from gpt.console import SCHEDULES, Report, parse_options
from gpt.data import BYTES, load_text
from gpt.sample import sample_text

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import ModuleError, ScheduleError
from mpimesh.runtime.events import gather_events
from mpimesh.schedule import stages_per_rank

EVALUATION_ROWS = 128
"""Windows of the text that is held out, always the same ones."""


def make_layers(options: Namespace, tp: mm.ProcessGroup | None) -> list[nn.Module]:
    """Return the layers of the model, whole or shared by the ranks of `tp`."""
    split_sequence = options.sequence_parallel and tp is not None
    return mm.parallel.gpt_layers(
        BYTES,
        options.features,
        options.layers,
        options.heads,
        max_tokens=options.context,
        rotary=True,
        dropout=options.dropout,
        tied=options.tied,
        tp=tp,
        sequence_parallel=split_sequence,
        tokens=options.context if split_sequence else None,  # tp ranks may share it unevenly
    )


def layer_times(options: Namespace, layers: Sequence[nn.Module]) -> list[float]:
    """Return how long layers take, in multiplications for each byte: what stages are cut by."""
    features = options.features
    block = 12 * features**2 + 2 * options.context * features
    times = [float(block if isinstance(layer, nn.GptBlock) else features) for layer in layers]
    times[-1] = float(features * BYTES)
    return times


def make_model(
    mesh: mm.DeviceMesh, options: Namespace, tracer: mm.Tracer | None
) -> mm.PipelineParallel:
    """Make this rank's part of the model. Collective.

    Raises:
        ProgramError: On every rank, if the model is too small for the mesh.
    """
    tp = mesh.group("tp") if mesh.dim_size("tp") > 1 else None
    if tp is None and options.sequence_parallel:
        raise ProgramError(
            f"--sequence-parallel: no ranks share a layer on the mesh {mesh.dims_text}"
        )
    num_stages = mesh.dim_size("pp") * stages_per_rank(options.schedule)
    microbatches = options.microbatches or (4 if num_stages > 1 else 1)
    try:
        layers = make_layers(options, tp)
        stages = mm.PipelineParallel.partition(
            layers, num_stages, mesh=mesh, times=layer_times(options, layers)
        )
        return mm.PipelineParallel(
            stages,
            microbatches,
            mesh=mesh,
            schedule=options.schedule,
            seed=options.seed,
            dtype=options.dtype,
            tracer=tracer,
        )
    except (ModuleError, ScheduleError) as error:
        # All ranks have the same options, so all of them come here.
        raise ProgramError(str(error)) from error


def make_optimizer(
    mesh: mm.DeviceMesh, pipe: mm.PipelineParallel, options: Namespace
) -> mm.ParallelOptimizer:
    """Make the optimizer of this rank's part of the model. Collective."""
    adam = optim.AdamW(
        pipe.parameters(),
        lr=options.lr,
        betas=(0.9, 0.99),
        weight_decay=options.weight_decay,
        # Norms and biases have one axis. A pull to 0 would only keep them from what they are for.
        decay_mask=lambda parameter: len(parameter.shape) > 1,
    )
    return mm.ParallelOptimizer(
        adam,
        pipe,
        zero=options.shard,
        # Gradients of float16 would vanish. All ranks leave out a step in which one overflowed.
        scaler=optim.LossScaler() if options.dtype == "float16" else None,
        group=mesh.group(),
    )


def run_settings(options: Namespace) -> dict[str, Any]:
    """Return what two runs must have in common to be one training: the mesh is not among it."""
    names = ("layers", "features", "heads", "context", "dropout", "tied", "dtype")
    names += ("batch_size", "decay_steps", "lr", "lr_schedule", "warmup")
    names += ("weight_decay", "clip", "seed")
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
        self.text = load_text(mesh, options.text, options.context)
        self.tracer = mm.Tracer(mesh.rank) if options.timeline else None
        self.pipe = make_model(mesh, options, self.tracer)
        self.loss: nn.CrossEntropy = nn.cross_entropy
        if mesh.dim_size("tp") > 1:
            self.loss = mm.parallel.VocabParallelCrossEntropy(BYTES, group=mesh.group("tp"))
        self.optimizer = make_optimizer(mesh, self.pipe, options)
        schedule = SCHEDULES[options.lr_schedule](options.warmup, options.decay_steps)
        self.rates = optim.LRScheduler(self.optimizer, schedule)
        # Nobody need read a large file as a whole for a run that is not kept.
        digest = self.text.digest() if options.checkpoint else ""
        settings = {**run_settings(options), "text": digest}
        self.checkpoints = RunCheckpoints(
            options.checkpoint,
            mesh,
            settings,
            every=options.checkpoint_steps,
            advice={"decay_steps": "to train longer than planned, add --decay-steps {}"},
            derived={"warmup": "decay_steps"},
        )
        self.state: dict[str, Any] = {
            "model": self.pipe,
            "optimizer": self.optimizer,
            "rates": self.rates,
            "losses": [],
            "held_out": {},
        }
        self.resumed_at = self.checkpoints.load(self.state)
        self.losses: list[float] = self.state["losses"]
        self.held_out: dict[int, float] = self.state["held_out"]
        if self.resumed_at:
            self.report.say(f"goes on after step {self.resumed_at}, saved in {options.checkpoint}")
        if self.resumed_at > options.steps:
            raise ProgramError(
                f"{options.checkpoint} is after step {self.resumed_at}, beyond --steps "
                f"{options.steps}: give more steps, or another folder"
            )
        self.batches = self.text.batches(
            mesh,
            self.pipe,
            options.steps,
            options.batch_size,
            parts=options.accumulate,
            seed=options.seed,
        )
        position = {"position": self.resumed_at * options.accumulate}
        self.batches.load_state_dict({**self.batches.state_dict(), **position})
        self.seconds = 0.0
        if self.tracer is not None and options.trace_step <= self.resumed_at:
            report.say(
                f"{options.timeline} is not drawn: step {options.trace_step} was done before this "
                f"run, which goes on after step {self.resumed_at}"
            )

    def run(self, guard: mm.store.RunGuard) -> bool:
        """Train, evaluate and save now and then. Returns whether it came to the end."""
        options = self.options
        with self.report.progress(self.resumed_at, len(self.held_out)) as progress:
            for step in range(self.resumed_at + 1, options.steps + 1):
                traced = self.tracer is not None and step == options.trace_step
                norm = self.traced_step(step) if traced else self.step(step)
                if step % options.evaluate == 0 or step == options.steps:
                    self.held_out[step] = self.evaluate()
                progress.step(self.losses, self.seconds, self.held_out, self.optimizer.lr, norm)
                stopping = guard.stopping(self.mesh)  # the same on every rank
                self.checkpoints.save(step, self.state, force=stopping or step == options.steps)
                if stopping and step < options.steps:
                    break
        self.checkpoints.close()
        if len(self.losses) < options.steps:
            return False
        if options.steps not in self.held_out:  # a longer run was stopped there
            self.held_out[options.steps] = self.evaluate()
        return True

    def step(self, number: int) -> float:
        """Do one training step; return the norm of its gradients."""
        start_s = time.perf_counter()
        options = self.options
        # Every rank passes its own rows, and None for what its stages do not take. Each part is
        # divided by the rows of all, so that the parts add up to the mean over the batch.
        train = partial(self.pipe.train_step, loss=self.loss, denominator=options.batch_size)
        with self.pipe.no_sync():
            losses = [train(*self.batches.next()) for _ in range(options.accumulate - 1)]
        losses.append(train(*self.batches.next()))
        norm = self.pipe.clip_grad_norm(options.clip)
        self.rates.step()  # before the optimizer's: step 0 of a warm-up would change nothing
        self.optimizer.step()
        self.losses.append(math.fsum(losses))
        self.seconds += time.perf_counter() - start_s
        return norm

    def traced_step(self, number: int) -> float:
        """Do one training step, and draw what every rank did when."""
        assert self.tracer is not None
        self.mesh.barrier()  # the picture is to show a step, not who came late to it
        self.tracer.clear()
        norm = self.step(number)
        self.report.draw_timeline(gather_events(self.mesh, self.tracer), number)
        return norm

    def evaluate(self) -> float:
        """Return the loss on the text that is held out. Collective.

        The ranks that have the outputs compute it; all get to know the number, and nothing else.
        """
        x, target = self.text.evaluation(EVALUATION_ROWS)
        # In parts of a training step's size, which so much memory was enough for.
        parts = -(-EVALUATION_ROWS // self.options.batch_size)
        return math.fsum(
            self.pipe.evaluate(*part, loss=self.loss, denominator=EVALUATION_ROWS)
            for part in zip(np.array_split(x, parts), np.array_split(target, parts), strict=True)
        )

    def sample(self) -> str:
        """Return what the model writes, on every rank. Collective."""
        options = self.options
        if not options.sample:
            return ""
        return sample_text(
            self.mesh,
            self.pipe,
            options.prompt,
            options.sample,
            context=options.context,
            temperature=options.temperature,
            seed=options.seed,
        )


def show_results(training: Training, report: Report) -> None:
    """Show and write what came out. Collective."""
    mesh, options = training.mesh, training.options
    steps = options.steps - training.resumed_at
    bytes_per_s = steps * options.batch_size * options.context / training.seconds if steps else None
    if bytes_per_s is not None:
        report.say(f"trained for {training.seconds:.1f} s: {bytes_per_s:,.0f} bytes/s")
    held_out = training.held_out[options.steps]
    report.say(
        f"loss on {EVALUATION_ROWS * options.context:,} bytes held out {held_out:.4f}: "
        f"{held_out / math.log(2):.2f} bits a byte; guessing takes {math.log2(BYTES):.0f}"
    )
    text = training.sample()
    if text:
        report.show_sample(text)
    report.show_saved(options.checkpoint, len(training.losses))
    report.write(
        {
            "mesh": mesh.dims_text,
            "ranks": mesh.size,
            "schedule": options.schedule,
            "sequence_parallel": options.sequence_parallel,
            "shard": options.shard,
            "accumulate": options.accumulate,
            **run_settings(options),
            "steps": options.steps,
            "resumed_at_step": training.resumed_at,
            "losses": training.losses,
            "held_out_losses": training.held_out,
            "skipped_steps": training.optimizer.skipped_steps,
            "sample": text,
            "seconds": training.seconds,
            "bytes_per_s": bytes_per_s,
        }
    )


def train(options: Namespace, guard: mm.store.RunGuard) -> int:
    """Run the program of one rank, and return its exit code."""
    with mm.DeviceMesh(options.mesh) as mesh:
        report = Report(mesh, options)
        training = Training(mesh, options, report)
        report.show_model(training.pipe)
        with training.batches:
            is_done = training.run(guard)
        if is_done:
            show_results(training, report)
            return 0
        report.say(f"stopped after step {len(training.losses)}, saved in {options.checkpoint}")
        return guard.code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on the ranks of mpiexec, or on virtual ones; return the exit code."""
    options = parse_options(arguments)
    # Without a folder to save in, signals end the program as ever.
    guard = mm.run_guard() if options.checkpoint else mm.run_guard(signals=())
    return run_program("train_gpt.py", train, options, guard)


if __name__ == "__main__":
    # All ranks end with the same code; a batch system is to see it, whatever the launcher.
    mm.exit_all(main())
