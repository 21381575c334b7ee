"""The site builds without a warning, has every page, and its links lead somewhere."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mpimesh as mm

DOCS = Path(__file__).parents[3] / "docs"


class Page(HTMLParser):
    """What a page of HTML can be reached by, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets, self.anchors = set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in {"href", "src"} and value:
                self.targets.add(value)


def test_the_names_of_the_reference_are_there():
    for page in (DOCS / "reference").glob("*.rst"):
        for path in re.findall(r"^   ([A-Za-z_][\w.]*)$", page.read_text(), re.M):
            assert operator.attrgetter(path)(mm), f"{page.name}: {path}"


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_it_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    options = ["-q", "-W", "-n", "--keep-going"]
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(DOCS.parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {
        path: Page(path.read_text())
        for path in site.rglob("*.html")
        if not path.is_relative_to(site / "_static")
    }
    assert {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")} <= {
        path.relative_to(site) for path in pages
    }
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert file.is_file(), f"{path.relative_to(site)}: {target}"
            if url.fragment and file in pages:
                assert unquote(url.fragment) in pages[file].anchors, f"{path.name}: {target}"
