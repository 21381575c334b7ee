"""A pipeline whose stages sleep: how much longer a step takes than its schedule says.

The ideal is what the simulator says for messages that take no time. Layers that sleep leave the
cores to the runtime, and so show what it costs alone. Where PyTorch is installed, the same step by
its own pipelining over gloo stands beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks import gloo
from benchmarks.measure import FULL, TINY, Effort, Timing, in_turns
from benchmarks.rows import make_rows, size_text
from mpimesh import nn
from mpimesh.nn import Constant, Parameter
from mpimesh.schedule import lower, make_schedule, simulate, stages_per_rank

__all__ = ["run"]

MICROBATCHES = 16
_ROUNDS = 5
_IDEAL = "as simulated, messages take no time"


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline.

    Attributes:
        schedule: Its schedule.
        nbytes: What a stage hands on, for each microbatch.
        forward_s: Sleep in a forward.
        input_s: Sleep in the half of a backward that gives the input's gradient.
        weight_s: Sleep in the other half.
    """

    schedule: str
    nbytes: int
    forward_s: float = 5e-3
    input_s: float = 5e-3
    weight_s: float = 5e-3

    @property
    def text(self) -> str:
        """Its name in the table."""
        times = "/".join(f"{s * 1e3:g}" for s in (self.forward_s, self.input_s, self.weight_s))
        return f"{self.schedule}, {times} ms, {size_text(self.nbytes)}"


CASES = (
    Case("1f1b", 32 << 10),
    Case("1f1b", 8 << 20),
    Case("gpipe", 8 << 20),
    Case("zbv", 32 << 10),
    Case("zbv", 8 << 20),
    Case("1f1b", 32 << 10, 0.0, 0.0, 0.0),
)


class Sleep(nn.Module):
    """Makes an array like the one it gets, after a while. One parameter, for a backward.

    As a layer does that computes; what stands in the array does not matter.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scale = Parameter("scale", (1,), Constant(1.0))

    def forward(self, x: Any, ctx: nn.Context | None = None) -> Any:
        """Sleep, and return an array like `x`."""
        _sleep(self.case.forward_s)
        return self._made(x, ctx)

    def backward_input(self, dy: Any, ctx: nn.Context) -> Any:
        """Sleep, and return an array like `dy`."""
        _sleep(self.case.input_s)
        return self._made(dy, ctx)

    def backward_weight(self, ctx: nn.Context) -> None:
        """Sleep."""
        _sleep(self.case.weight_s)

    def _made(self, x: Any, ctx: nn.Context | None) -> Any:
        room = None if ctx is None else ctx.empty(self, x.shape, x.dtype)
        return np.empty_like(x) if room is None else room


class NoLoss:
    """A loss that costs nothing: the gradient is the output."""

    def __call__(self, y: Any, target: Any) -> float:
        """Return 0."""
        return 0.0

    def value_and_grad(self, y: Any, target: Any, *, denominator: float) -> tuple[float, Any]:
        """Return 0 and `y`."""
        return 0.0, y

    def count(self, target: Any) -> int:
        """Return the number of rows."""
        return len(target)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return rows for each case: the ideal, mpimesh, and PyTorch where it is installed."""
    comm = mesh.group().communicator.native  # type: ignore[attr-defined]
    rows: list[dict[str, Any]] = []
    for case in _cases(effort):
        with mm.DeviceMesh({"pp": mesh.world_size}, comm) as pipes:
            step, ideal_s, num_actions = _pipeline(pipes, case)
            ways = {"mpimesh": step}
            with _torch_step(comm, case) as torch_step:
                if torch_step is not None:
                    ways["torch over gloo"] = torch_step
                timings = in_turns(comm, ways, calls=1, rounds=min(_ROUNDS, effort.rounds))
        rows += _rows(case, timings, ideal_s, num_actions)
    return rows


def _rows(
    case: Case, timings: dict[str, Timing], ideal_s: float, num_actions: int
) -> list[dict[str, Any]]:
    """Return rows that compare with the ideal; without any sleep, the time of an action."""
    if not ideal_s:
        per_action = {
            f"{way}, each of {num_actions} actions": replace(
                timing, median_s=timing.median_s / num_actions
            )
            for way, timing in timings.items()
        }
        return make_rows(case.text, per_action)
    ideal = Timing(ideal_s, 1.0, 0.0, ())
    compared = {
        way: replace(timing, ratio=timing.median_s / ideal_s, over_s=timing.median_s - ideal_s)
        for way, timing in timings.items()
    }
    return make_rows(case.text, {_IDEAL: ideal, **compared})


def _cases(effort: Effort) -> Iterator[Case]:
    for case in CASES:
        if effort is TINY:
            sleeps = (case.forward_s / 10, case.input_s / 10, case.weight_s / 10)
            yield Case(case.schedule, 1 << 10, *sleeps)
        else:
            yield case


def _pipeline(mesh: mm.DeviceMesh, case: Case) -> tuple[Callable[[], object], float, int]:
    """Return one step, its ideal seconds, and the most actions of a rank."""
    ranks = mesh.world_size
    num_stages = ranks * stages_per_rank(case.schedule)
    part = ranks / num_stages  # the stages of a rank share its time
    case = replace(
        case,
        forward_s=case.forward_s * part,
        input_s=case.input_s * part,
        weight_s=case.weight_s * part,
    )
    stages = [mm.PipelineStage(s).add_layer(Sleep(case)) for s in range(num_stages)]
    pipe = mm.PipelineParallel(stages, MICROBATCHES, mesh=mesh, schedule=case.schedule)
    x = np.ones((MICROBATCHES, case.nbytes // 4), np.float32)
    loss = NoLoss()
    schedule = make_schedule(case.schedule, num_stages, MICROBATCHES)
    ideal = simulate(
        schedule,
        forward_s=case.forward_s,
        backward_input_s=case.input_s,
        backward_weight_s=case.weight_s,
    )
    num_actions = max(map(len, lower(schedule).ranks))
    return lambda: pipe.train_step(x, x, loss=loss), float(ideal.step_s), num_actions


@contextmanager
def _torch_step(comm: MPI.Intracomm, case: Case) -> Iterator[Callable[[], object] | None]:
    """Give one step of the same pipeline by PyTorch; None where there is none."""
    if gloo.available() or case.schedule not in ("1f1b", "gpipe") or not case.forward_s:
        yield None
        return
    with gloo.opened(comm) as (torch, _):
        from torch.distributed import pipelining

        class Function(torch.autograd.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(context: Any, x: Any) -> Any:
                _sleep(case.forward_s)
                return x.clone()

            @staticmethod
            def backward(context: Any, dy: Any) -> Any:
                _sleep(case.input_s + case.weight_s)
                return dy

        class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(1))

            def forward(self, x: Any) -> Any:
                return Function.apply(x + 0 * self.scale)

        x = torch.ones(MICROBATCHES, case.nbytes // 4)
        stage = pipelining.PipelineStage(
            Layer(), comm.rank, comm.size, torch.device("cpu"), input_args=(x[:1],)
        )
        kinds = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
        schedule = kinds[case.schedule](
            stage, MICROBATCHES, loss_fn=lambda y, target: y.view(-1)[0] * 0 + y.sum() * 0
        )

        def step() -> None:
            if comm.rank == 0:
                schedule.step(x)
            elif comm.rank == comm.size - 1:
                schedule.step(target=x)
            else:
                schedule.step()

        yield step


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
