"""Which environment variables tell of the job at hand, and which of what a person wants of MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["clean_environment", "tuning"]

# What tells a process that it is a rank of a job, or where the job's nodes are.
_OF_A_JOB = (
    *("COBALT_", "FLUX_", "HYDI_", "HYDRA_", "LSB_", "MPIEXEC_", "MPI_LOCAL", "NSLOTS"),
    *("OMPI_", "PALS_", "PBS_", "PE_HOSTFILE", "PMI", "PRTE_", "SLURM"),
)
# Open MPI has both under one name; these parts of it are where a person chooses MPI's way.
_FRAMEWORKS = tuple(
    f"OMPI_MCA_{name}"
    for name in (
        *("accelerator", "btl", "coll", "mpi_", "mtl", "opal_", "osc", "pml", "rcache", "smsc"),
    )
)
_TUNING = (
    *("FI_", "I_MPI_FABRICS", "I_MPI_OFFLOAD", "I_MPI_OFI", "I_MPI_SHM", "LD_LIBRARY_PATH"),
    *("MPICH_", "MPIR_", "MV2_", "UCX_"),
    *_FRAMEWORKS,
)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` as a new job needs it: without what tells of the job at hand."""
    clean = {
        name: text
        for name, text in environment.items()
        if not name.startswith(_OF_A_JOB) or name.startswith(_FRAMEWORKS)
    }
    # Two ranks are no more than may run here, whatever the cores and the user.
    clean["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    clean["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    clean["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if os.geteuid() == 0:
        clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    package = str(Path(__file__).parents[2])
    clean["PYTHONPATH"] = os.pathsep.join([*filter(None, [clean.get("PYTHONPATH")]), package])
    return clean


def tuning(environment: Mapping[str, str]) -> list[str]:
    """Return the variables, as ``NAME=text``, by which a person has chosen MPI's way."""
    return sorted(
        f"{name}={text}" for name, text in environment.items() if name.startswith(_TUNING)
    )
