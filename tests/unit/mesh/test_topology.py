from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.errors import MeshError, WorldSizeError
from mpimesh.mesh import MeshTopology, TensorParallelTopology
from tests.helpers.raises import raises

small = st.integers(1, 4)

BAD: list[Any] = [(4,), 1.5, 3]


@st.composite
def topologies(draw):
    """Draw (topology, a world size that it fills)."""
    n = draw(small)
    k = draw(small)
    kind = draw(st.sampled_from(["any", "dp", "tp", "tp2", "pp", "mixed"]))
    if kind == "any":
        return MeshTopology.data_parallel(), n
    if kind == "dp":
        return MeshTopology.data_parallel(n), n
    if kind == "tp":
        return MeshTopology.tensor_parallel(n), n * k
    if kind == "tp2":
        rows = draw(small)
        return MeshTopology.tensor_parallel(rows * n, (rows, n)), rows * n * k
    if kind == "pp":
        return MeshTopology.pipeline_parallel(n), n
    dp = draw(small)
    return MeshTopology.mixed(tp=n, pp=k, dp=dp), n * k * dp


@given(topologies())
def test_text_comes_back(drawn):
    topology, world = drawn
    back = MeshTopology.parse(str(topology))
    assert back == topology == pickle.loads(pickle.dumps(topology))
    assert hash(back) == hash(topology)
    assert back.to_mesh(world) == topology.to_mesh(world)


@given(topologies())
def test_every_rank_is_in_one_group_of_each_kind(drawn):
    topology, world = drawn
    topology.validate(world)
    assert topology.to_mesh(world).size == world
    plan = topology.group_plan(world)
    assert plan == topology.group_plan(world)
    names = {name for name, _ in plan}
    assert len(names) == len(plan)
    assert "world" not in names
    kinds: dict[str, list[int]] = {}
    for name, ranks in plan:
        stage = name.startswith("pp_stage")
        kinds.setdefault("pp_stage" if stage else name.split("_")[0], []).extend(ranks)
    assert all(sorted(ranks) == list(range(world)) for ranks in kinds.values())


def test_kapsls_groups_of_a_mixed_topology():
    topology = MeshTopology.mixed(tp=2, pp=2, dp=2)
    plan = {name: list(ranks) for name, ranks in topology.group_plan(8)}
    assert list(plan.items())[:4] == [
        ("tp_dp0_pp0", [0, 1]),
        ("tp_dp0_pp1", [2, 3]),
        ("tp_dp1_pp0", [4, 5]),
        ("tp_dp1_pp1", [6, 7]),
    ]
    assert list(plan.items())[4:] == [
        ("pp_dp0_tp0", [0, 2]),
        ("pp_dp0_tp1", [1, 3]),
        ("pp_dp1_tp0", [4, 6]),
        ("pp_dp1_tp1", [5, 7]),
        ("dp_pp0_tp0", [0, 4]),
        ("dp_pp0_tp1", [1, 5]),
        ("dp_pp1_tp0", [2, 6]),
        ("dp_pp1_tp1", [3, 7]),
    ]


@given(small, small, small)
def test_ranks_of_a_mixed_topology_are_row_major(tp, pp, dp):
    mesh = MeshTopology.mixed(tp, pp, dp).to_mesh(tp * pp * dp)
    assert mesh.dim_names == ["dp", "pp", "tp"]
    for d, p, t in np.ndindex(dp, pp, tp):
        assert mesh.rank_at(dp=d, pp=p, tp=t) == (d * pp + p) * tp + t


def test_groups_of_the_other_kinds():
    def plan(topology, world, **options):
        return [(name, list(ranks)) for name, ranks in topology.group_plan(world, **options)]

    assert plan(MeshTopology.tensor_parallel(4), 8) == [
        ("tp_0", [0, 1, 2, 3]),
        ("tp_1", [4, 5, 6, 7]),
        ("dp_0", [0, 4]),
        ("dp_1", [1, 5]),
        ("dp_2", [2, 6]),
        ("dp_3", [3, 7]),
    ]
    shaped = MeshTopology.tensor_parallel(4, (2, 2))
    assert plan(shaped, 8) == plan(MeshTopology.tensor_parallel(4), 8)
    assert shaped.to_mesh(8).dims_text == "dp=2,tp_row=2,tp_col=2"
    assert plan(MeshTopology.pipeline_parallel(2), 2) == [
        ("pp_stage_0", [0]),
        ("pp_stage_1", [1]),
        ("pp_0", [0, 1]),
    ]
    assert plan(MeshTopology.data_parallel(), 3) == [("dp_0", [0, 1, 2])]
    assert plan(MeshTopology.pipeline_parallel(2), 3, allow_idle=True)[-1] == ("pp_0", [0, 1])


