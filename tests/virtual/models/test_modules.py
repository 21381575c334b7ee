"""Folders as sentence-transformers writes them: honoured, or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ModelError
from mpimesh.models import MiniLM, Modules
from mpimesh.models.random_model import VOCABULARY, write_random_model
from tests.helpers.bert_reference import Reference
from tests.helpers.raises import raises

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

SENTENCES = ["a b c", "man is eating", "", "food . a b"]


@pytest.fixture
def folder(tmp_path):
    return write_random_model(tmp_path / "model")


def token_vectors(folder):
    reference = Reference(folder)
    return [reference.tokens([2, *map(VOCABULARY.index, one.split()), 3]) for one in SENTENCES]


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def embedded(folder, sentences=SENTENCES):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            return MiniLM(mesh, folder).embed(sentences).vectors

    return mm.run_virtual(1, main)[0]


def modules(*kinds):
    places = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": places.get(kind, kind)}
        for kind in kinds
    ]


POOLED = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(axis=0),
    "mean": lambda x: x.mean(axis=0),
    "mean_sqrt_len_tokens": lambda x: x.sum(axis=0) / np.sqrt(len(x)),
}
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}


@pytest.mark.parametrize(
    "modes", [["cls"], ["max"], ["mean"], ["mean_sqrt_len_tokens"], ["cls", "max", "mean"]]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_pooling_is_the_one_that_the_folder_names(folder, modes, normalize):
    flags = {flag: name in modes for name, flag in FLAGS.items()}
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 12, **flags})
    last = ["Normalize"] if normalize else []
    write(folder / "modules.json", modules("Transformer", "Pooling", *last))
    expected = np.array(
        [np.concatenate([POOLED[name](x) for name in modes]) for x in token_vectors(folder)]
    )
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embedded(folder), expected, rtol=0, atol=1e-5)


def test_newer_folders_name_the_pooling_by_a_word(folder):
    write(folder / "1_Pooling/config.json", {"embedding_dimension": 12, "pooling_mode": "cls"})
    assert Modules.read(folder).pooling == ("cls",)
    write(folder / "1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]})
    assert Modules.read(folder).pooling == ("cls", "mean")


def test_without_modules_it_is_the_mean_as_it_is(folder):
    (folder / "modules.json").unlink()
    expected = np.array([x.mean(axis=0) for x in token_vectors(folder)])
    np.testing.assert_allclose(embedded(folder), expected, rtol=0, atol=1e-5)


def test_the_transformer_may_be_in_a_folder_of_its_own(folder):
    expected = embedded(folder)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).rename(inner / name)
    steps = modules("Transformer", "Pooling", "Normalize")
    steps[0]["path"] = "0_Transformer"
    write(folder / "modules.json", steps)
    np.testing.assert_array_equal(embedded(folder), expected)


def test_sentences_are_turned_to_lower_case_where_the_folder_says_so(folder):
    upper = [text.upper() for text in SENTENCES]
    expected = embedded(folder)
    assert not np.allclose(embedded(folder, upper), expected, atol=1e-3)
    settings = {"max_seq_length": 12, "do_lower_case": True}
    write(folder / "sentence_bert_config.json", settings)
    np.testing.assert_array_equal(embedded(folder, upper), expected)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_other_activations(folder, activation, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"hidden_act": activation})
    cube = np.sqrt(2 / np.pi)
    formulas = {
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
    }
    tanh = lambda x: x * (1 + np.tanh(cube * (x + 0.044715 * x**3))) / 2  # noqa: E731
    monkeypatch.setattr(Reference, "activation", staticmethod(formulas.get(activation, tanh)))
    expected = np.array([x.mean(axis=0) for x in token_vectors(folder)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embedded(folder), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "value", "values"),
    [
        (
            "modules.json",
            modules("Transformer", "Pooling", "Dense"),
            ("modules.json", "Transformer, Pooling, Dense"),
        ),
        (
            "modules.json",
            modules("Pooling", "Transformer"),
            ("modules.json", "Pooling, Transformer"),
        ),
        ("modules.json", {"type": "Pooling"}, ("modules.json", "type and path", "list")),
        ("modules.json", [1], ("modules.json", "type and path", "int")),
        ("modules.json", [{"type": "Transformer"}], ("modules.json", "type and path", "'path'")),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
            ("1_Pooling/config.json", "pooling_mode_lasttoken", "cls, max"),
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False},
            ("1_Pooling/config.json", "nothing"),
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "weightedmean"},
            ("1_Pooling/config.json", "weightedmean"),
        ),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            ("prompt", "'query'"),
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder, file, value, values):
    write(folder / file, value)
    with raises(ModelError, *values):
        Modules.read(folder)


def test_a_pooling_that_is_listed_must_be_there(folder):
    (folder / "1_Pooling/config.json").unlink()
    with raises(ModelError, "1_Pooling/config.json"):
        Modules.read(folder)


def test_weights_in_another_form_are_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with raises(ModelError, "rank 0", "model.safetensors", "pytorch_model.bin"):
        embedded(folder)
