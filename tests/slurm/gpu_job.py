"""A job whose ranks tell which GPU they took."""

from __future__ import annotations

import json
import sys

import mpimesh as mm
from mpimesh.mesh import probe, shared_gpus

probe.PROBE_TIMEOUT_S = 30  # a loaded machine must not turn the make-believe program into none
with mm.DeviceMesh("x=-1") as mesh:
    device = mesh.local_device()
    facts = {
        "rank": mesh.rank,
        "local_rank": mesh.local_rank,
        "gpu": device.partition_id,
        "number": device.id,
        "shared": [str(one) for one in shared_gpus(mesh._core.devices.table)],
    }
    # In one piece: the ranks write at the same time.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
