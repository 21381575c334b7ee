"""Agreement of ranks on the making of a model, and the failure of one of them."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, ModelError, MpimeshError, StageError
from mpimesh.models import MiniLM
from mpimesh.models.random_model import VOCABULARY, write_random_model
from tests.helpers.bert_reference import Reference
from tests.helpers.raises import names, raises

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

SENTENCES = ["a b c", "man is eating", "", "food . a b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small")


def errors_of(dims, make):
    """Return the error that each rank raised when it made its model."""

    def main():
        with mm.DeviceMesh(dims) as mesh:
            try:
                make(mesh)
            except MpimeshError as error:
                return error if error.agreed else None
        return None

    return mm.run_virtual(mm.Mesh(dims).size, main)


def rewrite(path, change):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def other_weights(folder):
    def change(tensors):
        tensors["encoder.layer.2.output.dense.bias"][3] += 1

    rewrite(folder / "model.safetensors", change)


def other_words(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"man"', '"men"'))


def other_eps(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_eps": 1e-6}))


def other_pooling(folder):
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')


@pytest.mark.parametrize("dims", ["dp=3", "tp=3", "pp=3"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_weights, "model.safetensors"),
        (other_words, "tokenizer.json"),
        (other_eps, "config.json"),
        (other_pooling, "modules.json"),
    ],
)
def test_another_file_on_one_rank_is_refused_on_all(folder, tmp_path, dims, change, name):
    other = write_random_model(tmp_path / "other")
    change(other)
    for error in errors_of(dims, lambda mesh: MiniLM(mesh, other if mesh.rank == 1 else folder)):
        assert isinstance(error, MismatchError)
        names(str(error), name, "rank 1", "rank 0")


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"dtype": "float64"}, ("dtype", "rank 1")),
        ({"batch_tokens": 99}, ("batch_tokens", "rank 1")),
        ({"data_dim": "tp", "tensor_dim": "dp"}, ("dims", "rank 1")),
        ({"dim": "nowhere"}, ("rank 1", "'nowhere'")),
        ({"dtype": "int32"}, ("rank 1", "'int32'")),
        ({"batch_tokens": 0}, ("rank 1", "batch_tokens", 0)),
        ({"batch_tokens": "many"}, ("rank 1", "TypeError")),
        (
            {"folder": "no such folder"},
            ("rank 1", "no such folder", "config.json"),
        ),
        ({"folder": "a\0b"}, ("rank 1", "null byte")),
    ],
)
def test_other_arguments_on_one_rank_are_refused_on_all(folder, options, values):
    def make(mesh):
        MiniLM(mesh, **{"folder": folder, **(options if mesh.rank == 1 else {})})

    for error in errors_of("dp=2,tp=2", make):
        names(str(error), *values)


def test_a_dim_over_which_nothing_is_shared_is_refused(folder):
    for error in errors_of("dp=2,foo=2", lambda mesh: MiniLM(mesh, folder)):
        assert isinstance(error, ModelError)
        names(str(error), "'foo'", "pp, dp, tp")


def test_what_nobody_expects_on_one_rank_ends_all(folder):
    """Such as memory that has run out."""

    class Path:
        def __fspath__(self):
            raise MemoryError("no more")

    for error in errors_of("dp=2", lambda mesh: MiniLM(mesh, Path() if mesh.rank else folder)):
        assert isinstance(error, ModelError)
        names(str(error), "rank 1", "MemoryError", "no more")


@pytest.mark.parametrize("dims", ["tp=2", "dp=2,tp=2", "pp=2,tp=2"])
def test_a_rank_that_fails_in_a_block_does_not_leave_the_others_waiting(folder, dims):
    """The last rank fails before the sum that the others are in; then the model works again."""
    size = mm.Mesh(dims).size

    def main():
        with mm.DeviceMesh(dims) as mesh:
            model = MiniLM(mesh, folder)
            expected = model.embed(SENTENCES).vectors
            block: Any = model._here[-2]._layer
            output = block.attention.output
            product = output._product
            if mesh.rank == size - 1:

                def fail(*given):
                    raise MemoryError("no more")

                output._product = fail
            with raises(StageError, f"rank {size - 1}", "MemoryError", "no more") as caught:
                model.embed(SENTENCES)
            assert caught.value.agreed
            output._product = product
            np.testing.assert_array_equal(model.embed(SENTENCES).vectors, expected)

    mm.run_virtual(size, main)


# -- dtypes of files ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_weights_of_other_float_types_are_read(tmp_path, kind):
    """The oracle reads what is left of the weights in that type, in float64."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), kind, kind))
    folder = write_random_model(tmp_path / "model")

    def change(tensors):
        tensors.update({name: values.astype(dtype) for name, values in tensors.items()})

    rewrite(folder / "model.safetensors", change)
    reference = Reference(folder)
    expected = [reference([2, *map(VOCABULARY.index, one.split()), 3]) for one in SENTENCES]

    def main():
        with mm.DeviceMesh("tp=2") as mesh:
            return MiniLM(mesh, folder).embed(SENTENCES).vectors

    for vectors in mm.run_virtual(2, main):
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_weights_that_are_no_floats_are_refused(tmp_path):
    folder = write_random_model(tmp_path / "model")

    def change(tensors):
        name = "encoder.layer.1.output.dense.weight"
        tensors[name] = tensors[name].astype(np.int8)

    rewrite(folder / "model.safetensors", change)
    for error in errors_of("pp=2", lambda mesh: MiniLM(mesh, folder)):
        names(str(error), "encoder.layer.1.output.dense.weight", "int8")


def test_bfloat16_without_its_library_is_refused(tmp_path, monkeypatch):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder = write_random_model(tmp_path / "model")

    def change(tensors):
        name = "embeddings.LayerNorm.bias"
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    rewrite(folder / "model.safetensors", change)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for error in errors_of("dp=1", lambda mesh: MiniLM(mesh, folder)):
        names(str(error), "bfloat16", "pip install")


# -- as many ranks as heads --------------------------------------------------------------


@pytest.mark.parametrize(
    "dims", ["tp=5", "tp=7", "tp=12", "dp=2,tp=3", "pp=3,tp=2", "dp=7", "pp=6", "dp=2,pp=2,tp=3"]
)
def test_twelve_heads_over_any_mesh(tmp_path_factory, dims):
    folder = write_random_model(
        tmp_path_factory.mktemp("models") / "twelve", heads=12, head_dim=2, hidden=17, blocks=2
    )
    rng = np.random.default_rng(1)
    sentences = [" ".join(rng.choice(VOCABULARY[4:], rng.integers(0, 10))) for _ in range(12)]
    reference = Reference(folder)
    expected = [reference([2, *map(VOCABULARY.index, one.split()), 3]) for one in sentences]

    def main():
        with mm.DeviceMesh(dims) as mesh:
            return MiniLM(mesh, folder, batch_tokens=30).embed(sentences).vectors

    for vectors in mm.run_virtual(mm.Mesh(dims).size, main):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
