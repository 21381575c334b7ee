"""An exception of a signal handler in a wait; then values, checkpoints, and the end of the mesh."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from tests.helpers.depth import deep, deep_but


class Late(Exception):
    pass


class Quit(BaseException):
    pass


def _split(mesh):
    return mm.distribute(np.arange(12.0).reshape(6, 2), mesh, "dp=S0")


def _waits(mesh) -> dict[str, tuple[Callable[[], Any], float]]:
    """Return functions of one exchange each, and what they give."""
    group, rank, size = mesh.group("dp"), mesh.rank, mesh.size
    x, large, received = _split(mesh), np.ones(300_000), np.full(5, 7.0)
    planned = group.all_reduce_init(np.ones(5))
    message = None
    if rank < 2:
        message = group.send_init(received, 0) if rank else group.recv_init(received, 1)

    def barrier():
        mesh.barrier()
        return 1.0

    def recv(array):
        if rank == 1:
            group.send(array, 0).resolve()
        return group.recv(1).resolve().sum() if rank == 0 else array.sum()

    def planned_message():
        if message is not None:
            message.start().resolve()
        return received.sum()

    return {
        "float": (lambda: float(x.sum()), 66.0),
        "planned": (lambda: planned.start().resolve().sum(), 5.0 * size),
        "full": (lambda: x.full().sum(), 66.0),
        "product": (lambda: (x.T @ x).full()[0, 0], 220.0),
        "mean": (lambda: group.all_reduce(np.ones(3), "mean").resolve().sum(), 3.0),
        "large": (lambda: group.all_reduce(large).resolve().sum(), 300_000.0 * size),
        "barrier": (barrier, 1.0),
        "recv": (lambda: recv(np.ones(3)), 3.0),
        "large recv": (lambda: recv(large), 300_000.0),
        "planned message": (planned_message, 35.0),
    }


WAITS = (
    "float",
    "planned",
    "full",
    "product",
    "mean",
    "large",
    "barrier",
    "recv",
    "large recv",
    "planned message",
)


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    # With checks on a function of split arrays is two exchanges, and it would skip the second one.
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _after(kind, seconds):
    def handler(*_):
        raise kind

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.nprocs(2, 3)
@pytest.mark.parametrize("kind", [Late, *deep(Quit)])
@pytest.mark.parametrize("name", deep_but(WAITS, "planned", "product", "barrier", "large recv"))
def test_a_program_goes_on_after_an_exception_in_a_wait(comm, tmp_path_factory, name, kind):
    folder = comm.bcast(tmp_path_factory.mktemp("saved") if comm.rank == 0 else None)
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        wait, expected = _waits(mesh)[name]
        mesh.barrier()
        if mesh.rank == 0:
            _after(kind, 0.3)
            with pytest.raises(kind):
                wait()
        comm.Barrier()  # the others come later
        if mesh.rank:
            wait()
        assert wait() == expected
        assert mesh.group().all_reduce(np.ones(2)).resolve()[0] == mesh.size
        mm.save(folder / "one", {"x": _split(mesh)})
        assert mm.load(folder / "one")["x"].sum() == 66


@pytest.mark.nprocs(2, 3)
@pytest.mark.parametrize("kind", ["float", "handle"])
def test_all_ranks_save_after_ctrl_c_in_a_collective_that_rank_0_had_not_started(
    comm, tmp_path_factory, kind
):
    folder = comm.bcast(tmp_path_factory.mktemp("saved") if comm.rank == 0 else None)
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        x = _split(mesh)
        mesh.barrier()
        if mesh.rank:
            _after(KeyboardInterrupt, 0.3)
            with pytest.raises(KeyboardInterrupt):
                float(x.sum()) if kind == "float" else mesh.group().all_reduce(x.local).resolve()
        comm.Barrier()
        mm.save(folder / "one", {"x": x})
    assert mm.load(folder / "one")["x"].sum() == 66
