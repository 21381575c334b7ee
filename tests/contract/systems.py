"""initialize_accelerator_system and its end."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MeshError, MpimeshError
from mpimesh.runtime import (
    initialize_accelerator_system,
    initialize_multi_client,
    shutdown_accelerator_system,
)


def check_start_and_end(comm):
    with pytest.raises(ValueError, match="not initialized") as caught:
        shutdown_accelerator_system()
    assert isinstance(caught.value, MpimeshError)
    for _ in range(2):
        kind = initialize_accelerator_system()
        assert kind in ("CPU", "GPU")
        for again in (initialize_accelerator_system, initialize_multi_client):
            with pytest.raises(ValueError, match="initialized already") as caught:
                again()
            assert isinstance(caught.value, MpimeshError)
        with mm.DeviceMesh("x=-1", comm) as mesh:
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == mesh.world_size
        shutdown_accelerator_system()
    if kind == "CPU":
        with pytest.raises(MeshError, match="no process has a GPU"):
            initialize_accelerator_system("gpu")
    with pytest.raises(MeshError, match="device_type must be one of"):
        initialize_accelerator_system("abacus")
    assert initialize_accelerator_system("cpu") == "CPU"
    shutdown_accelerator_system()
    with pytest.raises(ValueError, match="not initialized"):
        shutdown_accelerator_system()
