# The public names, each imported when it is first used: `__init__.py` reads them here.

from . import (
    arrays as arrays,
    comm as comm,
    compat as compat,
    data as data,
    dtensor as dtensor,
    errors as errors,
    layout as layout,
    mesh as mesh,
    nn as nn,
    optim as optim,
    parallel as parallel,
    runtime as runtime,
    schedule as schedule,
    settings as settings,
    store as store,
    testing as testing,
    trace as trace,
)
from .arrays import ReduceOp as ReduceOp
from .dtensor import (
    DTensor as DTensor,
    Halo as Halo,
    Random as Random,
    allow_gather as allow_gather,
    arange as arange,
    default_layout as default_layout,
    distribute as distribute,
    empty as empty,
    eye as eye,
    from_callback as from_callback,
    full as full,
    linspace as linspace,
    local_map as local_map,
    ones as ones,
    shift as shift,
    zeros as zeros,
)
from .errors import MpimeshError as MpimeshError
from .layout import (
    Layout as Layout,
    Partial as Partial,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
)
from .mesh import Mesh as Mesh, MeshTopology as MeshTopology
from .parallel import (
    DataParallel as DataParallel,
    Microbatches as Microbatches,
    ParallelOptimizer as ParallelOptimizer,
    PipelineParallel as PipelineParallel,
    PipelineStage as PipelineStage,
    fully_shard as fully_shard,
    tensor_parallel as tensor_parallel,
)
from .runtime import (
    CollectiveTensor as CollectiveTensor,
    DeviceMesh as DeviceMesh,
    ProcessGroup as ProcessGroup,
    exit_all as exit_all,
    run_virtual as run_virtual,
)
from .store import (
    Checkpoints as Checkpoints,
    load as load,
    open_array as open_array,
    run_guard as run_guard,
    save as save,
    save_array as save_array,
)
from .trace import Tracer as Tracer

__all__: list[str]
__version__: str
