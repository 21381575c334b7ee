"""Models measured and cut over real MPI: one cut for all ranks, which trains as the uncut model."""

from __future__ import annotations

from functools import partial

import numpy as np

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import StageError
from mpimesh.parallel import PipelineParallel, measure_layers
from mpimesh.schedule import auto
from tests.helpers.parallel_models import assert_same, batch, layers, train_alone, train_on
from tests.helpers.parallel_traps import Trap, error_of
from tests.helpers.raises import names


def test_a_wide_layer_has_a_stage_of_its_own(comm):
    """It takes many times as long as all others together: no measurement is that wrong."""
    made = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1024)]
    made += [nn.Linear(1024, 1024), nn.Linear(1024, 8), nn.ReLU(), nn.Linear(8, 8)]
    x = np.ones((256, 8), np.float32)
    with mm.DeviceMesh("pp=-1", comm) as mesh:
        # More repeats than usual: of a few, most may meet something else on a busy machine.
        costs = measure_layers(
            made, x, mesh=mesh, repeats=15, bytes_per_s=float("inf"), latency_s=0
        )
        stages = PipelineParallel.partition(made, 3, mesh=mesh, times=costs)
    assert [len(stage) for stage in stages] == [3, 1, 3], costs.total_s
    assert all(one.data is None for stage in stages for one in stage.parameters())


def test_all_ranks_have_the_same_costs_and_train_by_them(comm):
    dims = "dp=2,pp=2" if comm.size == 4 else "pp=-1"
    with mm.DeviceMesh(dims, comm) as mesh:
        num_stages = mesh.dim_size("pp")
        made = layers()
        costs = measure_layers(made, batch(0, 3)[0], mesh=mesh, dtype=np.float64)
        assert all(one_s > 0 for one_s in costs.total_s)
        assert all((one_s > 0) is (num_stages > 1) for one_s in costs.message_s)
        assert set(comm.allgather(costs)) == {costs}
        if num_stages > len(made):
            return
        stages = PipelineParallel.partition(made, num_stages, mesh=mesh, times=costs)
        of_stages = costs.joined(map(len, stages)).as_arguments()
        trained = train_on(mesh, 2, 13, stages=stages, schedule=partial(auto, **of_stages))
        assert_same(trained, train_alone(2, 13))


def test_a_layer_that_fails_on_the_last_rank_fails_on_all(comm):
    with mm.DeviceMesh("pp=-1", comm) as mesh:
        trap = Trap()
        if mesh.rank == comm.size - 1:
            trap.arm("B", 2)
        made = [nn.Linear(3, 2), trap, nn.Linear(2, 2)]
        x = np.ones((4, 3), np.float32)
        error = error_of(lambda: PipelineParallel.partition(made, 2, mesh=mesh, x=x))
        assert isinstance(error, StageError)
        names(str(error), f"rank {comm.size - 1}", "ValueError", "layer 1", "Trap", "boom")
        trap.disarm()
        assert len(PipelineParallel.partition(made, 2, mesh=mesh, x=x)) == 2
