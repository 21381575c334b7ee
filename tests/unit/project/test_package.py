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
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUFFIX = EXTENSION_SUFFIXES[0]

SAMPLE = ["tests/unit/mesh", "tests/unit/trace", "tests/virtual/mesh"]
"""Tests that need nothing of the repository but tests/."""


def run(folder: Path, *command: str | Path, code: int = 0, **variables: str) -> str:
    """Run `command` in `folder`, with nothing but what is installed; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def tracked() -> set[str]:
    """List the files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_nothing_that_is_built_is_in_the_repository():
    """Cython's C among it, which tools may leave beside the sources."""
    core = {name for name in tracked() if name.startswith("mpimesh/core/")}
    assert {Path(name).suffix for name in core} <= {".h", ".pxd", ".pxi", ".py", ".pyi", ".pyx"}


def copy_to(folder: Path) -> set[str]:
    """Copy the files of the repository, and nothing that was built; return their names."""
    files = tracked()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return files


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel alone, where the other packages are those of here; return the Python."""
    python = folder / "bin" / "python"
    venv.create(folder)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    run(folder, *command, "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    found = run(folder, python, "-c", "import mpimesh.core.node; print(mpimesh.__file__)")
    assert Path(found.strip()) == packages / "mpimesh" / "__init__.py"
    return python


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_sdist_and_wheel(tmp_path):
    clone = tmp_path / "clone"
    files = copy_to(clone)
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
    parts = {name for name in files if name.startswith("mpimesh/")}
    compiled = {name for name in parts if name.endswith(".pyx")}
    headers = {name for name in parts if name.endswith((".h", ".pxd", ".pxi"))}
    modules = {name.replace(".pyx", SUFFIX) for name in compiled}
    assert library == (parts - compiled - headers) | modules

    python = install(wheel, tmp_path / "empty")
    (unpacked,) = tmp_path.glob("mpimesh-*")
    shutil.rmtree(unpacked / "mpimesh")
    printed = run(unpacked, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE)
    assert re.search(r"[1-9]\d+ passed", printed)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_machine_without_a_compiler_builds_by_zig(tmp_path):
    """With a PATH that has nothing: pip brings zig, for the build alone."""
    clone = tmp_path / "clone"
    copy_to(clone)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, "."],
        cwd=clone,
        env={
            **os.environ,
            "PATH": str(tmp_path),
            "CC": "",
            "PIP_RETRIES": "0",
            "PIP_DEFAULT_TIMEOUT": "20",
        },
        capture_output=True,
        text=True,
    )
    if "No matching distribution found" in done.stderr:
        pytest.skip("pip has no network")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = tmp_path.glob("mpimesh-*.whl")
    install(wheel, tmp_path / "empty")


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_what_is_compiled_is_as_new_as_its_sources(tmp_path):
    """Whatever the times of the files say."""
    clone = tmp_path / "clone"
    copy_to(clone)
    core = clone / "mpimesh" / "core"
    for source in [*core.glob("*.pyx"), *core.glob("*.pxd")]:
        source.write_text("")
    use = [sys.executable, "-c", "import mpimesh.core.node"]
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    assert "is not built for" in run(clone, *use, code=1)
    assert "warning" not in run(clone, *build)
    module = core / f"node{SUFFIX}"
    run(clone, *use)

    built = module.stat()
    (core / "node.h").touch()
    run(clone, *use)
    assert "gcc" not in run(clone, *build)
    assert module.stat().st_mtime_ns == built.st_mtime_ns  # not compiled again

    with (core / "node.h").open("a") as file:
        file.write("/* more */")
    os.utime(core / "node.h", (0, 0))
    assert "is older than its sources for" in run(clone, *use, code=1)
    run(clone, *build)
    run(clone, *use)
    assert module.stat().st_mtime_ns > built.st_mtime_ns


def test_a_python_without_headers_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"Python\.h is missing: install python3-dev .* python3-devel"
    ):
        runpy.run_path(str(ROOT / "build_backend" / "headers.py"))


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
