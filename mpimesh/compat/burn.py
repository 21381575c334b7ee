"""burn's ``DistributedBackend`` and its synchronisation of gradients by ids; ``burn-collective``.

Training with mpimesh's own layers needs none of it: the parallel models reduce gradients in
buckets. This is for a program that has gradients of its own, or that says parameter by parameter
which are reduced: :class:`ModuleSharder` marks those of a module, and
:meth:`DistributedSyncClient.sync_parameters` reduces the gradients of what is marked.
A :class:`DistributedContext` stands for burn's server, and a group of ranks for its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh import nn, runtime
from mpimesh.arguments import as_int, as_time, check_kind, rank_names, shape_of, shown
from mpimesh.arrays import Array, OpLike, ReduceOp, namespace, wire_dtype
from mpimesh.compat.burn_collective import (
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    CollectiveTensor,
    NodeId,
    Number,
    PeerId,
    ReduceOperation,
    ReduceStrategy,
    all_reduce,
    as_op,
    broadcast,
    checked_group,
    finish_collective,
    nodes,
    reduce,
    register,
    reset_collective,
    start_global_orchestrator,
)
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    MpimeshError,
    UnresolvedError,
    on_all_ranks,
)
from mpimesh.nn import Parameter, SupportsLayer
from mpimesh.nn.parameter import as_parameters
from mpimesh.nn.protocol import is_layer, named_parameters
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "AllReduce",
    "AllReduceStrategy",
    "BroadcastStrategy",
    "CollectiveConfig",
    "CollectiveTensor",
    "DistributedConfig",
    "DistributedContext",
    "DistributedParamId",
    "DistributedParams",
    "DistributedSyncClient",
    "ModuleSharder",
    "NodeId",
    "PeerId",
    "ReduceOperation",
    "ReduceStrategy",
    "TensorRef",
    "all_reduce",
    "broadcast",
    "close_communication_server",
    "distributed_params",
    "finish_collective",
    "get_distributed_sync_client",
    "is_distributed",
    "nodes",
    "reduce",
    "register",
    "reset_collective",
    "set_distributed",
    "start_communication_server",
    "start_global_orchestrator",
]

L = TypeVar("L", bound=SupportsLayer)
T = TypeVar("T")

_MOST_NAMED = 8
"""So many parameters are named in a message."""


class DistributedParamId(Number):
    """The number by which all ranks know a parameter."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DistributedParams:
    """A parameter whose gradients are reduced.

    Attributes:
        param_id: Its number, the same on all ranks.
    """

    param_id: DistributedParamId


_MARKS: WeakKeyDictionary[Parameter, DistributedParams] = WeakKeyDictionary()
"""The marked parameters of this process: a mark is a parameter's own, as long as it is there."""


def set_distributed(parameter: Parameter, param_id: DistributedParamId | int | None) -> Parameter:
    """Mark a parameter, so that its gradients are reduced; returns it. Local.

    Args:
        parameter: The parameter; a copy of it has no mark.
        param_id: The number by which all ranks know it; None takes the mark off.

    Raises:
        GroupError: If `parameter` or `param_id` is none.
    """
    check_kind(parameter, Parameter, "parameter", GroupError, wanted="an nn.Parameter")
    if param_id is None:
        _MARKS.pop(parameter, None)
    else:
        _MARKS[parameter] = DistributedParams(_as_id(param_id))
    return parameter


def distributed_params(parameter: Parameter) -> DistributedParams | None:
    """Return the mark of a parameter; None without. Local."""
    check_kind(parameter, Parameter, "parameter", GroupError, wanted="an nn.Parameter")
    return _MARKS.get(parameter)


def is_distributed(parameter: Parameter) -> bool:
    """Tell whether a parameter is marked. Local."""
    return distributed_params(parameter) is not None


