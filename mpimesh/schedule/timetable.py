"""A schedule with times: when each action starts and ends, and where ranks are idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.schedule import Schedule
from mpimesh.trace import Category, Event, svg

__all__ = ["Idle", "Seconds", "TimedAction", "Timetable"]

# Sums and comparisons only, so integers and fractions stay exact.
Seconds = float | Fraction

_CATEGORIES: dict[ActionKind, Category] = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward_input",
    ActionKind.W: "backward_weight",
    ActionKind.SEND_F: "send",
    ActionKind.SEND_B: "send",
    ActionKind.RECV_F: "wait",
    ActionKind.RECV_B: "wait",
    ActionKind.REDUCE_GRAD: "collective",
    ActionKind.STEP: "optimizer",
}


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its times.

    Attributes:
        action: What is done.
        start_s: When the rank reaches it, in seconds from the start of the step.
        end_s: When it is over. For a receive, when the message is there. For a send, when
            the message has arrived, and for a REDUCE_GRAD when the sums are there; the rank
            itself goes on at `start_s`.
    """

    action: Action
    start_s: Seconds
    end_s: Seconds


_WORDS = {
    "fill": "filling the pipeline",
    "inputs": "waiting for inputs",
    "gradients": "waiting for gradients",
    "other": "between actions",
    "drain": "draining the pipeline",
}


