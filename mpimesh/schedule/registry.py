"""The schedules by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpimesh.arguments import shown
from mpimesh.errors import UnknownNameError
from mpimesh.schedule.auto import auto
from mpimesh.schedule.family import FAMILY, Generator
from mpimesh.schedule.schedule import Schedule

__all__ = ["make_schedule", "schedule_names", "stages_per_rank"]

_GENERATORS: Mapping[str, Generator] = MappingProxyType({**FAMILY, "auto": auto})


def schedule_names() -> tuple[str, ...]:
    """Return the names that :func:`make_schedule` knows."""
    return tuple(_GENERATORS)


def stages_per_rank(name: str) -> int:
    """Return into how many stages for each rank a model is cut for the schedule called `name`.

    It is 2 for those on a V. ``interleaved`` and ``looped_bfs`` can do with any number, of which 2
    is returned, and ``auto`` with any, of which 1 is.

    Raises:
        UnknownNameError: If there is no such schedule.
    """
    return 2 // make_schedule(name, 2, 1).num_ranks


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the schedule called `name`, without messages.

    One stage on each rank: ``gpipe``, ``1f1b``, ``zb1p``, ``zb2p``; ``forward`` for inference.
    Several, dealt in turn: ``interleaved``, ``looped_bfs``. Two, in the shape of a V: ``zbv``,
    ``vhalf``, ``vmin``, ``dualpipev``. Either: ``auto``, which takes all times as equal here; give
    :func:`~mpimesh.schedule.auto` the measured ones.

    Args:
        name: One of :func:`schedule_names`.
        num_stages: Number of stages over all ranks, at least 1.
        num_microbatches: Number of microbatches, at least 1; may be fewer than the stages.
        num_ranks: Number of ranks. If not given, as many as stages, or half as many where a
            schedule puts several stages on a rank.

    Raises:
        UnknownNameError: If there is no such schedule.
        ScheduleError: If a number is less than 1, or the schedule does not put so many stages
            on so many ranks.
    """
    if not isinstance(name, str) or name not in _GENERATORS:
        raise UnknownNameError(
            f"the name of a schedule is one of {', '.join(schedule_names())}, got {shown(name)}"
        )
    return _GENERATORS[name](num_stages, num_microbatches, num_ranks=num_ranks)