class ModuleSharder:
    """Marks the parameters of modules, with ids that all ranks of a group have alike.

    Args:
        group: The replicas.

    Raises:
        GroupError: If `group` is none.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = checked_group(group)
        self._next = 0

    def shard(self, module: L) -> L:
        """Mark each parameter of `module` that is not frozen; returns the module. Collective.

        One that is marked keeps its id; the others get the next ones that no parameter of the
        module has, in the order of the module's parameters.

        Raises:
            GroupError: On every rank, if `module` is none on any.
            MismatchError: On every rank, naming what differs, if the ranks' parameters differ in
                name, shape or id; then nothing is marked.
        """

        def marked() -> tuple[list[tuple[Parameter, int]], list[str]]:
            named = _trained(module)
            taken = {distributed_params(one) for _, one in named}
            free = (n for n in count(self._next) if DistributedParams(_as_id(n)) not in taken)
            marks, lines = [], []
            for name, one in named:
                mark = distributed_params(one)
                number = next(free) if mark is None else mark.param_id.value
                marks.append((one, number))
                lines.append(f"parameter {number} {name!r} {one.shape}")
            return marks, lines

        marks = _agreed(self._group, marked, "mark the same parameters")
        for one, number in marks:
            if not is_distributed(one):
                set_distributed(one, number)
                self._next = number + 1
        return module


Gradients = Mapping[DistributedParamId, Array] | Mapping[int, Array]
"""Arrays by the ids of their parameters."""


class DistributedSyncClient:
    """The gradients of one group of replicas, reduced in place, step after step.

    A step is three calls, on every rank of the group:

    - :meth:`register_sync_parameters`: which gradients come, and where they will lie;
    - :meth:`submit_gradient_sync` for each, in any order, as soon as it is complete;
    - :meth:`submit_sync_collective`: wait until all are reduced.

    Reductions start while others are still computed, in the order of the ids, which is the same on
    all ranks whatever order they submit in: one that is ahead of a lower id waits for it.

    Args:
        group: The replicas.
        all_reduce_op: ``"mean"`` or ``"sum"``; the mean divides by the size of the group.

    Raises:
        GroupError: If `group` is none, or `all_reduce_op` another one.
    """

    def __init__(
        self, group: ProcessGroup, all_reduce_op: ReduceOperation | OpLike = "mean"
    ) -> None:
        self._group = checked_group(group)
        self._op = as_op(all_reduce_op)
        if self._op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise GroupError(f"all_reduce_op must be 'mean' or 'sum', got {shown(all_reduce_op)}")
        # Of the step under way, in the order of the ids.
        self._gradients: dict[DistributedParamId, Array] = {}
        self._submitted: set[DistributedParamId] = set()
        self._reductions: list[runtime.CollectiveTensor] = []
        self._everyone: runtime.CollectiveTensor | None = None
        self._closed = False

    def register_sync_parameters(self, gradients: Gradients) -> None:
        """Begin a step: announce the arrays in which its gradients will be. Collective.

        Args:
            gradients: By id, arrays that can be written; of the same ids, shapes and dtypes on all
                ranks.

        Raises:
            GroupError: On every rank, if an id or an array will not do, or the last step has not
                ended.
            DTypeError: On every rank, if a dtype cannot be reduced so, as the mean of integers.
            MismatchError: On every rank, naming what differs, if the ranks announce different ones.
        """
        self._register(lambda: gradients)

    def sync_parameters(
        self, parameters: Iterable[Parameter], timeout_s: float | None = None
    ) -> None:
        """Reduce the gradients of those of `parameters` that are marked: a whole step. Collective.

        The others stay as they are. A marked one without a gradient counts as zeros.

        Raises:
            GroupError: On every rank, if none is marked, two have one id, or a marked one is frozen
                or has no memory, on any.
            MismatchError: On every rank, naming what differs, if the ranks' ids, shapes or dtypes
                differ.
            CollectiveTimeoutError: As :meth:`submit_sync_collective`.
        """
        self._register(lambda: _marked_gradients(parameters))
        for key in self._gradients:
            self.submit_gradient_sync(key)
        self.submit_sync_collective(timeout_s)

    def _register(self, gradients: Callable[[], Gradients]) -> None:
        self._refuse_closed()
        if self._gradients and self._everyone is None:
            # Local, and so on all ranks: the reductions that each has started may differ by now.
            raise self._unended()

        def announced() -> tuple[dict[DistributedParamId, Array], list[str]]:
            found = self._checked(gradients())
            lines = [f"parameter {key} {x.shape} {x.dtype}" for key, x in found.items()]
            return found, [f"{len(lines)} gradients, {self._op}", *lines]

        self._gradients = _agreed(self._group, announced, "register the same gradients")

    def submit_gradient_sync(self, param_id: DistributedParamId | int) -> None:
        """Let the gradient of a registered parameter be reduced; its array is complete. Local.

        Do not touch the array before :meth:`submit_sync_collective` has returned.

        Raises:
            GroupError: If it is not registered for this step, or submitted already.
        """
        self._refuse_closed()
        key = _as_id(param_id)
        where = f"on rank {self._group.rank} of group {self._group.name!r}"
        if key not in self._gradients:
            raise GroupError(
                f"parameter {key} is not registered {where}, for this step are "
                f"{_names(self._gradients)}; give it to register_sync_parameters on every rank"
            )
        if key in self._submitted or self._everyone is not None:
            raise GroupError(f"parameter {key} is submitted twice in a step {where}")
        self._submitted.add(key)
        self._start(len(self._reductions))

    def submit_sync_collective(self, timeout_s: float | None = None) -> None:
        """Wait until the gradients of all registered ids are reduced, and end the step. Collective.

        Args:
            timeout_s: Longest wait for the other ranks, alike on all; None waits as long as it
                takes. After a timeout the step goes on, and this may be called again.

        Raises:
            GroupError: If no step was begun, or `timeout_s` is no time.
            CollectiveTimeoutError: After `timeout_s`, naming the ranks that have not come here and
                the parameters that are not reduced.
            MismatchError: On every rank, naming parameters and ranks, if a registered gradient was
                not submitted. It counts as zeros there; the step has ended.

        Cost:
            Beside the reductions, an all-gather of a byte for each parameter; with a limit, the
            messages of a barrier with one.
        """
        self._refuse_closed()
        group = self._group
        limit_s = as_time(timeout_s, "timeout_s", GroupError)
        if not self._gradients:
            raise GroupError(
                f"rank {group.rank} of group {group.name!r} has no gradients to wait for: a step "
                "begins with register_sync_parameters"
            )
        try:
            if self._everyone is None:
                self._everyone = self._start_all()
                if limit_s is not None:
                    group.barrier(timeout_s=limit_s, label="submit_sync_collective")
            submitted = self._everyone.resolve(limit_s).reshape(group.size, -1)
            for reduction in self._reductions:
                reduction.resolve(limit_s)
        except CollectiveTimeoutError as error:
            states = zip(self._gradients, self._reductions, strict=True)
            open_ids = [key for key, reduction in states if not reduction.done()]
            raise CollectiveTimeoutError(
                f"submit_sync_collective: {_names(open_ids)} not reduced yet: {error}"
            ) from None
        keys = list(self._gradients)
        self._gradients, self._everyone = {}, None
        self._submitted, self._reductions = set(), []
        missing = [
            f"  parameter {key}: not by {rank_names(np.flatnonzero(there == 0).tolist())}"
            for key, there in zip(keys, submitted.T, strict=True)
            if not there.all()
        ]
        if missing:
            more = [f"  and {len(missing) - _MOST_NAMED} more"] * (len(missing) > _MOST_NAMED)
            rows = "\n".join(missing[:_MOST_NAMED] + more)
            raise on_all_ranks(
                MismatchError(
                    f"of the gradients that are registered on group {group.name!r} some were not "
                    f"submitted, and count as zeros:\n{rows}\n"
                    "call submit_gradient_sync for each of them on every rank"
                )
            )

    # -- helpers ---------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise _closed(self._group)

    def _checked(self, gradients: Gradients) -> dict[DistributedParamId, Array]:
        """Return arrays by id, in the order of the ids."""
        if self._gradients:
            raise self._unended()
        if not isinstance(gradients, Mapping) or not gradients:
            raise GroupError(f"gradients must be arrays by their ids, got {shown(gradients)}")
        found = {_as_id(key): x for key, x in gradients.items()}
        if len(found) < len(gradients):
            raise GroupError(f"gradients must have each id once, got {shown([*gradients])}")
        for key, x in found.items():
            flags = getattr(x, "flags", None)
            if shape_of(x) is None or not getattr(flags, "writeable", flags is not None):
                raise GroupError(
                    f"the gradient of parameter {key} must be an array that can be "
                    f"written, got {shown(x)}"
                )
            wire_dtype(x.dtype, self._op)  # refuses what cannot be reduced
        return dict(sorted(found.items()))

    def _unended(self) -> GroupError:
        names = _names(self._gradients)
        return GroupError(f"the last step, of {names}, has not ended: call submit_sync_collective")

    def _start(self, first: int, *, also_missing: bool = False) -> None:
        """Start the reductions from the `first` id on that may be started now, in order."""
        for key, x in list(self._gradients.items())[first:]:
            if key not in self._submitted:
                if not also_missing:
                    return
                x[...] = 0
            label = f"gradient of parameter {key}"
            self._reductions.append(self._group.all_reduce(x, self._op, out=x, label=label))

    def _start_all(self) -> runtime.CollectiveTensor:
        """Start the other reductions, and the exchange of what each rank has submitted."""
        self._start(len(self._reductions), also_missing=True)
        submitted = np.array([key in self._submitted for key in self._gradients], np.uint8)
        return self._group.all_gather(submitted, label="submitted gradients")


@dataclass(frozen=True, slots=True)
class DistributedConfig:
    """The configuration of a session.

    Attributes:
        all_reduce_op: The operation that reduces gradients.
    """

    all_reduce_op: ReduceOperation = ReduceOperation.Mean


class DistributedContext:
    """A session of a group: its gradients, and its reductions. A context manager.

    A group has one configuration at a time: a second session must have that of the open one.

    Args:
        group: The ranks.
        config: The operation that reduces gradients.

    Raises:
        GroupError: If `group` is none, or has an open session of another configuration.
    """

    def __init__(self, group: ProcessGroup, config: DistributedConfig | None = None) -> None:
        self._group = checked_group(group)
        self.config = DistributedConfig() if config is None else config
        check_kind(self.config, DistributedConfig, "config", GroupError, wanted="one of burn's")
        self._client = DistributedSyncClient(group, self.config.all_reduce_op)
        sessions = _SESSIONS.setdefault(group, [])
        if sessions and sessions[0].config != self.config:
            raise GroupError(
                f"group {group.name!r} has an open session of {sessions[0].config}, and a second "
                f"one must have the same, got {self.config}: close the first one, or take another "
                "group"
            )
        sessions.append(self)
        self._open: list[CollectiveTensor] = []

    @property
    def client(self) -> DistributedSyncClient:
        """The client that reduces the gradients of the session.

        Raises:
            GroupError: Once the session is closed.
        """
        self._client._refuse_closed()
        return self._client

    def all_reduce(self, tensor: Array, op: ReduceOperation | OpLike = "sum") -> CollectiveTensor:
        """Start a reduction over the group. Collective.

        Raises:
            GroupError: If the session is closed.
        """
        self._client._refuse_closed()
        handle = CollectiveTensor(self._group.all_reduce(tensor, as_op(op)))
        self._open.append(handle)
        return handle

    def sync_collective(self) -> None:
        """Wait for all reductions of the session, in the order of their start."""
        handles, self._open = self._open, []
        for handle in handles:
            handle.resolve()

    def close(self) -> None:
        """Wait for what was started, and take no more.

        Raises:
            UnresolvedError: If gradients are registered and not synchronised.
        """
        self.sync_collective()
        if self._client._gradients:
            raise UnresolvedError(
                f"the session has gradients that wait: {_names(self._client._gradients)}; call "
                "client.submit_sync_collective() first"
            )
        self._end()

    def _end(self) -> None:
        self._client._closed = True
        sessions = _SESSIONS.get(self._group, [])
        if self in sessions:
            sessions.remove(self)

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the session; after an error without waiting for anything."""
        if error is None:
            self.close()
        else:
            self._end()


