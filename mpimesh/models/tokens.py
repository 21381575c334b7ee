"""Sentences to ids of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import ModelError
from mpimesh.models.config import INSTALL

__all__ = ["Tokenized", "Tokenizer"]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Sentences as ids.

    Attributes:
        ids: Of each sentence.
        empty: Places of the sentences without a word: they are only the two tokens of the frame.
        cut: Places of the sentences that are longer than the model reads.
    """

    ids: tuple[HostArray, ...]
    empty: tuple[int, ...]
    cut: tuple[int, ...]


class Tokenizer:
    """A file tokenizer.json, read by the library tokenizers. Local.

    Args:
        path: The file.
        max_tokens: Most tokens of a sentence, with those of the frame.

    Raises:
        ModelError: If the library is missing, or the file cannot be read.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ModelError(f"cannot read sentences, {error}: {INSTALL}") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the base class itself
            raise ModelError(f"cannot read {path}: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        self._frame = self._tokenizer.num_special_tokens_to_add(False)

    def __call__(self, sentences: Sequence[str]) -> Tokenized:
        """Return the ids of sentences."""
        found = self._tokenizer.encode_batch(list(sentences))
        return Tokenized(
            ids=tuple(np.array(one.ids, np.int64) for one in found),
            empty=tuple(i for i, one in enumerate(found) if len(one.ids) <= self._frame),
            cut=tuple(i for i, one in enumerate(found) if one.overflowing),
        )
