"""Saves remove nothing but what they have written: in random folders, on success, failure, kill."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import MpimeshError, StoreError
from mpimesh.store.drafts import Draft
from mpimesh.store.files import new_token
from mpimesh.store.format import Manifest, is_manifest
from tests.helpers.depth import examples
from tests.helpers.drafts import left_by_a_kill
from tests.helpers.raises import raises

TOKEN = "0123456789ab"
NAMES = [
    "manifest.json",
    f"{TOKEN}.next",
    f"data-{TOKEN}",
    "data-2024",
    "00000-000.safetensors",
    "notes.txt",
    "zarr.json",
    ".zarray",
    "c",
    "0",
    "step-00000001",
    "step-00000001.left",
    f".ck.{TOKEN}.part",
    f".step-00000001.{TOKEN}.part",
    f".ck.zarr.{TOKEN}.part",
    f".ck.npy.{TOKEN}.part",
    "array.npy",
    "array.zarr",
    "ck",
    "ck.npy",
    "ck.zarr",
    "ck.h5",
]
TEXTS = ["", "{}", '{"name": "my app"}', '{"format":"mpimesh checkpoint","version":1,', "\x93NUMPY"]


class Killed(BaseException):
    """The process is no more: from here on nothing it does has an effect."""


@contextmanager
def failing(after: int, how: str) -> Iterator[None]:
    """Fail at a change of the file system, after so many of them: once, or for ever, as a kill."""
    count = 0

    def changed(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            writes = real is not OPEN or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            count += bool(writes)
            if how == "kill" and count > after and writes:
                raise Killed
            if how == "error" and count == after + 1 and writes:
                raise OSError(28, "No space left on device")
            return None if real is FSYNC else real(*args, **kwargs)

        return call

    names = ["rename", "replace", "unlink", "rmdir", "mkdir", "open", "fsync", "pwrite"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, changed(getattr(os, name)))
        yield


OPEN, FSYNC = os.open, os.fsync
NEW_NAMES = re.compile(r"(?<=step-00000001)\.left|[0-9a-f]{12}(?=\.part)")


def contents(folder: Path) -> dict[str, object]:
    """Return what is in a folder: texts of files, targets of links, by the names of both."""
    found: dict[str, object] = {}
    for at, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(at, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = "-> " + str(path.readlink())
            elif path.is_file():
                found[key] = path.read_bytes()
    return found


def grow(draw: random.Random, folder: Path, root: Path, depth: int = 0) -> None:
    """Put things into a folder that others have made, with names as ours."""
    for name in draw.sample(NAMES, draw.randrange(6)):
        path = folder / name
        if os.path.lexists(path):
            continue
        kind = draw.choice(["file", "file", "folder", "link"])
        if kind == "file" or depth == 3:
            path.write_text(draw.choice(TEXTS))
        elif kind == "folder":
            path.mkdir()
            grow(draw, path, root, depth + 1)
        else:
            path.symlink_to(draw.choice([root / "elsewhere", root / "elsewhere" / "work.txt"]))


def plant(draw: random.Random, run: Path) -> None:
    """Put checkpoints of ours there, whole, without a part, and what a kill has left of one."""
    for name in ("ck", "step-00000001", "step-00000002"):
        if draw.random() < 0.4 and not os.path.lexists(run / name):
            mm.save(run / name, {"old": np.arange(3)})
        if draw.random() < 0.3:
            with suppress(MpimeshError, OSError):  # something else is there
                left_by_a_kill(run / name)
    if draw.random() < 0.2 and not os.path.lexists(run / "ck.zarr"):
        mm.save_array(run / "ck.zarr", np.arange(5))
    for name in ("ck.npy", "ck.zarr"):
        if draw.random() < 0.2:
            with suppress(MpimeshError, Killed, OSError), failing(draw.randrange(12), "kill"):
                mm.save_array(run / name, np.arange(3))
    for each in run.glob(".*.part"):
        os.utime(each, (0, 0), follow_symlinks=False)
    whole = [path for path in run.glob("*/manifest.json") if is_manifest(path)]
    if whole and draw.random() < 0.5:  # a manifest of ours where nothing is that it lists
        (run / "copied").mkdir()
        shutil.copy(whole[0], run / "copied" / "manifest.json")
        (run / "copied" / f"data-{TOKEN}").mkdir()
        (run / "copied" / f"data-{TOKEN}" / "00000-000.safetensors").write_text("others'")


def save_something(draw: random.Random, run: Path) -> None:
    """Save once, in one of the ways that there are."""
    way = draw.choice(["save", "save", "copied", "array", "checkpoints"])
    if way == "checkpoints":
        with mm.Checkpoints(run, keep=1) as kept:
            kept.save(3, {"x": np.ones(2)})
    elif way == "array":
        name = draw.choice(["ck.npy", "ck.zarr", "ck.h5"])
        options: Any = {"dataset": "x"} if name == "ck.h5" else {}
        mm.save_array(run / name, np.ones(3), **options)
    else:
        mm.save(run / ("copied" if way == "copied" else "ck"), {"x": np.ones(2), "n": 1})


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**9), how=st.sampled_from(["nothing", "error", "kill"]))
def test_nothing_goes_but_what_was_saved(seed, how):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "elsewhere" / f"data-{TOKEN}").mkdir(parents=True)
        (root / "elsewhere" / "work.txt").write_text("years")
        run = root / "run"
        run.mkdir()
        grow(draw, run, root)
        others = contents(root)
        plant(draw, run)
        for path in (run / "copied").rglob("*.safetensors"):
            others[str(path.relative_to(root))] = path.read_bytes()
        for path in [each for each in run.rglob("*") if each.is_dir() and not each.is_symlink()]:
            if draw.random() < 0.2:  # beside, and among, what is ours
                note = path / "notes.txt"
                if not os.path.lexists(note):
                    note.write_text("mine")
                    others[str(note.relative_to(root))] = b"mine"
        for name in ("run/ck.npy", "run/ck.h5"):  # an empty file that is named is replaced
            if others.get(name) == b"":
                del others[name]
        for _ in range(2):
            try:
                with warnings.catch_warnings(), failing(draw.randrange(40), how):
                    warnings.simplefilter("ignore")
                    save_something(draw, run)
            except (MpimeshError, Killed):
                pass
            # Where a kill came in between, a folder may have another name, of the same beginning.
            now = {(NEW_NAMES.sub("", path), text) for path, text in contents(root).items()}
            gone = {(NEW_NAMES.sub("", path), text) for path, text in others.items()} - now
            assert not gone, (gone, sorted(map(str, now)))


@pytest.mark.parametrize("name", ["ck", "ck.npy", "ck.zarr", "ck.h5"])
def test_the_next_save_removes_what_a_kill_has_left(name, tmp_path):
    def save():
        if name == "ck":
            mm.save(tmp_path / name, {"x": np.ones(3)})
        else:
            mm.save_array(tmp_path / name, np.ones(3), dataset="x" if name == "ck.h5" else None)

    for after in range(0, 30, 1 if name == "ck" else 2):
        with suppress(Killed), failing(after, "kill"):
            save()
        for each in tmp_path.glob(".ck*"):
            os.utime(each, (0, 0))  # who begins to save is left alone for a minute
        save()
        assert [each.name for each in tmp_path.iterdir()] == [name], after


@pytest.mark.parametrize("text", ["", "note", "others'"])
def test_a_save_that_was_killed_before_its_note_had_its_name(text, tmp_path):
    hidden = tmp_path / f".ck.{TOKEN}.part"
    hidden.mkdir()
    new = hidden / f"{TOKEN}.next"
    new.write_bytes(Manifest({}, {}, None, ()).text() if text == "note" else text.encode())
    mm.save(tmp_path / "ck", [1])
    assert new.exists()  # it may have begun just now
    os.utime(hidden, (0, 0))
    mm.save(tmp_path / "ck", [1])
    assert hidden.exists() == new.exists() == (text == "others'")


def test_folders_of_others_are_refused(tmp_path):
    for name in ("app", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "app" / "manifest.json").write_text(json.dumps({"name": "my app"}))
    (tmp_path / "results" / "data-2024").mkdir()
    (tmp_path / "results" / "data-2024" / "run.csv").write_text("measured")
    before = contents(tmp_path)
    with raises(StoreError, tmp_path / "app", "another program", "another path"):
        mm.save(tmp_path / "app", [1])
    with raises(StoreError, tmp_path / "results", "data-2024", "another path"):
        mm.save(tmp_path / "results", [1])
    assert contents(tmp_path) == before


def test_what_lies_beside_a_checkpoint_stays(tmp_path):
    path = tmp_path / "a"
    mm.save(path, {"x": np.zeros(3)})
    (path / "notes.txt").write_text("mine")
    (path / f"data-{TOKEN}").mkdir()
    mm.save(path, {"x": np.ones(3)})
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / f"data-{TOKEN}").is_dir()
    assert mm.load(path)["x"].tolist() == [1, 1, 1]
    assert len([*path.iterdir()]) == 4
    with mm.Checkpoints(tmp_path / "run", keep=1) as kept:
        kept.save(1, {"x": np.ones(2)})
        notes = kept.path(1) / "notes.txt"
        notes.write_text("mine")
        kept.save(2, {"x": np.ones(2)})
        assert kept.steps == [2]
        assert [*kept.path(1).iterdir()] == [notes]


def test_two_saves_to_one_path_at_once(tmp_path):
    other = Draft(tmp_path / "a", new_token(), [])
    with raises(StoreError, tmp_path / "a", "another save", "path of its own"):
        mm.save(tmp_path / "a", [1])
    with mm.Checkpoints(tmp_path):  # an evaluation, beside a job that saves
        assert other.fresh.is_dir()
    other.close()
    mm.save(tmp_path / "a", [1])
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_files_of_a_damaged_checkpoint_stay(tmp_path):
    """What a killed save has noted may be its files, and the manifest does not say any more."""
    path = tmp_path / "step-00000001"
    mm.save(path, {"x": np.arange(3)})
    left = left_by_a_kill(path)
    (data,) = path.glob("data-*/*")
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with mm.Checkpoints(tmp_path):
        assert not left.exists()
    assert data.is_file()


@pytest.mark.parametrize("linked", ["data-*", "data-*/*"])
def test_nothing_behind_a_link_is_removed(linked, tmp_path):
    """A folder or a file of a killed save that was moved away since, with a link in its place."""
    left = left_by_a_kill(tmp_path / "a")
    (one,) = left.glob(linked)
    moved = one.rename(tmp_path / "moved")
    one.symlink_to(moved)
    before = contents(moved) if moved.is_dir() else moved.read_bytes()
    mm.save(tmp_path / "a", {"x": np.arange(3)})
    assert (contents(moved) if moved.is_dir() else moved.read_bytes()) == before
    assert one.is_symlink()


def test_files_with_names_that_no_save_gives_stay(tmp_path):
    left = left_by_a_kill(tmp_path / "a")
    (left / "notes.txt").write_text("mine")
    listed = (("notes.txt", 0), ("../work.txt", 0))
    (left / "manifest.json").write_bytes(Manifest({}, {}, None, listed).text())
    (tmp_path / "work.txt").write_text("mine")
    mm.save(tmp_path / "a", {"x": np.arange(3)})
    assert (left / "notes.txt").read_text() == "mine"
    assert (tmp_path / "work.txt").read_text() == "mine"


def test_a_link_is_not_written_through(tmp_path):
    work = tmp_path / "work.npy"
    np.save(work, np.arange(3))
    link = tmp_path / "out.npy"
    link.symlink_to(work)
    before = contents(tmp_path)
    with raises(StoreError, link, work):
        mm.save_array(link, np.zeros(3))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", ["readme.txt", "c/notes", "c/0.bak", "sub/thesis.tex"])
def test_what_lies_in_an_array_of_zarr_stays(tmp_path, other):
    path = tmp_path / "a.zarr"
    for chunks in (2, 3):
        mm.save_array(path, np.arange(6), chunks=(chunks,))
    file = path / other
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    before = contents(tmp_path)
    with raises(StoreError, path, file.relative_to(path).parts[0], "another path"):
        mm.save_array(path, np.zeros(6))
    assert contents(tmp_path) == before


def test_a_group_of_zarr_is_no_array(tmp_path):
    import zarr

    group = zarr.open_group(tmp_path / "a.zarr", mode="w", attributes={"kind": "array"})
    group.create_array("temperature", data=np.ones(5))
    before = contents(tmp_path)
    with raises(StoreError, tmp_path / "a.zarr", "no array of Zarr"):
        mm.save_array(tmp_path / "a.zarr", np.zeros(6))
    assert contents(tmp_path) == before
