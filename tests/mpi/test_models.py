"""A BERT for sentences on meshes of real ranks against one process in float64."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.models import MiniLM
from mpimesh.models.random_model import VOCABULARY, write_random_model
from tests.helpers.bert_reference import Reference

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

MESHES = {
    1: ["dp=1"],
    2: ["dp=2", "tp=2"],
    3: ["tp=3", "pp=3"],
    4: ["dp=2,tp=2", "pp=2,tp=2"],
    8: ["dp=2,pp=2,tp=2", "tp=8"],  # eleven heads over eight ranks
}


@pytest.mark.nprocs(*MESHES)
def test_any_mesh_gives_the_vectors_of_the_formulas(comm, tmp_path):
    heads = 11 if comm.size == 8 else 3
    folder = write_random_model(tmp_path / "small", heads=heads)  # each rank its own, all the same
    rng = np.random.default_rng(0)
    words = VOCABULARY[4:]
    sentences = [" ".join(rng.choice(words, rng.integers(0, 10))) for _ in range(25)]
    reference = Reference(folder)
    expected = np.array(
        [reference([2, *map(VOCABULARY.index, one.split()), 3]) for one in sentences]
    )
    for dims in MESHES[comm.size]:
        with mm.DeviceMesh(dims, comm) as mesh:
            model = MiniLM(mesh, folder, batch_tokens=30)
            for _ in range(2):
                found = model.embed(sentences)
                np.testing.assert_allclose(found.vectors, expected, rtol=0, atol=1e-5)
