"""`DTensor`: an array that is split over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from math import prod
from operator import getitem, setitem
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from mpimesh.arguments import as_shape, shown
from mpimesh.arrays import Array, DType, HostArray
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.core.dispatch import adopt
from mpimesh.dtensor.consistency import (
    CallNumber,
    agreed_blocks,
    call_compared,
    compare_call,
    compare_copies,
    compare_move,
    number_text,
    numbered,
    writable_block,
)
from mpimesh.dtensor.defaults import as_live
from mpimesh.dtensor.dispatch import (
    ADVICE,
    FACTS,
    FUNCTIONS,
    PLANNERS,
    StandIn,
    may_gather,
    name_of,
    rule_of,
    sure_rule_of,
)
from mpimesh.dtensor.methods import Methods, require_member
from mpimesh.dtensor.redistribute import (
    Redistribution,
    check_max_bytes,
    fitting_layout,
    plan_redistribute,
    redistribution,
)
from mpimesh.errors import (
    DTypeError,
    LayoutError,
    MpimeshError,
    NoRuleError,
    RankError,
    ShapeError,
)
from mpimesh.layout import (
    Layout,
    Placement,
    PlacementLike,
    RedistributionPlan,
    Replicate,
)
from mpimesh.mesh import WORLD, Mesh
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.call import Call
from mpimesh.runtime.operands import split_array
from mpimesh.runtime.persistent import Persistent
from mpimesh.trace import html

__all__ = ["DTensor", "are_whole", "common_mesh", "gathered", "whole_of"]

_IN_PLACE = {np.place, np.put, np.putmask, np.copyto, np.fill_diagonal, np.put_along_axis, setitem}
"""Functions that write into their first argument."""


class DTensor(Methods):
    """An array of which each rank of a mesh holds a block, as its layout says.

    Made by :func:`~mpimesh.distribute`, :meth:`from_local`, :func:`~mpimesh.zeros` and the like.
    NumPy's functions and operators work on it, and every rank calls them alike.

    `shape` is that of the whole array, `local` the block of this rank, NumPy's own array: write
    into it as you like, between operations. A rank that the mesh leaves out holds the
    tensor, too, to take part in :meth:`redistribute`; it has no block.

    Results are copies, also what a key takes, ``x[2:5]``, and what `reshape` and `redistribute`
    give, on every mesh and in every layout. Views, through which a write reaches `x`, are only
    `local`, what permutes axes (`T`), `np.expand_dims`, `real` and `imag`.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _mesh: DeviceMesh
        _block: HostArray | None
        _origin: CallNumber | str | None
        """The call that made it, with checks on; or the batch of Batches that it is; or None."""

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: Layout | None = None,  # so that DTensor(x) gets the message below
        shape: Sequence[int] = (),
        dtype: Any = None,
        block: HostArray | None = None,
    ) -> None:
        """Take a block as it is; users call :meth:`from_local`.

        Raises:
            ShapeError: If the block is not the one that `layout` gives this rank.
        """
        if not isinstance(layout, Layout):
            raise LayoutError(
                f"layout must be a Layout, got {shown(layout)}; mm.distribute(x, mesh, placements) "
                "splits an array, DTensor.from_local(block, mesh, placements) takes blocks"
            )
        if block is not None and not isinstance(block, np.ndarray):
            raise ShapeError(f"block must be a NumPy array or None, got {shown(block)}")
        live = as_live(mesh)
        self._hold(live, live._core.dispatch, layout, as_shape(shape), as_dtype(dtype), block)
        is_member = layout.mesh.contains_rank(mesh.rank)
        expected = layout.local_shape(self.shape, mesh.rank) if is_member else None
        found = None if block is None else (block.shape, block.dtype)
        if found != (None if expected is None else (expected, self.dtype)):
            raise ShapeError(
                f"rank {mesh.rank} must hold a block of shape {expected} and dtype {self.dtype} of "
                f"an array of shape {self.shape} as {layout}, got {found}"
            )

    @classmethod
    def from_local(
        cls,
        block: Any,
        mesh: DeviceMesh,
        placements: PlacementLike,
        *,
        shape: Sequence[int] | None = None,
    ) -> DTensor:
        """Make a tensor of the blocks that the ranks have. A block that can be written stays it.

        Collective over the mesh without `shape`: the ranks tell each other what they have. Blocks
        along an axis may then have any lengths.

        Args:
            block: This rank's block. Only arrays from :meth:`DeviceMesh.shared_empty` are
                read in place by others; any other is copied when it moves. One that is read-only
                is copied now, so that :attr:`local` can be written on every rank.
            mesh: The mesh.
            placements: As for :class:`Layout`.
            shape: The global shape, if it is known; then nothing is sent, and nothing compared.

        Raises:
            DTypeError: If the block is an array of CuPy: split arrays lie in host memory.
            ShapeError: If the block does not fit; without `shape` on every rank of the mesh.
            MismatchError: On every rank, saying which has what, if dtypes or shapes disagree.

        Example:
            >>> with mm.DeviceMesh("dp=3") as mesh:
            ...     rows = np.full((mesh.rank, 2), mesh.rank)
            ...     x = mm.DTensor.from_local(rows, mesh, "dp=S0")
            ...     print(x.shape, x.layout.text, x.full()[:, 0])
            (3, 2) dp=S0(0,1,2) [1 2 2]
        """
        own = writable_block(split_array(block), as_live(mesh))
        if shape is None:
            shape, layout, dtype, number = agreed_blocks(own, mesh, Layout(mesh, placements))
            own = own.astype(dtype, copy=False)  # another one only without elements
        else:
            shape, layout = as_shape(shape), Layout(mesh, placements)
            number = compare_call(mesh, "from_local", (shape, own.dtype, layout.text))
        made = cls(mesh, layout, shape, own.dtype, own)
        compare_copies(own, mesh, layout, "from_local")
        return numbered(made, number)

    # -- facts of the whole, and this rank's block: local ----------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The live mesh."""
        return self._mesh

    @property
    def layout(self) -> Layout:
        """The layout of the array on the mesh, as a value."""
        layout: Layout = self._spec.layout
        return layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape; :meth:`reshape` gives an array of another one."""
        return self._spec.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements; :meth:`astype` gives an array of another one."""
        dtype: DType = self._spec.dtype
        return dtype

    @property
    def local(self) -> HostArray:
        """This rank's block.

        Raises:
            RankError: If this rank is not in the mesh.
        """
        if self._block is None:
            raise RankError(
                f"rank {self.mesh.rank} holds no block: it is not in mesh {self.mesh.dims_text}"
            )
        return self._block

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the mesh and so holds a block."""
        return self._block is not None

    @property
    def placement(self) -> Placement:
        """One spec for each dim of the mesh."""
        return self.layout.placement

    @property
    def ndim(self) -> int:
        """Number of array axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.itemsize

    @property
    def global_offset(self) -> tuple[int, ...]:
        """Where this rank's block begins in the whole array."""
        return self.layout.global_offset(self.shape, self.mesh.rank)

    # -- what Python asks for ---------------------------------------------------------------

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def _repr_html_(self) -> str:
        """Show shape, dtype and which ranks hold which block, in notebooks. Local."""
        facts = f"DTensor of shape {self.shape}, {self.dtype}"
        return html.paragraph(facts) + self.layout._html_of(self.shape)

    def __repr__(self) -> str:
        """Show shape, dtype and layout. Local: it shows no values of other ranks."""
        return f"DTensor(shape={self.shape}, dtype={self.dtype}, {self.layout})"

    def __str__(self) -> str:
        """Show this rank's block, too. Local."""
        if self._block is None:
            return f"{self!r}, without a block on rank {self.mesh.rank}"
        what = f"the block of rank {self.mesh.rank}"
        if self.layout.partial_op:
            what = (
                f"what rank {self.mesh.rank} has, not yet reduced ({self.layout.partial_op}) with "
                "what others have; x.full() is the result"
            )
        return f"{self!r}, {what}:\n{self._block}"

    def __deepcopy__(self, memo: object) -> DTensor:
        """Return :meth:`copy`."""
        return self.copy()

    def __reduce__(self) -> NoReturn:
        """Refuse: a file or another process has neither the mesh nor the other blocks."""
        raise TypeError(
            f"{self!r} cannot be pickled: take x.local, or x.full(), which is collective"
        )

    # -- moving: collective --------------------------------------------------------------

    def plan(
        self,
        placements: PlacementLike | None = None,
        *,
        mesh: DeviceMesh | None = None,
        max_bytes: int = 0,
    ) -> RedistributionPlan:
        """Return what :meth:`redistribute` would move, between which nodes, and how. Local.

        With `max_bytes`, too: no collective of a group does it then, but messages.

        Raises:
            LayoutError: If the placements do not fit.
        """
        target = self._target(placements, mesh)
        goal = self.mesh if mesh is None else mesh
        check_max_bytes(max_bytes)
        plan = plan_redistribute(
            self.mesh, self._spec.layout, goal, target, self._spec.shape, self.itemsize
        )
        return replace(plan, collective=None) if max_bytes else plan

    def redistribute(
        self,
        placements: PlacementLike | None = None,
        *,
        mesh: DeviceMesh | None = None,
        max_bytes: int = 0,
    ) -> DTensor:
        """Return the same array in another layout, on this mesh or on another.

        Collective, and waits: all ranks of the mesh call it; with another `mesh`, all ranks of
        the communicator that both were made from. Each rank receives only what it lacks; ranks
        of a node read it in place.

        Args:
            placements: As for :class:`Layout`; if None, those of now, on the other mesh.
            mesh: The mesh to move to; this one if None.
            max_bytes: Most memory for packed messages at a time; 0 for no limit.

        Returns:
            A tensor with a block of its own, also if the layout is the same.

        Raises:
            LayoutError: If the placements do not fit the array or the mesh.
            DTypeError: If a reduction is needed that the dtype does not have.

        Cost:
            See :meth:`plan`, which tells without moving anything.
        """
        core, key = self._mesh._core, None
        if mesh is None and type(placements) is str and type(max_bytes) is int and not max_bytes:
            key = self._spec, placements
            known = core.moves.get(key)
            if known is not None:
                moving, made = known
                started: CollectiveTensor[DTensor] = moving.start(self._mesh, self._block, made)
                return started.resolve()
        target = self._target(placements, mesh)
        if (mesh is None or mesh is self._mesh) and target == self._spec.layout:
            number = compare_call(self._mesh, "redistribute", (self, target.text))
            return numbered(self.copy(), number)
        if key is not None and not core.context.settings.checks:
            made = partial(DTensor._of_block, self._mesh, target, self.shape, self.dtype)
            core.moves[key] = self._to(self._mesh, target), made
        return self._start(target, mesh, max_bytes).resolve()

    def start_redistribute(
        self,
        placements: PlacementLike | None = None,
        *,
        mesh: DeviceMesh | None = None,
        max_bytes: int = 0,
    ) -> CollectiveTensor[DTensor]:
        """Start :meth:`redistribute`; ``resolve()`` gives the new tensor.

        Do not write into `local` before.
        """
        return self._start(self._target(placements, mesh), mesh, max_bytes)

    def redistribute_init(
        self,
        placements: PlacementLike | None = None,
        *,
        mesh: DeviceMesh | None = None,
        out: DTensor | None = None,
    ) -> Persistent[DTensor]:
        """Plan :meth:`redistribute`, to be started many times. Local.

        For loops: arguments are checked, blocks and buffers worked out here. Each start reads what
        this array holds then, and writes into the same result; what the ranks start is compared as
        in a plain call.

        Args:
            placements: As of :meth:`redistribute`.
            mesh: The mesh to move to; this one if None.
            out: The tensor for the result: of this shape and dtype, in the new layout. New if None.

        Raises:
            LayoutError: If the placements do not fit, or `out` is in another layout.
            ShapeError: If `out` has another shape.
            DTypeError: If it has another dtype, or a reduction is needed that the dtype lacks.

        Example:
            >>> planned = x.redistribute_init("S1")
            >>> for _ in range(100):
            ...     x.local[...] = step()
            ...     columns = planned.start().resolve()
        """
        target = self._target(placements, mesh)
        goal = self._mesh if mesh is None else mesh
        if out is not None:
            _check_out(self, goal, target, out)
        into = None if out is None else out._block

        def made(block: HostArray | None) -> DTensor:
            return out if out is not None else self._moved(goal, target, None, block)

        which = number_text(self) if goal is self._mesh else ""
        return self._to(goal, target).planned(self._mesh, self._block, into, made, which)

    def _start(
        self, target: Layout, mesh: DeviceMesh | None, max_bytes: int
    ) -> CollectiveTensor[DTensor]:
        goal = self._mesh if mesh is None else mesh
        moving, number = self._to(goal, target), compare_move(self, goal, target)
        made = partial(self._moved, goal, target, number)
        return moving.start(self._mesh, self._block, made, max_bytes=max_bytes)

    def _to(self, goal: DeviceMesh, target: Layout) -> Redistribution:
        return redistribution(
            self._mesh, self._spec.layout, goal, target, self._spec.shape, self._spec.dtype
        )

    def _moved(
        self, goal: DeviceMesh, target: Layout, number: CallNumber | None, block: HostArray | None
    ) -> DTensor:
        return numbered(
            DTensor._of_block(goal, target, self._spec.shape, self._spec.dtype, block), number
        )

    @overload
    def full(self, *, root: None = None) -> HostArray: ...

    @overload
    def full(self, *, root: int) -> HostArray | Any: ...

    def full(self, *, root: int | None = None) -> HostArray | Any:
        """Return the whole array: on every rank of the mesh, or on rank `root` only.

        Collective over the mesh, and waits.

        Args:
            root: A rank of the mesh, as the mesh counts them; None for all.

        Returns:
            The array; None on ranks that do not get it.

        Raises:
            RankError: If `root` is not in the mesh. If that is so on some ranks only, the others
                get a MismatchError with ``MPIMESH_CHECKS`` on; without, they wait until those end.
        """
        if root is None:
            target = fitting_layout(self.mesh, (Replicate(),) * self.mesh.ndim, self._spec.shape)
        else:
            try:
                self._spec.layout.mesh.offset_of(root)
            except MpimeshError as error:
                if self.is_member:
                    self.mesh.group()._core.poison(Call("full", WORLD), error)
                raise
            target = Layout(Mesh((), [root]), ())
        if not self.is_member:
            return None
        compare_call(self.mesh, "full", (self, target.text))
        return self._to(self.mesh, target).start(self.mesh, self._block, lambda x: x).resolve()

    def full_tensor(self) -> HostArray:
        """Return :meth:`full`, by PyTorch's name. Collective over the mesh, and waits."""
        return self.full()

    def to_local(self) -> HostArray:
        """Return :attr:`local`, by PyTorch's name."""
        return self.local

    def copy(self) -> DTensor:
        """Return a tensor with a copy of the block. Local."""
        block = None
        if self._block is not None:
            block = self.mesh.shared_empty(self._block.shape, self._spec.dtype)
            block[...] = self._block
        made = DTensor._of_block(
            self.mesh, self._spec.layout, self._spec.shape, self._spec.dtype, block
        )
        return numbered(made, getattr(self, "_origin", None))

    def _target(self, placements: PlacementLike | None, mesh: DeviceMesh | None) -> Layout:
        goal = self._mesh if mesh is None else mesh
        if not isinstance(goal, DeviceMesh):
            raise LayoutError(f"an array is moved to a DeviceMesh, got {goal!r}")
        return fitting_layout(
            goal, self.placement if placements is None else placements, self._spec.shape
        )

    # -- NumPy -----------------------------------------------------------------------

    def _do_ufunc(self, ufunc: np.ufunc, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do a ufunc of NumPy, or one of its methods, by its rule."""
        if any(isinstance(one, StandIn) for one in (*args, *kwargs.get("out", ()))):
            return NotImplemented
        name = f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
        rule = sure_rule_of(np.ufunc)

        def do() -> Any:
            try:
                return rule(ufunc, method, args, dict(kwargs))
            except NoRuleError as error:
                _check_whole((args, kwargs), error)
            return gathered(getattr(ufunc, method), args, kwargs)

        return call_compared(self._mesh, name, args, do, kwargs)

    def _do_function(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Do a function of NumPy by its rule.

        One without a rule works on whole arrays: where all ranks have them, or may gather them.
        """
        if any(issubclass(kind, StandIn) for kind in types):
            return NotImplemented
        if function in FACTS:
            return self._do(function, args, kwargs)
        return call_compared(
            self._mesh,
            name_of(function),
            args,
            lambda: self._do(function, args, kwargs),
            kwargs,
            function,
        )

    @staticmethod
    def _do(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if function in FUNCTIONS or not are_whole((args, kwargs)):
            found = rule_of(function)
            if found is not None:
                try:
                    return found(*args, **kwargs)
                except NoRuleError as error:  # of an option, perhaps
                    _check_whole((args, kwargs), error)
        return gathered(function, args, kwargs)

    def _do_item(self, key: Any) -> Any:
        return call_compared(
            self._mesh, "getitem", (self, key), lambda: self._do(getitem, (self, key), {})
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        args = (self, key, value)
        call_compared(self._mesh, "setitem", args, lambda: self._do(setitem, args, {}))

    # -- what it is not ----------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Refuse: the whole array is on no rank, and to gather it is collective."""
        self._refuse("be converted to a NumPy array implicitly", _CURES)

    def __iter__(self) -> Any:
        self._refuse("be looped over")

    def _refuse(self, what: str, cures: str = "") -> NoReturn:
        if self.layout.is_replicated:
            raise LayoutError(
                f"{self!r} cannot {what}, as no DTensor can; every rank has all of this one: take "
                "x.local, which is NumPy's own array"
            )
        one = ", or float(x) for the number" if self.size == 1 else ""
        raise LayoutError(
            f"{self!r} cannot {what}: its parts are on several ranks; take x.local for this rank's "
            f"block, x.full() for the whole array{one}; all ranks call x.full() and float(x){cures}"
        )


_CURES = (
    ". mm.local_map calls a function of another library on blocks. In place of np.r_ and np.c_ "
    "write np.concatenate and np.stack, of a[x] mm.distribute(a, mesh, 'R')[x], of "
    "rng.permutation(x) x[mm.Random(0).permutation(len(x))]"
)
"""Replacements of calls by which NumPy asks for an array before a split one can answer."""


def _check_out(x: DTensor, goal: DeviceMesh, target: Layout, out: Any) -> None:
    """See whether a tensor can be the result of a redistribution. Local.

    Raises:
        LayoutError: If it is none, on another mesh, in another layout, or read-only.
        ShapeError: If it has another shape.
        DTypeError: If it has another dtype.
    """
    place = f"on rank {x.mesh.rank}"
    if not isinstance(out, DTensor):
        raise LayoutError(
            f"out of redistribute_init must be a DTensor, got {shown(out)} {place}; leave it out "
            "for a new one"
        )
    if out.shape != x.shape:
        raise ShapeError(f"out must have shape {x.shape}, got shape {out.shape} {place}")
    if out.dtype != x.dtype:
        raise DTypeError(f"out must have dtype {x.dtype}, got dtype {out.dtype} {place}")
    if out.mesh is not goal or out.layout != target:
        raise LayoutError(
            f"out must be in the new layout, {target} on mesh {goal.dims_text}, got {out.layout} "
            f"on mesh {out.mesh.dims_text} {place}"
        )
    if out.is_member and not out.local.flags.writeable:
        raise LayoutError(f"out must be writable, but its block is read-only {place}: copy it")


adopt(DTensor, PLANNERS)


# -- split arrays among the arguments of a function -----------------------------------------------


def common_mesh(operands: Sequence[Any]) -> DeviceMesh:
    """Return the mesh that all split arrays among `operands` are on.

    Raises:
        LayoutError: If they are on different ones.
    """
    tensors = [one for one in operands if isinstance(one, DTensor)]
    mesh = tensors[0].mesh
    for other in tensors[1:]:
        if other.mesh is not mesh:
            raise LayoutError(
                f"operands must be on one mesh, but {tensors[0]!r} and {other!r} are on two; bring "
                "one over with x.redistribute(placements, mesh=...)"
            )
    return mesh


def whole_of(x: DTensor) -> HostArray:
    """Return the whole array, on whose values the shape of a result depends. Collective.

    Raises:
        RankError: If this rank is not in the mesh.
    """
    require_member(x)
    return x.full()


def gathered(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` with whole arrays in place of split ones. Collective.

    Arrays in the result are replicated over the mesh. What it writes, into `out` or its first
    argument, is then written into the split array, in the layout that this has.

    Raises:
        RankError: If this rank is not in the mesh.
    """
    copy_to = sure_rule_of(np.copyto)
    in_place = function in _IN_PLACE or function.__name__ == "at"  # of any ufunc
    if in_place and not args:  # all by name
        args, kwargs = list(signature(function).bind(**kwargs).arguments.values()), {}
    if in_place and isinstance(args[0], DTensor):
        target, *others = args
        whole = np.array(whole_of(target))
        others, kwargs = _replaced((others, kwargs), [])
        function(whole, *others, **kwargs)
        copy_to(target, whole)
        return None
    out = kwargs.get("out")
    (out,) = out if isinstance(out, tuple) and len(out) == 1 else (out,)
    if isinstance(out, DTensor):
        rest = {key: one for key, one in kwargs.items() if key != "out"}
        copy_to(out, gathered(function, args, rest))
        return out
    found: list[DTensor] = []
    whole_args, whole_kwargs = _replaced(args, found), _replaced(kwargs, found)
    mesh = common_mesh(found)
    return _split(function(*whole_args, **whole_kwargs), mesh)


def _check_whole(tree: Any, error: NoRuleError) -> None:
    """Refuse a call that no rule does, unless it may be done on whole arrays.

    Raises:
        NoRuleError: On all ranks, with the words of `error` and what to do.
    """
    if not may_gather() and not are_whole(tree):
        if ADVICE in str(error) or "allow_gather" in str(error):
            raise error
        raise NoRuleError.everywhere(f"{error}; {ADVICE}") from None


def are_whole(tree: Any) -> bool:
    """Tell whether every rank has all of each split array in `tree`: then nothing need move."""
    if isinstance(tree, DTensor):
        return tree.layout.is_replicated
    if isinstance(tree, dict):
        return all(are_whole(one) for one in tree.values())
    return not isinstance(tree, list | tuple) or all(are_whole(one) for one in tree)


def _replaced(tree: Any, found: list[DTensor]) -> Any:
    if isinstance(tree, DTensor):
        found.append(tree)
        return whole_of(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(one, found) for one in tree)
    if isinstance(tree, dict):
        return {key: _replaced(one, found) for key, one in tree.items()}
    return tree


def _split(tree: Any, mesh: DeviceMesh) -> Any:
    if isinstance(tree, np.ndarray):
        return DTensor(mesh, Layout.replicated(mesh), tree.shape, tree.dtype, tree)
    if isinstance(tree, list | tuple):
        row = [_split(one, mesh) for one in tree]
        return type(tree)(*row) if hasattr(tree, "_fields") else type(tree)(row)
    return tree
