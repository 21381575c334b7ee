"""``python -m mpimesh embed``: what it reads, writes, tells and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.cli.embed import EmbedRequest, embed_lines
from mpimesh.cli.threads import fair_threads, share_cores
from mpimesh.errors import SentencesError
from mpimesh.models import MiniLM
from mpimesh.models.random_model import write_random_model
from tests.helpers.raises import names

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[3]
LINES = ["a man is eating food .", "", "b c", "a " * 30]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def expected(model):
    def main():
        with mm.DeviceMesh("dp=1") as mesh:
            return MiniLM(mesh, model).embed(LINES).vectors

    return mm.run_virtual(1, main)[0]


def embed(*arguments, stdin=b""):
    return subprocess.run(
        [sys.executable, "-m", "mpimesh", "embed", *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def request(model, lines, out=None, mesh="dp=1", as_json=True):
    return EmbedRequest(str(lines), mesh, out, model, 64, as_json)


def test_a_file_becomes_vectors_and_empty_and_cut_lines_are_counted(model, expected, tmp_path):
    lines, out = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    # As some editors write it: with a mark of the byte order, and two characters a line end.
    lines.write_bytes(("\ufeff" + "\r\n".join(LINES) + "\r\n").encode())
    result = embed(lines, "--model", model, "--out", out)
    assert result.returncode == 0, result.stderr
    told = result.stdout.decode()
    assert "4 sentences, 26 tokens, mesh dp=1: " in told
    assert "lines without a word: 1, namely 2\n" in told
    assert "lines cut to fit the model: 1, namely 4\n" in told
    assert f"wrote {out}: (4, 12), float32" in told
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()].count("vectors.npy.part") == 0


def test_standard_input_becomes_one_json_object(model):
    result = embed("-", "--model", model, "--json", stdin="\n".join(LINES).encode())
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["sentences"], told["features"], told["tokens"]) == (4, 12, 26)
    assert (told["empty"], told["cut"], told["out"]) == ([2], [4], None)
    assert told["sentences_per_s"] == pytest.approx(4 / told["seconds"], rel=2e-3)
    assert all(len(f"{told[name]!r}") <= 8 for name in ("loading_s", "seconds"))
    assert result.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["none.txt"], ("none.txt", "No such file")),
        (["-", "--mesh", "dp=2"], ("mpiexec -n 2 python -m mpimesh embed FILE",)),
        (["-", "--out", ""], (".npy",)),
        (["-", "--out", "x.txt"], ("x.txt", ".npy")),
        (["-", "--mesh", "foo=1"], ("'foo'", "MiniLM")),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_one_line(model, arguments, values):
    result = embed(*arguments, "--model", model)
    assert result.returncode == 2
    assert result.stdout == b""
    text = result.stderr.decode()
    assert text.startswith("error: ")
    names(text, *values)
    assert text.count("\n") == 1


@pytest.mark.parametrize("link", [False, True])
def test_the_sentences_are_not_overwritten_when_they_come_by_standard_input(model, tmp_path, link):
    lines = tmp_path / "lines.npy"
    lines.write_bytes(b"a man\n")
    out = tmp_path / "link.npy"
    out.symlink_to(lines)
    target = out if link else lines
    with lines.open("rb") as source:
        result = subprocess.run(
            [sys.executable, "-m", "mpimesh", "embed", "-", "--model", model, "--out", target],
            cwd=ROOT,
            stdin=source,
            capture_output=True,
            timeout=60,
        )
    assert result.returncode == 2
    names(result.stderr.decode(), target, "sentences")
    assert lines.read_bytes() == b"a man\n"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("n", range(8), 0)], [8]),
        ([("n", range(8), 0)] * 3, [2, 2, 2]),
        ([("n", range(2), 0)] * 4, [1] * 4),
        ([("n", [0, 1], 0), ("n", [2, 3, 4, 5], 0)], [2, 4]),  # bound to cores of their own
        ([("n", range(8), 0), ("m", range(8), 0), ("m", range(8), 0)], [8, 4, 4]),
        ([("n", range(8), 2.5)] * 2, [1, 1]),
        ([("n", range(8), 5.0)], [5]),
    ],
)
def test_a_rank_takes_its_share_of_the_cores_of_its_node(ranks, expected):
    assert [fair_threads(ranks, rank) for rank in range(len(ranks))] == expected


def test_the_threads_of_numpy_follow_unless_the_environment_says_how_many(monkeypatch):
    control = pytest.importorskip("threadpoolctl")

    def threads():
        return [
            one["num_threads"] for one in control.threadpool_info() if one["user_api"] == "blas"
        ]

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr("mpimesh.cli.threads.cpu_quota", lambda: 0.0)

    def main():
        found = []
        with mm.DeviceMesh("dp=1") as mesh:
            for environment in ({}, {"OMP_NUM_THREADS": "7"}):
                with share_cores(mesh, environment):
                    found.append(threads())
        return found

    before = threads()
    ((fair, left),) = mm.run_virtual(1, main)
    assert fair == [3] * len(before)
    assert left == before == threads()


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2", "tp=3"])
def test_rank_0_reads_and_writes_for_all(model, expected, tmp_path, dims):
    lines, out = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    lines.write_text("\n".join(LINES))

    def main():
        with mm.DeviceMesh(dims) as mesh:
            return embed_lines(request(model, lines, out, dims), mesh)

    first, *others = mm.run_virtual(mm.Mesh(dims).size, main)
    assert json.loads(first)["ranks"] == len(others) + 1
    assert others == [None] * len(others)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "out", "values"),
    [
        (b"good\n\xff\xfe bad\n", None, ("lines.txt", "line 2", "UTF-8")),
        (b"good\n", "no/such/folder/x.npy", ("no folder", "no/such/folder")),
        (b"good\n", ".", ("folder",)),
    ],
)
def test_all_ranks_hear_what_rank_0_cannot_do(model, tmp_path, content, out, values):
    lines = tmp_path / "lines.txt"
    lines.write_bytes(content)

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            embed_lines(request(model, lines, out and tmp_path / out), mesh)

    def told():
        try:
            main()
        except SentencesError as error:
            return str(error)
        return ""

    for text in mm.run_virtual(2, told):
        names(text, *values)
