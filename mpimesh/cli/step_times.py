"""Times of the actions and messages of a step, as the command line gives them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from mpimesh.cli.quantities import InputError, read_bytes, read_rate, read_seconds, read_several
from mpimesh.schedule import ActionKind, Schedule, Timetable, auto, simulate

__all__ = ["StepTimes"]

_Times = float | list[float]

# What a field is read from, where it is not the option of that name.
_OPTIONS = {
    "message": "--message or --latency",
    "transfer": "--bandwidth or --activation-bytes",
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of a step: one number each, or one for each stage or edge.

    Attributes:
        forward: Of F.
        backward: Of B.
        backward_input: Of I.
        backward_weight: Of W.
        message: From a send to its arrival, for each edge between neighbour stages.
        transfer: In which a message keeps the edge from the next, likewise.
        kept_bytes: Bytes, not seconds: what a microbatch leaves in a stage until its backward.
    """

    forward: _Times
    backward: _Times | None
    backward_input: _Times | None
    backward_weight: _Times | None
    message: _Times
    transfer: _Times
    kept_bytes: _Times | None = None

    @classmethod
    def read(
        cls,
        *,
        forward: str | None,
        backward: str | None,
        backward_input: str | None,
        backward_weight: str | None,
        message: str | None,
        latency: str | None,
        bandwidth: str | None,
        activation_bytes: str | None,
        kept_bytes: str | None,
    ) -> Self:
        """Read the options. Of a backward that is given as a sum, each half takes half.

        Raises:
            InputError: If one cannot be read, or they do not go together.
        """
        if forward is None:
            raise InputError("the time of a forward is missing: give --forward, such as 5ms")
        whole, first, second = _both_halves(
            read_several("--backward", backward, read_seconds),
            read_several("--backward-input", backward_input, read_seconds),
            read_several("--backward-weight", backward_weight, read_seconds),
        )
        if message is not None and (latency or bandwidth or activation_bytes):
            raise InputError(
                "--message is the whole time of a message: give either it, or --latency, "
                "--bandwidth and --activation-bytes"
            )
        if (bandwidth is None) != (activation_bytes is None):
            raise InputError("--bandwidth and --activation-bytes go together: give both or none")
        delays = read_several("--latency", latency, read_seconds)
        if message is not None:
            delays = read_several("--message", message, read_seconds)
        sizes = read_several("--activation-bytes", activation_bytes, read_bytes)
        rates = read_several("--bandwidth", bandwidth, read_rate)
        transfers = 0.0 if sizes is None or rates is None else _ratio(sizes, rates)
        return cls(
            forward=read_several("--forward", forward, read_seconds) or 0.0,
            backward=whole,
            backward_input=first,
            backward_weight=second,
            message=delays or 0.0,
            transfer=transfers,
            kept_bytes=read_several("--kept-bytes", kept_bytes, read_bytes),
        )

    def simulate(self, schedule: Schedule) -> Timetable:
        """Time `schedule`.

        Raises:
            InputError: If a time that it needs is missing, or there are not as many as stages.
            ScheduleError: If it is wrong.
        """
        self._check_counts(schedule.num_stages)
        kinds = {action.kind for action in schedule.actions()}
        split = kinds & {ActionKind.I, ActionKind.W}
        if (split and self.backward_input is None) or (
            ActionKind.B in kinds and self.backward is None
        ):
            raise InputError(
                f"schedule {schedule.name} has backwards: give --backward, or --backward-input and "
                "--backward-weight"
            )
        return simulate(
            schedule,
            forward_s=self.forward,
            backward_s=self.backward,
            backward_input_s=self.backward_input,
            backward_weight_s=self.backward_weight,
            message_s=self.message,
            transfer_s=self.transfer,
        )

    def find_schedule(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None
    ) -> Schedule:
        """Find the schedule that is fastest with these times.

        Raises:
            InputError: If the times of the halves of a backward are missing.
            ScheduleError: If numbers do not fit each other.
        """
        if self.backward_input is None or self.backward_weight is None:
            raise InputError(
                "a schedule is found by the times: give --backward, or --backward-input and "
                "--backward-weight"
            )
        self._check_counts(num_stages)
        return auto(
            num_stages,
            num_microbatches,
            num_ranks=num_ranks,
            forward_s=self.forward,
            backward_input_s=self.backward_input,
            backward_weight_s=self.backward_weight,
            message_s=_combined(self.message, self.transfer, 1),
        )

    def peak_bytes(self, timetable: Timetable) -> list[float] | None:
        """Return the most memory that activations take on each rank; None if it is not known."""
        if self.kept_bytes is None:
            return None
        schedule = timetable.schedule
        kept_bytes = _spread(self.kept_bytes, schedule.num_stages)
        return [timetable.peak_bytes(rank, kept_bytes) for rank in range(schedule.num_ranks)]

    def halved(self) -> StepTimes:
        """Return the times of the same model with each stage cut into two equal ones.

        An edge inside what was one stage is as its neighbours are.
        """
        return replace(
            self,
            forward=_halves(self.forward),
            backward=None if self.backward is None else _halves(self.backward),
            backward_input=None if self.backward_input is None else _halves(self.backward_input),
            backward_weight=None if self.backward_weight is None else _halves(self.backward_weight),
            kept_bytes=None if self.kept_bytes is None else _halves(self.kept_bytes),
            message=_more_edges(self.message),
            transfer=_more_edges(self.transfer),
        )

    def _check_counts(self, num_stages: int) -> None:
        for field in fields(self):
            edges = field.name in ("message", "transfer")
            _check_count(field.name, getattr(self, field.name), num_stages, edges=edges)


