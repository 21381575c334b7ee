"""burn's ``DistributedBackend``, its synchronisation of gradients by ids, and ``burn-collective``.

Training with mpimesh's own layers needs none of it: the parallel models reduce gradients in
buckets. This is for a program that has gradients of its own, or that says parameter by parameter
which are reduced: :class:`ModuleSharder` marks those of a module, and
:meth:`DistributedSyncClient.sync_parameters` reduces the gradients of what is marked.
A :class:`DistributedContext` stands for burn's server, and a group of ranks for its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh import nn, runtime
from mpimesh.arguments import as_int, as_time, check_kind, rank_names, shape_of, shown
from mpimesh.arrays import Array, OpLike, ReduceOp, as_reduce_op, namespace, wire_dtype
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    LaunchError,
    MismatchError,
    MpimeshError,
    UnresolvedError,
    on_all_ranks,
)
from mpimesh.nn import Parameter, SupportsLayer
from mpimesh.nn.parameter import as_parameters
from mpimesh.nn.protocol import is_layer, named_parameters
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.call import Call
from mpimesh.settings import AlgorithmName

__all__ = [
    "AllReduce",
    "AllReduceStrategy",
    "CollectiveConfig",
    "CollectiveTensor",
    "DistributedConfig",
    "DistributedContext",
    "DistributedParamId",
    "DistributedParams",
    "DistributedSyncClient",
    "ModuleSharder",
    "ReduceOperation",
    "TensorRef",
    "all_reduce",
    "broadcast",
    "distributed_params",
    "finish_collective",
    "is_distributed",
    "reduce",
    "register",
    "set_distributed",
    "start_global_orchestrator",
]

L = TypeVar("L", bound=SupportsLayer)
T = TypeVar("T")

_MOST_NAMED = 8
"""So many parameters are named in a message."""


@dataclass(frozen=True, slots=True, order=True)
class DistributedParamId:
    """The number by which all ranks know a parameter.

    Attributes:
        value: From 0 on.

    Raises:
        GroupError: If it is no such number.
    """

    value: int

    def __post_init__(self) -> None:
        """Take NumPy's integers, too."""
        object.__setattr__(self, "value", as_int(self.value, "param_id", GroupError, least=0))

    def __str__(self) -> str:
        """Write the number."""
        return str(self.value)


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
        self._group = _checked_group(group)
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


class ReduceOperation(Enum):
    """The operation that reduces gradients."""

    Sum = "sum"
    Mean = "mean"


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
        self._group = _checked_group(group)
        self._op = _op(all_reduce_op)
        if self._op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise GroupError(f"all_reduce_op must be 'mean' or 'sum', got {shown(all_reduce_op)}")
        # Of the step under way, in the order of the ids.
        self._gradients: dict[DistributedParamId, Array] = {}
        self._submitted: set[DistributedParamId] = set()
        self._reductions: list[runtime.CollectiveTensor] = []
        self._everyone: runtime.CollectiveTensor | None = None

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

    def assume_resolved(self) -> Array:
        """Return a result that is known to be there.

        Raises:
            UnresolvedError: If it is not, after all.
        """
        return self._handle.assume_resolved() if self._pending else self._handle


