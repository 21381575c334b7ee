"""Every public callable with arguments that work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.compat import burn, kapsl, tensorflow, tvm
from mpimesh.errors import MpimeshError

__all__ = ["CALLS", "LOCAL", "Call", "Place"]


class Place:
    """The arguments at a rank's hand: a mesh of two ranks, and what lies on it."""

    def __init__(self) -> None:
        self.mesh = mm.DeviceMesh("dp=2")
        self.group = self.mesh.group("dp")
        self.peer = 1 - self.mesh.rank
        self.value = mm.Mesh("dp=2,tp=2")
        self.tensor = mm.distribute(np.arange(8.0), self.mesh, "dp=S0")
        self.halo = mm.Halo(self.tensor)
        self.handle: mm.CollectiveTensor | None = None
        self.client: burn.DistributedSyncClient | None = None

    def start(self) -> mm.CollectiveTensor:
        """Start an operation, which :meth:`finish` resolves."""
        self.handle = self.group.all_reduce(np.ones(2))
        return self.handle

    def finish(self) -> None:
        """Resolve what was started."""
        if self.handle is not None:
            with suppress(MpimeshError):
                self.handle.resolve()
        if self.client is not None:
            with suppress(MpimeshError):
                self.client.submit_sync_collective(30)

    def send(self, x: Any = (1.0, 2.0), dest: Any = None, tag: Any = 0) -> Any:
        """Send to the other rank, which does so, too."""
        self.handle = self.group.send(x, self.peer if dest is None else dest, tag=tag)
        return self.group.recv(self.peer, tag=tag)

    def recv(
        self, source: Any = ..., shape: Any = None, dtype: Any = None, out: Any = None, tag: Any = 0
    ) -> Any:
        """Receive what the other rank sends, which does so, too."""
        source = self.peer if source is ... else source
        self.handle = self.group.recv(source, shape=shape, dtype=dtype, out=out, tag=tag)
        self.group.send(np.arange(2.0), self.peer, tag=tag).resolve()
        return self.handle

    def send_init(self, x: Any = (1.0, 2.0), dest: Any = None, tag: Any = 0) -> Any:
        """Plan a message, as :meth:`send`, and start it."""
        planned = self.group.send_init(x, self.peer if dest is None else dest, tag=tag)
        self.handle = planned.start()
        return self.group.recv(self.peer, tag=tag)

    def recv_init(self, out: Any = ..., source: Any = ..., tag: Any = 0) -> Any:
        """Plan a message, as :meth:`recv`, and start it."""
        out = np.zeros(2) if out is ... else out
        planned = self.group.recv_init(out, self.peer if source is ... else source, tag=tag)
        self.handle = planned.start()
        self.group.send(np.arange(2.0), self.peer, tag=tag).resolve()
        return self.handle

    def mapped(self, function: Any = abs, out_placements: Any = "dp=S0", **options: Any) -> Any:
        """Call what `local_map` returns."""
        return mm.local_map(function, out_placements, **options)(self.tensor)

    def synced(self, timeout_s: Any) -> None:
        """Reduce a gradient by its id, as burn does."""
        self.client = burn.DistributedSyncClient(self.group)
        self.client.register_sync_parameters({1: np.ones(2)})
        self.client.submit_gradient_sync(1)
        self.client.submit_sync_collective(timeout_s)


Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Callable[[Place], Call]] = {}
"""By its public name, a function and arguments that it takes."""

LOCAL: set[str] = set()
"""Those that take part in nothing: what one rank gives is no other's concern."""


def _call_of(
    owner: Callable[[Place], Any], name: str, arguments: dict[str, Any], place: Place
) -> Call:
    return getattr(owner(place), name.split()[0]), arguments


def _call_on_mesh(owner: Any, name: str, arguments: dict[str, Any], place: Place) -> Call:
    there = {"mesh": place.mesh, "placements": "dp=S0"}
    return getattr(owner, name.split()[0]), {**arguments, **there}


def _plain(prefix: str, owner: Any, calls: dict[str, dict[str, Any]]) -> None:
    """Add what is looked up in `owner`, which talks to no other rank."""
    for name, arguments in calls.items():
        CALLS[f"{prefix}.{name}"] = partial(_call_of, lambda _: owner, name, arguments)
        LOCAL.add(f"{prefix}.{name}")


