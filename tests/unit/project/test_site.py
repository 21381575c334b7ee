"""The site builds without a warning, has every page, and its links lead somewhere."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

import mpimesh as mm

DOCS = Path(__file__).parents[3] / "docs"
REFERS = {"href", "src"}


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
            elif name in REFERS and value:
                self.targets.add(value)


def test_the_names_of_the_reference_are_there():
    for page in (DOCS / "reference").glob("*.rst"):
        for path in re.findall(r"^   ([A-Za-z_][\w.]*)$", page.read_text(), re.M):
            assert operator.attrgetter(path)(mm), f"{page.name}: {path}"


def links_and_anchors(page: Path) -> tuple[set[str], set[str]]:
    """Return what a page of Markdown refers to, and the anchors that its headings will have."""
    targets, anchors = set[str](), set[str]()
    for before, token in pairwise(MarkdownIt().parse(page.read_text())):
        parts = token.children or []
        targets |= {str(part.attrs[name]) for part in parts for name in part.attrs.keys() & REFERS}
        if before.type == "heading_open":
            title = "".join(part.content for part in parts).lower()
            anchors.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return targets, anchors


def test_links_between_pages_lead_somewhere():
    """Those of the Markdown itself; what the site makes of them, the next test sees."""
    pages = {path: links_and_anchors(path) for path in DOCS.rglob("*.md")}
    missing = []
    for path, (targets, _) in pages.items():
        for target, url in ((target, urlsplit(target)) for target in targets):
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not file.exists() or (url.fragment and unquote(url.fragment) not in pages[file][1]):
                missing.append(f"{path.relative_to(DOCS)}: {target}")
    assert not missing


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
