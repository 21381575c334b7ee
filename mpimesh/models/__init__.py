"""Published models, run on a mesh: each rank reads its own part of the weights."""

from mpimesh.models.batches import Batch, plan_batches
from mpimesh.models.config import BertConfig, find_minilm
from mpimesh.models.from_file import EmbeddedFile, LineNumbers, embed_file
from mpimesh.models.minilm import BATCH_TOKENS, Embedded, MiniLM
from mpimesh.models.modules import Modules
from mpimesh.models.random_model import write_random_model
from mpimesh.models.weights import Weights

__all__ = [
    "BATCH_TOKENS",
    "Batch",
    "BertConfig",
    "Embedded",
    "EmbeddedFile",
    "LineNumbers",
    "MiniLM",
    "Modules",
    "Weights",
    "embed_file",
    "find_minilm",
    "plan_batches",
    "write_random_model",
]
