"""A file of lines to a file of vectors, over virtual ranks, in windows."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import SentencesError
from mpimesh.models import MiniLM, embed_file
from mpimesh.models.random_model import VOCABULARY, write_random_model
from tests.helpers.raises import names

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

WORDS = VOCABULARY[4:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def windows(monkeypatch):
    """Make windows small: three lines for each replica."""
    monkeypatch.setattr("mpimesh.models.from_file._LINES_OF_REPLICA", 3)


def run(dims, folder, source, out=None, progress=None):
    """Return what each rank got: its report, or the text of the error that all of them raise."""

    def main():
        with mm.DeviceMesh(dims) as mesh:
            model = MiniLM(mesh, folder, batch_tokens=40)
            try:
                told = progress if mesh.rank == 0 else None
                return embed_file(model, source, out, progress=told)
            except SentencesError as error:
                return str(error) if error.agreed else None

    return mm.run_virtual(mm.Mesh(dims).size, main)


def sentences(count=25):
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(0, 15))) for _ in range(count)]


def vectors_of(folder, texts):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            return MiniLM(mesh, folder, batch_tokens=40).embed(texts)

    return mm.run_virtual(1, main)[0]


@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "dp=2,pp=2", "tp=2"])
def test_windows_give_what_one_call_gives(folder, windows, tmp_path, dims, monkeypatch):
    source, out = tmp_path / "lines.txt", tmp_path / "v.npy"
    texts = sentences()
    source.write_text("".join(f"{text}\n" for text in texts))
    expected, told = vectors_of(folder, texts), []
    sizes = set()
    embed = MiniLM.embed

    def noted(self, sentences, **options):
        sizes.add((len(sentences), self.replicas))
        return embed(self, sentences, **options)

    monkeypatch.setattr(MiniLM, "embed", noted)
    reports = run(dims, folder, source, out, lambda *counts: told.append(counts))
    assert max(size for size, _ in sizes) == 3 * max(replicas for _, replicas in sizes)
    np.testing.assert_allclose(np.load(out), expected.vectors, rtol=0, atol=1e-5)
    for report in reports:
        assert report == reports[0]
    report = reports[0]
    assert (report.num_lines, report.width, report.dtype) == (25, 12, "float32")
    assert report.num_tokens == expected.num_tokens
    assert report.empty.first == tuple(place + 1 for place in expected.empty)
    assert report.cut.first == tuple(place + 1 for place in expected.cut)
    assert (report.empty.count, report.cut.count) == (len(expected.empty), len(expected.cut))
    assert told == sorted(told)
    assert told[0] == (0, 25)
    assert told[-1] == (25, 25)


def test_a_pipe_of_unknown_length_and_no_lines_at_all(folder, windows, tmp_path):
    source, out = tmp_path / "pipe", tmp_path / "v.npy"
    texts: list[str]
    for texts in (sentences(10), []):
        source.unlink(missing_ok=True)
        os.mkfifo(source)
        data = "".join(f"{text}\n" for text in texts).encode()
        writer = threading.Thread(target=source.write_bytes, args=(data,))
        writer.start()
        report, _ = run("dp=2", folder, source, out)
        writer.join()
        assert report.num_lines == len(texts)
        expected = vectors_of(folder, texts).vectors
        np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-5)


def test_only_so_many_line_numbers_are_kept(folder, tmp_path):
    source = tmp_path / "lines.txt"
    source.write_text("\n" * 1500)
    (report,) = run("dp=1", folder, source)
    assert report.empty.count == 1500
    assert report.empty.first == tuple(range(1, 1001))


def test_a_failure_in_the_middle_ends_all_ranks_and_leaves_nothing(folder, windows, tmp_path):
    """In a pipe the bad line is met only when the lines before it are computed."""
    source, out = tmp_path / "pipe", tmp_path / "v.npy"
    out.write_bytes(b"before")
    os.mkfifo(source)
    writer = threading.Thread(target=source.write_bytes, args=(b"a b\n" * 20 + b"\xff\n",))
    writer.start()
    for text in run("dp=2,tp=2", folder, source, out):
        names(text, "line 21", "UTF-8")
    writer.join()
    assert out.read_bytes() == b"before"
    assert {one.name for one in tmp_path.iterdir()} == {"pipe", "v.npy"}


def test_what_cannot_be_written_is_told_before_anything_is_computed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(MiniLM, "embed", None)
    source = tmp_path / "lines.npy"
    source.write_text("a\n" * 5)
    for out, words in ((tmp_path / "no" / "v.npy", "no folder"), (source, "sentences")):
        for text in run("dp=2", folder, source, out):
            names(text, out, words)
    assert source.read_text() == "a\n" * 5
    assert {one.name for one in tmp_path.iterdir()} == {"lines.npy"}


def test_a_disk_that_gets_full_ends_all_ranks(folder, windows, tmp_path, monkeypatch):
    source, out = tmp_path / "lines.txt", tmp_path / "v.npy"
    source.write_text("a b\n" * 30)

    def full(self, vectors):
        raise self._problem(OSError(28, "No space left on device"))

    monkeypatch.setattr("mpimesh.models.vectors_file.VectorsFile.append", full)
    for text in run("dp=2", folder, source, out):
        assert text == f"cannot write {out}: No space left on device"
    assert {one.name for one in tmp_path.iterdir()} == {"lines.txt"}
