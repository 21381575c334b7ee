"""TensorFlow DTensor's checkpoints: saved by name in one layout, restored in another."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.compat.tensorflow import (
    DTensorCheckpoint,
    enable_save_as_bf16,
    name_based_restore,
    name_based_save,
    sharded_save,
)
from mpimesh.dtensor import DVariable
from mpimesh.errors import DTypeError, MeshError, MismatchError, ShapeError, StoreError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises

W = np.random.default_rng(3).normal(size=(6, 5)).astype(np.float32)
LAYOUTS = ["x=R", "x=S0", "x=S1"]


def split(mesh, layout, values=W):
    return mm.distribute(values, mesh, layout)


def variable(mesh, layout, values=W, **options):
    return DVariable(values, layout=layout, mesh=mesh, **options)


def clear(variable):
    variable.assign(variable.value() * np.float32(0))


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("restored", LAYOUTS)
def test_t37_restored_in_another_layout_on_another_number_of_ranks(saved, restored, tmp_path):
    prefix = str(tmp_path / "w")

    def save(mesh):
        bias = variable(mesh, "x=S0", W[:, 0].copy())
        name_based_save(mesh, prefix, {"layer/w": split(mesh, saved), "b": bias})

    def restore(mesh):
        own = split(mesh, restored, np.zeros_like(W))
        found = name_based_restore(mesh, prefix, {"layer/w": own})
        assert found.keys() == {"layer/w"}
        assert found["layer/w"].layout == own.layout
        assert not own.full().any()
        return found["layer/w"].full()

    on_ranks("x=2", save)
    for found in on_ranks("x=3", restore):
        np.testing.assert_array_equal(found, W, strict=True)


def test_t37_variables_take_what_was_restored(tmp_path):
    def body(mesh):
        mine = variable(mesh, "x=S0")
        sharded_save(mesh, str(tmp_path / "c"), ["v"], [""], [mine])
        clear(mine)
        restored = name_based_restore(mesh, str(tmp_path / "c"), {"v": mine})
        assert not mine.full().any()
        mine.assign(restored["v"])
        return mine.full()

    for found in on_ranks("x=2", body):
        np.testing.assert_array_equal(found, W)


def test_t37_variables_saved_as_bf16(tmp_path):
    def body(mesh):
        mine, other = variable(mesh, "x=S0"), variable(mesh, "x=S1")
        enable_save_as_bf16([mine, np.zeros(3)])
        assert (mine.save_as_bf16, other.save_as_bf16) == (True, False)
        name_based_save(mesh, str(tmp_path / "c"), {"mine": mine, "other": other})
        restored = name_based_restore(mesh, str(tmp_path / "c"), {"mine": mine, "other": other})
        with raises(DTypeError, "'mine'", "bfloat16", "float32"):
            name_based_restore(mesh, str(tmp_path / "c"), {"mine": other})
        with raises(DTypeError, "float32", "float64"):
            enable_save_as_bf16([variable(mesh, "x=R", W.astype(np.float64))])
        mesh.group().barrier()
        checkpoint = DTensorCheckpoint(mesh, v=mine)
        path = checkpoint.save(str(tmp_path / "d"))
        clear(mine)
        checkpoint.restore(path)
        return {name: one.full() for name, one in restored.items()}, mine.full()

    rounded = W.astype(ml_dtypes.bfloat16).astype(np.float32)
    for found, restored in on_ranks("x=2", body):
        np.testing.assert_array_equal(found["mine"], rounded, strict=True)
        np.testing.assert_array_equal(found["other"], W, strict=True)
        np.testing.assert_array_equal(restored, rounded, strict=True)
    stored = mm.load(tmp_path / "c")
    assert stored["mine"].dtype == ml_dtypes.bfloat16


def test_t37_a_checkpoint_of_a_model_and_variables(tmp_path):
    x, target = np.ones((6, 4), np.float32), np.zeros(6, np.int64)

    def make(mesh):
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        model = mm.DataParallel(net, mesh, "x", loss=nn.cross_entropy)
        optimizer = mm.ParallelOptimizer(optim.Adam(model.parameters(), lr=0.1), model)
        counts = {"epochs": 0, "scale": variable(mesh, "x=R")}
        return model, optimizer, DTensorCheckpoint(mesh, counts, model=model, optimizer=optimizer)

    def save(mesh):
        model, optimizer, checkpoint = make(mesh)
        paths = []
        for _ in range(2):
            model.train_step(x, target, optimizer=optimizer)
            paths.append(checkpoint.save(str(tmp_path / "run")))
        assert paths == [str(tmp_path / "run-1"), str(tmp_path / "run-2")]
        return float(model.train_step(x, target, optimizer=optimizer))

    def restore(mesh):
        model, optimizer, checkpoint = make(mesh)
        clear(checkpoint._tree["root"]["scale"])
        tree = checkpoint.restore(str(tmp_path / "run-2"))
        assert checkpoint.save_counter == 2
        assert tree["model"] is model
        assert tree["root"]["epochs"] == 0
        np.testing.assert_array_equal(tree["root"]["scale"].full(), W)
        loss = float(model.train_step(x, target, optimizer=optimizer))
        assert checkpoint.save(str(tmp_path / "run")) == str(tmp_path / "run-3")
        return loss

    wanted = on_ranks("x=2", save)
    assert on_ranks("x=2", restore) == wanted


def test_t37_refusals(tmp_path):
    prefix = str(tmp_path / "c")

    def body(mesh):
        w = split(mesh, "x=S0")
        name_based_save(mesh, prefix, {"w": w, "other": w})
        with raises(StoreError, "'w'", "DTensor", "distribute"):
            name_based_save(mesh, prefix, {"w": cast(Any, W)})
        with raises(StoreError, "by name"):
            name_based_restore(mesh, prefix, cast(Any, [w]))
        with raises(StoreError, "'v'"):
            name_based_restore(mesh, prefix, {"v": w})
        with raises(ShapeError, "'w'", (6, 5), (6, 4)):
            name_based_restore(mesh, prefix, {"w": split(mesh, "x=S0", W[:, :4].copy())})
        with raises(DTypeError, "'w'", "float32", "float64"):
            name_based_restore(mesh, prefix, {"w": split(mesh, "x=S0", W.astype("f8"))})
        with raises(StoreError, prefix):
            name_based_restore(mesh, f"{prefix}-none", {"w": w})
        with raises(StoreError, "2 names", "1 arrays"):
            sharded_save(mesh, prefix, ["w", "v"], None, [w])
        with raises(StoreError, "once"):
            sharded_save(mesh, prefix, ["w", "w"], None, [w, w])
        with raises(StoreError, "slices", "'6 5 0,3:-'"):
            sharded_save(mesh, prefix, ["w"], ["6 5 0,3:-"], [w])
        with raises(StoreError, "tensor_names", "True"):
            sharded_save(mesh, prefix, cast(Any, True), None, [w])
        with raises(StoreError, "slices"):
            sharded_save(mesh, prefix, ["w"], cast(Any, [W]), [w])
        with raises(StoreError, "text", "3"):
            sharded_save(mesh, prefix, cast(Any, [3]), None, [w])
        with raises(StoreError, "variables", "5"):
            enable_save_as_bf16(cast(Any, 5))
        with raises(DTypeError, "dtype", "True"):
            DVariable(W, layout="x=S0", mesh=mesh, dtype=True)
        with raises(MeshError, "mesh"):
            DTensorCheckpoint(cast(Any, "x=2"))
        with mm.DeviceMesh("y=2") as another, raises(MeshError, "'w'", "y=2"):
            name_based_save(another, prefix, {"w": w})
        with raises(MismatchError, "name_based_save"):
            name_based_save(mesh, prefix, {f"w{mesh.rank}": w})
        found = name_based_restore(mesh, prefix, {"w": w, "other": w})  # as it was
        return found["w"].full()

    for found in on_ranks("x=2", body):
        np.testing.assert_array_equal(found, W)
