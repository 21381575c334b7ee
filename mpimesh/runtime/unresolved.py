"""Refusals to use a result that has not come yet as if it were an array.

Without it Python says that ``+`` does not know a CollectiveTensor, and NumPy makes an array that
holds the handle. Every operator and every function of NumPy raises UnresolvedError instead, which
says what to write.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NoReturn

from mpimesh.errors import UnresolvedError

__all__ = ["Unresolved"]


def _refusing(example: str) -> Callable[..., NoReturn]:
    """Return a method that refuses, and shows how it would go."""

    def refuse(handle: Unresolved, *_: Any, **_options: Any) -> NoReturn:
        raise handle._refusal(example)

    return refuse


def _binary(symbol: str) -> Callable[..., NoReturn]:
    return _refusing(f"handle.resolve() {symbol} x")


def _reflected(symbol: str) -> Callable[..., NoReturn]:
    return _refusing(f"x {symbol} handle.resolve()")


class Unresolved:
    """Not an array, be it resolved or not, and says so to whoever uses it as one.

    Two handles are equal if they are one; a handle and a number or an array cannot be compared.
    """

    __slots__ = ()

    def _what(self) -> object:
        """Return what gives the result; its `str` names it."""
        raise NotImplementedError

    def _is_resolved(self) -> bool:
        """Tell whether its result was taken."""
        raise NotImplementedError

    def _refusal(self, example: str) -> UnresolvedError:
        cure = "is no array yet: resolve it first"
        if self._is_resolved():
            cure = "does not become its array: use what resolve() returned"
        return UnresolvedError(
            f"a CollectiveTensor {cure}, as in {example}; it is the result of {self._what()}"
        )

    # In place, too: Python takes the binary method where there is no other.
    __add__, __radd__ = _binary("+"), _reflected("+")
    __sub__, __rsub__ = _binary("-"), _reflected("-")
    __mul__, __rmul__ = _binary("*"), _reflected("*")
    __matmul__, __rmatmul__ = _binary("@"), _reflected("@")
    __truediv__, __rtruediv__ = _binary("/"), _reflected("/")
    __floordiv__, __rfloordiv__ = _binary("//"), _reflected("//")
    __mod__, __rmod__ = _binary("%"), _reflected("%")
    __pow__, __rpow__ = _binary("**"), _reflected("**")
    __and__, __rand__ = _binary("&"), _reflected("&")
    __or__, __ror__ = _binary("|"), _reflected("|")
    __xor__, __rxor__ = _binary("^"), _reflected("^")
    __lshift__, __rlshift__ = _binary("<<"), _reflected("<<")
    __rshift__, __rrshift__ = _binary(">>"), _reflected(">>")
    __lt__, __le__, __gt__, __ge__ = map(_binary, ("<", "<=", ">", ">="))
    __neg__, __pos__ = _refusing("-handle.resolve()"), _refusing("+handle.resolve()")
    __invert__, __abs__ = _refusing("~handle.resolve()"), _refusing("abs(handle.resolve())")
    __round__ = _refusing("handle.resolve().round()")
    __int__, __float__ = _refusing("int(handle.resolve())"), _refusing("float(handle.resolve())")
    __complex__ = _refusing("complex(handle.resolve())")
    __index__ = _refusing("int(handle.resolve())")
    __getitem__, __iter__ = _refusing("handle.resolve()[i]"), _refusing("iter(handle.resolve())")
    __setitem__ = _refusing("handle.resolve()[i] = x")
    __contains__ = _refusing("x in handle.resolve()")
    # A handle is no answer to a question: without this, `if handle:` is true whatever comes.
    __bool__ = _refusing("bool(handle.resolve())")
    __len__ = _refusing("len(handle.resolve())")
    __array__ = _refusing("numpy.asarray(handle.resolve())")

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is this very handle.

        Raises:
            UnresolvedError: If it is a number or an array.
        """
        if isinstance(other, numbers.Number) or hasattr(other, "dtype"):
            raise self._refusal("handle.resolve() == x")
        return self is other

    __hash__ = object.__hash__

    def __format__(self, how: str) -> str:
        """Say what it is, if asked for no format of numbers.

        Raises:
            UnresolvedError: If it is.
        """
        if how:
            raise self._refusal("format(handle.resolve(), ...)")
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse an attribute, which the result may have.

        Raises:
            AttributeError: Always.
        """
        hint = "" if name.startswith("_") else f"; its result may: handle.resolve().{name}"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )

    def __array_ufunc__(self, function: Any, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse to be an operand of NumPy.

        Raises:
            UnresolvedError: Always.
        """
        raise self._refusal(f"numpy.{function.__name__}(handle.resolve(), ...)")

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        """Refuse to be an argument of NumPy.

        Raises:
            UnresolvedError: Always.
        """
        raise self._refusal(f"numpy.{function.__name__}(handle.resolve(), ...)")
