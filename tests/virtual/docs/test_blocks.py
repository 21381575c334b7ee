"""Each block of code on each page does what the page says.

The blocks of a page run in order: `python` on virtual ranks, each with names of its own that last
to its end, `console` and `sh` as commands of mpimesh. Comments of HTML say what is special.
Before the first heading they are about the whole page, else about the next block:

    <!-- ranks: 3 -->           on so many virtual ranks, else 4
    <!-- one process -->        in the main thread, as a program that calls mm.run_virtual
    <!-- output -->             a `text` block: what the block before it has printed, its lines in
                                any order; "..." stands for anything
    <!-- needs: torch -->       without these packages it is skipped
    <!-- not run: it needs a GPU -->
    <!-- deep -->               not in a quick run
    <!-- run: assert x == 3 --> runs as the block before it, and is not shown; may have more lines
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import pytest
import typer.main
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import mpimesh as mm
from mpimesh.cli import app
from mpimesh.errors import MissingPackageError
from mpimesh.testing.launch import LaunchResult

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
    if "generated" not in path.parts and path.name != "CHANGELOG.md"
)
MARKS = {"ranks", "one process", "output", "needs", "not run", "deep", "run"}
CHANGING = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>"),
    (r"took [0-9.]+ s", "took <seconds>"),
    (r"[0-9.]+ MiB", "<size>"),
]
"""What differs from run to run in the outputs of commands."""


@dataclass(frozen=True)
class Block:
    """A block of code, or what a comment has to run."""

    kind: str
    text: str
    line: int
    marks: dict[str, str]

    @property
    def ranks(self) -> int:
        """The number of virtual ranks, 0 for the main thread."""
        return 0 if "one process" in self.marks else int(self.marks.get("ranks", 4))


def blocks_of(page: Path) -> list[Block]:
    """Read a page: its blocks of code, each with the marks of its page and its own."""
    blocks: list[Block] = []
    page_marks: dict[str, str] = {}
    marks: dict[str, str] = {}
    headed = False
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "heading_open":
            headed = True
        elif token.type == "html_block":
            for comment in re.findall(r"<!--(.*?)-->", token.content, re.S):
                key, _, value = comment.strip().partition(":")
                assert key in MARKS, f"{page}:{line}: unknown mark {key!r}"
                if key == "run":
                    code = value.lstrip(" ").removeprefix("\n")
                    where = [one.marks for one in blocks if one.kind == "python"][-1:]
                    same = page_marks | (marks or (where[0] if where else {}))
                    blocks.append(Block("python", code, line, same | {"run": ""}))
                elif headed:
                    marks[key] = value.strip()
                else:
                    page_marks[key] = value.strip()
        elif token.type == "fence":
            blocks.append(Block(token.info.strip(), token.content, line + 1, page_marks | marks))
            marks = {}
    return blocks


BLOCKS = {page: blocks_of(page) for page in PAGES}


class Lines(io.TextIOBase):
    """Whole lines of each thread, for prints of several ranks would else run together."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._begun = threading.local()

    def write(self, text: str) -> int:
        *whole, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self.lines += whole
        self._begun.text = rest
        return len(text)

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Run:
    """A run of a page's blocks, in a folder of its own."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.printed = Lines()
        self.outputs: dict[int, list[str]] = {}
        self.names: dict[int, dict[str, Any]] = {}

    def python(self, blocks: list[Block]) -> None:
        """Run blocks on one number of ranks; what they make, a mesh too, lasts for all of them."""
        ranks = blocks[0].ranks
        codes = [
            compile("\n" * (one.line - 1) + one.text, str(ROOT / self.page), "exec")
            for one in blocks
        ]
        numbers = iter(blocks)

        def take() -> None:
            self.outputs[next(numbers).line] = self.printed.take()

        together = threading.Barrier(ranks or 1, action=take)

        def main() -> None:
            rank = int(threading.current_thread().name.rpartition(" ")[2]) if ranks else 0
            own = self.names.setdefault(rank, {"mm": mm, "np": np, "__name__": "__main__"})
            for code in codes:
                try:
                    exec(code, own)
                except BaseException:
                    together.abort()
                    raise
                together.wait()

        with contextlib.redirect_stdout(cast(TextIO, self.printed)):
            if ranks:
                mm.run_virtual(ranks, main)
            else:
                main()

    def commands(self, block: Block) -> None:
        """Run those commands of mpimesh that take no time, and compare what a console shows."""
        output = []
        for command, shown in commands_of(block):
            words = mpimesh_words(command)
            if words and words[0] in {"simulate", "checkpoint"}:
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{self.page}: {command}\n{result.output}"
                output += result.output.splitlines()
                if block.kind == "console":
                    assert masked(result.output) == masked(shown), command
        self.outputs[block.line] = output


def masked(text: str) -> str:
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text)
    return text.strip()


def compare(shown: str, printed: list[str], place: str) -> None:
    """Compare a text with what ranks have printed, whose lines may come in any order."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if checker.check_output(shown, "\n".join(printed) + "\n", flags):
        return
    rest = [line for line in printed if line.strip()]
    for line in filter(str.strip, shown.splitlines()):
        met = next((one for one in rest if checker.check_output(line, one, flags)), None)
        assert met is not None, f"{place}: not printed: {line!r}, but {rest}"
        rest.remove(met)
    assert not rest, f"{place}: printed and not shown: {rest}"