def _both_halves(
    whole: _Times | None, first: _Times | None, second: _Times | None
) -> tuple[_Times | None, _Times | None, _Times | None]:
    """Complete B from I and W, or I and W from B."""
    if whole is None:
        if (first is None) != (second is None):
            raise InputError(
                "half of a backward is missing: give --backward-input and --backward-weight, or "
                "one of them and --backward, their sum"
            )
        if first is not None and second is not None:
            whole = _combined(first, second, 1)
    elif first is not None:
        second = _rest(whole, first, "--backward-input") if second is None else second
    elif second is not None:
        first = _rest(whole, second, "--backward-weight")
    else:
        first = second = _halved(whole)
    return whole, first, second


def _halved(times: _Times) -> _Times:
    return [one / 2 for one in times] if isinstance(times, list) else times / 2


def _rest(whole: _Times, half: _Times, option: str) -> _Times:
    rest = _combined(whole, half, -1)
    if min(rest if isinstance(rest, list) else [rest]) < 0:
        raise InputError(f"{option} is more than --backward, the sum of both halves")
    return rest


def _combined(first: _Times, second: _Times, sign: int) -> _Times:
    if not isinstance(first, list) and not isinstance(second, list):
        return first + sign * second
    count = max(len(one) for one in (first, second) if isinstance(one, list))
    pairs = zip(_spread(first, count), _spread(second, count), strict=False)
    return [one + sign * other for one, other in pairs]


def _ratio(sizes: _Times, rates: _Times) -> _Times:
    if not isinstance(sizes, list) and not isinstance(rates, list):
        return sizes / rates
    count = max(len(one) for one in (sizes, rates) if isinstance(one, list))
    pairs = zip(_spread(sizes, count), _spread(rates, count), strict=False)
    return [size / rate for size, rate in pairs]


def _spread(times: _Times, count: int) -> list[float]:
    return times if isinstance(times, list) else [times] * count


def _check_count(name: str, times: _Times | None, num_stages: int, *, edges: bool) -> None:
    if not isinstance(times, list):
        return
    needed = num_stages - edges
    if len(times) != needed:
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        what = "pair of neighbour stages" if edges else "stage"
        raise InputError(
            f"{option} needs one number, or one for each {what}, which are {needed} for "
            f"{num_stages} stages; got {len(times)}"
        )


def _halves(times: _Times) -> _Times:
    if not isinstance(times, list):
        return times / 2
    return [one / 2 for one in times for _ in range(2)]


def _more_edges(times: _Times) -> _Times:
    if not isinstance(times, list):
        return times
    inner = [*times, times[-1]]  # of each stage that is cut, like the edge after it
    return [edge for pair in zip(inner, times, strict=False) for edge in pair] + inner[-1:]
