"""For which jobs it holds what was measured of shared memory."""

from __future__ import annotations

import pytest

from mpimesh.comm.algorithms import OPERATIONS, Sizes
from mpimesh.comm.tuner import KeptSizes


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "MPIR_CVAR_NOLOCAL", "OMPI_MCA_pml"])
def test_an_mpi_that_is_told_to_send_otherwise_is_measured_anew(monkeypatch, tmp_path, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    sizes = Sizes([1] * len(OPERATIONS), "", slots_from=77)
    KeptSizes.of_machine("auto").learn(3, 1, sizes, keep=True)
    assert KeptSizes.of_machine("auto").of_ranks(3) is not None
    monkeypatch.setenv(name, "x")
    assert KeptSizes.of_machine("auto").of_ranks(3) is None
