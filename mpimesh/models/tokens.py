"""Sentences to ids of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import ModelError
from mpimesh.models.config import INSTALL

__all__ = ["Tokenized", "Tokenizer"]

_AT_A_TIME = 1024


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
        lower: Whether sentences are turned to lower case first.

    Raises:
        ModelError: If the library is missing, or the file cannot be read.
    """

    def __init__(self, path: Path, max_tokens: int, *, lower: bool = False) -> None:
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
        self._lower = lower
        self._frame = self._tokenizer.num_special_tokens_to_add(False)

    def __call__(self, sentences: Sequence[str]) -> Tokenized:
        """Return the ids of sentences."""
        ids: list[HostArray] = []
        cut: list[int] = []
        # What the library gives of a sentence is much larger than its ids: a few at a time.
        for start in range(0, len(sentences), _AT_A_TIME):
            some = sentences[start : start + _AT_A_TIME]
            texts = [text.lower() for text in some] if self._lower else list(some)
            for place, one in enumerate(self._tokenizer.encode_batch_fast(texts), start):
                ids.append(np.array(one.ids, np.int32))
                if one.overflowing:
                    cut.append(place)
        return self.tokenized(ids, cut)

    def tokenized(self, ids: Sequence[HostArray], cut: Iterable[int]) -> Tokenized:
        """Return the value for sentences whose ids are known. Local."""
        empty = tuple(place for place, one in enumerate(ids) if len(one) <= self._frame)
        return Tokenized(tuple(ids), empty, tuple(cut))
