"""What is compiled: the window of the ranks that share memory, its operations and their waits."""

from mpimesh.core import built

built.check()
