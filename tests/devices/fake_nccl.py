"""NCCL between the streams of a fake GPU: an operation runs when all its ranks have come."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.devices.fake_arrays import at_address
from tests.devices.fake_streams import Clock

__all__ = ["FakeNccl"]

_LIMIT_S = 20

_NAMES = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64"]
_FUNCTIONS = [np.add, np.multiply, np.fmax, np.fmin]
"""NCCL's own leave NaN out."""


class FakeNccl(SimpleNamespace):
    """The module `cupy.cuda.nccl`.

    Attributes:
        gpu_of: Tells on which GPU the rank of a communicator is, to refuse a shared one; none does.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.available = True
        self.dtypes = {number: np.dtype(name.lower()) for number, name in enumerate(_NAMES)}
        for number, name in enumerate(_NAMES):
            setattr(self, f"NCCL_{name}", number)
        for number, name in enumerate(("SUM", "PROD", "MAX", "MIN")):
            setattr(self, f"NCCL_{name}", number)
        self.clock = clock
        self.meetings: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.group = threading.local()
        self.ids = 0
        self.joined = threading.Condition()
        self.members: dict[bytes, set[int]] = defaultdict(set)
        self.NcclError = type("NcclError", (RuntimeError,), {})

    def get_version(self) -> int:
        return 22705

    def get_unique_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(128, "little")

    def groupStart(self) -> None:
        self.group.parts = []

    def groupEnd(self) -> None:
        parts, self.group.parts = self.group.parts, None
        by_stream: dict[int, list[Any]] = defaultdict(list)
        for stream, part in parts:
            by_stream[stream].append(part)
        for stream, together in by_stream.items():
            self._put(stream, together)

    def submit(self, stream: int, part: Any) -> None:
        if getattr(self.group, "parts", None) is not None:
            self.group.parts.append((stream, part))
        else:
            self._put(stream, [part])

    def _put(self, stream: int, parts: list[Any]) -> None:
        def happen() -> bool:
            return [part() for part in parts].count(False) == 0

        self.clock.objects[stream].put(happen)

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> _Communicator:
        """Wait for all ranks, as NCCL does."""
        with self.joined:
            self.members[unique_id].add(rank)
            self.joined.notify_all()
            if not self.joined.wait_for(lambda: len(self.members[unique_id]) == size, _LIMIT_S):
                raise self.NcclError("NCCL_ERROR_SYSTEM_ERROR: not all ranks have come")
        return _Communicator(self, size, unique_id, rank)


class _Communicator:
    def __init__(self, nccl: FakeNccl, size: int, unique_id: bytes, rank: int) -> None:
        assert len(unique_id) == 128
        self._nccl = nccl
        self._size = size
        self._id = unique_id
        self._rank = rank
        self._sequence = 0
        self._pairs: dict[tuple[int, int], int] = defaultdict(int)
        self.destroyed = self.aborted = False
        self.failure: Exception | None = None

    def destroy(self) -> None:
        self.destroyed = True

    def abort(self) -> None:
        self.aborted = True

    def check_async_error(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _collective(self, stream: int, mine: Any, move: Any) -> None:
        self._sequence += 1
        meeting: Any = self._nccl.meetings[self._id, self._sequence]

        def part() -> bool:
            meeting.setdefault(self._rank, mine)
            if len(meeting) == self._size and "done" not in meeting:
                move([meeting[rank] for rank in range(self._size)])
                meeting["done"] = True
            return "done" in meeting

        self._nccl.submit(stream, part)

    def _array(self, ptr: int, count: int, datatype: int) -> Any:
        return at_address(ptr, (count,), self._nccl.dtypes[datatype])

    def _reduced(self, parts: list[Any], op: int) -> Any:
        whole = parts[0][0].copy()
        for send, *_ in parts[1:]:
            whole = _FUNCTIONS[op](whole, send)
        return whole

    def allReduce(
        self, send: int, recv: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        def move(parts: list[Any]) -> None:
            whole = self._reduced(parts, op)
            for _, out in parts:
                out[...] = whole

        mine = (self._array(send, count, datatype), self._array(recv, count, datatype))
        self._collective(stream, mine, move)

    def reduce(
        self, send: int, recv: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        def move(parts: list[Any]) -> None:
            parts[root][1][...] = self._reduced(parts, op)

        out = self._array(recv, count, datatype) if self._rank == root else None
        self._collective(stream, (self._array(send, count, datatype), out), move)

    def reduceScatter(
        self, send: int, recv: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        def move(parts: list[Any]) -> None:
            whole = self._reduced(parts, op)
            for rank, (_, out) in enumerate(parts):
                out[...] = whole[rank * count : (rank + 1) * count]

        whole = self._array(send, count * self._size, datatype)
        self._collective(stream, (whole, self._array(recv, count, datatype)), move)

    def allGather(self, send: int, recv: int, count: int, datatype: int, stream: int) -> None:
        def move(parts: list[Any]) -> None:
            whole = np.concatenate([given for given, _ in parts])
            for _, out in parts:
                out[...] = whole

        out = self._array(recv, count * self._size, datatype)
        self._collective(stream, (self._array(send, count, datatype), out), move)

    def broadcast(
        self, send: int, recv: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        def move(parts: list[Any]) -> None:
            whole = parts[root][0].copy()
            for _, out in parts:
                out[...] = whole

        mine = (self._array(send, count, datatype), self._array(recv, count, datatype))
        self._collective(stream, mine, move)

    def send(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message(stream, self._rank, peer, self._array(buffer, count, datatype))

    def recv(self, buffer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._message(stream, peer, self._rank, self._array(buffer, count, datatype))

    def _message(self, stream: int, source: int, dest: int, mine: np.ndarray) -> None:
        # A rank that sends to itself has both ends.
        end = "recv" if source != self._rank or (source, dest) in self._half_open() else "send"
        number = self._pairs[source, dest, end] = self._pairs[source, dest, end] + 1  # type: ignore[index]
        meeting: Any = self._nccl.meetings[self._id, source, dest, number]

        def part() -> bool:
            meeting.setdefault(end, mine)
            if "send" in meeting and "recv" in meeting and "done" not in meeting:
                meeting["recv"][...] = meeting["send"]
                meeting["done"] = True
            return "done" in meeting

        self._nccl.submit(stream, part)

    def _half_open(self) -> set[tuple[int, int]]:
        mine = (self._rank, self._rank)
        sent = self._pairs[*mine, "send"]  # type: ignore[index]
        received = self._pairs[*mine, "recv"]  # type: ignore[index]
        return {mine} if sent > received else set()