class DistributedContext:
    """A session of a group: its gradients, and its reductions. A context manager.

    Args:
        group: The ranks.
        config: The operation that reduces gradients.

    Raises:
        GroupError: If `group` is none.
    """

    def __init__(self, group: ProcessGroup, config: DistributedConfig | None = None) -> None:
        self._group = _checked_group(group)
        self.config = DistributedConfig() if config is None else config
        check_kind(self.config, DistributedConfig, "config", GroupError, wanted="one of burn's")
        self.client = DistributedSyncClient(group, self.config.all_reduce_op)
        self._open: list[CollectiveTensor] | None = []

    def all_reduce(self, tensor: Array, op: ReduceOperation | OpLike = "sum") -> CollectiveTensor:
        """Start a reduction over the group. Collective.

        Raises:
            GroupError: If the session is closed.
        """
        if self._open is None:
            raise GroupError(f"the session of group {self._group.name!r} is closed: begin another")
        handle = CollectiveTensor(self._group.all_reduce(tensor, _op(op)))
        self._open.append(handle)
        return handle

    def sync_collective(self) -> None:
        """Wait for all reductions of the session, in the order of their start."""
        for handle in self._open or ():
            handle.resolve()
        self._open = None if self._open is None else []

    def close(self) -> None:
        """Wait for what was started, and take no more.

        Raises:
            UnresolvedError: If gradients are registered and not synchronised.
        """
        self.sync_collective()
        if self.client._gradients:
            raise UnresolvedError(
                f"the session has gradients that wait: {_names(self.client._gradients)}; call "
                "client.submit_sync_collective() first"
            )
        self._open = None

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the session, unless there was an error."""
        if error is None:
            self.close()


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
        self._group = _checked_group(group)
        self._op = _op(op)

    def forward(self, x: Array, ctx: nn.Context | None = None) -> Array:
        """Return the reduction of `x`. Collective."""
        return self._group.all_reduce(x, self._op).resolve()

    def backward_input(self, dy: Array, ctx: nn.Context) -> Array:
        """Return the reduction of `dy`. Collective."""
        return self._group.all_reduce(dy, self._op).resolve()


# -- burn-collective -----------------------------------------------------------------------------


class AllReduceStrategy:
    """Ways of a reduction, by the names of :meth:`mpimesh.ProcessGroup.all_reduce`."""

    Centralized = "centralized"
    Ring = "ring"

    @staticmethod
    def Tree(arity: int = 2) -> str:
        """Return the way along a tree, of which each rank has at most `arity` branches."""
        return f"tree({arity})"


@dataclass(frozen=True, slots=True)
class CollectiveConfig:
    """The configuration of a peer. Nodes and their addresses are the launcher's.

    Attributes:
        num_devices: Number of peers; that of all ranks if None.
        local_all_reduce_strategy: The way of reductions; the fastest if None.
    """

    num_devices: int | None = None
    local_all_reduce_strategy: str | None = None

    def with_num_devices(self, number: int) -> CollectiveConfig:
        """Return it with this number of peers."""
        return replace(self, num_devices=number)

    def with_local_all_reduce_strategy(self, strategy: str) -> CollectiveConfig:
        """Return it with this way of reductions."""
        return replace(self, local_all_reduce_strategy=strategy)

    def is_valid(self) -> bool:
        """Tell whether the number of peers is one."""
        return self.num_devices is None or self.num_devices >= 1


def register(mesh: DeviceMesh, config: CollectiveConfig | None = None) -> ProcessGroup:
    """Return a group of the first `num_devices` ranks, called ``"collective"``. Collective.

    Raises:
        GroupError: On every rank, if it is registered, or the configuration is not valid.
        RankError: On every rank, if there are not as many ranks.
    """
    check_kind(mesh, DeviceMesh, "mesh", GroupError, wanted="a live DeviceMesh")

    def ranks() -> range:
        number = None if config is None else config.num_devices
        number = mesh.world_size if number is None else number
        return range(as_int(number, "num_devices", GroupError, least=1))

    return mesh.add_group("collective", agree_alike(mesh.group(), "register", ranks))


def finish_collective(group: ProcessGroup) -> None:
    """Give the group back, so that it may be registered again. Collective."""
    _checked_group(group).close()


def all_reduce(
    tensor: Array,
    op: ReduceOperation | OpLike,
    group: ProcessGroup,
    strategy: str | None = None,
) -> CollectiveTensor:
    """Start a reduction over a group, which burn calls the ids of devices. Collective."""
    way = cast(AlgorithmName | None, strategy)
    return CollectiveTensor(_checked_group(group).all_reduce(tensor, _op(op), algorithm=way))


def reduce(
    tensor: Array, op: ReduceOperation | OpLike, root: int, group: ProcessGroup
) -> Array | None:
    """Return the reduction on `root`, None elsewhere. Collective, and waits."""
    return _checked_group(group).reduce(tensor, _op(op), root=root).resolve()


def broadcast(tensor: Array | None, group: ProcessGroup) -> Array:
    """Return the array of the one rank that has one. Collective, and waits.

    Raises:
        GroupError: On every rank, if none has one, or several have.
    """
    return _checked_group(group).broadcast(tensor, root=None).resolve()


def start_global_orchestrator(port: int | None = None) -> NoReturn:
    """Refuse: the launcher connects the ranks.

    Raises:
        LaunchError: Always.
    """
    raise LaunchError(
        "there is no orchestrator to start: mpiexec or srun starts the ranks and connects them, "
        "as in `mpiexec -n 4 python program.py`"
    )


def _op(op: ReduceOperation | OpLike) -> ReduceOp:
    return as_reduce_op(op.value if isinstance(op, ReduceOperation) else op)


def _agreed(group: ProcessGroup, make: Callable[[], tuple[T, list[str]]], task: str) -> T:
    """Return what `make` gives beside lines that must be the same on all ranks; errors, too."""
    problem: MpimeshError | None = None
    try:
        made, lines = make()
    except MpimeshError as error:
        problem, lines = error, [f"{type(error).__name__}: {error}"]
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


def _checked_group(group: object) -> ProcessGroup:
    return check_kind(group, ProcessGroup, "group", GroupError, wanted="a group of ranks")


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
    return param_id if isinstance(param_id, DistributedParamId) else DistributedParamId(param_id)


def _names(keys: Iterable[DistributedParamId]) -> str:
    every = [str(key) for key in keys]
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return f"parameters {', '.join(every[:_MOST_NAMED]) or 'none'}{more}"
