"""Write events as Chrome's trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpimesh.trace.tracer import Category, Event, shift_events

__all__ = ["chrome_trace", "write_chrome_trace"]

# These run beside the work of a rank, so they get threads of their own: events of one thread
# that overlap without one inside the other are drawn wrong.
_BESIDE: frozenset[Category] = frozenset({"send", "recv", "collective"})


def chrome_trace(
    events: Iterable[Event],
    *,
    offsets_s: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return `events` as an object in Chrome's trace event format.

    A rank is a process. Its thread 0 has what it does itself, waiting too; messages and
    collectives lie on threads 1, 2, ..., as many as run at one time. An arrow (a flow event) goes
    from each send to its receive, where both have an :attr:`Event.message`.

    Args:
        events: Events of any ranks.
        offsets_s: For a rank, seconds to add to its times, to put all on one clock.
        labels: For a rank, its name; ``rank 3`` if left out.

    Returns:
        The object, with times in microseconds from the first event.

    Raises:
        TraceError: If an offset is not finite.
    """
    shifted = sorted(shift_events(events, offsets_s), key=_by_rank_and_start)
    origin_s = min((event.start_s for event in shifted), default=0.0)
    lanes = _lanes(shifted)
    records = [_complete(event, lane, origin_s) for event, lane in zip(shifted, lanes, strict=True)]
    threads = sorted({(event.rank, lane) for event, lane in zip(shifted, lanes, strict=True)})
    return {
        "traceEvents": [
            *_metadata(threads, labels or {}),
            *records,
            *_flows(shifted, lanes, origin_s),
        ],
        "displayTimeUnit": "ms",
    }


def write_chrome_trace(
    path: str | os.PathLike[str],
    events: Iterable[Event],
    *,
    offsets_s: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
) -> None:
    """Write :func:`chrome_trace` to the file `path`.

    Raises:
        TraceError: If an offset is not finite.
        OSError: If the file cannot be written.
    """
    trace = chrome_trace(events, offsets_s=offsets_s, labels=labels)
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")


def _by_rank_and_start(event: Event) -> tuple[int, float, float]:
    return event.rank, event.start_s, -event.duration_s


def _lanes(events: list[Event]) -> list[int]:
    """Give each event its thread: 0, or the first one that is free when the event starts."""
    lanes = []
    free_at_s: dict[int, list[float]] = {}
    for event in events:
        if event.category not in _BESIDE:
            lanes.append(0)
            continue
        ends = free_at_s.setdefault(event.rank, [])
        free = (lane for lane, end_s in enumerate(ends) if end_s <= event.start_s)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [event.end_s]
        lanes.append(lane + 1)
    return lanes


def _complete(event: Event, lane: int, origin_s: float) -> dict[str, Any]:
    arguments = {"bytes": event.nbytes or None, "stage": event.stage}
    arguments["microbatch"] = event.microbatch
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.category,
        "pid": event.rank,
        "tid": lane,
        "ts": _microseconds(event.start_s - origin_s),
        "dur": _microseconds(event.duration_s),
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _flows(events: list[Event], lanes: list[int], origin_s: float) -> Iterator[dict[str, Any]]:
    """Yield the two ends of an arrow for each message whose send and receive are both there.

    A message's text comes again in the next step. So the last receive is that of the last send, and
    so on backwards: of a ring that is full, the oldest are missing.
    """
    ends: dict[str, tuple[list[int], list[int]]] = {}
    for place, event in enumerate(events):
        if event.message is not None:
            ends.setdefault(event.message, ([], []))[event.category != "send"].append(place)
    number = 0
    for sends, receives in ends.values():
        for pair in zip(reversed(sends), reversed(receives), strict=False):
            number += 1
            for place, phase in zip(pair, ("s", "f"), strict=True):
                event = events[place]
                ts = _microseconds(event.start_s - origin_s)
                if phase == "f":  # at its end, but inside it
                    ts = max(ts, _microseconds(event.end_s - origin_s - 1e-9))
                flow = {"ph": phase, "name": "message", "cat": "message", "id": number}
                yield {
                    **flow,
                    **({"bp": "e"} if phase == "f" else {}),
                    "pid": event.rank,
                    "tid": lanes[place],
                    "ts": ts,
                }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)  # to the nanosecond, the finest a clock here can tell


def _metadata(threads: list[tuple[int, int]], labels: Mapping[int, str]) -> list[dict[str, Any]]:
    records = []
    for rank in sorted({rank for rank, _ in threads}):
        records.append(_named("process_name", rank, 0, name=labels.get(rank, f"rank {rank}")))
        records.append(_named("process_sort_index", rank, 0, sort_index=rank))
    for rank, lane in threads:
        name = "work" if lane == 0 else "messages" if lane == 1 else f"messages {lane}"
        records.append(_named("thread_name", rank, lane, name=name))
        records.append(_named("thread_sort_index", rank, lane, sort_index=lane))
    return records


def _named(kind: str, rank: int, lane: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": arguments}
