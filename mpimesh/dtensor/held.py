"""A rank's own view of a split array: facts of the whole, and its own block. All of it local."""

from __future__ import annotations

from math import prod

from mpimesh.arrays import DType, HostArray
from mpimesh.errors import RankError
from mpimesh.layout import Layout, Placement
from mpimesh.runtime import DeviceMesh

__all__ = ["Held"]


class Held:
    """The facts of a split array; none of them can be assigned."""

    __slots__ = ("_block", "_dtype", "_layout", "_mesh", "_shape")

    _block: HostArray | None
    _dtype: DType
    _layout: Layout
    _mesh: DeviceMesh
    _shape: tuple[int, ...]

    @property
    def mesh(self) -> DeviceMesh:
        """The live mesh."""
        return self._mesh

    @property
    def layout(self) -> Layout:
        """The layout of the array on the mesh, as a value."""
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape; :meth:`reshape` gives an array of another one."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements; :meth:`astype` gives an array of another one."""
        return self._dtype

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

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

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
