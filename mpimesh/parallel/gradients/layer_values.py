"""Values of parameters that ranks divide, gathered layer by layer while a step runs.

At stage 3 of ZeRO a rank keeps its part of each bucket's values. Where not all ranks see one
memory, as over several nodes, the values of a layer are gathered before it runs, and let go when
the next one runs; meanwhile those of the next one come. So a rank has its part, and the buckets of
two layers. It is the same forward and backward.

All replicas run the same layers in the same order, which needs the same number of microbatches: a
replica that has fewer rows runs some of none. So their gathers meet. If a rank fails in a layer,
the others leave their waits, and all finish what any has started, as for layers that are
split (:class:`mpimesh.parallel.tensor_model.TensorWatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mpimesh.arrays import Array
from mpimesh.arrays.memory import aligned_bytes
from mpimesh.errors import ModuleStateError
from mpimesh.nn import Sequential
from mpimesh.nn.containers import is_plain
from mpimesh.parallel.gradients.bucket import Bucket, BucketShard
from mpimesh.parallel.replicas import Line, groups_of_lines, lines_along
from mpimesh.parallel.slots import SlotPool
from mpimesh.parallel.tensor_model import TensorWatch
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree

__all__ = ["LayerValues"]

_OUTSIDE = (
    "the replicas divide its values, and gather them in the steps of its model only: call "
    "forward() of the model instead of the layer's, or take the layers out by into_inner()"
)


class LayerValues:
    """The values of this rank's layers, of which it has a part between their uses; at first none.

    Attributes:
        shards: The shards of which only a part is here.
        meets: Whether replicas meet in layers, so that all run the same number of microbatches:
            some rank has such shards.
    """

    def __init__(self) -> None:
        self.shards: list[BucketShard] = []
        self.meets = False
        self._group: ProcessGroup | None = None
        self._watch: TensorWatch | None = None
        self._pool = SlotPool(aligned_bytes)
        # The shards that are here: their gathers, None once the values are shown.
        self._here: dict[BucketShard, Any] = {}
        self._are_whole = False
        self._asking: list[Sequential] = []
        self._roots: set[int] = set()  # the stages
        self._nested: set[int] = set()  # the Sequentials in them that run as if they were not there
        self._path: list[int] = []  # the Sequentials that are running, from a stage inwards
        self._needs: dict[int, tuple[BucketShard, ...]] = {}
        # What the layer needs that comes after one, forward and backward.
        self._ahead: tuple[dict[int, tuple[BucketShard, ...]], ...] = ({}, {})

    def bring(
        self,
        stages: Iterable[Sequential],
        buckets: Iterable[Bucket],
        scope: ProcessGroup,
        mesh: DeviceMesh,
        dim: str,
    ) -> None:
        """Bring what layers need from now on, if buckets have only a part of their values.

        Collective over the ranks that step together; and if it is so for any, over the mesh: the
        replicas get a group for these gathers alone, because after a failure some are under way
        when the ranks meet elsewhere.

        Args:
            stages: The stages of this rank.
            buckets: The buckets.
            scope: The ranks that step together.
            mesh: The mesh.
            dim: The dim of the replicas.
        """
        shards = [bucket.shard for bucket in buckets if bucket.shard is not None]
        self.shards = [shard for shard in shards if shard.values is None]
        self.meets = any(agree(scope, "values by layers", bool(self.shards)))
        if not self.meets:
            return
        lines: dict[tuple[int, ...], list[Line]] = {(): lines_along(mesh, dim)}
        self._group = groups_of_lines(mesh, lines, kind="layers of", apart=True)[()]
        of = {id(one): shard for shard in self.shards for one in shard.parameters}
        for stage in stages:
            self._roots.add(id(stage))
            needs: list[tuple[int, tuple[BucketShard, ...]]] = []
            for layer in self._layers_in(stage):
                found = (of.get(id(parameter)) for parameter in layer.parameters())
                if wanted := tuple(dict.fromkeys(filter(None, found))):
                    needs.append((id(layer), wanted))
            self._needs.update(needs)
            for ahead, order in zip(self._ahead, (needs, needs[::-1]), strict=True):
                ahead.update((layer, after) for (layer, _), (_, after) in pairwise(order))

    def _layers_in(self, layers: Sequential) -> Iterator[Any]:
        """Yield the layers that run one after the other, and have them ask before they run."""
        layers.before = partial(self.need, layers)
        self._asking.append(layers)
        for layer in layers.layers:
            if is_plain(layer):
                self._nested.add(id(layer))
                yield from self._layers_in(layer)
            else:
                yield layer

    # -- in a step: what all replicas do in the same order --------------------------------------

    def begin(self, check_abort: Callable[[], None]) -> None:
        """Let the waits of a step call `check_abort`, which raises if it is to be left. Local."""
        if self._group is not None:
            self._watch = TensorWatch(self._group, check_abort, most=len(self.shards))

    def need(self, asking: Sequential, layer: object, backward: bool) -> None:
        """Have the values of a layer here, and let go of others. Collective over the replicas.

        Args:
            asking: The Sequential that is about to run it. Where it runs inside of a layer that has
                all its values already, such as a Checkpoint, nothing is to be done.
            layer: The layer.
            backward: Whether it runs backward.
        """
        watch = self._watch
        if watch is None:
            raise ModuleStateError(f"{layer!r} cannot run outside of a step: {_OUTSIDE}")
        path = self._path
        if id(asking) in self._roots:
            path.clear()
        elif id(asking) not in path:
            return
        else:
            del path[path.index(id(asking)) :]
        path += [id(asking), id(layer)] if id(layer) in self._nested else [id(asking)]
        wanted = self._needs.get(id(layer))
        if wanted is None:
            return
        here = self._here
        soon = (*wanted, *self._ahead[backward].get(id(layer), ()))
        for shard in [one for one in here if one not in soon]:
            self._settle(shard)
            shard.hide()
            del here[shard]
        for shard in soon:
            if shard not in here:
                shard.check_hidden()
                here[shard] = watch.start(
                    "all_gather",
                    shard.own,
                    axis=0,
                    sizes=shard.sizes,
                    out=self._memory_for(shard),
                    label="values",
                )
        for shard in wanted:
            self._settle(shard)

    def _settle(self, shard: BucketShard) -> None:
        """Wait for the values of a shard, if they are under way, and show them."""
        handle = self._here[shard]
        if handle is not None:
            shard.show(handle.resolve())
            self._here[shard] = None

    def settle(self) -> None:
        """Wait for what is under way and was not needed in the end. Collective."""
        for shard in self._here:
            self._settle(shard)

    def end(self) -> None:
        """Let go of the step, and of the values. Local."""
        for shard in self._here:
            shard.hide()
        self._here.clear()
        self._pool.end_step()
        self._path.clear()
        self._watch = None

    def notes(self) -> list[Any]:
        """Return what the other ranks are to know after a failure. Local."""
        return [] if self._watch is None else self._watch.notes()

    def finish(self, notes: Sequence[list[Any]]) -> None:
        """Leave nothing of a failed step on the group. Collective over it.

        Args:
            notes: Those of its ranks.
        """
        if self._watch is not None:
            self._watch.finish(notes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for values that come and go."""
        return self._pool.nbytes

    def _memory_for(self, shard: BucketShard) -> Array:
        size = sum(shard.sizes)
        if shard.xp is np:
            return self._pool.take((size,), shard.dtype)
        return shard.xp.empty(size, shard.dtype)

    # -- between steps: collective over the replicas, where they divide values -----------------

    @contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Have all values here for a moment; inside of another such moment for as long as that.

        Args:
            write: Keep what was written to them.
        """
        is_inner = self._are_whole
        if not is_inner:
            self._gather()
            self._are_whole = True
        try:
            yield
            for shard in self.shards if write else ():
                shard.keep()
        finally:
            if not is_inner:
                self._are_whole = False
                for shard in self.shards:
                    shard.hide()

    def restore(self) -> None:
        """Have all values here for good."""
        self._gather()
        self.shards = []
        self.meets = False
        self._needs.clear()
        for ahead in self._ahead:
            ahead.clear()
        for layers in self._asking:
            layers.before = None
        self._asking.clear()
        self._roots.clear()
        self._nested.clear()

    def _gather(self) -> None:
        group = self._group
        if group is None:
            return
        handles = [
            group.all_gather(shard.own, sizes=shard.sizes, label="values") for shard in self.shards
        ]
        for shard, handle in zip(self.shards, handles, strict=True):
            shard.show(handle.resolve())