def _of(
    prefix: str,
    owner: Callable[[Place], Any],
    calls: dict[str, dict[str, Any]],
    *,
    local: bool = False,
) -> None:
    """Add methods of what a place has."""
    for name, arguments in calls.items():
        CALLS[f"{prefix}.{name}"] = partial(_call_of, owner, name, arguments)
        if local:
            LOCAL.add(f"{prefix}.{name}")


def _on_mesh(prefix: str, owner: Any, calls: dict[str, dict[str, Any]]) -> None:
    """Add what takes a mesh and placements, too."""
    for name, arguments in calls.items():
        CALLS[f"{prefix}.{name}"] = partial(_call_on_mesh, owner, name, arguments)


_QUERIES: dict[str, dict[str, Any]] = {
    "contains_dim": {"dim": "dp"},
    "contains_rank": {"rank": 0},
    "coord_of": {"rank": 0, "dim": "dp"},
    "coords_of": {"rank": 0},
    "dim_size": {"dim": "dp"},
    "group_index": {"rank": 0, "dims": "dp"},
    "group_ranks": {"rank": 0, "dims": "dp"},
    "groups": {"dims": "dp"},
    "neighbour": {"rank": 0, "dim": "dp"},
    "num_groups": {"dims": "dp"},
    "offset_of": {"rank": 0},
    "place_in_group": {"rank": 0, "dims": "dp"},
    "rank_of": {"offset": 0},
}

_plain(
    "mm",
    mm,
    {
        "Mesh": {"dims": "dp=2"},
        "Partial": {},
        "Placement": {"specs": ["S0"]},
        "Random": {},
        "Replicate": {},
        "Shard": {"axis": 0},
        "Tracer": {"rank": 0},
        "run_virtual": {"size": 1, "function": int},
    },
)
_plain(
    "mesh",
    mm.mesh,
    {
        "Device": {"id": 0, "name": "a", "backend": mm.mesh.DeviceBackend("cpu")},
    },
)
_plain(
    "Mesh",
    mm.Mesh,
    {
        "from_ids": {"shape": (2,), "ids": [0, 1]},
    },
)
_plain(
    "MeshTopology",
    mm.MeshTopology,
    {
        "data_parallel": {},
        "mixed": {"tp": 1, "pp": 1, "dp": 1},
        "parse": {"text": "data-parallel"},
        "pipeline_parallel": {"stages": 2},
        "tensor_parallel": {"degree": 2},
    },
)
_plain(
    "MeshTopology",
    mm.MeshTopology.parse("mixed:tp=2,pp=2,dp=2"),
    {name: {"world_size": 8} for name in ("group_plan", "to_mesh", "validate")},
)
_plain(
    "Layout",
    mm.Layout,
    {
        "replicated": {"mesh": mm.Mesh("dp=2")},
    },
)
_plain(
    "Layout",
    mm.Layout(mm.Mesh("dp=2"), "S0"),
    {
        "agrees_with": {"other": mm.Layout(mm.Mesh("dp=2"), "S0")},
        "box": {"shape": (4,), "rank": 0},
        "global_offset": {"shape": (4,), "rank": 0},
        "holders": {"shape": (4,)},
        "local_shape": {"shape": (4,), "rank": 0},
        "sharding_dims": {"axis": 0},
        "tiling": {"shape": (4,)},
    },
)
_plain("Shard", mm.Shard, {"of_sizes": {"axis": 0, "sizes": [1, 2]}})
_plain(
    "Placement",
    mm.Placement,
    {"from_text": {"text": "S0"}, "of": {"placements": "S0", "dim_names": ["dp"]}},
)
_plain("Placement", mm.Placement(["S0"]), {"named": {"dim_names": ["dp"]}})
_of(
    "Mesh",
    lambda place: place.value,
    {**_QUERIES, "check_world": {"world_size": 4}},
    local=True,
)
_of("DeviceMesh", lambda place: place.mesh, _QUERIES, local=True)
_of(
    "Mesh",
    lambda place: place.value,
    {
        "flatten": {"dims": "dp,tp", "name": "all"},
        "submesh_of": {"rank": 0, "dims": "dp"},
        "unflatten": {"dim": "dp", "dims": "a=2"},
    },
    local=True,
)
_of(
    "DeviceMesh",
    lambda place: place.mesh,
    {
        "budget": {},
        "coord": {"dim": "dp"},
        "devices_by_backend": {"backend": "cpu"},
        "devices_in_group": {"name": "dp"},
        "get_device": {"rank": 0},
        "get_group": {"name": "dp"},
        "group": {},
        "group_rank": {"name": "dp"},
        "in_group": {"name": "dp"},
        "set_rank": {"rank": 0},
        "shared_empty": {"shape": (2,)},
    },
    local=True,
)
_of(
    "DeviceMesh",
    lambda place: place.mesh,
    {
        "add_group": {"name": "more", "ranks": [0, 1]},
        "add_group along dims": {"name": "more", "dims": "dp"},
        "barrier": {},
        "reshape": {"dims": "a=2"},
        "set_comm": {"comm": None},
    },
)
_of(
    "ProcessGroup",
    lambda place: place.group,
    {
        "barrier": {},
        "empty_once": {"shape": 2},
        "group_rank_of": {"world_rank": 0},
        "start_barrier": {},
        **{
            name: {"x": np.arange(4.0)}
            for name in (
                "all_gather",
                "all_reduce",
                "all_to_all",
                "broadcast",
                "gather",
                "reduce",
                "reduce_scatter",
                "scatter",
                "shift",
            )
        },
    },
)


