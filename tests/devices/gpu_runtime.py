"""As much of CuPy as choosing a device takes: what the driver says, and which device is current."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["CupyOfDevices", "uuid_of"]


def uuid_of(digits: str) -> str:
    """Write 32 hexadecimal digits as the driver does."""
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


class CupyOfDevices(ModuleType):
    """A module to stand in `sys.modules` as "cupy", with devices of these UUIDs.

    Args:
        uuids: 32 hexadecimal digits for each device that the process may see; None for a CuPy
            that does not report them.
    """

    def __init__(self, uuids: Sequence[str | None]) -> None:
        super().__init__("cupy")
        self.ndarray = type("ndarray", (), {})
        self.current = threading.local()
        self.cuda = SimpleNamespace(runtime=_Runtime(self, uuids), Device=self._device)

    def _device(self, number: int) -> Any:
        def use() -> None:
            self.current.number = number

        return SimpleNamespace(id=number, use=use)


class _Runtime:
    CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
    is_hip = False

    def __init__(self, cupy: CupyOfDevices, uuids: Sequence[str | None]) -> None:
        self._cupy = cupy
        self._uuids = uuids

    def getDevice(self) -> int:
        return getattr(self._cupy.current, "number", 0)

    def getDeviceCount(self) -> int:
        return len(self._uuids)

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        digits = self._uuids[number]
        return {
            "name": b"NVIDIA A100",
            "totalGlobalMem": 40 << 30,
            "multiProcessorCount": 108,
            "major": 8,
            "minor": 0,
            "uuid": None if digits is None else bytes.fromhex(digits),
        }

    def deviceGetPCIBusId(self, number: int) -> str:
        digits = self._uuids[number]
        # The last digits of the UUID, so that the same hardware is at the same place for all.
        return f"0000:{'0' + str(number) if digits is None else digits[-2:]}:00.0"

    def driverGetVersion(self) -> int:
        return 12040
