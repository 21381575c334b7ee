"""The schedules that come from a rule, not from measured times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from mpimesh.schedule.dualpipev import dualpipev
from mpimesh.schedule.forward_only import forward_only
from mpimesh.schedule.gpipe import gpipe
from mpimesh.schedule.interleaved import interleaved
from mpimesh.schedule.looped_bfs import looped_bfs
from mpimesh.schedule.one_f_one_b import one_f_one_b
from mpimesh.schedule.placement import one_stage_each
from mpimesh.schedule.schedule import Schedule
from mpimesh.schedule.vhalf import vhalf
from mpimesh.schedule.vmin import vmin
from mpimesh.schedule.zb1p import zb1p
from mpimesh.schedule.zb2p import zb2p
from mpimesh.schedule.zbv import zbv

__all__ = ["FAMILY", "Generator"]


class Generator(Protocol):
    """Makes a schedule for any numbers that it has one for."""

    def __call__(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
    ) -> Schedule:
        """Make the schedule; raise ScheduleError if there is none."""


def _one_each(name: str, generator: Callable[[int, int], Schedule]) -> Generator:
    """Give a generator that puts one stage on each rank the argument that the others have."""

    def make(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
        one_stage_each(name, num_stages, num_ranks)
        return generator(num_stages, num_microbatches)

    return make


FAMILY: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": _one_each("gpipe", gpipe),
        "1f1b": _one_each("1f1b", one_f_one_b),
        "interleaved": interleaved,
        "looped_bfs": looped_bfs,
        "zb1p": _one_each("zb1p", zb1p),
        "zb2p": _one_each("zb2p", zb2p),
        "zbv": zbv,
        "vhalf": vhalf,
        "vmin": vmin,
        "dualpipev": dualpipev,
        "forward": _one_each("forward", forward_only),
    }
)
