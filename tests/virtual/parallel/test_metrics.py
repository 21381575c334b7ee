"""The numbers of training reach callbacks on rank 0, and Python's log."""

from __future__ import annotations

import logging
import math

import pytest

import mpimesh as mm
from mpimesh.errors import MeshError
from tests.helpers.raises import raises


def test_means_of_steps_reach_rank_0(caplog):
    caplog.set_level(logging.INFO, "mpimesh")

    def main():
        seen: list[tuple[int, dict[str, float]]] = []
        with mm.DeviceMesh("dp=2") as mesh:
            metrics = mm.parallel.TrainingMetrics(
                mesh, lambda step, numbers: seen.append((step, dict(numbers))), every=2, first=4
            )
            for loss in (1.0, 3.0, 5.0, math.inf, 7.0):
                metrics.step(loss=loss, samples=10)
            metrics.step(loss=9.0, grad_norm=0.5)
            with raises(MeshError, "loss", "'much'"):
                metrics.step(loss="much")  # type: ignore[arg-type]
        return seen

    here, there = mm.run_virtual(2, main)
    assert there == []
    assert [step for step, _ in here] == [6, 8, 10]
    assert [numbers["loss"] for _, numbers in here] == [2.0, math.inf, 8.0]
    assert here[2][1]["grad_norm"] == 0.5
    assert all(numbers["samples_per_s"] > 0 for _, numbers in here)
    records = [record for record in caplog.records if record.name == "mpimesh"]
    assert [record.__dict__["rank"] for record in records] == [0, 0, 0]
    assert "step 6: loss 2" in records[0].getMessage()


def test_a_step_that_is_refused_counts_for_nothing():
    def main():
        seen: list[tuple[int, float]] = []
        with mm.DeviceMesh("dp=1") as mesh:
            metrics = mm.parallel.TrainingMetrics(
                mesh, lambda step, numbers: seen.append((step, numbers["loss"])), every=2
            )
            for wrong in ({"grad_norm": "x"}, {"samples": -1}):
                with raises(MeshError, *wrong):
                    metrics.step(loss=100.0, **wrong)
            metrics.step(loss=1.0)
            metrics.step(loss=3.0)
        return seen

    assert mm.run_virtual(1, main) == [[(2, 2.0)]]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"first": -1}, {"callback": 3}])
def test_wrong_arguments(wrong):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            options = {name: value for name, value in wrong.items() if name != "callback"}
            callbacks = [wrong["callback"]] if "callback" in wrong else []
            with raises(MeshError, *wrong):
                mm.parallel.TrainingMetrics(mesh, *callbacks, **options)

    mm.run_virtual(1, main)
    with raises(MeshError, "mesh must be a live DeviceMesh"):
        mm.parallel.TrainingMetrics(mm.Mesh("dp=2"))  # type: ignore[arg-type]


def test_saving_is_logged_with_the_rank(caplog, tmp_path):
    caplog.set_level(logging.INFO, "mpimesh")

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            mm.save(tmp_path / "x", {"x": mm.zeros(4, mesh, "dp=S0")}, mesh=mesh)

    mm.run_virtual(2, main)
    saved = [record for record in caplog.records if "saving" in record.getMessage()]
    assert sorted(record.__dict__["rank"] for record in saved) == [0, 1]
