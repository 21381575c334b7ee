"""A stand-in for CuPy in child processes, so that MPI's answer to device pointers can be chosen.

STAND_IN says where its "device memory" is: "host" memory, so that MPI is right to take it,
"nowhere", so that whoever reads it crashes, or "elsewhere", so that what was written is not found
again; "near", so that MPI reaches it in memory that ranks share, but not by its network; "ucx", so
that UCX alone reaches it (see only_ucx.c, which must be preloaded); "absent" has no device, and
"stuck" never comes to an end. STAND_IN_GPUS says which GPUs each rank sees, as in "0,1;2": rank 0
sees two, rank 1 another one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

KIND = os.environ["STAND_IN"]
__version__ = "0"
_FIRST_PAGE = itertools.cycle(range(1, 60))


class Array:
    def __init__(self, on_host: np.ndarray) -> None:
        self.on_host = on_host

    def __getitem__(self, place: Any) -> Array:
        return Array(self.on_host[place])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.on_host.__array_interface__["data"][0]
        if KIND == "nowhere" or (KIND == "near" and _is_far()):
            address = 64 * next(_FIRST_PAGE)
        elif KIND == "ucx":
            address = _only_ucx("only_ucx_hidden", ctypes.c_void_p(address))
        return {
            "shape": self.on_host.shape,
            "typestr": self.on_host.dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def asarray(values: Any) -> Array:
    on_host = np.array(values)
    if KIND == "ucx":
        address = _only_ucx("only_ucx_new", ctypes.c_size_t(on_host.nbytes))
        memory = memoryview((ctypes.c_char * on_host.nbytes).from_address(address))
        on_host = np.frombuffer(memory, on_host.dtype).reshape(on_host.shape)
        on_host[...] = values
    return Array(on_host)


def _is_far() -> bool:
    """Tell whether MPI is told to use its network alone."""
    btl = os.environ.get("OMPI_MCA_btl", "")  # noqa: SIM112
    no_sm = btl.startswith("^sm") or (btl != "" and "sm" not in btl.split(","))
    return no_sm or os.environ.get("MPIR_CVAR_NOLOCAL") == "1"


def _gpus() -> list[int]:
    """Return the GPUs that this rank sees."""
    ranks = os.environ.get("STAND_IN_GPUS", "0").split(";")
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    return [int(text) for text in ranks[int(rank) % len(ranks)].split(",")]


def _only_ucx(name: str, argument: Any) -> int:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_void_p
    return int(function(argument))


def asnumpy(array: Array) -> np.ndarray:
    return array.on_host + 1 if KIND == "elsewhere" else array.on_host.copy()


class _Device:
    def __init__(self, _number: int) -> None:
        pass

    def use(self) -> None:
        if KIND == "absent":
            raise RuntimeError("no CUDA-capable device is detected")


def _synchronize() -> None:
    if KIND == "stuck":
        time.sleep(600)


cuda = SimpleNamespace(
    Device=_Device,
    get_current_stream=lambda: SimpleNamespace(synchronize=_synchronize),
    runtime=SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: len(_gpus()),
        getDeviceProperties=lambda number: {
            "name": b"a stand-in",
            "uuid": bytes([_gpus()[number]]),
        },
        deviceGetPCIBusId=lambda number: f"0000:{_gpus()[number]:02x}:00.0",
        runtimeGetVersion=lambda: 12080,
        driverGetVersion=lambda: 13000,
    ),
)
