"""Facts about this process and its machine, read from files that may look like this."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import pytest

from mpimesh.cli.doctor import shm_warning
from mpimesh.cli.facts import (
    Rank,
    Shm,
    _library_path,
    find_cuda,
    find_rank,
    find_shm,
    find_software,
)
from mpimesh.mesh.probe import cpu_quota
from mpimesh.runtime import Launch


def test_a_rank_survives_json():
    launch = Launch("srun", 4, 1, 1, "n7")
    environment = {"OMP_NUM_THREADS": "3", "MPIMESH_CHECKS": "1", "HOME": "/"}
    mine = find_rank(2, 1, launch, software="all", environment=environment)
    assert Rank.from_fields(json.loads(json.dumps(dataclasses.asdict(mine)))) == mine
    assert (mine.rank, mine.local_rank, mine.node, mine.pid) == (2, 1, "n7", os.getpid())
    assert {*mine.cores} == os.sched_getaffinity(0)
    assert (mine.threads, mine.settings) == (3, "MPIMESH_CHECKS=1")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 0),
    ],
)
def test_the_time_of_cores_is_the_least_of_all_levels(files, quota, tmp_path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_the_size_of_a_folder(tmp_path):
    found = find_shm(tmp_path)
    assert found.total_bytes >= found.free_bytes > 0
    assert find_shm(tmp_path / "none").total_bytes == 0


def test_the_file_of_the_mpi_library(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 08:01 5  /usr/lib/libm.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 6  /opt/my mpi/lib/libmpi.so.12.1\n"
    )
    assert _library_path(maps) == "/opt/my mpi/lib/libmpi.so.12.1"
    assert _library_path(tmp_path / "none") == ""


def test_versions_of_what_runs_here():
    software = find_software()
    assert software.interpreter == sys.executable
    assert software.numpy.startswith("2.")
    assert software.mpimesh


def test_a_cupy_that_fails_is_a_problem_to_show(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('no libcudart')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    found = find_cuda()
    assert (found.installed, found.problem) == (True, "ImportError: no libcudart")


def test_the_nccl_that_cupy_imports_only_when_it_is_asked_to(monkeypatch, tmp_path):
    """`cupy.cuda.nccl` is no attribute before somebody has imported it."""
    runtime = (
        "def runtimeGetVersion(): return 13020\n"
        "def driverGetVersion(): return 13000\n"
        "def getDeviceCount(): return 1\n"
    )
    files = {
        "__init__.py": "from cupy import cuda\n__version__ = '14.2.0'\n",
        "cuda/__init__.py": "from cupy.cuda import runtime\n",
        "cuda/runtime.py": runtime,
        "cuda/nccl.py": "available = True\ndef get_version(): return 22907\n",
    }
    for name, text in files.items():
        (tmp_path / "cupy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cupy" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ["cupy", *(one for one in sys.modules if one.startswith("cupy."))]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = find_cuda()
    for name in [one for one in sys.modules if one.partition(".")[0] == "cupy"]:
        del sys.modules[name]  # by monkeypatch it would come back at the end
    assert (found.problem, found.nccl, found.gpus) == ("", "2.29.7", 1)


def test_what_is_said_before_mpi_starts():
    assert shm_warning(Shm()) == ""
    assert shm_warning(Shm(64 << 20, 60 << 20)) == ""
    warning = shm_warning(Shm(64 << 10, 64 << 10))
    assert "64 KiB free of 64 KiB" in warning
    assert "--shm-size=1g" in warning
