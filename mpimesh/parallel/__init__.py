"""Data, tensor and pipeline parallelism: models cut over replicas, ranks and stages, as one."""

from mpimesh.nn.attention import ParallelAttention
from mpimesh.nn.dropout import ParallelDropout
from mpimesh.nn.embedding import VocabParallelEmbedding
from mpimesh.nn.linear import ColumnParallelLinear, RowParallelLinear
from mpimesh.nn.losses import VocabParallelCrossEntropy
from mpimesh.nn.split import SequenceSplit
from mpimesh.nn.tensor_parallel import gpt_layers, tensor_parallel
from mpimesh.nn.transformer import ParallelFeedForward, ParallelSwiGLU
from mpimesh.parallel.bucket import Bucket
from mpimesh.parallel.bucket_plan import BucketTuning
from mpimesh.parallel.buckets import BUCKET_BYTES, GradientBuckets
from mpimesh.parallel.data_parallel import DataParallel, fully_shard
from mpimesh.parallel.layer_costs import measure_layers
from mpimesh.parallel.microbatch import (
    Microbatches,
    microbatch_rows,
    replica_rows,
    split_microbatches,
)
from mpimesh.parallel.model import clip_grad_norm
from mpimesh.parallel.parallel_optimizer import ParallelOptimizer
from mpimesh.parallel.pipeline import PipelineParallel, StepReport
from mpimesh.parallel.split_layers import sum_shared_gradients
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.training_loop import (
    Accumulation,
    MetricsCallback,
    TrainingMetrics,
    reduce_gradients,
)

__all__ = [
    "BUCKET_BYTES",
    "Accumulation",
    "Bucket",
    "BucketTuning",
    "ColumnParallelLinear",
    "DataParallel",
    "GradientBuckets",
    "MetricsCallback",
    "Microbatches",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelFeedForward",
    "ParallelOptimizer",
    "ParallelSwiGLU",
    "PipelineParallel",
    "PipelineStage",
    "RowParallelLinear",
    "SequenceSplit",
    "StepReport",
    "TrainingMetrics",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "clip_grad_norm",
    "fully_shard",
    "gpt_layers",
    "measure_layers",
    "microbatch_rows",
    "reduce_gradients",
    "replica_rows",
    "split_microbatches",
    "sum_shared_gradients",
    "tensor_parallel",
]
