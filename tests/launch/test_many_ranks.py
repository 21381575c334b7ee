"""More ranks than cores, by far: meshes, collectives and messages of 32 processes."""

from __future__ import annotations

import pytest


@pytest.mark.deep
def test_32_processes(launch):
    result = launch(
        32,
        """
        import numpy as np, mpimesh as mm
        with mm.DeviceMesh("dp=4,pp=8") as mesh, mm.DeviceMesh("all=32") as flat:
            assert mesh.size == flat.size == 32
            ranks = np.arange(32.0).reshape(4, 8)
            d, p = mesh.rank // 8, mesh.rank % 8
            for _ in range(3):
                handles = [
                    mesh.group("dp").all_reduce(np.full(3, float(mesh.rank))),
                    mesh.group("pp").all_reduce(np.full(9000, float(mesh.rank)), op="max"),
                    flat.group().all_gather(np.array([mesh.rank])),
                    flat.group().reduce(np.ones(1), root=31),
                    mesh.group("pp").shift(np.array([mesh.rank]), wrap=True),
                ]
                found = [handle.resolve() for handle in reversed(handles)][::-1]
                assert (found[0] == ranks[:, p].sum()).all()
                assert (found[1] == ranks[d].max()).all()
                assert found[2].tolist() == [*range(32)]
                assert found[3] is None if mesh.rank < 31 else found[3][0] == 32
                assert found[4][0] == ranks[d, p - 1]
            x = mm.distribute(np.arange(64.0 * 32).reshape(64, 32), flat, "all=S0")
            assert x.redistribute("all=S1").sum() == x.full().sum() == 2047 * 1024
        print("ok")
        """,
        timeout_s=100,
    )
    assert result.returncode == 0, str(result)
    assert result.stdout.split() == ["ok"] * 32
