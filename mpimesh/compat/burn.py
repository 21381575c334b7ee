"""burn's synchronisation of gradients: each rank submits them by id, and then waits for all.

Training with mpimesh's own layers needs none of it: :class:`~mpimesh.GradientBuckets` and the
parallel models reduce gradients in buckets. This is for a program that has gradients of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, as_time, check_kind, digest_bits, rank_names, shape_of, shown
from mpimesh.arrays import Array, ReduceOp, as_reduce_op, wire_dtype
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    MpimeshError,
    on_all_ranks,
)
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = ["DistributedParamId", "DistributedSyncClient"]

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

    def __init__(self, group: ProcessGroup, all_reduce_op: ReduceOp | str = "mean") -> None:
        wanted = "a group of ranks, as mesh.group('dp') gives"
        self._group = check_kind(group, ProcessGroup, "group", GroupError, wanted=wanted)
        self._op = as_reduce_op(all_reduce_op)
        if self._op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise GroupError(f"all_reduce_op must be 'mean' or 'sum', got {shown(all_reduce_op)}")
        # Of the step under way, in the order of the ids.
        self._gradients: dict[DistributedParamId, Array] = {}
        self._submitted: set[DistributedParamId] = set()
        self._reductions: list[CollectiveTensor] = []
        self._everyone: CollectiveTensor | None = None

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

        Cost:
            One all-gather of 8 bytes from each rank.
        """
        if self._gradients and self._everyone is None:
            # Local, and so on all ranks: the reductions that each has started may differ by now.
            raise self._unended()
        problem: MpimeshError | None = None
        try:
            found = self._checked(gradients)
            lines = [f"parameter {key} {x.shape} {x.dtype}" for key, x in found.items()]
        except MpimeshError as error:
            problem, lines = error, [f"{type(error).__name__}: {error}"]
        self._agree([f"{len(lines)} gradients, {self._op}", *lines])
        if problem is not None:
            raise on_all_ranks(problem)
        self._gradients = found

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
        return GroupError(
            f"the last step, of {_names(self._gradients)}, has not ended: call "
            "submit_sync_collective"
        )

    def _agree(self, lines: list[str]) -> None:
        """Raise on all ranks if `lines` are not the same on all; errors are among them."""
        group, text = self._group, "\n".join(lines).encode()
        digests = group.all_gather(np.array([digest_bits(text, 63)])).resolve()
        if (digests == digests[0]).all():
            return
        sizes = group.all_gather(np.array([len(text)])).resolve()
        texts = group.all_gather(np.frombuffer(text, np.uint8), sizes=sizes.tolist()).resolve()
        parts = np.split(texts, np.cumsum(sizes)[:-1])
        everyone = [bytes(part).decode().split("\n") for part in parts]
        common = set(everyone[0]).intersection(*everyone)
        rows = []
        for rank, there in enumerate(everyone):
            own = [line for line in there if line not in common]
            rows.append(f"  rank {rank}: {', '.join(own[:_MOST_NAMED]) or 'nothing else'}")
        raise on_all_ranks(
            MismatchError(
                f"the ranks of group {group.name!r} must register the same gradients, but beside "
                "what they have in common:\n" + "\n".join(rows)
            )
        )

    def _start(self, first: int, *, also_missing: bool = False) -> None:
        """Start the reductions from the `first` id on that may be started now, in order."""
        for key, x in list(self._gradients.items())[first:]:
            if key not in self._submitted:
                if not also_missing:
                    return
                x[...] = 0
            label = f"gradient of parameter {key}"
            self._reductions.append(self._group.all_reduce(x, self._op, out=x, label=label))

    def _start_all(self) -> CollectiveTensor:
        """Start the other reductions, and the exchange of what each rank has submitted."""
        self._start(len(self._reductions), also_missing=True)
        submitted = np.array([key in self._submitted for key in self._gradients], np.uint8)
        return self._group.all_gather(submitted, label="submitted gradients")


def _as_id(param_id: Any) -> DistributedParamId:
    return param_id if isinstance(param_id, DistributedParamId) else DistributedParamId(param_id)


def _names(keys: Iterable[DistributedParamId]) -> str:
    every = [str(key) for key in keys]
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return f"parameters {', '.join(every[:_MOST_NAMED]) or 'none'}{more}"
