"""Report on a pipeline's last step of training, beside what its schedule lets expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mpimesh.errors import MpimeshError, TraceError
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.step import END_OF_STEP, GRADIENTS
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.events import gather_events
from mpimesh.schedule import (
    Timetable,
    action_overhead_s,
    measured_step,
    predicted_step,
    schedule_svg,
)
from mpimesh.trace import Event, svg

__all__ = ["StepReport", "last_step", "report_step"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of training as it was measured, and as its schedule predicts it.

    Attributes:
        step: Number of the step.
        measured: What the ranks of one pipeline did when, from the first computation to the last.
        predicted: The same schedule, simulated with the mean times that were measured; see
            :func:`~mpimesh.schedule.predicted_step`.
    """

    step: int
    measured: Timetable
    predicted: Timetable

    @property
    def overhead_s(self) -> float:
        """Seconds that a rank spent on an action beside computing and waiting, in the mean."""
        return action_overhead_s(self.measured)

    def to_svg(self) -> str:
        """Draw both below each other on one time axis."""
        schedule = self.measured.schedule
        title = (
            f"Training step {self.step}: {schedule.name}, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches"
        )
        tables = {"measured": self.measured, "predicted": self.predicted}
        return schedule_svg(tables, title=title)

    def __str__(self) -> str:
        lines = [
            f"step {self.step} {what} {svg.duration(float(one.step_s))}, of which a rank is idle "
            f"for {svg.duration(float(one.mean_bubble_s))}, {100 * one.bubble_fraction:.1f} %: "
            f"{one.mean_idle()}"
            for what, one in (("measured", self.measured), ("predicted", self.predicted))
        ]
        lines.append(f"each action cost {svg.duration(self.overhead_s)} beside its computation")
        return "\n".join(lines)


def report_step(engine: Engine) -> StepReport | None:
    """Report the last training step, on the first rank of the mesh. Collective.

    Raises:
        TraceError: On every rank, if the tracers do not hold the whole step.
    """
    mesh = engine.mesh
    events = gather_events(mesh, engine.tracer)
    report, problem = None, None
    if mesh.rank == 0:
        everyone = list(mesh.group().ranks)
        ranks = [everyone.index(rank) for rank in engine.pipe.ranks]
        try:
            report = _report(engine, last_step(events), ranks)
        except MpimeshError as error:
            problem = TraceError(
                f"there is no whole step of training in the tracers: {error}; make the pipeline "
                "with tracer=Tracer(mesh.rank) on every rank, and report after train_step"
            )
    scope = engine.scope
    call = Call("step report", scope.name)
    agree(scope._core, call, problem=problem)
    return report


def _report(engine: Engine, events: Sequence[Event], ranks: Sequence[int]) -> StepReport:
    places = {rank: place for place, rank in enumerate(ranks)}
    mine = [replace(event, rank=places[event.rank]) for event in events if event.rank in places]
    count = len({event.microbatch for event in mine if event.category == "forward"})
    if not count:
        raise TraceError("no forward was recorded")
    measured = measured_step(
        engine.plans.schedule(count, training=True), mine, skips=engine.plans.edges.skips
    )
    return StepReport(engine.step, measured, predicted_step(measured))


def last_step(events: Iterable[Event]) -> list[Event]:
    """Return the events of each rank's last whole step of training.

    Args:
        events: Of any ranks, in the order in which each rank recorded its own.
    """
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    return [event for one in ranks.values() for event in _last_step(one)]


def _last_step(events: list[Event]) -> list[Event]:
    """Cut the last step out of one rank's events: steps of training end with their gradients."""
    names = [event.name if event.category == "wait" else "" for event in events]
    ends = [place for place, name in enumerate(names) if name == END_OF_STEP]
    trained = [place for place, name in enumerate(names) if name == GRADIENTS]
    if not trained:
        return []
    # Its own end of step comes before its gradients; the one before that closed the step before.
    earlier = [place for place in ends if place < trained[-1]][:-1]
    return events[earlier[-1] + 1 if earlier else 0 : trained[-1]]
