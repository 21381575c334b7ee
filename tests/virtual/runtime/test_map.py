"""A handle gives what a function makes of its result."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import TransportError, UnresolvedError
from mpimesh.runtime import messages
from tests.helpers.raises import raises


def test_a_mapped_handle():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group, asked = mesh.group(), []

            def root(total):
                asked.append(total)
                return float(np.sqrt(total))

            handles = [
                group.all_reduce(np.array(8.0)),  # a value
                group.all_reduce(np.array(8, np.float16)),  # made of a wider one at the end
            ]
            for handle in handles:
                assert handle.map(root) is handle
                assert not asked
                assert handle.resolve() == 4.0
                assert handle.resolve() == 4.0
                assert len(asked) == 1
                asked.clear()
                with raises(UnresolvedError, "all_reduce(shape ()", "resolved"):
                    handle.map(root)
            twice = group.all_gather(np.array([mesh.rank])).map(list).map(len)
            assert twice.resolve() == 2

    mm.run_virtual(2, main)


def test_an_error_of_the_function_is_kept():
    def main():
        with mm.DeviceMesh("a=1") as mesh:
            handle = mesh.group().all_reduce(np.ones(1)).map(lambda x: x.nothing)  # type: ignore[attr-defined]
            for _ in range(2):
                with pytest.raises(AttributeError):
                    handle.resolve()

    mm.run_virtual(1, main)


def test_a_result_interrupted_while_it_is_made_is_lost_and_not_half_made():
    def main():
        def stop(_):
            raise KeyboardInterrupt

        with mm.DeviceMesh("a=2") as mesh:
            group = mesh.group()
            handle = group.all_reduce(np.full(3, 3, np.float16), op="mean").map(stop)
            with pytest.raises(KeyboardInterrupt):
                handle.resolve()
            for _ in range(2):
                with raises(TransportError, "KeyboardInterrupt", "all_reduce(shape (3,)", "again"):
                    handle.resolve()
            assert group.all_reduce(np.ones(2)).resolve().tolist() == [2, 2]

    mm.run_virtual(2, main)


@pytest.mark.parametrize("size", [3, 30_000])
@pytest.mark.parametrize("way", ["any", "out", "shape", "shift"])
def test_a_message_interrupted_while_its_result_is_made_is_lost(way, size, monkeypatch):
    """Its room, which the message was not put into, was the result."""
    interrupted: list[object] = []

    def once(*arguments):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return make_result(*arguments)

    def start(group):
        if way == "shift":
            return group.shift(np.ones(size + group.rank), 1)
        if group.rank == 0:
            return group.send(np.ones(size), 1)
        if way == "any":
            return group.recv(0)
        if way == "out":
            return group.recv(0, out=np.zeros((size, 2))[:, 0])
        return group.recv(0, shape=(size + 1,), dtype="f8")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            group = mesh.group()
            handle = start(group)
            if mesh.rank == 0:
                assert handle.resolve() is None
                return
            with pytest.raises(KeyboardInterrupt):
                handle.resolve()
            for _ in range(2):
                with raises(TransportError, "KeyboardInterrupt", "from rank 0", "again"):
                    handle.resolve()

    make_result = messages._Route._result
    monkeypatch.setattr(messages._Route, "_result", once)
    mm.run_virtual(2, main)
