"""The example of published weights on meshes of virtual ranks, against one process in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import MpimeshError
from tests.helpers.bert_reference import Reference
from tests.helpers.depth import deep, examples
from tests.helpers.raises import names
from tests.launch.example_runs import example_module

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

MAX_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def minilm():
    with pytest.MonkeyPatch.context() as patch:
        yield example_module("minilm.model", patch)


@pytest.fixture(scope="module")
def written(minilm):
    with pytest.MonkeyPatch.context() as patch:
        return example_module("minilm.random_model", patch)


@pytest.fixture
def folder(written, tmp_path):
    return written.write_random_model(tmp_path / "small")


def sentences_of(written, count=30):
    rng = np.random.default_rng(0)
    words = written.VOCABULARY[4:]
    return [" ".join(rng.choice(words, rng.integers(0, 15))) for _ in range(count)]


def tokens_of(written, folder, sentences):
    """Return for each sentence the vectors of its tokens, by the formulas."""
    reference, words = Reference(folder), written.VOCABULARY
    ids = [[words.index(word) for word in one.split()][: MAX_TOKENS - 2] for one in sentences]
    return [reference.tokens([2, *one, 3]) for one in ids]


def of_length_1(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def embedded(minilm, dims, folder, sentences, **options):
    """Return what each virtual rank gets."""

    def main():
        with mm.DeviceMesh(dims) as mesh:
            model = minilm.MiniLM(mesh, folder, **options)
            first, again = model.embed(sentences), model.embed(sentences[:3])
            np.testing.assert_allclose(again, first[:3], rtol=0, atol=1e-5)
            return first

    return mm.run_virtual(mm.Mesh(dims).size, main)


@pytest.mark.parametrize(
    "dims",
    [
        *deep("dp=1"),
        "dp=3",
        *deep("pp=2"),
        "pp=5",
        *deep("tp=2"),
        "tp=3",
        *deep("dp=2,tp=2", "dp=2,pp=2,tp=2"),
    ],
)
def test_any_mesh_gives_the_vectors_of_the_formulas(minilm, written, folder, dims):
    """Also with heads that are not dealt evenly, and stages without a block."""
    sentences = sentences_of(written)
    tokens = tokens_of(written, folder, sentences)
    expected = of_length_1(np.array([one.mean(axis=0) for one in tokens]))
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12)):
        for found in embedded(minilm, dims, folder, sentences, batch_tokens=40, dtype=dtype):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_fewer_sentences_than_replicas_and_none(minilm, written, folder):
    sentences = sentences_of(written, 2)
    first, *others = embedded(minilm, "dp=4", folder, sentences)
    assert all(np.array_equal(first, one) for one in others)
    assert embedded(minilm, "pp=2", folder, [])[0].shape == (0, 12)


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_files_say_what_is_computed(minilm, written, folder):
    """[CLS] in place of the mean, lengths as they are, lower case, another activation."""
    sentences = sentences_of(written, 8)
    rewrite(folder / "config.json", hidden_act="relu")
    rewrite(folder / "sentence_bert_config.json", do_lower_case=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "activation", staticmethod(lambda x: np.maximum(x, 0)))
        expected = np.array([one[0] for one in tokens_of(written, folder, sentences)])
    upper = [one.upper() for one in sentences]
    for found in embedded(minilm, "tp=2", folder, upper):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "change", "values"),
    [
        ("config.json", {"hidden_act": "mish"}, ("hidden_act", "'mish'", "gelu")),
        ("config.json", {"model_type": "roberta"}, ("model_type", "'roberta'", "bert")),
        ("config.json", {"vocab_size": 13}, ("words.weight", 13, 12)),
        ("config.json", {"num_hidden_layers": 4}, ("4.attention",)),
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            ("pooling_mode_max_tokens", "mean"),
        ),
    ],
    ids=str,
)
def test_another_model_is_refused_on_all_ranks(minilm, folder, file, change, values):
    rewrite(folder / file, **change)

    def main():
        with mm.DeviceMesh("tp=2") as mesh:
            try:
                minilm.MiniLM(mesh, folder)
            except MpimeshError as error:
                return error
        return None

    for error in mm.run_virtual(2, main):
        assert error.agreed
        names(str(error), *values)


@settings(max_examples=examples(60))
@given(lengths=st.lists(st.integers(1, 40), max_size=60), batch_tokens=st.integers(1, 100))
def test_each_sentence_is_in_one_batch_of_its_size(minilm, lengths, batch_tokens):
    batches = minilm.make_batches(lengths, batch_tokens)
    rows = [row for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    ordered = [lengths[row] for row in rows]
    assert ordered == sorted(ordered, reverse=True)
    for batch in batches:
        cost = len(batch) * max(lengths[row] for row in batch)
        assert cost <= batch_tokens or len(batch) == 1


def test_the_published_model_gives_the_vectors_of_the_formulas(minilm):
    found = minilm.find_minilm()
    if found is None:
        pytest.skip(minilm.INSTALL)
    from tokenizers import Tokenizer

    folder = Path(found)
    sentences = ["A man is eating food.", "", "MPI passes messages; ranks wait for them. " * 60]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    reference = Reference(folder)
    expected = np.array([reference(tokenizer.encode(one).ids) for one in sentences])
    for vectors in embedded(minilm, "tp=2", folder, sentences):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_row_i_of_the_file_is_the_vector_of_line_i(minilm, written, folder, tmp_path, monkeypatch):
    """A line ends with a line feed and nothing else; more windows than one."""
    program = example_module("embed_minilm", monkeypatch)
    monkeypatch.setattr(program, "WINDOW", 2)
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\ufeffa b\fc\r\n\nman\u2028is\n. food".encode())
    out = tmp_path / "vectors.npy"
    for virtual in ("3", "2"):
        arguments = [str(lines), "--model", str(folder), "--out", str(out), "--virtual", virtual]
        assert program.main(arguments) == 0
        expected = embedded(minilm, "dp=1", folder, ["a b\fc", "", "man\u2028is", ". food"])[0]
        np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-6)
    assert sorted(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize(
    ("content", "out", "values"),
    [(b"\xff\n", "v.npy", ("read lines", "utf-8")), (b"a\n", "none/v.npy", ("none/v.npy", "file"))],
)
def test_what_rank_0_cannot_do_is_said_once(
    folder, tmp_path, monkeypatch, capsys, content, out, values
):
    program = example_module("embed_minilm", monkeypatch)
    lines = tmp_path / "lines.txt"
    lines.write_bytes(content)
    arguments = [str(lines), "--model", str(folder), "--out", str(tmp_path / out), "--virtual", "2"]
    assert program.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    names(line, "embed_minilm.py: error:", *values)
