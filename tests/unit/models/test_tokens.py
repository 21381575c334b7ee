"""Long texts are cut before they are turned into tokens, and nobody can tell."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpimesh.models.random_model import write_random_model
from mpimesh.models.tokens import Tokenizer
from tests.helpers.depth import examples

pytest.importorskip("safetensors")
library = pytest.importorskip("tokenizers")

MOST = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small") / "tokenizer.json"


@settings(max_examples=examples(100))
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from(["a", "b", "man", "food", " ", "   ", "\t", ".", "\x1c", "\u3000", "x"])
        ).map("".join),
        max_size=4,
    ),
    chars=st.integers(1, 3),
)
def test_the_tokens_are_those_of_the_whole_text(path, texts, chars):
    whole = library.Tokenizer.from_file(str(path))
    whole.no_padding()
    whole.enable_truncation(MOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpimesh.models.tokens._CHARS_OF_TOKEN", chars)
        found = Tokenizer(path, MOST)(texts)
    expected = whole.encode_batch(texts)
    assert [ids.tolist() for ids in found.ids] == [one.ids for one in expected]
    assert list(found.cut) == [place for place, one in enumerate(expected) if one.overflowing]


def test_of_a_long_line_only_the_beginning_is_looked_at(path):
    tokenizer = Tokenizer(path, MOST)
    inner = tokenizer._tokenizer
    seen: list[int] = []

    class Recorder:
        def encode_batch_fast(self, texts):
            seen.extend(map(len, texts))
            return inner.encode_batch_fast(texts)

        def encode(self, text):
            seen.append(len(text))
            return inner.encode(text)

    tokenizer._tokenizer = Recorder()
    found = tokenizer(["a man " * 100_000, " " * 3000 + "a " * 100_000])
    assert [ids.tolist() for ids in found.ids] == [[2, 4, 7, 4, 3], [2, 4, 4, 4, 3]]
    assert found.cut == (0, 1)
    assert max(seen) < 20_000