def _planned(name: str, place: Place) -> Call:
    """Return a call that plans a collective and starts it."""

    def call(**arguments: Any) -> Any:
        return getattr(place.group, name)(**arguments).start()

    return call, {"x": np.arange(4.0)}


for _name in (
    "all_gather_init",
    "all_reduce_init",
    "all_to_all_init",
    "broadcast_init",
    "gather_init",
    "reduce_init",
    "reduce_scatter_init",
):
    CALLS[f"ProcessGroup.{_name}"] = partial(_planned, _name)
CALLS["ProcessGroup.scatter_init"] = lambda place: (
    _planned("scatter_init", place)[0],
    {"x": np.arange(4.0), "out": np.empty(4 // place.group.size)},
)
CALLS["ProcessGroup.send"] = lambda place: (place.send, {})
CALLS["ProcessGroup.recv"] = lambda place: (place.recv, {})
CALLS["ProcessGroup.send_init"] = lambda place: (place.send_init, {})
CALLS["ProcessGroup.recv_init"] = lambda place: (place.recv_init, {})
_of(
    "CollectiveTensor",
    Place.start,
    {"map": {"function": abs}, "resolve": {}, "wait": {}},
)
_on_mesh(
    "mm",
    mm,
    {
        "Layout": {},
        "arange": {"start": 4},
        "distribute": {"x": np.arange(4.0)},
        "distribute from a root": {"x": np.arange(4.0), "root": 0},
        "empty": {"shape": (4,)},
        "eye": {"rows": 4},
        "from_callback": {"shape": (4,), "callback": lambda _: np.zeros(2)},
        "full": {"shape": (4,), "value": 1},
        "linspace": {"start": 0, "stop": 1},
        "ones": {"shape": (4,)},
        "zeros": {"shape": (4,)},
    },
)
_on_mesh("Halo", mm.Halo, {"of_shape": {"shape": (4,)}})
_on_mesh("DTensor", mm.DTensor, {"from_local": {"block": np.zeros(2)}})
_on_mesh(
    "Random",
    mm.Random(1),
    {
        "bernoulli": {"p": 0.5, "shape": (4,)},
        "exponential": {"shape": (4,)},
        "integers": {"low": 0, "high": 3, "shape": (4,)},
        "normal": {"shape": (4,)},
        "uniform": {"shape": (4,)},
    },
)
_plain("Random", mm.Random(1), {"permutation": {"n": 3}})
_of(
    "Halo",
    lambda place: place.halo,
    {"exchange": {"x": None}, "field": {}, "start": {"field": None}},
)
_of(
    "DTensor",
    lambda place: place.tensor,
    {
        "full": {},
        "plan": {},
        "redistribute": {"placements": "R"},
        "start_redistribute": {"placements": "R"},
    },
)
CALLS |= {
    "Mesh.rank_at": lambda place: (
        lambda dp, tp: place.value.rank_at(dp, tp),
        {"dp": 0, "tp": 0},
    ),
    "Mesh.submesh": lambda place: (
        lambda dims, tp: place.value.submesh(dims, tp=tp),
        {"dims": "dp", "tp": 0},
    ),
    "DeviceMesh.rank_at": lambda place: (lambda dp: place.mesh.rank_at(dp=dp), {"dp": 0}),
    "mm.DeviceMesh": lambda _: (mm.DeviceMesh, {"dims": "dp=2"}),
    "mm.DTensor": lambda place: (
        mm.DTensor,
        {
            "mesh": place.mesh,
            "layout": place.tensor.layout,
            "shape": (8,),
            "dtype": float,
            "block": np.zeros(4),
        },
    ),
    "mm.Halo": lambda place: (mm.Halo, {"x": place.tensor}),
    "dtensor.HaloField": lambda place: (mm.dtensor.HaloField, {"halo": place.halo}),
    "mm.default_layout": lambda place: (
        lambda mesh, placements=None: mm.default_layout(mesh, placements).__enter__(),
        {"mesh": place.mesh},
    ),
    "mm.local_map": lambda place: (
        place.mapped,
        {
            "function": abs,
            "out_placements": "dp=S0",
            "in_placements": None,
            "out_shapes": None,
            "mesh": None,
        },
    ),
    "mm.shift": lambda place: (mm.shift, {"x": place.tensor, "steps": 1, "axis": 0}),
    "tvm.annotate_sharding": lambda place: (
        tvm.annotate_sharding,
        {"x": place.tensor, "mesh": place.mesh, "placement": "S0"},
    ),
    "tvm.struct_info": lambda place: (tvm.struct_info, {"x": place.tensor}),
    "tvm.scatter_from_worker0": lambda place: (
        tvm.scatter_from_worker0,
        {"x": np.ones(4), "num_workers": 2, "axis": 0, "group": place.group},
    ),
    "burn.DistributedSyncClient": lambda place: (
        burn.DistributedSyncClient,
        {"group": place.group, "all_reduce_op": "sum"},
    ),
    "burn.register_sync_parameters": lambda place: (
        burn.DistributedSyncClient(place.group).register_sync_parameters,
        {"gradients": {1: np.ones(2)}},
    ),
    "burn.submit_sync_collective": lambda place: (place.synced, {"timeout_s": 30}),
    "tensorflow.Heartbeat": lambda place: (
        tensorflow.Heartbeat,
        {"mesh": place.mesh, "timeout_s": 30, "strikes": 3},
    ),
    "kapsl.dist_ops": lambda place: (kapsl.dist_ops, {"mesh": place.mesh}),
    "tvm.redistribute": lambda place: (
        tvm.redistribute,
        {"x": place.tensor, "mesh": place.mesh, "placement": "R"},
    ),
    "tvm.redistribute_replica_to_shard": lambda place: (
        tvm.redistribute_replica_to_shard,
        {"x": place.tensor.redistribute("R"), "num_workers": 2, "axis": 0},
    ),
}
_of(
    "kapsl",
    lambda place: kapsl.dist_ops(place.mesh),
    {
        "all_reduce": {"data": np.ones(2), "op": "sum", "group": "world"},
        "broadcast": {"data": np.ones(2), "root_rank": 0, "group": "world"},
        "all_gather": {"local": np.ones(2), "output": np.ones(4), "group": "world"},
        "scatter": {"data": np.ones(4), "chunk": np.ones(2), "root_rank": 0, "group": "world"},
        "gather": {"local": np.ones(2), "output": np.ones(4), "root_rank": 0, "group": "world"},
        "reduce_scatter": {"data": np.ones(4), "output": np.ones(2), "op": "sum"},
        "barrier": {"group": "world"},
    },
)
