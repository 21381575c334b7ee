"""Where activations enter layers that are split by their outputs, and their gradient comes out.

Each rank computes some outputs from all of the input, so that its gradient of the input is a part
of the true one. Several layers with one input, such as those of queries, keys and values, enter
together: the input is gathered once, and one sum is made of all their gradients.
"""

from __future__ import annotations

from typing import Any

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import Context
from mpimesh.nn.composite import Composite
from mpimesh.nn.masked import joined, parted
from mpimesh.nn.protocol import backward_weight
from mpimesh.parallel.tensor.group import Pending, TensorGroup
from mpimesh.parallel.tensor.part import ColumnPart
from mpimesh.parallel.tensor.sequence import SequenceSplit
from mpimesh.runtime import ProcessGroup

__all__ = ["Around", "Entered", "Entrance"]


class Entrance:
    """The entrance of layers that are split by their outputs.

    Args:
        group: The ranks that they are split over.
        sequence: How the input is split along the sequence, if it is.

    Raises:
        GroupError: If this rank is not in the group.
        ModuleError: If `sequence` is split over another group.
    """

    def __init__(self, group: ProcessGroup | TensorGroup, sequence: SequenceSplit | None) -> None:
        self.tensor = TensorGroup(group) if sequence is None else sequence.tensor
        self.sequence = sequence
        given = group.group if isinstance(group, TensorGroup) else group
        if self.tensor.group is not given:
            raise ModuleError(
                f"a layer that is split over {given!r} cannot have a sequence that is split over "
                f"{self.tensor.group!r}"
            )

    def enter(self, x: Array, ctx: Context | None) -> Array:
        """Return all of `x`. Collective with a sequence. This rank's places of it are kept."""
        if ctx is not None:
            ctx.save(self, x)
        return x if self.sequence is None else self.sequence.gather(x).resolve()

    def whole_mask(self, mask: Array, ctx: Context | None) -> Array:
        """Return all of a mask. Collective with a sequence, for the first of a pass that asks."""
        sequence = self.sequence
        if sequence is None:
            return mask
        if ctx is None:
            return sequence.gather(mask).resolve()
        return ctx.once(mask, lambda: sequence.gather(mask).resolve())

    def leave(self, dx: Array | None, ctx: Context) -> Pending:
        """Start to sum the ranks' gradients of the input, None if nobody wants it. Collective."""
        ctx.defer(self, *ctx.take(self))
        if dx is None:
            return Pending(None, None, None)
        if self.sequence is None:
            return self.tensor.all_reduce(dx, owned=True)
        return self.sequence.reduce_scatter(dx)

    def again(self, ctx: Context, *, wanted: bool) -> Pending:
        """Start to get all of the input once more, for the weights' gradients. Collective.

        Args:
            ctx: The microbatch.
            wanted: False if nobody needs it, on all ranks alike.
        """
        (x,) = ctx.take_deferred(self)
        if not wanted or self.sequence is None:
            return Pending(None, x, None)
        return self.sequence.gather(x)

    def __deepcopy__(self, memo: object) -> Entrance:
        """Return one of its own: what a context keeps for the copy is the copy's."""
        return Entrance(self.tensor, self.sequence)


class Entered(Composite):
    """A composite whose first layers are split by their outputs, and its last one by its inputs.

    To be listed before the unsplit composite among the bases, which does the maths: its forward
    and backward see all of the input, and give a part of its gradient. The first layers are
    each a :class:`~mpimesh.parallel.tensor.part.ColumnPart`.

    Attributes:
        eager: Whether `backward_input` runs the weights' half, too, while the gradient of the
            input is summed, so that `backward_weight` has nothing left to do. Set by what is
            around it, while its own `backward` runs both halves.
    """

    entrance: Entrance
    eager: bool = False

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Do what the unsplit layer does. Collective over the group; raises what that does."""
        x, mask = parted(self, x, ctx)
        whole = self.entrance.enter(x, ctx)
        if mask is not None:
            mask = self.entrance.whole_mask(mask, ctx)
        return super().forward(joined(whole, mask), ctx)  # type: ignore[safe-super]  # by then not

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return the gradient of the input. Collective over the group."""
        pending, masked = self._start(dy, ctx)
        if self.eager:
            self._add_gradients(ctx)
        dx = pending.resolve()
        return (dx, None) if masked else dx

    def backward(self, dy: Array, ctx: Context) -> Any:
        """Run both halves; the weights' are computed while the input's is summed. Collective."""
        pending, masked = self._start(dy, ctx)
        self._add_gradients(ctx)
        dx = pending.resolve()
        return (dx, None) if masked else dx

    def backward_weight(self, ctx: Context) -> None:
        """Add the parameters' gradients. Collective if the input is split along the sequence."""
        if not self.eager:
            self._add_gradients(ctx)

    def _add_gradients(self, ctx: Context) -> None:
        children = [child for _, child in reversed(self.named_children())]
        first = [child for child in children if isinstance(child, ColumnPart)]
        wanted = any(layer.weight.requires_grad for layer in first)
        whole = self.entrance.again(ctx, wanted=wanted)
        for child in children:
            if child not in first:
                backward_weight(child, ctx)
        x = whole.resolve()
        for layer in first:
            layer.add_gradients(x, ctx)

    def _start(self, dy: Array, ctx: Context) -> tuple[Pending, bool]:
        """Start to sum the gradients of the input; tell whether that came with a mask."""
        found = super().backward_input(dy, ctx)
        dx, _ = parted(self, found)
        return self.entrance.leave(dx, ctx), isinstance(found, tuple)


class Around(Composite):
    """A composite with layers within that are :class:`Entered`.

    To be listed before the unsplit composite among the bases. Its backward computes the weights'
    gradients of each of these layers while the gradient of that layer's input is summed.
    """

    def backward(self, dy: Any, ctx: Context) -> Any:
        """Run both halves, with the same bits as one after the other. Collective."""
        within = [child for _, child in self.named_children() if isinstance(child, Entered)]
        for child in within:
            child.eager = True
        try:
            return super().backward(dy, ctx)
        finally:
            for child in within:
                child.eager = False
