"""How many functions lie between a call and its bytes: it may become fewer."""

from __future__ import annotations

import pytest

import mpimesh as mm
from tests.helpers.hops import hops, ways

# Functions and files that a call passes: `mpiexec -n 2 python -m tests.helpers.hops` counts them.
MOST = {
    "all_reduce": (1, 1),
    "all_reduce, planned": (1, 1),
    "barrier": (3, 2),
    "send and recv": (4, 2),
    "redistribute": (6, 3),
    "x + y": (0, 0),
    "x @ w": (0, 0),
    "halo exchange": (4, 2),
    "train_step": (190, 40),  # 183: it hangs a little on what comes between
}


@pytest.mark.nprocs(2)
def test_calls_pass_no_more_functions_than_before(comm, monkeypatch, capfd):
    """What is more must not stay; what is fewer must stay so."""
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    more, fewer, names = [], [], []
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        for name, call in ways(mesh):
            names.append(name)
            found = hops(call, mesh.rank)
            most = MOST[name]
            text = (
                f"{name}: {found.functions} functions in {found.files} files, {most} in the table"
            )
            if found.functions > most[0] or found.files > most[1]:
                more.append(f"{text}\n{found}")
            # A step waits more than once, and looks for what came between: that differs.
            elif found.functions < 0.9 * most[0]:
                fewer.append(text)
    assert names == [*MOST]
    if mesh.rank == 0 and fewer:
        with capfd.disabled():
            print("\n".join([f"Lower the table of {__file__}, if this is so again:", *fewer]))
    problems = comm.bcast(more)
    assert not problems, (
        "a call passes more functions of mpimesh than the table allows: take some out of its way, "
        "or say in the commit why it needs them and raise the number\n" + "\n\n".join(problems)
    )