_SESSIONS: WeakKeyDictionary[ProcessGroup, list[DistributedContext]] = WeakKeyDictionary()
"""The open sessions of each group, which are of one configuration."""


def start_communication_server(
    group: ProcessGroup, config: DistributedConfig | None = None
) -> DistributedContext:
    """Open a session of a group that :func:`get_distributed_sync_client` finds. Local.

    Args:
        group: The ranks: burn's devices.
        config: The operation that reduces gradients.

    Raises:
        GroupError: If `group` has an open session.
    """
    if _SESSIONS.get(checked_group(group)):
        raise GroupError(
            f"group {group.name!r} has an open session: close_communication_server ends it"
        )
    return DistributedContext(group, config)


def get_distributed_sync_client(group: ProcessGroup) -> DistributedSyncClient:
    """Return the client of the session of a group. Local.

    Raises:
        GroupError: If there is none.
    """
    return _session(group).client


def close_communication_server(group: ProcessGroup) -> None:
    """Close the session of a group, see :meth:`DistributedContext.close`.

    Raises:
        GroupError: If there is none.
        UnresolvedError: If gradients are registered and not synchronised.
    """
    _session(group).close()


def _session(group: ProcessGroup) -> DistributedContext:
    sessions = _SESSIONS.get(checked_group(group))
    if not sessions:
        raise GroupError(
            f"group {group.name!r} has no open session: start_communication_server opens one"
        )
    return sessions[0]


