"""TensorFlow's heartbeats and data sets, ``T35`` and ``T38``, on virtual ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat import tensorflow as tf
from mpimesh.compat.tensorflow import DTensorDataset, Heartbeat, heartbeat_enabled
from mpimesh.errors import LayoutError, ModuleError, PeerLostError
from mpimesh.runtime.watchdog import EXIT_CODE
from tests.helpers.compat_programs import beats_go_on
from tests.helpers.raises import raises


@pytest.mark.parametrize("size", [1, 2, 3])
def test_t35_beats(size):
    mm.run_virtual(size, beats_go_on, None)


@pytest.mark.parametrize(
    ("value", "enabled"), [(None, True), ("1", True), ("True", True), ("0", False), ("no", False)]
)
def test_t35_heartbeat_enabled(value, enabled, monkeypatch):
    if value is None:
        monkeypatch.delenv("DTENSOR_ENABLE_HEARTBEAT", raising=False)
    else:
        monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", value)
    assert heartbeat_enabled() == enabled

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=10)
            if enabled or mesh.rank == 0:  # else nobody waits for anybody
                heartbeat.beat()
            return heartbeat.enabled, heartbeat.beats

    assert mm.run_virtual(2, main) == [(enabled, int(enabled))] * 2


def test_t35_a_late_rank_is_a_strike_and_no_more(capsys):
    def main():
        with mm.DeviceMesh("x=3") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=0.5)
            for step in range(3):
                if mesh.rank == 2 and step == 1:
                    time.sleep(1.2)
                heartbeat.beat()
            return int(mesh.group().all_reduce(np.array([heartbeat.beats])).resolve()[0])

    assert mm.run_virtual(3, main) == [9] * 3
    lines = capsys.readouterr().err.splitlines()
    assert {line.split("]")[0] for line in lines} == {"[rank 0", "[rank 1"}
    # A rank that came late itself has waited less.
    assert sum("heartbeat 1, strike 1 of 3" in line for line in lines) == 2
    assert len(lines) <= 4
    assert all("ranks [2] of group 'world' had not come" in line for line in lines)


def test_t35_three_strikes():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=0.15)
            heartbeat.beat()
            if mesh.rank == 1:
                time.sleep(2)
            heartbeat.beat()

    with raises(PeerLostError, "heartbeat 1", "strike 3 of 3", "ranks [1]", "0.15 s") as caught:
        mm.run_virtual(2, main)
    assert caught.value.exit_code == EXIT_CODE


X = np.arange(66.0).reshape(11, 6)


@pytest.mark.parametrize("of_axes", [True, False])
def test_t38_each_rank_reads_its_slice_of_a_batch(of_axes):
    y = np.arange(11)
    read = []

    def rows(numbers):
        read.extend(numbers.tolist())
        return X[numbers], y[numbers]

    def main():
        with mm.DeviceMesh("batch=2,model=3") as mesh:
            axes = (tf.Layout(["batch", "model"], mesh), tf.Layout(["batch"], mesh))
            layouts = axes if of_axes else tuple(mm.Layout(mesh, one) for one in axes)
            data = DTensorDataset(
                rows,
                mesh=mesh,
                layouts=layouts,
                global_batch_size=4,
                batch_dim="batch",
                rows=11,
                prefetch=0,
            )
            assert len(data) == 2
            for _ in range(2):  # from the first on each time
                for number, (x, target) in enumerate(data):
                    span = slice(4 * number, 4 * number + 4)
                    first, column = 2 * mesh.coord("batch"), 2 * mesh.coord("model")
                    here = X[span][first : first + 2, column : column + 2]
                    assert np.array_equal(x.local, here)
                    assert np.array_equal(x.full(), X[span])
                    assert np.array_equal(target.full(), y[span])
                    assert target.layout.text == "batch=S0, model=R"
            data.close()
            data.close()

    mm.run_virtual(6, main)
    assert len(read) == 6 * 2 * 2 * 2  # ranks, times, batches, rows
    assert set(read) == set(range(8))


def test_t38_without_a_dim_each_rank_has_all_rows():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            layout = mm.Layout(mesh, "dp=S1")
            data = DTensorDataset({"x": X}, mesh=mesh, layouts={"x": layout}, global_batch_size=5)
            (first, second) = data
            assert np.array_equal(second["x"].local, X[5:10, 3 * mesh.rank :][:, :3])
            assert np.array_equal(first["x"].full(), X[:5])

    mm.run_virtual(2, main)


@pytest.mark.parametrize(
    ("options", "error", "values"),
    [
        ({"global_batch_size": 5}, ModuleError, ("global_batch_size", 2, "'batch'", 5)),
        ({"global_batch_size": 0}, ModuleError, ("global_batch_size", 0)),
        ({"dataset_already_batched": True}, ModuleError, ("dataset_already_batched",)),
        ({"batch_dim": None}, LayoutError, ("layouts", "batch_dim", None)),
        ({"layouts": "batch"}, LayoutError, ("layouts", "'batch'")),
        ({"layouts": None}, LayoutError, ("layouts", None)),
    ],
)
def test_t38_refusals(options, error, values):
    def main():
        with mm.DeviceMesh("batch=2") as mesh:
            layout = tf.Layout(["batch", "unsharded"], mesh)
            given = {"layouts": layout, "global_batch_size": 4, "batch_dim": "batch", **options}
            with raises(error, *values):
                DTensorDataset(X, mesh=mesh, **given)
            built = {**given, "layouts": (layout,), "global_batch_size": 4}
            built |= {"batch_dim": "batch", "dataset_already_batched": False}
            with raises(ModuleError, "layouts", "array"):
                next(iter(DTensorDataset(X, mesh=mesh, **built)))

    mm.run_virtual(2, main)