@dataclass(frozen=True, slots=True)
class Idle:
    """Where a rank's bubble lies. The parts add up to the bubble.

    Attributes:
        fill_s: Before the rank's first computation: the pipeline fills.
        inputs_s: Later, waiting for the output of the stage before.
        gradients_s: Later, waiting for the gradient of the stage after.
        other_s: Later, and waiting for no message: nothing in a simulation, and
            in a step that really ran what the actions cost beside their computing.
        drain_s: After the rank's last computation: the pipeline drains.
    """

    fill_s: Seconds = 0
    inputs_s: Seconds = 0
    gradients_s: Seconds = 0
    other_s: Seconds = 0
    drain_s: Seconds = 0

    def parts(self) -> dict[str, Seconds]:
        """Return the parts by the names of their attributes, without the ending ``_s``."""
        return {one.name.removesuffix("_s"): getattr(self, one.name) for one in fields(self)}

    def __str__(self) -> str:
        """The parts in words, the largest first; what is nothing but rounding is left out."""
        parts = sorted(self.parts().items(), key=lambda item: -item[1])
        least_s = 1e-6 * float(sum(part_s for _, part_s in parts))
        told = [
            f"{_WORDS[name]} {svg.duration(float(part_s))}"
            for name, part_s in parts
            if part_s > least_s
        ]
        return ", ".join(told) if told else "never idle"


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times of all actions: the outcome of :func:`simulate`, or of a step that was measured.

    Attributes:
        schedule: The schedule with its messages.
        starts_s: For each rank when it reaches its actions, in the order of its list, in seconds
            from the start of the step.
        ends_s: When they are over, likewise; see :class:`TimedAction` for messages and sums.
        step_s: When the last rank is done.
    """

    schedule: Schedule
    starts_s: tuple[tuple[Seconds, ...], ...]
    ends_s: tuple[tuple[Seconds, ...], ...]
    step_s: Seconds
    _busy_s: tuple[Seconds, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # All else asks for it many times over.
        busy_s = (
            sum(end_s - start_s for _, start_s, end_s in self.computing(rank))
            for rank in range(self.schedule.num_ranks)
        )
        object.__setattr__(self, "_busy_s", tuple(busy_s))

    @property
    def ranks(self) -> tuple[tuple[TimedAction, ...], ...]:
        """For each rank its actions with their times, in the order of its list; made anew."""
        return tuple(
            tuple(TimedAction(*one) for one in self._timed(rank))
            for rank in range(self.schedule.num_ranks)
        )

    def computing(self, rank: int) -> list[tuple[Action, Seconds, Seconds]]:
        """Return what `rank` computes: each action with its start and its end."""
        return [one for one in self._timed(rank) if one[0].kind.computes]

    def busy_s(self, rank: int) -> Seconds:
        """Return how long `rank` computes."""
        return self._busy_s[rank]

    def bubble_s(self, rank: int) -> Seconds:
        """Return how long `rank` is idle between the start and the end of the step."""
        return self.step_s - self.busy_s(rank)

    def idle_fraction(self, rank: int) -> float:
        """Return the share of the step in which `rank` is idle; 0 for a step of no time."""
        return float(self.bubble_s(rank) / self.step_s) if self.step_s else 0.0

    @property
    def mean_bubble_s(self) -> Seconds:
        """Idle time of a rank, the mean over the ranks."""
        num_ranks = self.schedule.num_ranks
        return (num_ranks * self.step_s - sum(self._busy_s)) / num_ranks

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks over the time of all ranks; 0 for a step that takes no time."""
        return float(self.mean_bubble_s / self.step_s) if self.step_s else 0.0

    def peak_activations(self, rank: int) -> int:
        """Return the most activations that `rank` keeps, see :meth:`Schedule.peak_in_flight`."""
        return self.schedule.peak_in_flight(rank)

    def peak_bytes(self, rank: int, kept_bytes: Sequence[float]) -> float:
        """Return the most memory that activations take on `rank`.

        Args:
            rank: The rank.
            kept_bytes: For each stage what a microbatch leaves there from its forward to the end
                of its backward.
        """
        if not self.schedule.trains:
            return 0.0
        kept = peak = 0.0
        for action in self.schedule.ranks[rank]:
            if action.kind is ActionKind.F:
                kept += kept_bytes[action.stage]
                peak = max(peak, kept)
            elif action.kind is ActionKind.B or action.kind is ActionKind.W:
                kept -= kept_bytes[action.stage]
        return peak

    def idle(self, rank: int) -> Idle:
        """Say where the bubble of `rank` lies."""
        parts: dict[str, Seconds] = {one.name: 0 for one in fields(Idle)}
        computed_to_s: Seconds | None = None
        waits: list[tuple[str, Seconds]] = []
        for action, start_s, end_s in self._timed(rank):
            kind = action.kind
            if kind is ActionKind.RECV_F or kind is ActionKind.RECV_B:
                if end_s > start_s:
                    which = "inputs_s" if kind is ActionKind.RECV_F else "gradients_s"
                    waits.append((which, end_s - start_s))
            elif kind.computes:
                if computed_to_s is None:
                    parts["fill_s"] = start_s
                elif start_s > computed_to_s:
                    rest_s = start_s - computed_to_s
                    for which, wait_s in waits:
                        part_s = min(wait_s, rest_s)
                        parts[which] += part_s
                        rest_s -= part_s
                    parts["other_s"] += rest_s
                computed_to_s = end_s
                waits.clear()
        if computed_to_s is None:
            return Idle(fill_s=self.step_s)
        parts["drain_s"] = self.step_s - computed_to_s
        return Idle(**parts)

    def mean_idle(self) -> Idle:
        """Say where the bubble lies, in the mean over the ranks."""
        num_ranks = self.schedule.num_ranks
        every = [self.idle(rank).parts() for rank in range(num_ranks)]
        return Idle(
            **{f"{name}_s": sum(one[name] for one in every) / num_ranks for name in every[0]}
        )

    def events(self) -> list[Event]:
        """Return what a tracer would have seen: computing, waiting, messages and sums under way.

        All but computations are left out where they take no time.
        """
        return [
            Event(
                rank=rank,
                name=str(action),
                category=_CATEGORIES[action.kind],
                start_s=float(start_s),
                duration_s=float(end_s - start_s),
                stage=action.stage,
                microbatch=None if action.kind.is_whole else action.microbatch,
            )
            for rank in range(self.schedule.num_ranks)
            for action, start_s, end_s in self._timed(rank)
            if end_s > start_s or action.kind.computes
        ]

    def _timed(self, rank: int) -> Iterator[tuple[Action, Seconds, Seconds]]:
        return zip(self.schedule.ranks[rank], self.starts_s[rank], self.ends_s[rank], strict=True)