def _closed(group: ProcessGroup) -> GroupError:
    return GroupError(f"the session of group {group.name!r} is closed: begin another")


class TensorRef:
    """A reference to an array that a reduction writes into."""

    def __init__(self, tensor: Array) -> None:
        self.tensor = tensor

    def comm_device(self) -> str:
        """Return ``"cpu"`` or the device of a CuPy array."""
        return str(getattr(self.tensor, "device", "cpu"))

    def float_from_ref(self) -> Array:
        """Return a copy of the array."""
        return self.tensor.copy()


class AllReduce(nn.Module):
    """A layer that reduces over a group; its backward reduces gradients by the same operation.

    Args:
        group: The ranks.
        op: ``"sum"`` or ``"mean"``.
    """

    def __init__(self, group: ProcessGroup, op: ReduceOperation | OpLike = "sum") -> None:
        self._group = checked_group(group)
        self._op = as_op(op)

    def forward(self, x: Array, ctx: nn.Context | None = None) -> Array:
        """Return the reduction of `x`. Collective."""
        return self._group.all_reduce(x, self._op).resolve()

    def backward_input(self, dy: Array, ctx: nn.Context) -> Array:
        """Return the reduction of `dy`. Collective."""
        return self._group.all_reduce(dy, self._op).resolve()


