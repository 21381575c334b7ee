"""Entries of gradient buckets: counts for each parameter, and which parameters share a bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from mpimesh.arguments import as_real
from mpimesh.arrays import ReduceOp, namespace
from mpimesh.arrays.namespace import DType
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import Parameter
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = [
    "BucketEntry",
    "Plan",
    "make_buckets",
    "make_entries",
    "plan_buckets",
    "plans_of",
]

Plan = Sequence[Sequence[int]]
"""For each bucket the numbers of its parameters."""


class BucketEntry:
    """The counts of one parameter.

    Attributes:
        parameter: Whose gradient it is.
        name: Its name in messages.
        group: The ranks over which the gradient is reduced.
        dtype: That of the gradient.
        bucket: Where the gradient lives; None in a group of one rank.
        count: How often the gradient was added to in this cycle.
        uses: How often in each backward of earlier cycles; None while that is not known.
        completed_in: The last cycle in which nothing more was to be added, as far as its bucket
            knows.
        ready_s: When something was last added to the gradient, on this rank's clock.
    """

    __slots__ = (
        "bucket",
        "completed_in",
        "count",
        "dtype",
        "group",
        "name",
        "parameter",
        "ready_s",
        "uses",
    )

    def __init__(self, parameter: Parameter, name: str, group: ProcessGroup, dtype: DType) -> None:
        self.parameter = parameter
        self.name = name
        self.group = group
        self.dtype = dtype
        self.bucket: Bucket | None = None
        self.count = 0
        self.uses: int | None = None
        self.completed_in = -1
        self.ready_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.parameter.size * int(self.dtype.itemsize)

    def end_cycle(self, backwards: int) -> None:
        """Note how often the gradient was added to in each of so many backwards."""
        if backwards:
            uses, rest = divmod(self.count, backwards)
            self.uses = None if rest else uses

    def check_addition(self, *, is_open: bool) -> None:
        """Check that the gradient may be added to now.

        Raises:
            ModuleStateError: If no cycle was begun, or the gradient is being reduced already.
        """
        if not is_open:
            raise ModuleStateError(
                f"rank {self.group.world_rank}: a gradient was added to parameter {self.name!r} "
                "after the sums over the replicas; call zero_grad() or begin() of the buckets "
                "before the next backward"
            )
        if self.bucket is not None and self.bucket.handle is not None:
            raise ModuleStateError(
                f"rank {self.group.world_rank}: gradient {self.count + 1} of parameter "
                f"{self.name!r} came while its bucket is being reduced; earlier cycles had "
                f"{self.uses} for each backward. Make the buckets with overlap=False for a model "
                "whose layers run in some steps and not in others"
            )


def make_entries(
    parameters: list[Parameter],
    names: Sequence[str] | None,
    groups: Sequence[ProcessGroup],
    grad_dtype: DType | None = None,
) -> tuple[dict[int, BucketEntry], list[tuple[str, Parameter]]]:
    """Return an entry for each parameter to train, by its id, in order; and the frozen ones.

    Args:
        parameters: The parameters.
        names: Their names for messages; their own if None. To one that several have, the number
            of the parameter is added, by which ranks know what they speak of.
        groups: For each the ranks over which its gradient is reduced.
        grad_dtype: The dtype of gradients where it is wider than the parameter's.
    """
    if names is not None and len(names) != len(parameters):
        raise ModuleError(f"got {len(names)} names for {len(parameters)} parameters")
    if len(groups) != len(parameters):
        raise ModuleError(f"got {len(groups)} groups for {len(parameters)} parameters")
    entries: dict[int, BucketEntry] = {}
    frozen: list[tuple[str, Parameter]] = []
    names = [parameter.name for parameter in parameters] if names is None else names
    often = Counter(names)
    for place, parameter in enumerate(parameters):
        name = names[place]
        if id(parameter) in entries:
            raise ModuleError(f"parameter {name!r} is registered twice, the second time as {place}")
        if parameter.on_ready is not None:
            raise ModuleError(
                f"parameter {name!r} is registered with other buckets: give a whole model to one "
                "DataParallel or fully_shard, once; or take its layers out of the one before by "
                "into_inner(), or call buckets.close() of a pipeline that is trained no more"
            )
        if often[name] > 1:  # of a weight in each of several layers
            name = f"{name} of parameter {place}"
        if parameter.requires_grad:
            dtype = np.dtype(parameter.value().dtype)
            if grad_dtype is not None:
                dtype = np.promote_types(dtype, grad_dtype)
            if dtype != parameter.dtype and not parameter.takes_wider_grad:
                raise ModuleError(
                    f"parameter {name!r} of {parameter.dtype} belongs to a library that keeps "
                    f"gradients in the parameter's dtype: leave out grad_dtype={str(grad_dtype)!r}"
                )
            entries[id(parameter)] = BucketEntry(parameter, name, groups[place], dtype)
        else:
            frozen.append((name, parameter))
    return entries, frozen


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Put parameters into buckets in the order in which backward makes their gradients.

    Backward goes through a model from its end, so the last parameter comes first. A bucket
    holds parameters of one kind and at most `bucket_bytes`, except that a larger parameter
    has a bucket of its own; it takes what comes next of its kind as long as that fits.
    Buckets stand in the order in which their last gradients come.

    Args:
        sizes_bytes: Bytes of each parameter's gradient, in the order of the parameters.
        kinds: What only equals may share a bucket, such as dtypes.
        bucket_bytes: Most bytes of a bucket, at least 1.

    Returns:
        For each bucket the numbers of its parameters, falling. Each parameter is in one.

    Raises:
        ModuleError: If `bucket_bytes` is less than 1.
    """
    as_real(bucket_bytes, "bucket_bytes", ModuleError, least=1, finite=False)
    done: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for number in reversed(range(len(sizes_bytes))):
        kind, size = kinds[number], sizes_bytes[number]
        if kind not in filling or filled_bytes[kind] + size > bucket_bytes:
            filling[kind] = []
            filled_bytes[kind] = 0
            done.append(filling[kind])
        filling[kind].append(number)
        filled_bytes[kind] += size
    done.sort(key=lambda members: -members[-1])
    return tuple(map(tuple, done))


