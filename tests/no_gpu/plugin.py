"""A plugin of pytest: CuPy without a GPU for the whole process.

`python -m pytest -p tests.no_gpu.plugin tests/no_gpu`, or with ``--with-mpi tests/gpu``: the tests
for a GPU, as far as types, shapes and numbers go. Time does not pass here: what a missing wait
would break is seen with the stand-in of `tests/devices` only.
"""

from __future__ import annotations

import sys
import warnings

import pytest

from mpimesh.comm import cuda_ipc
from tests.no_gpu.by_numpy import Numbers
from tests.no_gpu.driver import Driver

__all__ = ["driver", "numbers"]


def _start() -> tuple[Driver | None, Numbers | None]:
    if "cupy" in sys.modules:
        raise pytest.UsageError("CuPy must not be imported before its driver is replaced")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries that are missing without CUDA
            found = Driver()
            import cupy
    except ImportError:
        return None, None
    cuda_ipc.address_range = found.address_range  # which asks a library of the driver
    return found, Numbers(cupy)


driver, numbers = _start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Let a test fail where CUDA's place was asked for what it does not know."""
    result = yield
    if driver is not None:
        problems, driver.problems = driver.problems, []
        assert not problems, problems
    return result
