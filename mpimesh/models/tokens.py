"""Sentences to ids of tokens."""

from __future__ import annotations

import importlib
import re
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
_CHARS_OF_TOKEN = 32
# Far more than most have: a second look at a text is rare.
_SPACE = re.compile("[ \t\n\r]")
# What every tokenizer takes for the end of a word; not all that Python calls a space is.


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
        self._most_chars = max_tokens * _CHARS_OF_TOKEN
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
            for place, one in enumerate(self._beginnings(texts), start):
                ids.append(np.array(one.ids, np.int32))
                if one.overflowing:
                    cut.append(place)
        return self.tokenized(ids, cut)

    def _beginnings(self, texts: Sequence[str]) -> list[Any]:
        """Return what the library makes of texts; of a long one it gets no more than is needed.

        Words do not depend on each other. So what the beginning of a text, up to a space, gives
        are the first tokens of the whole; if they are more than the model reads, the rest is not
        looked at.
        """
        shorter = [_beginning(text, self._most_chars) for text in texts]
        found = list(self._tokenizer.encode_batch_fast(shorter))
        for place, text in enumerate(texts):
            chars = len(shorter[place])
            while chars < len(text) and not found[place].overflowing:
                more = _beginning(text, 4 * chars)
                found[place], chars = self._tokenizer.encode(more), len(more)
        return found

    def tokenized(self, ids: Sequence[HostArray], cut: Iterable[int]) -> Tokenized:
        """Return the value for sentences whose ids are known. Local."""
        empty = tuple(place for place, one in enumerate(ids) if len(one) <= self._frame)
        return Tokenized(tuple(ids), empty, tuple(cut))


def _beginning(text: str, chars: int) -> str:
    """Return `text` up to the first space behind as many characters."""
    found = _SPACE.search(text, chars)
    return text[: found.start()] if found else text
