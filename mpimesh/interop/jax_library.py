"""JAX itself, or an error that says how to get it."""

from __future__ import annotations

from mpimesh.errors import MissingPackageError

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise MissingPackageError(
        "mpimesh.interop.jax needs JAX, which is not installed: pip install jax"
    ) from None

__all__ = ["jax"]
