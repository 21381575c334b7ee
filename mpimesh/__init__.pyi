# The public names, each imported when it is first used: `__init__.py` reads them here.

from . import (
    arrays as arrays,
)
from . import (
    comm as comm,
)
from . import (
    compat as compat,
)
from . import (
    data as data,
)
from . import (
    dtensor as dtensor,
)
from . import (
    errors as errors,
)
from . import (
    layout as layout,
)
from . import (
    mesh as mesh,
)
from . import (
    nn as nn,
)
from . import (
    optim as optim,
)
from . import (
    parallel as parallel,
)
from . import (
    runtime as runtime,
)
from . import (
    schedule as schedule,
)
from . import (
    settings as settings,
)
from . import (
    store as store,
)
from . import (
    testing as testing,
)
from . import (
    trace as trace,
)
from .arrays import (
    ReduceOp as ReduceOp,
)
from .dtensor import (
    BlockPlace as BlockPlace,
)
from .dtensor import (
    DTensor as DTensor,
)
from .dtensor import (
    Halo as Halo,
)
from .dtensor import (
    HaloField as HaloField,
)
from .dtensor import (
    Random as Random,
)
from .dtensor import (
    allow_gather as allow_gather,
)
from .dtensor import (
    arange as arange,
)
from .dtensor import (
    default_layout as default_layout,
)
from .dtensor import (
    distribute as distribute,
)
from .dtensor import (
    empty as empty,
)
from .dtensor import (
    eye as eye,
)
from .dtensor import (
    from_callback as from_callback,
)
from .dtensor import (
    full as full,
)
from .dtensor import (
    linspace as linspace,
)
from .dtensor import (
    local_map as local_map,
)
from .dtensor import (
    ones as ones,
)
from .dtensor import (
    shift as shift,
)
from .dtensor import (
    zeros as zeros,
)
from .errors import (
    MpimeshError as MpimeshError,
)
from .layout import (
    Layout as Layout,
)
from .layout import (
    Partial as Partial,
)
from .layout import (
    Placement as Placement,
)
from .layout import (
    Replicate as Replicate,
)
from .layout import (
    Shard as Shard,
)
from .mesh import (
    Device as Device,
)
from .mesh import (
    DeviceBackend as DeviceBackend,
)
from .mesh import (
    DeviceInfo as DeviceInfo,
)
from .mesh import (
    GpuPreference as GpuPreference,
)
from .mesh import (
    GroupBackend as GroupBackend,
)
from .mesh import (
    Mesh as Mesh,
)
from .mesh import (
    MeshDimension as MeshDimension,
)
from .mesh import (
    MeshStats as MeshStats,
)
from .mesh import (
    MeshTopology as MeshTopology,
)
from .mesh import (
    create_distributed_mesh as create_distributed_mesh,
)
from .mesh import (
    create_mesh as create_mesh,
)
from .mesh import (
    device_mesh as device_mesh,
)
from .parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from .parallel import (
    DataParallel as DataParallel,
)
from .parallel import (
    GradientBuckets as GradientBuckets,
)
from .parallel import (
    Microbatches as Microbatches,
)
from .parallel import (
    ParallelAttention as ParallelAttention,
)
from .parallel import (
    ParallelDropout as ParallelDropout,
)
from .parallel import (
    ParallelFeedForward as ParallelFeedForward,
)
from .parallel import (
    ParallelOptimizer as ParallelOptimizer,
)
from .parallel import (
    ParallelSwiGLU as ParallelSwiGLU,
)
from .parallel import (
    PipelineParallel as PipelineParallel,
)
from .parallel import (
    PipelineStage as PipelineStage,
)
from .parallel import (
    RowParallelLinear as RowParallelLinear,
)
from .parallel import (
    SequenceSplit as SequenceSplit,
)
from .parallel import (
    VocabParallelCrossEntropy as VocabParallelCrossEntropy,
)
from .parallel import (
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from .parallel import (
    clip_grad_norm as clip_grad_norm,
)
from .parallel import (
    fully_shard as fully_shard,
)
from .parallel import (
    gpt_layers as gpt_layers,
)
from .parallel import (
    split_sequence as split_sequence,
)
from .parallel import (
    sum_shared_gradients as sum_shared_gradients,
)
from .parallel import (
    tensor_parallel as tensor_parallel,
)
from .runtime import (
    CollectiveTensor as CollectiveTensor,
)
from .runtime import (
    DeviceMesh as DeviceMesh,
)
from .runtime import (
    Launch as Launch,
)
from .runtime import (
    ProcessGroup as ProcessGroup,
)
from .runtime import (
    Traffic as Traffic,
)
from .runtime import (
    exit_all as exit_all,
)
from .runtime import (
    run_virtual as run_virtual,
)
from .store import (
    Checkpoints as Checkpoints,
)
from .store import (
    RunGuard as RunGuard,
)
from .store import (
    load as load,
)
from .store import (
    open_array as open_array,
)
from .store import (
    run_guard as run_guard,
)
from .store import (
    save as save,
)
from .store import (
    save_array as save_array,
)
from .trace import (
    Tracer as Tracer,
)

__all__: list[str]
__version__: str
