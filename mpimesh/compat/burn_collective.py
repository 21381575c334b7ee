"""burn's ``burn-collective``: peers that register, and strategies by which they reduce.

A peer is a rank, and a node a host: the launcher has started and connected them, so addresses and
ports are refused. :mod:`mpimesh.compat.burn` has these names, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh import runtime
from mpimesh.arguments import as_int, check_kind, shown
from mpimesh.arrays import Array, OpLike, ReduceOp, as_reduce_op, wire_dtype
from mpimesh.comm.algorithms import tree_arity
from mpimesh.errors import GroupError, LaunchError, RankError, on_all_ranks
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree_alike

__all__ = [
    "AllReduceStrategy",
    "BroadcastStrategy",
    "CollectiveConfig",
    "CollectiveTensor",
    "NodeId",
    "Number",
    "PeerId",
    "ReduceOperation",
    "ReduceStrategy",
    "all_reduce",
    "as_op",
    "broadcast",
    "checked_group",
    "finish_collective",
    "nodes",
    "reduce",
    "register",
    "reset_collective",
    "start_global_orchestrator",
]

_NAME = "collective"


class ReduceOperation(Enum):
    """The operation that reduces gradients."""

    Sum = "sum"
    Mean = "mean"


@dataclass(frozen=True, slots=True, order=True)
class Number:
    """A number from 0 on, which means the same on all ranks."""

    value: int

    def __post_init__(self) -> None:
        """Take NumPy's integers, too."""
        name = type(self).__name__
        object.__setattr__(self, "value", as_int(self.value, name, GroupError, least=0))

    def __str__(self) -> str:
        """Write the number."""
        return str(self.value)


class PeerId(Number):
    """The number of a peer: a rank of the group that :func:`register` returns."""

    __slots__ = ()


class NodeId(Number):
    """The number of a node, in the order of the nodes' first peers."""

    __slots__ = ()


class CollectiveTensor:
    """A result to come, or an array that is there. Copies resolve to the same array."""

    def __init__(self, handle: runtime.CollectiveTensor | Array) -> None:
        self._handle = handle
        self._pending = isinstance(handle, runtime.CollectiveTensor)

    def clone(self) -> CollectiveTensor:
        """Return another handle of the same result."""
        return CollectiveTensor(self._handle)

    def resolve(self) -> Array:
        """Wait for this operation only, and return its result; see `mpimesh.CollectiveTensor`."""
        return self._handle.resolve() if self._pending else self._handle

    def wait(self, timeout_s: float | None = None) -> Array:
        """Wait for at most `timeout_s` seconds, and return the result.

        Raises:
            CollectiveTimeoutError: After that time; the operation goes on, and can be waited for
                again.
        """
        return self._handle.resolve(timeout_s) if self._pending else self._handle

    def test(self) -> bool:
        """Tell whether the result is there, without waiting."""
        return self._handle.done() if self._pending else True

    done = test

    def assume_resolved(self) -> Array:
        """Return a result that is known to be there.

        Raises:
            UnresolvedError: If it is not, after all.
        """
        return self._handle.assume_resolved() if self._pending else self._handle


# -- strategies ------------------------------------------------------------------------------------


class ReduceStrategy:
    """Ways of a reduction to one peer, by the names of :meth:`mpimesh.ProcessGroup.reduce`."""

    Centralized = "centralized"

    @staticmethod
    def Tree(arity: int = 2) -> str:
        """Return the way along a tree, of which each peer has at most `arity` branches."""
        return f"tree({arity})"


class BroadcastStrategy(ReduceStrategy):
    """Ways of a broadcast, by the names of :meth:`mpimesh.ProcessGroup.broadcast`."""


class AllReduceStrategy(ReduceStrategy):
    """Ways of a reduction to all, by the names of :meth:`mpimesh.ProcessGroup.all_reduce`."""

    Ring = "ring"


