"""A BERT for sentences on meshes of virtual ranks against one process in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, ModelError, MpimeshError
from mpimesh.models import MiniLM, find_minilm
from mpimesh.models.random_model import VOCABULARY, write_random_model
from tests.helpers.bert_reference import Reference
from tests.helpers.raises import names

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

WORDS = VOCABULARY[4:]
FRAME = (2, 3)
MAX_TOKENS = 12


def random_sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(0, 15))) for _ in range(count)]


def ids_of(sentence):
    ids = [VOCABULARY.index(word) for word in sentence.split()]
    return [FRAME[0], *ids[: MAX_TOKENS - 2], FRAME[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def expected(folder):
    reference = Reference(folder)
    return np.array([reference(ids_of(one)) for one in random_sentences(30)])


def embed(dims, folder, sentences, **options):
    with mm.DeviceMesh(dims) as mesh:
        model = MiniLM(mesh, folder, **options)
        found = model.embed(sentences)
        again = model.embed(sentences[:3])
    return found, again, model.read_bytes


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "dims",
    ["dp=1", "dp=3", "pp=2", "pp=5", "tp=2", "tp=3", "dp=2,tp=2", "pp=2,tp=3", "dp=2,pp=2,tp=2"],
)
def test_any_mesh_gives_the_vectors_of_the_formulas(folder, expected, dims):
    """Also with more stages than blocks, and heads that are not dealt evenly."""
    sentences = random_sentences(30)
    size = mm.Mesh(dims).size
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12)):
        told = mm.run_virtual(
            size, embed, dims, folder, sentences, batch_tokens=40, dtype=np.dtype(dtype)
        )
        for found, again, _ in told:
            assert found.vectors.dtype == dtype
            np.testing.assert_allclose(found.vectors, expected, rtol=0, atol=tolerance)
            np.testing.assert_allclose(again.vectors, expected[:3], rtol=0, atol=tolerance)
            assert found.empty == tuple(i for i, one in enumerate(sentences) if not one)
            assert found.cut == tuple(i for i, one in enumerate(sentences) if len(one.split()) > 10)
            assert found.num_tokens == sum(len(ids_of(one)) for one in sentences)


def test_a_model_tells_what_it_is(folder):
    with mm.DeviceMesh("dp=1") as mesh:
        text = repr(MiniLM(mesh, folder, dtype="float64"))
    assert text == f"MiniLM('dp=1', {str(folder)!r}, width=12, dtype=float64)"


def test_fewer_sentences_than_replicas_and_none(folder, expected):
    for found, again, _ in mm.run_virtual(4, embed, "dp=4", folder, random_sentences(2)):
        np.testing.assert_allclose(found.vectors, expected[:2], rtol=0, atol=1e-5)
        assert len(again.vectors) == 2
    for found, _, _ in mm.run_virtual(2, embed, "pp=2", folder, []):
        assert found.vectors.shape == (0, expected.shape[1])


def test_a_rank_reads_only_its_weights(folder):
    """Stages read their own; words are shared. All read a block's norms and its last biases."""
    features, hidden, blocks, words, positions = 12, 10, 3, len(VOCABULARY), MAX_TOKENS
    word = 4 * features
    tables = (positions + 2 + 2) * word  # with the types, and the norm's two
    table = words * word + tables
    norms_and_biases = 4 * (4 + 2) * features

    def inside(heads, columns):
        """Return the bytes of some heads and columns of a block."""
        attention = 3 * (features + 1) * 4 * heads + features * 4 * heads
        return 4 * (attention + (features + 1) * columns + features * columns)

    whole = inside(3, hidden) + norms_and_biases
    read = {
        dims: [told[2] for told in mm.run_virtual(size, embed, dims, folder, [])]
        for dims, size in (("dp=2", 2), ("pp=2", 2), ("tp=2", 2))
    }
    assert read["dp=2"] == [table + blocks * whole] * 2
    assert read["pp=2"] == [table + 2 * whole, whole]
    assert read["tp=2"] == [
        words // 2 * word + tables + blocks * (inside(2, 5) + norms_and_biases),
        words // 2 * word + tables + blocks * (inside(1, 5) + norms_and_biases),
    ]


