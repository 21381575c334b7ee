from __future__ import annotations

import os

import pytest
from hypothesis import given, strategies as st

from mpimesh.mesh import cpu_device
from mpimesh.mesh.device import cpus_of_text, cpus_text
from mpimesh.mesh.probe import memory_limit_bytes

TOTAL = 8 << 20
NO_LIMIT_V1 = "9223372036854771712"


@pytest.fixture
def machine(tmp_path):
    """Give a function that writes files of /proc and /sys and returns their root."""

    def write(files):
        for name, text in {
            "proc/meminfo": f"MemFree: 1 kB\nMemTotal: {TOTAL >> 10} kB\n",
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


V2 = {"proc/self/cgroup": "0::/user/job\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, TOTAL),
        ({**V2, "sys/fs/cgroup/user/job/memory.max": "max\n"}, TOTAL),
        ({**V2, "sys/fs/cgroup/user/job/memory.max": "4096\n"}, 4096),
        # The least of all levels counts, and a missing level is none.
        ({**V2, "sys/fs/cgroup/user/memory.max": "4096\n"}, 4096),
        (
            {
                **V2,
                "sys/fs/cgroup/user/memory.max": "4096\n",
                "sys/fs/cgroup/user/job/memory.max": "8192",
            },
            4096,
        ),
        # In a container the own group is the root of what is mounted.
        ({**V2, "sys/fs/cgroup/memory.max": "5000\n"}, 5000),
        ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/memory.max": "5000\n"}, 5000),
        ({**V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "6000\n"}, 6000),
        ({**V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": NO_LIMIT_V1}, TOTAL),
        ({**V1, "sys/fs/cgroup/cpu/x/memory.limit_in_bytes": "1"}, TOTAL),
        # A limit above the machine's memory is none; garbage is none.
        ({**V2, "sys/fs/cgroup/memory.max": str(TOTAL * 2)}, TOTAL),
        ({**V2, "sys/fs/cgroup/memory.max": "lots"}, TOTAL),
        ({"proc/self/cgroup": "nonsense\n\n"}, TOTAL),
        ({"proc/meminfo": "nonsense\nMemTotal:\n"}, 0),
        ({"proc/meminfo": "", **V2, "sys/fs/cgroup/memory.max": "5000"}, 5000),
    ],
)
def test_memory_is_what_the_control_groups_leave(machine, files, limit):
    assert memory_limit_bytes(machine(files)) == limit


def test_memory_of_an_empty_machine(tmp_path):
    assert memory_limit_bytes(tmp_path) == 0


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_numbers_come_back(cpus):
    assert cpus_of_text(cpus_text(cpus)) == cpus


def test_cpu_numbers_are_written_as_the_kernel_does():
    assert cpus_text([8, 3, 0, 1, 2]) == "cpus:0-3,8"
    for text in (None, "", "GPU-1", "cpus:", "cpus:a-b"):
        assert cpus_of_text(text) is None


def test_the_cpu_of_this_process():
    cpu = cpu_device()
    assert cpu.compute_units == len(os.sched_getaffinity(0))
    assert cpus_of_text(cpu.partition_id) == frozenset(os.sched_getaffinity(0))
    assert cpu.name