def plans_of(
    entries: Sequence[BucketEntry],
    replicas: ProcessGroup,
    bucket_bytes: int,
    plan: Plan | None = None,
) -> list[tuple[list[BucketEntry], Plan]]:
    """Return the parameters of each group with their plan: first those of the replicas.

    The other groups stand in the order of their first parameters.

    Args:
        entries: The parameters.
        replicas: The replicas.
        bucket_bytes: Most bytes of a bucket.
        plan: That of the replicas, if it is made already.

    Raises:
        ModuleError: If `bucket_bytes` is less than 1, or the plan will not do.
    """
    members: dict[int, list[BucketEntry]] = {id(replicas): []}
    for entry in entries:
        members.setdefault(id(entry.group), []).append(entry)
    return [
        (those, _plan_of(those, bucket_bytes, plan if key == id(replicas) else None))
        for key, those in members.items()
    ]


def _plan_of(
    entries: Sequence[BucketEntry], bucket_bytes: int, forced: Plan | None = None
) -> tuple[tuple[int, ...], ...]:
    """Deal parameters of one group to buckets; to none, if the group has one rank.

    Args:
        entries: The parameters.
        bucket_bytes: Most bytes of a bucket.
        forced: The plan, if it is made already.

    Raises:
        ModuleError: If `bucket_bytes` is less than 1, or the forced plan has not each parameter
            once, or different dtypes in a bucket.
    """
    dtypes = [entry.parameter.dtype for entry in entries]
    sizes_bytes = [entry.nbytes for entry in entries]
    plan = plan_buckets(sizes_bytes, dtypes, bucket_bytes)
    if forced is not None:
        plan = tuple(tuple(members) for members in forced)
        once = sorted(number for members in plan for number in members) == [*range(len(entries))]
        if not once or any(len({dtypes[number] for number in one}) != 1 for one in plan):
            raise ModuleError(
                f"a plan of buckets has each of the {len(entries)} parameters once, and in a "
                f"bucket those of one dtype, got {plan}"
            )
    return () if not entries or entries[0].group.size == 1 else plan


def _make_bucket(
    entries: Sequence[BucketEntry],
    place: int,
    replicas: ProcessGroup,
    mesh: DeviceMesh,
    op: ReduceOp,
) -> Bucket:
    """Return the bucket of some parameters, the `place`-th of their group's. Local."""
    parameters = [entry.parameter for entry in entries]
    size = sum(parameter.size for parameter in parameters)
    xp, dtype = namespace(parameters[0].value()), entries[0].dtype
    flat = mesh.shared_empty(size, dtype) if xp is np else xp.empty(size, dtype)
    group = entries[0].group
    name = f"bucket {place}" + (f" of {group.name}" if group is not replicas else "")
    bucket = Bucket(parameters, flat, group, name, op)
    for entry in entries:
        entry.bucket = bucket
    return bucket


def make_buckets(
    plans: Sequence[tuple[Sequence[BucketEntry], Plan]],
    replicas: ProcessGroup,
    mesh: DeviceMesh,
    op: ReduceOp,
) -> list[list[Bucket]]:
    """Return the buckets of each group, by its plan. Local."""
    return [
        [
            _make_bucket([those[number] for number in numbers], place, replicas, mesh, op)
            for place, numbers in enumerate(plan)
        ]
        for those, plan in plans
    ]
