"""The checkpoints of a run: which are kept, which is loaded, what happens on a full disk."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DamagedError, StoreError
from mpimesh.store import DamagedCheckpointWarning, LeftCheckpointWarning
from tests.helpers.drafts import left_by_a_kill
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises


def run(
    folder: Path, steps: range, *, ranks: int = 2, **options: Any
) -> list[tuple[int, list[float]]]:
    """Go on with a run; return for each rank the step that it began after, and what it had."""

    def main(mesh: mm.DeviceMesh) -> tuple[int, list[float]]:
        with mm.Checkpoints(folder, mesh, **options) as checkpoints:
            x = mm.zeros(5, mesh, "dp=S0")
            state: dict[str, Any] = {"x": x, "losses": []}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedCheckpointWarning)
                state = checkpoints.load(state) or state
            begun = checkpoints.step, list(state["losses"])
            assert x.full().tolist() == [float(checkpoints.step)] * 5
            for step in range(max(steps.start, checkpoints.step + 1), steps.stop):
                x.local[...] = step
                state["losses"].append(step / 2)
                assert checkpoints.save(step, state) == checkpoints.is_due(step)
            return begun

    return on_ranks(f"dp={ranks}", main)


def test_a_folder_that_cannot_be_listed_is_an_error_on_all_ranks(tmp_path):
    """Only the first rank lists it; the other one must not wait for what does not come."""

    def main(mesh: mm.DeviceMesh) -> str:
        with mm.Checkpoints(tmp_path / "run", mesh) as checkpoints:
            mesh.group().barrier()
            if mesh.rank == 0:
                (tmp_path / "run").rmdir()
                (tmp_path / "run").write_text("a file")
            with raises(
                StoreError, "cannot load from", tmp_path / "run", "Not a directory"
            ) as error:
                checkpoints.load()
            return str(error.value)

    first, second = on_ranks("dp=2", main)
    assert first == second


@pytest.mark.parametrize("wait", [True, False])
def test_the_last_ones_are_kept(tmp_path, wait):
    folder = tmp_path / "run"
    assert run(folder, range(1, 12), every=2, keep=3, wait=wait) == [(0, [])] * 2
    assert sorted(each.name for each in folder.iterdir()) == [
        "step-00000006",
        "step-00000008",
        "step-00000010",
    ]
    begun = [(10, [step / 2 for step in range(1, 11)])]
    assert run(folder, range(1, 15), ranks=3, every=2, keep=1, wait=wait) == begun * 3
    assert [each.name for each in folder.iterdir()] == ["step-00000014"]
    run(folder, range(1, 20), ranks=1, every=1, keep=None, wait=wait)
    assert len([*folder.iterdir()]) == 6


def damage(path: Path, how: str) -> None:
    file = next(path.rglob("*.safetensors"))
    manifest = path / "manifest.json"
    text = bytearray(file.read_bytes())
    if how == "flipped":
        text[-1] ^= 4
        file.write_bytes(text)
    elif how == "cut":
        file.write_bytes(text[:-8])
    elif how == "missing":
        file.unlink()
    elif how == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"x"', b'"y"'))
    else:
        manifest.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "manifest", "no manifest"])
def test_a_damaged_one_is_stepped_over(tmp_path, how):
    folder = tmp_path / "run"
    run(folder, range(1, 5), keep=None)
    damage(folder / "step-00000004", how)

    def load(mesh: mm.DeviceMesh) -> int:
        with mm.Checkpoints(folder, mesh) as checkpoints:
            x = mm.zeros(5, mesh, "dp=S0")
            told: list[str] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                checkpoints.load({"x": x})
                told = [str(each.message) for each in caught if mesh.rank == 0]
            assert x.full().tolist() == [3.0] * 5
            if how != "no manifest":
                with pytest.raises(DamagedError):
                    checkpoints.load({"x": x}, step=4)
            return sum("step 4" in text and "step-00000004" in text for text in told)

    counts = on_ranks("dp=1", load)
    assert counts == [how != "no manifest"]
    if how == "no manifest":
        with raises(StoreError, "step-00000004", "no checkpoint"):
            run(folder, range(1, 6), keep=None)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(folder, range(1, 6), ranks=1, keep=None)  # the damaged one is replaced
    aside = [str(each.message) for each in caught if "step-00000004.left" in str(each.message)]
    assert len(aside) == (how == "manifest") == (folder / "step-00000004.left").exists()
    assert on_ranks("dp=1", lambda mesh: mm.Checkpoints(folder, mesh).steps) == [[1, 2, 3, 4, 5]]
    for step in range(1, 6):
        damage(folder / f"step-{step:08}", "flipped")
    with pytest.raises(DamagedError):
        run(folder, range(1, 6))


def test_a_course_that_was_left_is_set_aside(tmp_path):
    folder = tmp_path / "run"

    def main(mesh: mm.DeviceMesh) -> None:
        x = mm.zeros(4, mesh, "dp=S0")
        with mm.Checkpoints(folder, mesh, every=10, keep=2) as checkpoints:
            for step in (10, 20, 30):
                checkpoints.save(step, {"x": x, "course": "old"})
        with mm.Checkpoints(folder, mesh, every=5, keep=2) as checkpoints:
            checkpoints.load(step=20)
            if mesh.rank:
                checkpoints.save(25, {"x": x, "course": "new"})
            else:
                with pytest.warns(LeftCheckpointWarning, match=r"step 30 .* after step 25"):
                    checkpoints.save(25, {"x": x, "course": "new"})
        with mm.Checkpoints(folder, mesh) as checkpoints:
            assert checkpoints.load()["course"] == "new"
            assert checkpoints.step == 25

    on_ranks("dp=2", main)
    names = ["step-00000020", "step-00000025", "step-00000030.left"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert mm.load(folder / names[2])["course"] == "old"


def test_without_mpi(tmp_path):
    run(tmp_path / "run", range(1, 6), every=2)
    with mm.Checkpoints(tmp_path / "run", every=2) as checkpoints:
        assert checkpoints.steps == [2, 4]
        assert checkpoints.load()["x"].tolist() == [4.0] * 5
        assert checkpoints.step == 4
        checkpoints.save(6, {"x": np.ones(5)})
        assert checkpoints.steps == [2, 4, 6]
    with pytest.raises(StoreError, match="2 ranks"):
        mm.run_virtual(2, lambda: mm.Checkpoints(tmp_path / "run"))


def test_what_was_not_finished_goes(tmp_path):
    folder = tmp_path / "run"
    run(folder, range(1, 2))
    left_by_a_kill(folder / "step-00000002")
    (folder / "mine.txt").write_text("not ours")
    run(folder, range(1, 2))
    assert sorted(each.name for each in folder.iterdir()) == ["mine.txt", "step-00000001"]


def test_refusals(tmp_path):
    (tmp_path / "file").write_text("mine")

    def main(mesh: mm.DeviceMesh) -> None:
        with raises(StoreError, "is a file"):
            mm.Checkpoints(tmp_path / "file", mesh)
        options: Any
        for options in ({"keep": 0}, {"every": 0}, {"wait": 2}, {"keep": 2 + mesh.rank}):
            with pytest.raises(StoreError):
                mm.Checkpoints(tmp_path / "run", mesh, **options)
        with raises(StoreError, "mesh must be"):
            mm.Checkpoints(tmp_path / "run", 3)  # type: ignore[arg-type]
        checkpoints = mm.Checkpoints(tmp_path / "run", mesh, every=2)
        assert checkpoints.load({}) is None
        with raises(StoreError, "no checkpoint of step 5"):
            checkpoints.load(step=5)
        assert not checkpoints.save(1, [1])
        assert checkpoints.save(1, [1], force=True)
        checkpoints.close()
        with raises(StoreError, "closed"):
            checkpoints.save(2, [1])

    on_ranks("dp=2", main)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_at_every_save(small_disk, wait):
    folder = small_disk / "run"

    def main(mesh: mm.DeviceMesh) -> None:
        checkpoints = mm.Checkpoints(folder, mesh, keep=1, wait=wait)
        x = mm.zeros(70_000, mesh, "dp=S0")  # 560 KB: room for one, and not for two
        filler = small_disk / "filler"
        checkpoints.save(1, {"x": x})
        for step in range(2, 12):
            x.local[...] = step
            if mesh.rank == 0:
                room = os.statvfs(small_disk)
                filler.write_bytes(bytes(room.f_bavail * room.f_bsize * (step % 5) // 5))
            mesh.barrier()
            with raises(StoreError, "No space left on device", "as it was"):
                checkpoints.save(step, {"x": x})
                checkpoints.close()
            checkpoints = mm.Checkpoints(folder, mesh, keep=1, wait=wait)
            assert checkpoints.steps == [1]
            x.local[...] = -1
            checkpoints.load({"x": x})
            assert not x.full().any()
            if mesh.rank == 0:
                filler.unlink(missing_ok=True)
            mesh.barrier()
        x = mm.zeros(10, mesh, "dp=S0")
        checkpoints.save(12, {"x": x})
        checkpoints.close()
        mesh.barrier()
        assert checkpoints.steps == [12]

    on_ranks("dp=2", main)
    assert [each.name for each in folder.iterdir()] == ["step-00000012"]
    np.testing.assert_array_equal(mm.load(folder / "step-00000012")["x"], np.zeros(10))
