"""Values that one microbatch leaves behind in forward, for its own backward.

Layers hold parameters and nothing of a microbatch, so any number of
microbatches can be in flight through the same layer: each has a `Context`, and
they may finish in any order.

A context may also have room for the result of one layer where others are to read it;
:meth:`Context.empty` gives it to that layer, and nothing to all others.

A layer's record passes two places in a context::

    forward --save--> saved --take--> backward_input --defer--> deferred
        --take_deferred--> backward_weight

A layer that a model uses twice has two records. Backward runs through a model
from its end, so `saved` gives the last record first; `deferred` gives the first
one first, so that weight gradients are added in the same order, to the bit,
whether they are computed at once or later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from mpimesh.arguments import as_flag, as_int
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import ModuleError, ModuleStateError

__all__ = ["Context", "Room"]

T = TypeVar("T")

Room: TypeAlias = "Callable[[tuple[int, ...], DType], Array | None]"
"""Returns memory for an array of a shape and dtype; None if it has none to give."""


class _Records:
    """The records of one layer. Holds the layer, so that its id stays its own."""

    __slots__ = ("deferred", "module", "saved")

    def __init__(self, module: object) -> None:
        self.module = module
        self.saved: list[tuple[Any, ...]] = []
        self.deferred: deque[tuple[Any, ...]] = deque()


class Context:
    """One microbatch's life through one stage: from its forward to its weight gradients.

    Arrays are kept by reference. Until its backward is done, nobody may write
    to an array that went into or came out of a forward with this context.

    Attributes:
        step: Number of the training step; dropout draws other masks at each.
        first_row: Index, in the global batch, of the microbatch's first row.
        training: False makes dropout the identity while backward still works.

    Args:
        memory: Gives memory for the results of all layers, as :data:`Room` does; None has each
            layer take its own.

    Raises:
        ModuleError: If a number is negative.
    """

    __slots__ = ("_for", "_made", "_memory", "_records", "_room", "first_row", "step", "training")

    def __init__(
        self,
        *,
        step: int = 0,
        first_row: int = 0,
        training: bool = True,
        memory: Room | None = None,
    ) -> None:
        self.step = as_int(step, "step", ModuleError, least=0)
        self.first_row = as_int(first_row, "first_row", ModuleError, least=0)
        self.training = as_flag(training, "training", ModuleError)
        self._records: dict[int, _Records] = {}
        self._made: dict[int, tuple[object, object]] = {}
        self._for: object = None
        self._room: Room | None = None
        self._memory = memory

    def offer(self, module: object, room: Room | None) -> None:
        """Let :meth:`empty` give `module`, and no other layer, what `room` returns.

        Args:
            module: The layer whose result, or gradient, is to lie there.
            room: Returns an uninitialised array of a shape and dtype, or None.
        """
        self._for = module
        self._room = room

    def empty(self, module: object, shape: tuple[int, ...], dtype: DType) -> Array | None:
        """Return memory to write the result of `module` into; None if it is to take its own.

        A layer need not ask. One that does saves a copy of what a pipeline hands on, in forward
        and in backward, and gets memory that steps use again and again:
        ``np.add(a, b, out=ctx.empty(self, a.shape, a.dtype))``.
        """
        if self._for is module and self._room is not None:
            return self._room(shape, dtype)
        return None if self._memory is None else self._memory(shape, dtype)

    def once(self, source: object, make: Callable[[], T]) -> T:
        """Return what `make` gave when it was first called for this very `source`.

        For what several layers make of one and the same array that passes through them all. It is
        kept as long as the context, or up to :meth:`clear`.
        """
        # With the source itself, so that its id stays its own.
        if id(source) not in self._made:
            self._made[id(source)] = source, make()
        found: Any = self._made[id(source)][1]
        return found  # type: ignore[no-any-return]

    def save(self, module: object, *values: Any) -> None:
        """Keep `values` for the backward of `module`."""
        self._of(module).saved.append(values)

    def peek(self, module: object) -> tuple[Any, ...]:
        """Return what `take` would, and keep it.

        Raises:
            ModuleStateError: If nothing is saved, see `take`.
        """
        records = self._records.get(id(module))
        if records is None:
            raise ModuleStateError(
                f"{module!r}: backward needs what forward saved, but forward did not run with "
                f"{self!r}; call forward(x, ctx) with the same Context first"
            )
        if not records.saved:
            raise ModuleStateError(
                f"{module!r}: backward already ran for each forward with {self!r}; what forward "
                "saved is freed by it, so call forward(x, ctx) again first"
            )
        return records.saved[-1]

    def take(self, module: object) -> tuple[Any, ...]:
        """Give up and return the values that `module` saved last.

        Raises:
            ModuleStateError: If forward did not run with this context, or each
                of its runs had its backward.
        """
        values = self.peek(module)
        self._records[id(module)].saved.pop()
        return values

    def defer(self, module: object, *values: Any) -> None:
        """Keep `values` for the `backward_weight` of `module`."""
        self._of(module).deferred.append(values)

    def take_deferred(self, module: object) -> tuple[Any, ...]:
        """Give up and return the values that `module` deferred first.

        Raises:
            ModuleStateError: If `backward_input` did not run with this context,
                or each of its runs had its `backward_weight`.
        """
        records = self._records.get(id(module))
        if records is None or not records.deferred:
            raise ModuleStateError(
                f"{module!r}: backward_weight needs a backward_input before it with {self!r}, "
                "and each backward_input allows exactly one backward_weight"
            )
        return records.deferred.popleft()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits: each forward had its backward, with weights."""
        return not any(records.saved or records.deferred for records in self._records.values())

    def clear(self) -> None:
        """Drop everything that is kept, for a microbatch whose backward will not run."""
        self._records.clear()
        self._made.clear()

    def drop(self, module: object) -> None:
        """Drop what is kept for `module`."""
        self._records.pop(id(module), None)

    def _of(self, module: object) -> _Records:
        records = self._records.get(id(module))
        if records is None:
            records = self._records[id(module)] = _Records(module)
        return records

    def __repr__(self) -> str:
        training = "" if self.training else ", training=False"
        return f"Context(step={self.step}, first_row={self.first_row}{training})"