def test_expected_world_size():
    assert MeshTopology.data_parallel().expected_world_size == 1
    assert MeshTopology.data_parallel(3).expected_world_size == 3
    assert MeshTopology.tensor_parallel(4).expected_world_size == 4
    assert MeshTopology.pipeline_parallel(5).expected_world_size == 5
    assert MeshTopology.mixed(2, 3, 4).expected_world_size == 24


@pytest.mark.parametrize(
    ("topology", "world", "values"),
    [
        (MeshTopology.data_parallel(4), 3, ("Data", 4, 3)),
        (
            MeshTopology.tensor_parallel(4),
            2,
            ("Tensor", 4, 2),
        ),
        (
            MeshTopology.pipeline_parallel(4),
            2,
            ("Pipeline", 4, 2),
        ),
        (
            MeshTopology.mixed(tp=2, pp=3, dp=4),
            8,
            ("TP=2, PP=3, DP=4", 24, 8),
        ),
    ],
)
def test_too_small_a_world(topology, world, values):
    for check in (topology.validate, topology.to_mesh, topology.group_plan):
        with raises(WorldSizeError, *values):
            check(world)
        with raises(WorldSizeError, *values):
            check(world, allow_idle=True)


@pytest.mark.parametrize(
    ("topology", "world", "used"),
    [
        (MeshTopology.data_parallel(4), 6, 4),
        (MeshTopology.tensor_parallel(4), 6, 4),
        (MeshTopology.tensor_parallel(4), 11, 8),
        (MeshTopology.pipeline_parallel(4), 8, 4),
        (MeshTopology.mixed(2, 2, 2), 9, 8),
    ],
)
def test_leftover_ranks_are_refused_or_idle(topology, world, used):
    idle = world - used
    with raises(WorldSizeError, str(topology), used, world, idle, "allow_idle=True"):
        topology.validate(world)
    assert topology.to_mesh(world, allow_idle=True).size == used
    ranks = {rank for _, ranks in topology.group_plan(world, allow_idle=True) for rank in ranks}
    assert ranks == set(range(used))


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: MeshTopology.data_parallel(0), ("n", 0)),
        (lambda: MeshTopology.tensor_parallel(0), ("degree", 0)),
        (lambda: MeshTopology.tensor_parallel(4, (2, 4)), ("mesh_shape", "2 x 4 = 8", "degree 4")),
        (lambda: TensorParallelTopology(4, BAD[0]), ("mesh_shape", "(rows, columns)", (4,))),
        (lambda: MeshTopology.tensor_parallel(4, (-2, -2)), ("rows", -2)),
        (lambda: MeshTopology.pipeline_parallel(-1), ("stages", -1)),
        (lambda: MeshTopology.mixed(1, 2, 0), ("dp", 0)),
        (lambda: MeshTopology.mixed(BAD[1], 2, 1), ("tp", 1.5)),
        (lambda: MeshTopology.parse("ring"), ("topology", "'ring'")),
        (lambda: MeshTopology.parse(BAD[2]), ("topology", 3)),
        (lambda: MeshTopology.parse("mixed:tp=2"), ("topology 'mixed:tp=2'", "option")),
        (
            lambda: MeshTopology.parse("data-parallel:stages=2"),
            ("topology 'data-parallel:stages=2'", "option"),
        ),
        (
            lambda: MeshTopology.parse("mixed:tp=2,tp=2,pp=1,dp=1"),
            ("topology 'mixed:tp=2,tp=2,pp=1,dp=1'", "'tp=2'"),
        ),
        (lambda: MeshTopology.parse("mixed:tp"), ("topology 'mixed:tp'", "'tp'")),
        (lambda: MeshTopology.parse("pipeline-parallel:stages=2x2"), ("stages", (2, 2))),
        (
            lambda: MeshTopology.parse("tensor-parallel:degree=4,mesh_shape=4"),
            ("mesh_shape", "(rows, columns)", 4),
        ),
        (lambda: MeshTopology.mixed(1, 1, 1).validate(0), ("world_size", 0)),
    ],
)
def test_topologies_that_break_a_rule(make, values):
    with raises(MeshError, *values):
        make()
