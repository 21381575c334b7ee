"""mpimesh: a device mesh for MPI.

Named meshes of ranks, collectives with deferred results, and pipelines of stages, for
NumPy and CuPy, on any MPI. Importing this package starts no MPI, and loads little: each name is
imported when it is first used.
"""

import gc
import sys
from typing import Any

import lazy_loader

from mpimesh.runtime.failure import install

_load, _, _names = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"

# `mm.mesh.Device` works, but what is used by everybody stands in `mm` itself.
_ROOMS = {"arrays", "comm", "dtensor", "layout", "mesh", "runtime", "settings"}
_ROOMS |= {"store", "trace"}
__all__ = [name for name in _names if name not in _ROOMS]


def __getattr__(name: str) -> Any:
    if name not in _names:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; {_cure(name)}",
            name=name,
            obj=sys.modules[__name__],
        )
    # What is imported stays: the collector need not look through all of it again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _load(name)
    finally:
        if collects:
            gc.enable()


_ELSEWHERE = {
    "init_device_mesh": 'use mm.DeviceMesh("dp=2,tp=4")',
    "init_process_group": 'the first mesh starts MPI: mm.DeviceMesh("dp=-1")',
    "distribute_tensor": "use mm.distribute(x, mesh, placements)",
    "barrier": "use mesh.barrier()",
    "DistributedDataParallel": "use mm.DataParallel(layer, mesh)",
    "get_rank": "use mesh.rank",
    "get_world_size": "use mesh.size",
}
"""PyTorch's names, and what stands for them."""


def _cure(name: str) -> str:
    if name in ("array", "asarray"):
        return "mm.distribute(x, mesh, placements) makes a split array of one of NumPy"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if callable(getattr(sys.modules.get("numpy"), name, None)):
        return f"split arrays are arguments of NumPy's own functions: np.{name}(x)"
    return (
        "layers are in mm.nn, optimizers in mm.optim, split layers in mm.parallel; collectives "
        "are methods of mesh.group(dim)"
    )


def __dir__() -> list[str]:
    return __all__.copy()


# Other ranks may wait for this process from now on: it must not fail without a word.
install()
del install
