"""Compiled: the window of the ranks that share memory, its operations, calls and handles."""

from mpimesh.core import built

built.check()
