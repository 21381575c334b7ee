"""Lines, and which of them are refused."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpimesh.errors import SentencesError
from mpimesh.models.lines import Lines
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def lines_of(path, most_lines=2, most_bytes=10):
    found = []
    with Lines(path) as lines:
        while window := lines.window(most_lines=most_lines, most_bytes=most_bytes):
            assert len(window) <= most_lines
            assert sum(map(len, window[:-1])) < most_bytes
            found += window
        return found, lines.total


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n\n", ["", "", ""]),
        (b"a", ["a"]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb\r\n\r\nc\rd", ["a", "b", "", "c\rd"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", [""]),
        ("a\fb\vc\x1cd\x85e\u2028f\u2029g\n".encode(), ["a\fb\vc\x1cd\x85e\u2028f\u2029g"]),
    ],
)
def test_a_line_ends_with_a_line_feed_and_nothing_else(tmp_path, content, expected):
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    assert lines_of(path) == (expected, len(expected))


@settings(max_examples=examples(60))
@given(
    st.lists(st.text("ab\r\f\x1c\x85\u2028\ufeff\U0001f600", max_size=6)),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_there_are_as_many_lines_as_line_feeds(tmp_path_factory, texts, most_lines, most_bytes):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes("".join(f"{text}\n" for text in texts).encode())
    found, total = lines_of(path, most_lines, most_bytes)
    texts = [text.removesuffix("\r") for text in texts]
    assert total == len(texts)
    assert found == [texts[0].removeprefix("\ufeff"), *texts[1:]] if texts else not found


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"good\n\xff\xfe bad\n", ("line 2", "UTF-8")),
        (b"good\ngood\ncut \xe2\x80", ("line 3", "UTF-8")),
        ("zwei\nzeilen\n".encode("utf-16-le"), ("line 1", "NUL")),
    ],
)
def test_a_file_on_disk_is_refused_before_its_first_line(tmp_path, content, values):
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    with raises(SentencesError, *values) as info:
        Lines(path)
    assert str(info.value).count("lines.txt") == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (".", ("directory",)),
        ("none.txt", ("none.txt", "No such file")),
        ("none/none.txt", ("none/none.txt", "No such file")),
        ("a\0b", ("null byte",)),
    ],
)
def test_what_is_no_file_is_named(tmp_path, name, values):
    with raises(SentencesError, tmp_path, *values):
        Lines(tmp_path / name)


def test_a_pipe_is_read_as_it_comes(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"a\nb\n\xff\n",))
    writer.start()
    with Lines(path) as lines:
        assert lines.total is None
        assert lines.window(most_lines=2, most_bytes=100) == ["a", "b"]
        with raises(SentencesError, path, "line 3", "UTF-8"):
            lines.window(most_lines=2, most_bytes=100)
    writer.join()


def test_without_a_standard_input_it_says_so(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with raises(SentencesError, "standard input"):
        Lines("-")
