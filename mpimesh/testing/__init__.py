"""Help for the tests of programs that use mpimesh.

:func:`gradcheck` compares the gradients of a layer of one's own with difference quotients.
:mod:`mpimesh.testing.pytest_plugin` is a pytest plugin for tests under mpiexec;
it is loaded by name, so that importing this package does not need pytest.
"""

from mpimesh.testing.gradcheck import gradcheck
from mpimesh.testing.launch import LaunchResult, mpi_vendor

__all__ = ["LaunchResult", "gradcheck", "mpi_vendor"]
