"""The make-believe cluster itself: it is up when it says so, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import NODES, Slurm, missing

pytestmark = pytest.mark.slurm


def daemons(folder: Path) -> list[int]:
    """The processes that have the cluster's folder in their command or their environment."""
    needle = f"{folder}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in text:
            found.append(int(entry.name))
    return found


def test_a_cluster_starts_and_stops(tmp_path):
    if lacks := missing():
        pytest.skip(f"no Slurm on this machine, it lacks {', '.join(lacks)}")
    with Slurm(tmp_path / "cluster") as cluster:
        assert cluster.run("sinfo", "-h", "-o", "%D %t").split() == [str(NODES), "idle"]
        assert len(daemons(cluster.folder)) >= NODES + 2
    assert daemons(tmp_path / "cluster") == []