def test_progress_counts_the_sentences_of_this_rank(folder):
    def main():
        told = []
        with mm.DeviceMesh("dp=2") as mesh:
            model = MiniLM(mesh, folder, batch_tokens=20)
            model.embed(
                random_sentences(30), progress=lambda done, total: told.append((done, total))
            )
            model.embed(random_sentences(2))
        return told

    first, second = mm.run_virtual(2, main)
    assert first[0][1] + second[0][1] == 30
    for told in (first, second):
        assert told[0][0] == 0
        assert told[-1][0] == told[-1][1]
        assert sorted(told) == told
        assert len(told) > 3


def errors_of(size, dims, folder, sentences=("a",), **options):
    """Return the error that each rank raised."""

    def main():
        try:
            with mm.DeviceMesh(dims) as mesh:
                here = sentences(mesh.rank) if callable(sentences) else sentences
                MiniLM(mesh, folder, **options).embed(here)
        except MpimeshError as error:
            return error if error.agreed else None
        return None

    return mm.run_virtual(size, main)


def changed(tmp_path, file, **changes):
    folder = write_random_model(tmp_path / "changed")
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"hidden_act": "mish"}, ("config.json", "hidden_act", "'mish'", "'gelu'")),
        ({"model_type": "roberta"}, ("config.json", "model_type", "'roberta'", "'bert'")),
        ({"is_decoder": True}, ("config.json", "is_decoder", True)),
        (
            {"position_embedding_type": "relative_key"},
            ("config.json", "position_embedding_type", "'relative_key'"),
        ),
        (
            {"vocab_size": 13},
            ("model.safetensors", "embeddings.word_embeddings.weight", (13, 12), (12, 12)),
        ),
        (
            {"num_hidden_layers": 4},
            ("model.safetensors", "encoder.layer.3.attention.self.query.weight"),
        ),
        ({"num_attention_heads": 5}, ("config.json", "num_heads=5", "hidden=10")),
        ({"hidden_size": "wide"}, ("config.json", "'wide'")),
        ({"max_position_embeddings": 4}, ("config.json", "12 tokens", "positions for 4")),
    ],
    ids=str,
)
def test_files_of_another_model_are_refused_on_all_ranks(tmp_path, change, values):
    for error in errors_of(2, "tp=2", changed(tmp_path, "config.json", **change)):
        assert isinstance(error, ModelError)
        names(str(error), "ranks 0-1", *values)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_damaged_files_are_named(tmp_path, file, damage):
    path = write_random_model(tmp_path / "damaged") / file
    path.unlink() if damage == "missing" else path.write_bytes(b"\0{garbage")
    for error in errors_of(1, "dp=1", path.parent):
        assert isinstance(error, ModelError)
        if damage == "garbage" or file != "tokenizer.json":
            assert file in str(error)


@pytest.mark.parametrize(
    ("dims", "options", "values"),
    [
        ("tp=4", {}, ("3 heads", "10 columns", "4 ranks")),
        ("dp=2", {"batch_tokens": 0}, ("batch_tokens", 0)),
        ("dp=2", {"dtype": "int32"}, ("float16, float32, float64", "'int32'")),
        ("dp=2", {"sentences": "one text"}, ("sentences", "one text")),
        ("dp=2", {"sentences": ["a", 5]}, ("sentences", "int", 1)),
        ("dp=2", {"sentences": ["a", "\ud800"]}, ("sentences", "surrogates not allowed")),
    ],
)
def test_what_cannot_be_done_is_refused_on_all_ranks(folder, dims, options, values):
    for error in errors_of(mm.Mesh(dims).size, dims, folder, **options):
        names(str(error), *values)


def test_other_sentences_on_a_rank_are_refused_on_all(folder):
    told = errors_of(3, "dp=3", folder, sentences=lambda rank: ["a b", "a" if rank == 2 else "b"])
    for error in told:
        assert isinstance(error, MismatchError)
        names(str(error), "sentences", "rank 2", "rank 0")


# -- the published model, where it is installed -------------------------------------------


def test_the_published_model_gives_the_vectors_of_the_formulas():
    try:
        folder = Path(find_minilm())
    except ModelError as error:
        pytest.skip(str(error))
    from tokenizers import Tokenizer

    sentences = ["A man is eating food.", "", "MPI passes messages; ranks wait for them. " * 60]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    reference = Reference(folder)
    expected = np.array([reference(tokenizer.encode(one).ids) for one in sentences])
    for found, *_ in mm.run_virtual(2, embed, "tp=2", None, sentences):
        np.testing.assert_allclose(found.vectors, expected, rtol=0, atol=1e-5)
        assert (found.empty, found.cut) == ((1,), (2,))