def runs(block: Block) -> bool:
    return block.kind in {"python", "console", "sh"} and "not run" not in block.marks


def require(block: Block, config: pytest.Config) -> None:
    for package in block.marks.get("needs", "").split():
        pytest.importorskip(package)
    if "deep" in block.marks and not (config.getoption("--deep") or config.getoption("--rest")):
        pytest.skip("runs in make test-all only")


def parts_of(blocks: list[Block]) -> Iterator[tuple[str, list[Block]]]:
    """Yield the blocks that run together, in order: those of Python on one number of ranks."""
    part: list[Block] = []
    for block in blocks:
        if (
            part
            and block.kind != "text"
            and (part[0].kind, part[0].ranks) != (block.kind, block.ranks)
        ):
            yield part[0].kind, part
            part = []
        part.append(block)
    if part:
        yield part[0].kind, part


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(runs, BLOCKS[page]))], ids=str)
def test_a_page(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setenv("MPLBACKEND", "agg")
    run, last = Run(page), 0
    blocks = [block for block in BLOCKS[page] if runs(block) or "output" in block.marks]
    for block in blocks:
        require(block, request.config)
    for language, several in parts_of(blocks):
        code = [block for block in several if block.kind != "text"]
        if language == "python":
            run.python(code)
        else:
            for block in code:
                run.commands(block)
        for block in several:
            if block.kind == "text":
                compare(block.text, run.outputs[last], f"{page}:{block.line}")
            elif "run" not in block.marks and (block.kind == "python" or run.outputs[block.line]):
                last = block.line
    text = (ROOT / page).read_text()
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        if f'"{Path(picture).name}"' in text:  # the page draws what it shows
            assert Path(picture).stat().st_size > 500
            if os.environ.get("PAGES_REDRAW"):
                shutil.copy(picture, ROOT / page.parent)


def alike(one: Block, other: Block) -> bool:
    """Tell whether both blocks are Python that a reader sees, on one number of ranks."""
    return (one.kind, one.ranks) == (other.kind, other.ranks) and "run" not in one.marks


def whole_programs() -> list[Any]:
    programs = []
    for page, blocks in BLOCKS.items():
        for block, after in itertools.zip_longest(blocks, blocks[1:]):
            if block.kind == "python" and "__name__ ==" in block.text and runs(block):
                shown = after.text if after is not None and "output" in after.marks else None
                if "import mpimesh" not in block.text:  # it is cut over blocks
                    before = blocks[: blocks.index(block)]
                    parts = [one.text for one in before if runs(one) and alike(one, block)]
                    block = replace(block, text="\n".join([*parts, block.text]))
                programs.append(pytest.param(page, block, shown, id=f"{page}:{block.line}"))
    return programs


@pytest.mark.deep
@pytest.mark.parametrize(("page", "block", "shown"), whole_programs())
def test_a_whole_program_under_mpiexec(
    page: Path,
    block: Block,
    shown: str | None,
    launch: Callable[..., LaunchResult],
    request: pytest.FixtureRequest,
) -> None:
    require(block, request.config)
    result = launch(block.ranks or 1, block.text, env={"MPLBACKEND": "agg"})
    assert result.returncode == 0, str(result)
    if shown is not None:
        compare(shown, result.stdout.splitlines(), f"{page}:{block.line}")


NOT_RUN = [
    pytest.param(block, id=f"{page}:{block.line}")
    for page, blocks in BLOCKS.items()
    for block in blocks
    if "not run" in block.marks
]


@pytest.mark.parametrize("block", NOT_RUN)
def test_a_block_that_is_not_run_says_why_and_can_be_read(block: Block) -> None:
    assert block.marks["not run"], "which reason?"
    if block.kind == "python":
        compile(block.text, "block", "exec")


# -- commands of a shell ---------------------------------------------------------------------------

ELSEWHERE = {
    *("apptainer", "cat", "cd", "cp", "done", "do", "echo", "eval", "export", "for"),
    *("flux", "git", "grep", "ldd", "ls", "mkdir", "module", "nvidia-smi", "pkg-config", "podman"),
    *("qsub", "salloc", "scancel", "scontrol", "sed", "sinfo", "source", "squeue", "ulimit"),
    *("which", "while", "docker", "tar", "df", "du", "chmod", "conda", "spack", "nsys", "ps"),
    *(
        "pre-commit",
        "ruff",
        "mypy",
        "pytest",
        "kill",
        ".",
        "sacct",
        "ompi_info",
        "less",
        "uv",
        "ln",
    ),
}
"""Programs of others, whose options nobody checks here."""
STARTERS = {
    "mpiexec",
    "mpirun",
    "srun",
    "sbatch",
    "env",
    "time",
    "nice",
    "exec",
    "python",
    "python3",
}


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command, without comments, and what a console shows after it."""
    text = block.text.replace("\\\n", " ")
    if block.kind == "console":
        yield from re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.M)
        return
    for line in text.splitlines():
        for command in re.split(r"\s(?:&&|\|\||\||;)\s|;\s", re.sub(r"(^|\s)#.*", "", line)):
            if command.strip():
                yield command.strip(), ""


def split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return [*itertools.dropwhile(lambda word: re.match(r"[A-Z_0-9]+=", word), words)]


def mpimesh_words(command: str) -> list[str] | None:
    """Return the arguments of mpimesh's own command, None if it is another's."""
    found = re.search(r"(?:^|\s|\()(?:python3? -m )?mpimesh\s+([^)]*)", command)
    starts = split(command)[0] in STARTERS | {"mpimesh", "eval"} if found else False
    return split(found[1].removesuffix(')"')) if found and starts else None


def check_mpimesh(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    options = {"--help", *(name for one in command.params for name in one.opts)}
    for word in itertools.takewhile(lambda word: word[0] not in "<>|&", words):
        if word.startswith("-"):
            name = word.partition("=")[0]
            assert name in options or not name.strip("-")[:1].isalpha(), f"no option {name}"
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
            options = {"--help"} | {
                name for one in command.params for name in (*one.opts, *one.secondary_opts)
            }
        elif getattr(command, "commands", {}):
            raise AssertionError(f"no command {word}")


def sources_of(program: Path) -> str:
    """Return the text of an example and of what its folder has for it."""
    return "\n".join(path.read_text() for path in sorted(program.parent.rglob("*.py")))


def check(command: str) -> None:
    """Fail if a command names what is not there."""
    if (own := mpimesh_words(command)) is not None:
        check_mpimesh(own)
        return
    words = split(command)
    if not words:
        return
    if words[0] == "make":
        targets = [word for word in words[1:] if not re.match(r"[A-Z_]+=|-", word)]
        for target in targets:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(
                rf"^{re.escape(target)}:|\.PHONY:(?:.*\\\n)*.*\s{target}\s"
                rf"|^\$\(RANKS:%={re.sub(r'[0-9]+$', '%', target)}\)",
                makefile,
                re.M,
            ), f"no target {target}"
        for name in re.findall(r"\b([A-Z_]+)=", " ".join(words[1:])):
            assert re.search(rf"\b{name}\b", (ROOT / "Makefile").read_text()), f"no variable {name}"
        return
    if words[0].endswith("pip") or "pip" in words[:4]:
        project = (ROOT / "pyproject.toml").read_text()
        for group in re.findall(r"(?:mpimesh|\.)\[([\w,]+)\]", command):
            for extra in group.split(","):
                assert f"\n{extra} = [" in project, f"no extra {extra}"
        return
    program = next((word for word in words if word.endswith((".py", ".sbatch", ".sh"))), None)
    if program is not None and "/" in program and not program.startswith(("/", "$", "~")):
        assert (ROOT / program).is_file(), f"no file {program}"
        if program.startswith("examples/"):
            text = sources_of(ROOT / program)
            for word in words[words.index(program) + 1 :]:
                if word.startswith("--"):
                    name = word[2:].partition("=")[0]
                    assert re.search(rf"--{name}\b|\b{name.replace('-', '_')}\b", text), (
                        f"{program} has no option --{name}"
                    )
        return
    name = words[0]
    assert (
        name in ELSEWHERE | STARTERS
        or (ROOT / name).exists()
        or name.startswith(("$", "(", "-", ".venv", "/"))
        or re.match(r"\w+=", name)
    ), f"what is {name}?"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(one.kind == "sh" for one in BLOCKS[page])], ids=str
)
def test_commands_name_what_is_there(page):
    wrong = []
    for block in BLOCKS[page]:
        if block.kind == "sh":
            for command, _ in commands_of(block):
                try:
                    check(command)
                except AssertionError as error:
                    wrong.append(f"{page}:{block.line}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_are_there(page):
    """Whatever stands in the text as `mm.name`, or `mpimesh.room.name`."""
    missing = []
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for root, path in set(re.findall(r"`(mm|mpimesh)((?:\.[A-Za-z_]\w*)+)", text)):
        thing: Any = mm
        for name in path[1:].split("."):
            if hasattr(thing, name):
                thing = getattr(thing, name)
                continue
            module = f"{getattr(thing, '__name__', '')}.{name}"
            try:
                thing = importlib.import_module(module)
            except MissingPackageError:
                break
            except ModuleNotFoundError:
                missing.append(root + path)
                break
    assert not missing, f"{page}: no such names: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_are_named_are_there(page):
    """Whatever stands in the text as `room/file.py`, in the library or beside it."""
    named = re.findall(r"`((?:[a-z_]+/)+\w+\.pyi?)`", (ROOT / page).read_text())
    missing = [
        one for one in named if not ((ROOT / one).is_file() or (ROOT / "mpimesh" / one).is_file())
    ]
    assert not missing, f"{page}: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / page.parent / link).exists()]
    assert not missing, f"{page}: {missing}"
