"""A GPT split over real MPI ranks, against the whole one in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import StageError
from mpimesh.parallel import measure_layers
from tests.helpers.parallel_traps import Trap, assert_nothing_left, error_of
from tests.helpers.tensor_models import assert_same, batch, layers, trained, trained_alone, trapped

MESHES = {
    1: ["tp=1"],
    2: ["tp=2"],
    3: ["tp=3"],
    4: ["tp=4", "dp=2,tp=2", "pp=2,tp=2"],
    8: ["dp=2,pp=2,tp=2"],
}


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("plain", False), ("llama", True)])
def test_it_trains_like_the_whole_one(comm, kind, sequence_parallel):
    for dims in MESHES[comm.size]:
        with mm.DeviceMesh(dims, comm) as mesh:
            got = trained(mesh, kind, sequence_parallel=sequence_parallel)
            assert_same(got, trained_alone(kind))


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_that_fails_within_a_layer_ends_the_step_on_all(comm, sequence_parallel):
    dims = "pp=2,tp=2" if comm.size == 4 else f"tp={comm.size}"
    with mm.DeviceMesh(dims, comm) as mesh:
        model, traps, loss = trapped(mesh, sequence_parallel)
        step = partial(model.train_step, *batch(0), loss=loss)
        for place in ("inside", "outside"):
            for kind, microbatch in (("F", 1), ("B", 0)):
                if mesh.coord("tp") == 1:
                    traps[0][place].arm(kind, microbatch)
                assert type(error_of(step)) is StageError
                assert_nothing_left(mesh)
                traps[0][place].disarm()
        loss.armed = True
        assert "boom in the loss" in str(error_of(step))
        loss.armed = False
        assert step() == pytest.approx(trained_alone("plain")[0][0], rel=1e-11)


@pytest.mark.nprocs(2, 3, 4)
def test_a_rank_that_fails_while_layers_are_measured_ends_it_on_all(comm):
    with mm.DeviceMesh(f"tp={comm.size}", comm) as mesh:
        made = layers("plain", tp=mesh.group("tp"))
        trap = Trap()
        block: Any = made[4]
        block.mlp.activation = nn.Sequential(block.mlp.activation, trap)
        measure = partial(measure_layers, made, batch(0)[0][:2], mesh=mesh, repeats=1)
        if mesh.rank == 1:
            trap.arm("F", 1)
        assert "rank 1: ValueError: layer 4" in str(error_of(measure))
        assert_nothing_left(mesh)
        trap.disarm()
        assert len(measure().forward_s) == len(made)