@dataclass(frozen=True, slots=True)
class CollectiveConfig:
    """The configuration of a peer, the same on all ranks. A strategy of None is the fastest way.

    Without a strategy over nodes, the local ones are those of all peers. With one, a reduction is
    done within each node by the local strategy, and then between the first peers of the nodes.

    Attributes:
        num_devices: Number of peers, on all nodes together; that of all ranks if None.
        local_all_reduce_strategy: The way of :func:`all_reduce`.
        local_reduce_strategy: The way of :func:`reduce`.
        local_broadcast_strategy: The way of :func:`broadcast`.
        num_nodes: Number of nodes that the peers must be on; any if None.
        global_all_reduce_strategy: The way of :func:`all_reduce` between nodes.
        global_reduce_strategy: The way of :func:`reduce` between nodes.
        global_broadcast_strategy: The way of :func:`broadcast` between nodes.
    """

    num_devices: int | None = None
    local_all_reduce_strategy: str | None = None
    local_reduce_strategy: str | None = None
    local_broadcast_strategy: str | None = None
    num_nodes: int | None = None
    global_all_reduce_strategy: str | None = None
    global_reduce_strategy: str | None = None
    global_broadcast_strategy: str | None = None

    def with_num_devices(self, number: int) -> CollectiveConfig:
        """Return it with this number of peers."""
        return replace(self, num_devices=number)

    def with_num_nodes(self, number: int) -> CollectiveConfig:
        """Return it with this number of nodes."""
        return replace(self, num_nodes=number)

    def with_local_all_reduce_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`all_reduce`, within nodes if there is one between."""
        return replace(self, local_all_reduce_strategy=strategy)

    def with_local_reduce_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`reduce`, within nodes if there is one between."""
        return replace(self, local_reduce_strategy=strategy)

    def with_local_broadcast_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`broadcast`, within nodes if there is one between."""
        return replace(self, local_broadcast_strategy=strategy)

    def with_global_all_reduce_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`all_reduce` between nodes."""
        return replace(self, global_all_reduce_strategy=strategy)

    def with_global_reduce_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`reduce` between nodes."""
        return replace(self, global_reduce_strategy=strategy)

    def with_global_broadcast_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of :func:`broadcast` between nodes."""
        return replace(self, global_broadcast_strategy=strategy)

    def with_global_address(self, address: object) -> NoReturn:
        """Refuse: the launcher connects the ranks; LaunchError."""
        _refuse("an address of an orchestrator", address)

    def with_node_address(self, address: object) -> NoReturn:
        """Refuse: the launcher connects the ranks; LaunchError."""
        _refuse("an address of a node", address)

    def with_data_service_port(self, port: object) -> NoReturn:
        """Refuse: the launcher connects the ranks; LaunchError."""
        _refuse("a port", port)

    def is_valid(self) -> bool:
        """Tell whether the numbers are 1 or more, and there are such strategies."""
        try:
            self._check()
        except GroupError:
            return False
        return True

    def _check(self) -> None:
        for name in ("num_devices", "num_nodes"):
            if getattr(self, name) is not None:
                as_int(getattr(self, name), name, GroupError, least=1)
        for level in ("local", "global"):
            for operation in ("all_reduce", "reduce", "broadcast"):
                name = f"{level}_{operation}_strategy"
                way = getattr(self, name)
                known = isinstance(way, str) and (way == "centralized" or tree_arity(way) > 1)
                ring = way == "ring" and operation == "all_reduce"
                if not (way is None or known or ring):
                    also = ", 'ring'" if operation == "all_reduce" else ""
                    raise GroupError(
                        f"{name} must be 'centralized', 'tree(b)' with b from 2 on{also} or None, "
                        f"got {shown(way)}"
                    )

    def _over_nodes(self) -> bool:
        ways = (self.global_all_reduce_strategy, self.global_reduce_strategy)
        return any(way is not None for way in (*ways, self.global_broadcast_strategy))


def _refuse(what: str, value: object) -> NoReturn:
    raise LaunchError(
        f"{what} is not used, got {shown(value)}: mpiexec or srun starts the ranks and connects "
        "them, as in `mpiexec -n 4 python program.py`"
    )


# -- peers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Peers:
    """The configuration of a registered group; with strategies over nodes two groups more."""

    config: CollectiveConfig
    node_of: tuple[int, ...]
    """Of each peer."""
    node: ProcessGroup | None = None
    """The peers of this rank's node."""
    firsts: ProcessGroup | None = None
    """The first peer of each node."""


_PEERS: WeakKeyDictionary[ProcessGroup, _Peers] = WeakKeyDictionary()


