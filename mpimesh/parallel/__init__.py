"""Data, tensor and pipeline parallelism: models cut over replicas, ranks and stages, as one."""

from mpimesh.parallel.clip import clip_grad_norm
from mpimesh.parallel.data import DataParallel, fully_shard
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.buckets import BUCKET_BYTES, GradientBuckets
from mpimesh.parallel.gradients.tuning import BucketTuning
from mpimesh.parallel.layer_costs import measure_layers
from mpimesh.parallel.microbatch import (
    Microbatches,
    microbatch_rows,
    replica_rows,
    split_microbatches,
)
from mpimesh.parallel.optimizer import ParallelOptimizer
from mpimesh.parallel.pipeline import PipelineParallel
from mpimesh.parallel.stage import PipelineStage
from mpimesh.parallel.step_report import StepReport
from mpimesh.parallel.tensor.attention import ParallelAttention
from mpimesh.parallel.tensor.dropout import ParallelDropout
from mpimesh.parallel.tensor.embedding import VocabParallelEmbedding
from mpimesh.parallel.tensor.feedforward import ParallelFeedForward, ParallelSwiGLU
from mpimesh.parallel.tensor.gpt import gpt_layers
from mpimesh.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpimesh.parallel.tensor.loss import VocabParallelCrossEntropy
from mpimesh.parallel.tensor.sequence import SequenceSplit, split_sequence
from mpimesh.parallel.tensor.split import tensor_parallel
from mpimesh.parallel.tensor.sums import sum_shared_gradients

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "BucketTuning",
    "ColumnParallelLinear",
    "DataParallel",
    "GradientBuckets",
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
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "clip_grad_norm",
    "fully_shard",
    "gpt_layers",
    "measure_layers",
    "microbatch_rows",
    "replica_rows",
    "split_microbatches",
    "split_sequence",
    "sum_shared_gradients",
    "tensor_parallel",
]
