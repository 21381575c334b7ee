"""Arrays on a device: CuPy's are staged through the host, all others are refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from mpimesh.errors import DTypeError
from tests.contract.cases import same, values
from tests.contract.meshes import mesh_of
from tests.contract.oracle import joined, reduced
from tests.helpers.fake_cupy import FakeArray, FakeCupy
from tests.helpers.fake_device import FakeDeviceArray
from tests.helpers.raises import raises


class _Runtime:
    """CUDA's runtime on a machine without a driver."""

    class CUDARuntimeError(Exception):
        """The error of the stand-in."""

    @classmethod
    def getDeviceCount(cls):
        raise cls.CUDARuntimeError("no driver")


class CupyWithoutDevice(FakeCupy):
    """A stand-in for CuPy that finds no device, whose arrays work nevertheless."""

    cuda = SimpleNamespace(runtime=_Runtime)


def check_device_memory_of_others_is_refused(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        x = FakeDeviceArray((2 * n, 3))
        for call in (
            group.all_reduce,
            group.reduce,
            group.reduce_scatter,
            group.all_gather,
            group.gather,
            group.all_to_all,
            group.broadcast,
            group.shift,
            lambda x: group.alone().scatter(x).resolve(),
            lambda x: group.broadcast(x, root=None),
            lambda x: group.all_reduce(x, out=x),
        ):
            with raises(DTypeError, "FakeDeviceArray", "cupy.asarray(x)"):
                call(x)
        host = np.ones((2 * n, 3))
        for call in (group.all_reduce, group.broadcast, group.all_to_all):
            with raises(DTypeError, "out", "FakeDeviceArray"):
                call(host, out=x)
        if n > 1:
            peer = (group.rank + 1) % n
            with raises(DTypeError, "FakeDeviceArray", "cupy.asarray(x)"):
                group.send(x, peer)
            with raises(DTypeError, "out", "FakeDeviceArray"):
                group.recv(peer, out=x)
        same(group.all_reduce(host).resolve(), host * n)


def check_arrays_of_cupy_are_staged(comm):
    """With a stand-in for CuPy, that the test has put in its place."""
    cupy = sys.modules["cupy"]
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        last = n - 1
        for dtype in ("f8", "f2", ">f4"):
            for order in ("C", "F"):
                inputs = [np.array(values(r, (n, 2 * n), dtype), order=order) for r in range(n)]
                total, mean = reduced(inputs, "sum"), reduced(inputs, "mean")
                columns = joined([given[:, 2 * me : 2 * me + 2] for given in inputs], 1)
                rows = joined([given[me : me + 1] for given in inputs])
                whole, sides = joined(inputs), joined(inputs, 1)
                x = FakeArray(inputs[me])
                after, before = (me + 1) % n, (me - 1) % n
                calls = [
                    (lambda out, x=x: group.all_reduce(x, out=out), total),
                    (lambda out, x=x: group.all_reduce(x, "mean", out=out), mean),
                    (lambda out, x=x: group.reduce(x, root=me, out=out), total)
                    if n == 1
                    else (
                        lambda out, x=x: group.all_reduce(x, "max", out=out),
                        reduced(inputs, "max"),
                    ),
                    (lambda out, x=x: group.reduce_scatter(x, out=out), total[me : me + 1]),
                    (
                        lambda out, x=x: group.reduce_scatter(x, axis=1, out=out),
                        total[:, 2 * me : 2 * me + 2],
                    ),
                    (lambda out, x=x: group.all_gather(x, out=out), whole),
                    (lambda out, x=x: group.all_gather(x, axis=1, out=out), sides),
                    (lambda out, x=x: group.all_to_all(x, out=out), rows),
                    (lambda out, x=x: group.all_to_all(x, split_axis=1, out=out), columns),
                    (lambda out, x=x: group.broadcast(x, root=last, out=out), inputs[last]),
                    (
                        lambda out, x=x: group.broadcast(
                            x if me == 0 else None, root=None, out=out
                        ),
                        inputs[0],
                    ),
                    (
                        lambda out, x=x: group.scatter(x, root=0, axis=1, out=out),
                        inputs[0][:, 2 * me : 2 * me + 2],
                    ),
                ]
                for call, expected in calls:
                    got = call(None).resolve()
                    assert isinstance(got, FakeArray)
                    same(got.on_host, expected)
                    device = cupy.asarray(np.zeros(expected.shape, dtype))
                    assert call(device).resolve() is device
                    same(device.on_host, expected)
                    on_host = np.zeros(expected.shape, dtype)
                    assert call(on_host).resolve() is on_host
                    same(on_host, expected)
                same(x.on_host, inputs[me])
                got = group.gather(x, root=0).resolve()
                assert (got is None) == (me != 0)
                if me == 0:
                    assert isinstance(got, FakeArray)
                    same(got.on_host, whole)
                for offset in (0, 1):
                    got = group.shift(x, offset, wrap=True).resolve()
                    assert isinstance(got, FakeArray)
                    same(got.on_host, inputs[(me - offset) % n])
                if n > 1:
                    device = cupy.asarray(np.zeros((n, 2 * n), dtype))
                    sends = [group.send(x, after), group.send(x, after)]
                    assert group.recv(before, out=device).resolve() is device
                    same(device.on_host, inputs[before])
                    same(group.recv(before).resolve(), inputs[before])
                    for send in sends:
                        send.resolve()
                total_host = np.zeros((n, 2 * n), dtype)
                device = cupy.asarray(total_host)
                assert group.all_reduce(inputs[me], out=device).resolve() is device
                same(device.on_host, total)


CHECKS = {
    name.removeprefix("check_").replace("_", " "): value
    for name, value in dict(vars()).items()
    if name.startswith("check_")
}
