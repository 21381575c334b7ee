"""Tests on a real GPU: skipped where CuPy or a device is missing. `make test-gpu` runs them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def _why_not() -> str:
    """Return why no test here can run, or nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries that it does not find
            import cupy
    except ImportError as error:
        return f"needs CuPy: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs a GPU: {error}"
    return "" if count else "needs a GPU"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if _HERE in item.path.parents]
    if not own:
        return
    why_not = _why_not()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.mpi)
        # The first use of each kernel compiles it; the first of a way starts child processes.
        item.add_marker(pytest.mark.limit(300))
        item.add_marker(pytest.mark.timeout(0))
        # What CuPy has to say of the machine, such as of a first compilation, is no failure.
        item.add_marker(pytest.mark.filterwarnings(r"default:::cupy.*"))
        # Most machines have fewer GPUs than the tests have ranks.
        item.add_marker(pytest.mark.filterwarnings("ignore:ranks share GPUs"))
        if why_not:
            item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.fixture
def communicator(comm):
    """The ranks, each with a GPU current: its own where there are enough, else a shared one."""
    import cupy

    from mpimesh.comm import ProgressEngine
    from mpimesh.comm.mpi import MPICommunicator

    communicator = MPICommunicator.duplicate(comm)
    communicator.engine = ProgressEngine()
    with cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()):
        yield communicator
        communicator.free()
