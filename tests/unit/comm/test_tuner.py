"""The time that measuring takes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mpimesh.comm import tuner
from mpimesh.comm.algorithms import NEVER, Sizes
from mpimesh.comm.engine import ProgressEngine


class Slow:
    """Ranks, memory and collectives of which each takes its time."""

    size, rank = 64, 0

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.waits = 0

    def empty(self, nbytes: int) -> None:
        return None

    def prepare(self, name, ways, *arguments):
        return self.start

    def start(self, *arguments):
        self.waits += 1
        end_s = time.perf_counter() + self.takes_s

        class Request:
            def test(self) -> bool:
                return time.perf_counter() >= end_s

        return Request()

    broadcast = barrier = all_reduce = reduce_scatter = all_gather = all_to_all = start


@pytest.mark.parametrize("nodes", [1, 2])
def test_measuring_ends_when_its_time_is_over(monkeypatch, tmp_path, nodes):
    monkeypatch.setattr(tuner, "_BUDGET_S", 0.1)
    monkeypatch.setattr(tuner._Clock, "spent_s", 0.0)
    slow: Any = Slow(0.005)
    kept = tuner.KeptSizes("auto", tmp_path / "sizes.json")
    for repeat in range(2):
        begin_s = time.perf_counter()
        sizes = kept.agreed(
            slow,
            nodes,
            lambda: tuner.measure(
                slow, slow, ProgressEngine(), slow if nodes == 1 else None, 1 << 20
            ),
        )
        # What is under way when the time is over ends: one round of each way.
        assert slow.waits < (60, 80)[repeat]
        assert time.perf_counter() - begin_s < 10
        assert sizes.numbers == Sizes.unmeasured(several_nodes=nodes > 1).numbers
        assert sizes.slots_from == NEVER
        kept = tuner.KeptSizes("auto", tmp_path / "sizes.json")
    assert not (tmp_path / "sizes.json").exists()
    assert tuner._Clock.spent_s < 5


def test_fast_ranks_are_measured_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(tuner, "_BUDGET_S", 60.0)
    monkeypatch.setattr(tuner._Clock, "spent_s", 0.0)
    fast: Any = Slow(0.0)
    kept = tuner.KeptSizes("auto", tmp_path / "sizes.json")
    sizes = kept.agreed(fast, 1, lambda: tuner.measure(fast, fast, ProgressEngine(), fast, 1 << 20))
    assert sizes.reason == tuner._MEASURED
    assert fast.waits > 300
    assert (tmp_path / "sizes.json").exists()
