"""What is distributed: the sdist is the repository, the wheel the library, and it works alone."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SAMPLE = ["tests/unit/mesh", "tests/unit/trace", "tests/virtual/mesh"]
"""Tests that need nothing of the repository but tests/."""


def run(folder: Path, *command: str | Path) -> str:
    """Run `command` in `folder`, with nothing but what is installed; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def tracked() -> set[str]:
    """List the files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.mark.deep
def test_sdist_and_wheel(tmp_path):
    files = tracked()
    clone = tmp_path / "clone"
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    # Without a network: by the setuptools that is installed.
    run(clone, sys.executable, "-m", "build", "--no-isolation")

    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        assert files - inside == set()
        archive.extractall(tmp_path, filter="data")
    # What setuptools adds, and folders.
    added = {n for n in inside - files if n and not (clone / n).is_dir()}
    assert {name.split("/")[0] for name in added} <= {"PKG-INFO", "mpimesh.egg-info"}

    (wheel,) = (clone / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert library == {name for name in files if name.startswith("mpimesh/")}

    # An environment with the wheel alone, in which the other packages are those of this one.
    python = tmp_path / "empty" / "bin" / "python"
    venv.create(tmp_path / "empty")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(tmp_path, *install, "--no-index", wheel)
    (packages,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    found = run(tmp_path, python, "-c", "import mpimesh; print(mpimesh.__file__)")
    assert Path(found.strip()) == packages / "mpimesh" / "__init__.py"

    (unpacked,) = tmp_path.glob("mpimesh-*")
    shutil.rmtree(unpacked / "mpimesh")
    printed = run(unpacked, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE)
    assert re.search(r"[1-9]\d+ passed", printed)


def test_the_address_of_the_project_is_the_same_everywhere():
    (home,) = re.findall(r'^Homepage = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    texts = [*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    owner = home.rpartition("/")[0]
    for path in texts:
        for address in re.findall(rf"{owner}/[\w.-]+", path.read_text()):
            assert address.removesuffix(".git") == home, path


def test_citation_and_package_have_one_version():
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_workflows_run_what_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for target in re.findall(r"\bmake ([\w-]+)", path.read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name}: make {target}"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_variable_of_openmp_leaves_make_run_its_ranks(monkeypatch):
    """coreutils' nproc takes OMP_NUM_THREADS for the number of cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = run(ROOT, "make", "-n", "run")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(ROOT, "make", "-n", "run") == plain


def test_an_older_python_is_refused_before_anything_is_searched_for(monkeypatch):
    """Some versions of pip search for minutes, and say nothing of Python."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"3\.11 or newer.*3\.10\.13"):
        runpy.run_path(str(ROOT / "setup.py"))
    stated = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in stated
