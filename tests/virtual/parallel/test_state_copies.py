"""States are copies: neither training nor writing into them reaches the other, on any model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from tests.helpers.depth import examples

WIDTH = 4
DIMS = {1: ["dp=1", "dp=1,tp=1"], 2: ["dp=2", "pp=2", "dp=1,tp=2"], 4: ["dp=2,pp=2", "dp=2,tp=2"]}


class Counted(nn.Module):
    """Counts its batches in a buffer."""

    batches: Any

    def __init__(self):
        self.register_buffer("batches", np.zeros(WIDTH, np.int64))

    def forward(self, x, ctx=None):
        self.batches += ctx is not None
        return x

    def backward(self, dy, ctx):
        return dy


def layers(mesh, split):
    if split:
        group = mesh.group("tp")
        return [
            mm.parallel.ColumnParallelLinear(WIDTH, 2 * WIDTH, group=group),
            mm.parallel.RowParallelLinear(2 * WIDTH, WIDTH, group=group),
        ]
    return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


def made(draw, mesh):
    """Return a model or a module, its optimizer, and a function that takes a step."""
    rng = np.random.default_rng(0)
    dtype, stage = draw(["float32", "float16"]), 0
    x, y = (rng.normal(size=(8, WIDTH)).astype(dtype) for _ in range(2))
    rule = draw([optim.Adam, lambda params: optim.SGD(params, lr=0.1, momentum=0.9)])
    if "pp" in mesh.dim_names:
        stages = [mm.PipelineStage(0), mm.PipelineStage(1)]
        for one, layer in zip(stages, layers(mesh, split=False), strict=True):
            one.add_layer(layer).add_layer(Counted())
        model: Any = mm.PipelineParallel(
            stages, 2, mesh=mesh, dim="pp", loss=nn.mse_loss, dtype=dtype
        )
    else:
        module = nn.Sequential(*layers(mesh, "tp" in mesh.dim_names), Counted())
        if mesh.dims_text == "dp=1" and draw([True, False]):
            module.materialize(seed=0, dtype=dtype)
            optimizer = rule(module.parameters())

            def alone():
                ctx = nn.Context()
                module.backward(np.ones_like(module(x, ctx)), ctx)
                optimizer.step()

            return module, optimizer, alone
        model = mm.DataParallel(module, mesh, loss=nn.mse_loss, dtype=dtype)
        stage = draw([0, 1, 2, 3])
        mm.fully_shard(model, mesh, stage=stage)
    optimizer = rule(model.parameters())
    if draw([True, True, False]) or stage:
        optimizer = mm.ParallelOptimizer(optimizer, model)
    return model, optimizer, lambda: model.train_step(x, y, optimizer=optimizer)


def arrays_in(state):
    if isinstance(state, np.ndarray):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from arrays_in(value)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**9), size=st.sampled_from([1, 2, 4]))
def test_states_are_copies(seed, size):
    def main():
        rng = np.random.default_rng(seed)

        def draw(row):
            return row[int(rng.integers(len(row)))]

        with mm.DeviceMesh(draw(DIMS[size])) as mesh:
            model, optimizer, step = made(draw, mesh)
            step()

            def states():
                with model.gathered() if hasattr(model, "gathered") else nullcontext():
                    found = [model.state_dict(), optimizer.state_dict()]
                if hasattr(model, "full_state_dict"):
                    found.append(model.full_state_dict())
                if isinstance(optimizer, mm.ParallelOptimizer):
                    found.append(optimizer.full_state_dict())
                return found

            first = states()
            kept = copy.deepcopy(first)
            assert [*arrays_in(first)]
            step()
            step()
            np.testing.assert_equal(first, kept)  # what was kept stays
            second, third = states(), states()
            mesh.barrier()
            for array in arrays_in(third):  # may be written, and no other rank sees it
                array[...] = 7 + mesh.rank
            mesh.barrier()
            np.testing.assert_equal(states(), second)
            model.load_state_dict(kept[2] if len(kept) > 2 else kept[0])
            optimizer.load_state_dict(kept[3] if len(kept) > 3 else kept[1])
            np.testing.assert_equal(states(), kept)

    mm.run_virtual(size, main)
