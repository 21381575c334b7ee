"""The methods that arrays of NumPy have, each by its function."""

from __future__ import annotations

from numpy.lib.mixins import NDArrayOperatorsMixin

__all__ = ["Methods"]


class Methods(NDArrayOperatorsMixin):
    """What a split array can do as NumPy's own can."""

    __slots__ = ()