def register(mesh: DeviceMesh, config: CollectiveConfig | None = None) -> ProcessGroup:
    """Return a group of the first `num_devices` ranks, called ``"collective"``. Collective.

    Raises:
        GroupError: On every rank, if it is registered, the configuration is not valid, or the
            peers are on another number of nodes.
        RankError: On every rank, if there are not as many ranks.
        MismatchError: On every rank, if the configurations differ.
    """
    check_kind(mesh, DeviceMesh, "mesh", GroupError, wanted="a live DeviceMesh")
    hosts = mesh.hosts

    def checked() -> tuple[CollectiveConfig, int]:
        chosen = CollectiveConfig() if config is None else config
        check_kind(chosen, CollectiveConfig, "config", GroupError, wanted="one of burn-collective")
        chosen._check()
        size = mesh.world_size if chosen.num_devices is None else chosen.num_devices
        there = len(set(hosts[:size]))
        if chosen.num_nodes not in (None, there):
            raise GroupError(
                f"num_nodes is {chosen.num_nodes}, but the first {size} ranks are on {there} "
                "nodes; start them so, or leave num_nodes out"
            )
        return chosen, size

    chosen, size = agree_alike(mesh.group(), "register", checked)
    group = mesh.add_group(_NAME, range(size))
    order = {host: place for place, host in enumerate(dict.fromkeys(hosts[:size]))}
    node_of = tuple(order[host] for host in hosts[:size])
    node = firsts = None
    if chosen._over_nodes():
        for place in range(len(order)):
            members = [rank for rank in range(size) if node_of[rank] == place]
            made = mesh.add_group(f"{_NAME} node {place}", members, apart=True)
            node = made if mesh.rank in members else node
        leaders = [node_of.index(place) for place in range(len(order))]
        firsts = mesh.add_group(f"{_NAME} nodes", leaders, apart=True)
    _PEERS[group] = _Peers(chosen, node_of, node, firsts)
    return group


def nodes(group: ProcessGroup) -> dict[NodeId, list[PeerId]]:
    """Return the peers of each node. Local.

    Raises:
        GroupError: If `group` is not registered.
    """
    found: dict[NodeId, list[PeerId]] = {}
    for peer, node in enumerate(_registered(group).node_of):
        found.setdefault(NodeId(node), []).append(PeerId(peer))
    return found


def finish_collective(group: ProcessGroup) -> None:
    """Give the group back, so that it may be registered again. Collective.

    Raises:
        GroupError: If `group` is not registered.
    """
    peers = _registered(group)
    del _PEERS[group]
    for one in (peers.node, peers.firsts, group):
        if one is not None:
            one.close()


def reset_collective(mesh: DeviceMesh) -> None:
    """Give back what is registered on a mesh, if anything is. Collective."""
    check_kind(mesh, DeviceMesh, "mesh", GroupError, wanted="a live DeviceMesh")
    if (group := mesh.get_group(_NAME)) is not None:
        finish_collective(group)


def all_reduce(
    tensor: Array,
    op: ReduceOperation | OpLike,
    group: ProcessGroup,
    strategy: str | None = None,
) -> CollectiveTensor:
    """Start a reduction over a group, which burn calls the ids of devices. Collective.

    Args:
        tensor: This rank's array.
        op: The operation.
        group: The ranks.
        strategy: The way, over all ranks of the group; that of the configuration of a registered
            group if None. In two levels, within nodes and between them, it waits.

    Raises:
        GroupError: If there is no such way.
        DTypeError: If the dtype cannot be reduced by `op`.
    """
    peers, reduction = _PEERS.get(checked_group(group)), as_op(op)
    if strategy is not None or peers is None or peers.node is None:
        way: Any = strategy or (peers and peers.config.local_all_reduce_strategy)
        return CollectiveTensor(group.all_reduce(tensor, reduction, algorithm=way))
    config, partial_op = peers.config, _of_parts(tensor, reduction)
    local: Any = config.local_all_reduce_strategy
    between: Any = config.global_all_reduce_strategy
    down: Any = config.local_broadcast_strategy
    if local == "ring":  # by which nothing is reduced to one rank
        total = peers.node.all_reduce(tensor, partial_op, algorithm=local).resolve()
    else:
        total = peers.node.reduce(tensor, partial_op, algorithm=local).resolve()
    if peers.firsts is not None and peers.node.rank == 0:
        peers.firsts.all_reduce(total, partial_op, out=total, algorithm=between).resolve()
    total = peers.node.broadcast(tensor if total is None else total, algorithm=down).resolve()
    return CollectiveTensor(_finished(total, reduction, group.size))


