"""``python -m mpimesh checkpoint``: what it prints of checkpoints, good and damaged ones."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from typer.testing import CliRunner

import mpimesh as mm
from mpimesh.cli import app
from mpimesh.cli.checkpoint import export, problems_of
from mpimesh.errors import StoreError
from mpimesh.store.files import PART
from mpimesh.store.format import MANIFEST, ArrayEntry, Manifest, Piece, digest_of, read_manifest
from tests.helpers.depth import deep
from tests.helpers.raises import names, raises

ARRAYS = {
    "weight": np.random.default_rng(0).random((6, 4)).astype(np.float32),
    "bias": np.arange(4).astype(ml_dtypes.bfloat16),
    "phase": np.array([1 + 2j, 3 - 1j]),
    "empty": np.empty((0, 3), np.int64),
    "scale": np.array(7, np.int16),
}


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert (result.stderr == "") == (code != 2)
    if code == 2:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result.stderr or result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (100, 200, 300):
        tree = {"model": ARRAYS, "step": step, "loss": float("nan"), "shape": (1, "a")}
        mm.save(tmp_path / f"step-{step:08}", tree)
    return tmp_path


def file_of(checkpoint: Path) -> Path:
    return next(iter(checkpoint.glob("data-*/*.safetensors")))


def rows_of(text: str) -> list[list[str]]:
    return [re.split("  +", line.strip()) for line in text.splitlines()]


def test_ls_marks_what_is_damaged_or_not_finished(folder):
    file_of(folder / "step-00000200").unlink()
    (folder / f".step-00000400.0123456789ab{PART}").mkdir()
    (folder / "step-00000500").mkdir()
    (folder / "step-00000600").mkdir()
    (folder / "step-00000600" / MANIFEST).write_text("{}")
    (folder / "notes.txt").write_text("x")
    head, *rows = rows_of(run("ls", folder))
    assert head == ["checkpoint", "saved", "size", "arrays", "state"]
    assert [row[0] for row in rows] == [f"step-{step:08}" for step in range(100, 700, 100)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", row[1]) for row in rows)
    states = [row[-1] for row in rows]
    assert states[0] == states[2] == "complete"
    assert rows[0][3] == str(len(ARRAYS))
    names(states[1], "damaged", "is missing")
    assert states[3] == "not finished"
    names(states[4], "damaged", MANIFEST)
    names(states[5], "damaged", "not the manifest")


def test_show_tells_arrays_and_values(folder):
    text = run("show", folder / "step-00000100")
    rows = rows_of(text)
    assert ["model.weight", "6 x 4", "float32", "1", "96 B"] in rows
    assert ["model.bias", "4", "bfloat16", "1", "8 B"] in rows
    assert ["model.phase", "2", "complex128", "1", "32 B"] in rows
    assert ["model.empty", "0 x 3", "int64"] in [row[:3] for row in rows]
    assert ["model.scale", "-", "int16", "1", "2 B"] in rows
    assert ["step", "100"] in rows
    assert ["loss", "nan"] in rows
    assert ["shape", "(1, 'a')"] in rows
    assert rows[-1] == ["5 arrays of 138 B in 1 file"]


def test_verify_says_that_all_is_whole(folder):
    text = run("verify", folder / "step-00000100")
    names(text, folder / "step-00000100", "is whole", "5 arrays in 1 file", "checksums")


def header_places(header: bytes) -> list[int]:
    """Return places of a header but for its padding, and the metadata, which nobody reads."""
    metadata = re.search(rb'"__metadata__":\{[^}]*\},', header)
    skipped = range(*metadata.span()) if metadata else range(0)
    return [place for place in range(len(header.rstrip())) if place not in skipped]


@pytest.mark.parametrize("place", ["data", *deep("header"), "manifest", "end"])
def test_verify_finds_each_changed_byte(folder, place):
    checkpoint = folder / "step-00000100"
    path = checkpoint / MANIFEST if place == "manifest" else file_of(checkpoint)
    text = path.read_bytes()
    start = min(8 + int.from_bytes(text[:8], "little"), len(text))
    numbers = {
        "data": range(start, len(text), 5),
        "header": header_places(text[:start]),
        "manifest": range(0, len(text), 11),
        "end": [len(text)],
    }[place]
    for number in numbers:
        changed = bytearray(text)
        changed[number : number + 1] = bytes([changed[number] ^ 1]) if place != "end" else b"x"
        path.write_bytes(changed)
        found = run("verify", checkpoint, code=2 if b'"version":0' in changed else 1)
        names(found, path) if place != "data" else names(found, path, "another checksum")
        if place in ("header", "data"):
            assert problems_of(*read_manifest(checkpoint))


def test_verify_names_each_array_that_is_damaged(folder):
    path = file_of(folder / "step-00000100")
    with safetensors.safe_open(path, framework="np") as file:
        assert "model.weight" in file.keys()  # noqa: SIM118 - it is no dict
    text = bytearray(path.read_bytes())
    _, manifest = read_manifest(folder / "step-00000100")
    for name in ("model.weight", "model.phase"):
        text[manifest.arrays[name].pieces[0].begin] ^= 1
    path.write_bytes(text)
    found = run("verify", folder / "step-00000100", code=1)
    assert sum("another checksum" in line for line in found.splitlines()) == 2
    names(found, "model.weight", "model.phase", "step-00000100 is damaged")
    run("show", folder / "step-00000100")


def test_export_is_what_other_programs_read(folder, tmp_path):
    out = tmp_path / "out.safetensors"
    text = run("export", folder / "step-00000100", out, "--only", "model.*", "--strip", "model.")
    names(text, out, "5 arrays", "138 B")
    with safetensors.safe_open(out, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(ARRAYS)
        for name, array in ARRAYS.items():
            read = file.get_tensor(name)
            if name == "phase":
                read = read.view(np.complex128)[..., 0]
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)
    names(run("verify", out), "is whole", "without checksums")
    run("export", folder / "step-00000100", out, "--only", "*.bias", "--only", "*.scale")
    assert {row[0] for row in rows_of(run("show", out))[1:3]} == {"model.bias", "model.scale"}


def test_export_of_many_pieces_takes_little_memory(tmp_path):
    array = np.random.default_rng(0).random((3000, 1500))
    cuts = [(0, 700), (700, 1500)]
    boxes = [((a, a + 600), cut) for a in range(0, 3000, 600) for cut in cuts]
    pieces, begin = [], 0
    with (tmp_path / "f").open("wb") as file:
        for (top, bottom), (left, right) in boxes:
            data = array[top:bottom, left:right].tobytes()
            file.write(data)
            pieces.append(Piece(0, ((top, bottom), (left, right)), begin, digest_of(data)))
            begin += len(data)
    entry = ArrayEntry(array.shape, array.dtype, tuple(pieces))
    manifest = Manifest({"w": entry}, {}, None, (("f", begin),))
    out = tmp_path / "out.safetensors"
    tracemalloc.start()
    done: list[int] = []
    assert export(tmp_path, manifest, {"w": "v"}, out, done.append) == array.nbytes == sum(done)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20 < array.nbytes
    tracemalloc.stop()
    with safetensors.safe_open(out, framework="np") as file:
        assert (file.get_tensor("v") == array).all()


def test_nothing_is_exported_of_what_is_damaged(folder, tmp_path):
    path = file_of(folder / "step-00000100")
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    out = tmp_path / "out.safetensors"
    names(run("export", folder / "step-00000100", out, code=2), path, "another checksum")
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*out*"))


def test_what_cannot_be_done_is_said_in_a_line(folder, tmp_path):
    checkpoint = folder / "step-00000100"
    out = tmp_path / "out.safetensors"
    names(run("ls", tmp_path / "none", code=2), tmp_path / "none", "No such file")
    names(run("ls", checkpoint, code=2), "checkpoint show")
    names(run("show", tmp_path, code=2), tmp_path, "no checkpoint")
    names(run("verify", tmp_path / "none", code=2), tmp_path / "none")
    names(run("export", checkpoint, out, "--only", "other.*", code=2), "other.*")
    names(run("export", checkpoint, tmp_path / "no" / "f", code=2), tmp_path / "no" / "f")
    mm.save(tmp_path / "two", {"a": {"w": np.zeros(2)}, "w": np.zeros(2)})
    found = run("export", tmp_path / "two", out, "--strip", "a.", code=2)
    names(found, "'w' twice", "another name")


def test_no_mpi_is_started(folder):
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom mpimesh.cli import app\n"
        "result = CliRunner().invoke(app, ['checkpoint', 'verify', sys.argv[1]])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(folder / "step-00000100")]
    subprocess.run(command, check=True, timeout=60)


def test_an_export_replaces_no_file_of_others(tmp_path):
    mm.save(tmp_path / "a", {"x": np.ones(2)})
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    link = tmp_path / "link.safetensors"
    link.symlink_to(notes)
    folder, manifest = read_manifest(tmp_path / "a")
    for out in (notes, link):
        with raises(StoreError, out, "another name"):
            export(folder, manifest, {"x": "x"}, out)
    assert notes.read_text() == "mine"
    for _ in range(2):
        export(folder, manifest, {"x": "x"}, tmp_path / "out.safetensors")