def _agreed(group: ProcessGroup, make: Callable[[], tuple[T, list[str]]], task: str) -> T:
    """Return what `make` gives beside lines that must be the same on all ranks; errors, too."""
    problem: MpimeshError | None = None
    try:
        made, lines = make()
    except MpimeshError as error:
        problem, lines = error, [f"{type(error).__name__}: {error}"]
    with group._core.progress.keeping(problem):
        everyone = agree(group, Call(task, group.name), lines)
    common = set(everyone[0]).intersection(*everyone)
    rows = []
    for rank, there in enumerate(everyone):
        own = [line for line in there if line not in common]
        rows.append(f"  rank {rank}: {', '.join(own[:_MOST_NAMED]) or 'nothing else'}")
    if any(there != everyone[0] for there in everyone):
        raise on_all_ranks(
            MismatchError(
                f"the ranks of group {group.name!r} must {task}, but beside what "
                "they have in common:\n" + "\n".join(rows)
            )
        )
    if problem is not None:
        raise on_all_ranks(problem)
    return made


def _trained(module: object) -> list[tuple[str, Parameter]]:
    """Return the parameters of a module that are not frozen, with their names."""
    if not is_layer(module):
        raise GroupError(f"module must be a layer with parameters, got {shown(module)}")
    return [(name, one) for name, one in named_parameters(module) if one.requires_grad]


def _marked_gradients(parameters: Iterable[Parameter]) -> dict[DistributedParamId, Array]:
    """Return the gradients of marked parameters by id; one without gets zeros."""
    found: dict[DistributedParamId, Parameter] = {}
    for one in as_parameters(parameters, "parameters"):
        mark = distributed_params(one)
        if mark is None or found.get(mark.param_id) is one:
            continue
        if mark.param_id in found or not one.requires_grad or one.data is None:
            raise GroupError(
                f"{one!r} is marked as parameter {mark.param_id}: it must be the only one of this "
                "id, not frozen, and have memory; set_distributed(parameter, None) takes the mark "
                "off"
            )
        found[mark.param_id] = one
    for one in found.values():
        if one.grad is None:
            one.grad = namespace(one.data).zeros_like(one.data, dtype=one.grad_dtype)
    return {key: one.grad for key, one in found.items()}


def _as_id(param_id: Any) -> DistributedParamId:
    if isinstance(param_id, DistributedParamId):
        return param_id
    return DistributedParamId(as_int(param_id, "param_id", GroupError, least=0))


def _names(keys: Iterable[DistributedParamId]) -> str:
    every = [str(key) for key in keys]
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return f"parameters {', '.join(every[:_MOST_NAMED]) or 'none'}{more}"
