"""initialize_accelerator_system and its end."""

from __future__ import annotations

import numpy as np

import mpimesh as mm
from mpimesh.errors import MeshError, MpimeshError
from mpimesh.runtime import (
    initialize_accelerator_system,
    initialize_multi_client,
    shutdown_accelerator_system,
)
from tests.helpers.raises import raises


def check_start_and_end(comm):
    with raises(ValueError, "initialize_accelerator_system") as caught:
        shutdown_accelerator_system()
    assert isinstance(caught.value, MpimeshError)
    for _ in range(2):
        kind = initialize_accelerator_system()
        assert kind in ("CPU", "GPU")
        for again in (initialize_accelerator_system, initialize_multi_client):
            with raises(ValueError, "shutdown_accelerator_system") as caught:
                again()
            assert isinstance(caught.value, MpimeshError)
        with mm.DeviceMesh("x=-1", comm) as mesh:
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == mesh.world_size
        shutdown_accelerator_system()
    if kind == "CPU":
        with raises(MeshError, "device_type", "GPU"):
            initialize_accelerator_system("gpu")
    with raises(MeshError, "device_type", "CPU, GPU", "'ABACUS'"):
        initialize_accelerator_system("abacus")
    assert initialize_accelerator_system("cpu") == "CPU"
    shutdown_accelerator_system()
    with raises(ValueError, "initialize_accelerator_system"):
        shutdown_accelerator_system()