def reduce(
    tensor: Array, op: ReduceOperation | OpLike, root: int | PeerId, group: ProcessGroup
) -> Array | None:
    """Return the reduction on `root`, None elsewhere. Collective, and waits.

    Raises:
        RankError: If there is no such rank.
        DTypeError: If the dtype cannot be reduced by `op`.
    """
    peers, reduction = _PEERS.get(checked_group(group)), as_op(op)
    target = root.value if isinstance(root, PeerId) else root
    local: Any = None if peers is None else peers.config.local_reduce_strategy
    if peers is None or peers.node is None or peers.firsts is None:
        return group.reduce(tensor, reduction, root=target, algorithm=local).resolve()
    target = as_int(target, "root", RankError, least=0, most=group.size - 1)
    between: Any = peers.config.global_reduce_strategy
    partial_op, node = _of_parts(tensor, reduction), peers.node_of[target]
    total: Array | None = peers.node.reduce(tensor, partial_op, algorithm=local).resolve()
    if total is not None:
        total = peers.firsts.reduce(total, partial_op, root=node, algorithm=between).resolve()
    first = peers.node_of.index(node)
    if first != target:
        if group.rank == first:
            group.send(total, target).resolve()
            return None
        total = group.recv(first).resolve() if group.rank == target else None
    return None if total is None else _finished(total, reduction, group.size)


def broadcast(tensor: Array | None, group: ProcessGroup) -> Array:
    """Return the array of the one rank that has one. Collective, and waits.

    Raises:
        GroupError: On every rank, if none has one, or several have.
    """
    peers = _PEERS.get(checked_group(group))
    local: Any = None if peers is None else peers.config.local_broadcast_strategy
    if peers is None or peers.node is None or peers.firsts is None:
        return group.broadcast(tensor, root=None, algorithm=local).resolve()
    between: Any = peers.config.global_broadcast_strategy
    has = group.all_gather(np.array([tensor is not None])).resolve()
    senders = np.flatnonzero(has).tolist()
    if len(senders) != 1:
        raise on_all_ranks(
            GroupError(f"one rank of group {group.name!r} must have an array, got {senders}")
        )
    start, mine = peers.node_of[senders[0]], peers.node_of[as_int(group.rank, "rank")]
    spread = partial(peers.node.broadcast, root=None, algorithm=local)
    found: Any = tensor
    if mine == start:
        found = spread(found).resolve()
    if peers.node.rank == 0:
        found = peers.firsts.broadcast(found, root=None, algorithm=between).resolve()
    return found if mine == start else spread(found).resolve()


def start_global_orchestrator(port: int | None = None) -> NoReturn:
    """Refuse: the launcher connects the ranks.

    Raises:
        LaunchError: Always.
    """
    _refuse("an orchestrator", port)


def as_op(op: ReduceOperation | OpLike) -> ReduceOp:
    """Return mpimesh's operation."""
    return as_reduce_op(op.value if isinstance(op, ReduceOperation) else op)


def checked_group(group: object) -> ProcessGroup:
    """Return `group`, if it is one."""
    return check_kind(group, ProcessGroup, "group", GroupError, wanted="a group of ranks")


def _registered(group: object) -> _Peers:
    found = _PEERS.get(checked_group(group))
    if found is None:
        raise GroupError(f"{shown(group)} is not registered: burn.register(mesh) returns a group")
    return found


def _of_parts(x: Array, op: ReduceOp) -> ReduceOp:
    """Return the operation of the parts of a reduction in levels; checks the whole one's dtype."""
    wire_dtype(x.dtype, op)
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _finished(total: Array, op: ReduceOp, size: int) -> Array:
    """Divide the sum of a mean, once."""
    if op is ReduceOp.MEAN:
        np.divide(total, size, out=total, casting="unsafe")
    return total
