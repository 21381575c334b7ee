"""Data and pipeline parallelism: models cut over replicas and stages, trained as one."""

from mpimesh.parallel.bucket import Bucket
from mpimesh.parallel.buckets import BUCKET_BYTES, GradientBuckets
from mpimesh.parallel.clip import clip_grad_norm
from mpimesh.parallel.data import DataParallel
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
from mpimesh.parallel.tuning import BucketTuning

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "BucketTuning",
    "DataParallel",
    "GradientBuckets",
    "Microbatches",
    "ParallelOptimizer",
    "PipelineParallel",
    "PipelineStage",
    "StepReport",
    "clip_grad_norm",
    "measure_layers",
    "microbatch_rows",
    "replica_rows",
    "split_microbatches",
]
