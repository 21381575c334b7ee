"""Layers of other libraries in models of mpimesh; each is imported when it is asked for.

:mod:`mpimesh.interop.torch` takes modules and losses of PyTorch, :mod:`mpimesh.interop.jax` takes
functions of JAX. Importing this package imports neither.
"""
