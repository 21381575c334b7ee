"""Counts of each operation, against closed formulas, on virtual ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mpimesh as mm
from tests.contract.received import OPERATIONS, check_operation

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_receives(name, size, monkeypatch):
    for checks in ("0", "1"):
        monkeypatch.setenv("MPIMESH_CHECKS", checks)
        mm.run_virtual(size, check_operation, None, name)


def test_peers_are_ranks_of_the_mesh():
    def main():
        with mm.DeviceMesh("dp=2,tp=2") as mesh:
            mesh.group("dp").all_gather(np.ones(3, "u1")).resolve()
            mesh.group("tp").all_reduce(np.ones(8, "u1")).resolve()
            traffic = mesh.traffic()
            return {
                name: {peer: one.received_bytes for peer, one in traffic.by_peer(name).items()}
                for name in ("all_gather", "all_reduce", None)
            }

    for rank, found in enumerate(mm.run_virtual(4, main)):
        dp, tp = rank ^ 2, rank ^ 1
        assert found == {"all_gather": {dp: 3}, "all_reduce": {tp: 8}, None: {dp: 3, tp: 8}}


def test_sections_can_be_looked_at():
    def main():
        with mm.DeviceMesh("dp=3") as mesh:
            group = mesh.group()
            group.all_reduce(np.ones(3)).resolve()
            before = mesh.traffic().snapshot()
            assert before == mesh.traffic()
            group.all_gather(np.ones(2)).resolve()
            group.all_gather(np.ones(2)).resolve()
            assert before != mesh.traffic()
            section = mesh.traffic() - before
            assert before.calls == {"all_reduce": 1}
            assert section.calls == {"all_gather": 2}
            assert section.bytes == {"all_gather": 32}
            assert (section.received_bytes, section.received_messages) == (64, 4)
            assert section.by_peer() == (mesh.traffic().by_peer("all_gather"))
            group.all_gather(np.ones(2)).resolve()
            assert section.received_bytes == 64
            assert mesh.traffic() - mesh.traffic() == mm.runtime.Traffic()

    mm.run_virtual(3, main)


def test_it_is_a_plain_dict_for_json():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            group = mesh.group()
            group.all_gather(np.ones(2)).resolve()
            group.barrier()
            traffic = mesh.traffic()
            assert list(traffic) == [("all_gather", 1, 16), ("barrier", 1, 0)]
            told = traffic.as_dict()
            assert json.loads(json.dumps(told)) == told
            return told

    for rank, told in enumerate(mm.run_virtual(2, main)):
        received = {"received_bytes": 16, "received_messages": 1}
        nothing = {"received_bytes": 0, "received_messages": 0}
        assert told == {
            "calls": 2,
            "bytes": 16,
            **received,
            "operations": {
                "all_gather": {"calls": 1, "bytes": 16, **received},
                "barrier": {"calls": 1, "bytes": 0, **nothing},
            },
            "peers": {str(1 - rank): received},
        }


def test_it_is_a_table_to_read():
    traffic = mm.runtime.Traffic()
    assert str(traffic).splitlines() == [
        "operation  calls  put in  received  messages",
        "all            0     0 B       0 B         0",
    ]
    traffic.count("all_reduce", 3 << 20, 1200)
    traffic.count("send", 1023)
    traffic.receive("all_reduce", 3, 1 << 20, 2)
    traffic.receive("recv", 11, 1536)
    assert str(traffic).splitlines() == [
        "operation   calls  put in  received  messages",
        "all_reduce  1,200   3 MiB     1 MiB         2",
        "recv            0     0 B   1.5 KiB         1",
        "send            1  1023 B       0 B         0",
        "all         1,201   3 MiB     1 MiB         3",
        "",
        "from     received  messages",
        "rank 3      1 MiB         2",
        "rank 11   1.5 KiB         1",
    ]


def test_of_many_peers_the_table_shows_those_that_sent_most():
    traffic = mm.runtime.Traffic()
    for peer in range(1000):
        traffic.receive("recv", peer, 100 + (peer >= 990) * peer)
    lines = str(traffic).splitlines()
    rows = [line.split()[:2] for line in lines[5:]]
    assert rows == [
        *(["rank", str(peer)] for peer in (*range(6), *range(990, 1000))),
        ["984", "others"],
    ]
    assert lines[-1].split()[2:] == ["96.1", "KiB", "984"]
