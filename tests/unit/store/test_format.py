"""Manifests and headers: what is written is read, and what is not so is refused."""

from __future__ import annotations

import json
import math
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save

from mpimesh.errors import DamagedError, DTypeError, StoreError
from mpimesh.layout.boxes import fits, uncovered, view, volume, whole
from mpimesh.store.format import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    Piece,
    digest_of,
    file_dtype,
    missing_in,
    parse_safetensors,
    read_manifest,
    safetensors_header,
    tensor_name,
)
from mpimesh.store.parts import from_json, to_json
from tests.helpers.depth import examples, is_deep
from tests.helpers.raises import raises

PLAIN = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8"]
EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2"]
SMALL = [np.dtype(getattr(ml_dtypes, name)) for name in ["bfloat16", *EIGHT_BITS]]
DTYPES = [*map(np.dtype, PLAIN), *SMALL]
MUTATIONS = 34_000 if is_deep() else 4_000
"""Of each of three kinds."""
OURS = (DamagedError, StoreError, DTypeError)


def sealed(body: bytes) -> bytes:
    """Return a manifest's text with the checksum that fits, as a forger would."""
    body = re.sub(rb',\s*"xxh3_64":[^,]*\}\s*$', b"", body)
    return body + b',\n"xxh3_64":"%016x"}\n' % digest_of(body)


# -- round trips -----------------------------------------------------------------------------------


@st.composite
def grids(draw):
    """A shape, and boxes that make it up."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes: list[Any] = [()]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [(*box, pair) for box in boxes for pair in list(pairwise(cuts)) or [(0, 0)]]
    return shape, draw(st.permutations(boxes))


def json_values():
    numbers = st.integers(-(2**200), 2**200) | st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.none() | st.booleans() | numbers | st.text()
    keys = st.text(max_size=3) | st.sampled_from(["$", "$float", "$$float", "nan"])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    )


@st.composite
def manifests(draw):
    files: list[list[Any]] = [
        [f"data-{number}/0.safetensors", 64] for number in range(draw(st.integers(1, 3)))
    ]
    arrays = {}
    for name in draw(st.lists(st.text(max_size=5), max_size=4, unique=True)):
        shape, boxes = draw(grids())
        entry = ArrayEntry(shape, draw(st.sampled_from([*DTYPES, np.dtype("c16")])), ())
        pieces = []
        for box in boxes:
            number = draw(st.integers(0, len(files) - 1))
            digest = draw(st.none() | st.integers(0, 2**64 - 1))
            pieces.append(Piece(number, box, files[number][1], digest))
            files[number][1] += entry.nbytes(pieces[-1])
        arrays[name] = ArrayEntry(shape, entry.dtype, tuple(pieces))
    values = draw(st.dictionaries(st.text(max_size=3), json_values(), max_size=3))
    return Manifest(
        arrays, values, draw(json_values()), tuple((name, size) for name, size in files)
    )


@settings(max_examples=examples(300))
@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    text = manifest.text()
    parsed = Manifest.parse(text, "m")
    assert (parsed.arrays, parsed.files) == (manifest.arrays, manifest.files)
    # -0.0 is 0.0 and True is 1 otherwise.
    assert repr((parsed.values, parsed.tree)) == repr((manifest.values, manifest.tree))
    assert parsed.text() == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))


@settings(max_examples=examples(1000))
@given(grids(), st.data())
def test_what_is_missing_is_a_box_without_a_piece(case, data):
    shape, boxes = case
    boxes = data.draw(st.lists(st.sampled_from(boxes), max_size=len(boxes) + 2))
    marks = np.zeros(shape, bool)
    for box in boxes:
        view(marks, box)[...] = True
    gap = missing_in(
        ArrayEntry(shape, np.dtype("i1"), tuple(Piece(0, box, 0, None) for box in boxes))
    )
    assert (gap is None) == bool(marks.all())
    if gap is not None:
        assert fits(gap, shape)
        assert volume(gap)
        assert not view(marks, gap).any()


def test_boxes_may_overlap():
    boxes = [((0, 3), (0, 3)), ((0, 3), (0, 3)), ((1, 4), (1, 4)), ((0, 1), (2, 4))]
    assert uncovered(boxes, whole((4, 4))) == ((3, 4), (0, 1))
    assert uncovered([*boxes, ((3, 4), (0, 2))], whole((4, 4))) is None


def test_many_pieces_are_covered_quickly():
    rows = [((row, row + 1), (0, 64)) for row in range(50_000)]
    assert uncovered(rows, whole((50_000, 64))) is None
    assert uncovered(rows[:-1], whole((50_000, 64))) == ((49_999, 50_000), (0, 64))


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("c16"), np.dtype(">f4")], ids=str)
def test_plain_safetensors_reads_what_is_written(dtype, tmp_path):
    arrays = {
        "w": np.arange(6).reshape(2, 3).astype(dtype),
        tensor_name("w", (4, 8), ((2, 4), (0, 8))): np.ones((2, 8)).astype(dtype),
        "none": np.empty((3, 0, 2), dtype),
        "ein": np.ones((), dtype),
    }
    header, begins = safetensors_header(
        [(name, one.dtype, one.shape) for name, one in arrays.items()], {"format": "np"}
    )
    assert len(header) % 64 == 0
    assert begins[0] == len(header)
    data = [one.astype(file_dtype(one.dtype)).tobytes() for one in arrays.values()]
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"".join([header, *data]))
    with safetensors.safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(arrays)
        assert file.metadata() == {"format": "np"}
        for name, array in arrays.items():
            if dtype.name in EIGHT_BITS:  # which it hands to PyTorch alone
                continue
            read = file.get_tensor(name)
            if dtype.name == "complex128":
                read = np.ascontiguousarray(read).view("c16")[..., 0]
            assert read.dtype == array.dtype.newbyteorder("<")
            np.testing.assert_array_equal(read, array)
    for name, about in safetensors.deserialize(path.read_bytes()):
        assert about["data"] == arrays[name].astype(file_dtype(dtype)).tobytes()
    tensors = parse_safetensors(header, path.stat().st_size, "f")
    assert [begin for _, _, begin in tensors.values()] == begins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_plain_safetensors_writes_is_read(dtype, tmp_path):
    arrays = {
        "b": np.arange(6).reshape(2, 3).astype(dtype),
        "a.weight": np.ones(5, np.float64),
        "none": np.empty((0, 4), dtype),
        "ein": np.ones((), dtype),
    }
    path = tmp_path / "f.safetensors"
    path.write_bytes(save(arrays, {"some": "text"}))
    folder, manifest = read_manifest(path)
    assert folder == tmp_path
    text = path.read_bytes()
    assert manifest.files == (("f.safetensors", len(text)),)
    assert manifest.arrays.keys() == arrays.keys()
    for name, entry in manifest.arrays.items():
        (piece,) = entry.pieces
        assert (entry.shape, entry.dtype) == (arrays[name].shape, arrays[name].dtype)
        assert (piece.box, piece.digest) == (whole(entry.shape), None)
        assert text[piece.begin :][: entry.nbytes(piece)] == arrays[name].tobytes()
    assert Manifest.parse(manifest.text(), "m") == manifest


# -- mutations -------------------------------------------------------------------------------------

ODD: list[Any] = [
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    2**64,
    10**400,
    0.5,
    1e300,
    True,
    None,
    "",
    "..",
    "F32",
    [],
    {},
]
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"-",
    b"9" * 30,
    b"1e9",
    b"\\ud800",
    b"\xff",
    b"\0",
]


def mutated(text: bytes, random: random.Random) -> bytes:
    """Flip, delete, insert, repeat, swap or cut bytes of a text."""
    size = len(text)
    a, b, c = sorted(random.randrange(size) for _ in range(3))
    b, c = (b, c) if random.random() < 0.2 else (min(b, a + 6), min(c, a + 12))
    kind = random.randrange(7)
    if kind == 0:
        return text[:a] + bytes([text[a] ^ 1 << random.randrange(8)]) + text[a + 1 :]
    if kind == 1:
        return text[:a] + text[b:]
    if kind == 2:
        return text[:a] + random.choice(TOKENS) + text[a:]
    if kind == 3:
        return text[:b] + text[a:b] + text[b:]
    if kind == 4:
        return text[:a] + text[b:c] + text[a:b] + text[c:]
    if kind == 5:
        return text[:a]
    return text[:a] + random.randbytes(b - a) + text[b:]


def mutated_tree(content: Any, random: random.Random) -> Any:
    """Put an odd value, or one from elsewhere in it, to some place of a JSON value."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(item, dict | list):
                collect(item)

    content = json.loads(json.dumps(content))
    collect(content)
    (holder, key), (other, elsewhere) = random.choice(places), random.choice(places)
    kind = random.randrange(4)
    if kind == 0:
        holder[key] = random.choice(ODD)
    elif kind == 1:
        holder[key] = json.loads(json.dumps(other[elsewhere]))
    elif kind == 2 and type(holder[key]) is int:
        holder[key] += random.choice([-64, -8, -1, 1, 8, 64])
    else:
        del holder[key]
    return content


def mutated_json(text: bytes, random: random.Random) -> bytes:
    try:
        content = mutated_tree(json.loads(text), random)
        while random.random() < 0.3:
            content = mutated_tree(content, random)
    except (IndexError, KeyError, TypeError):  # a second mutation of what the first has left
        return text + b" "
    return json.dumps(content, separators=(",", ":")).encode()


MANIFEST_TEXT = Manifest(
    {
        "w": ArrayEntry(
            (4, 6),
            np.dtype("f4"),
            (Piece(0, ((0, 4), (0, 3)), 320, 1), Piece(1, ((0, 4), (3, 6)), 192, 2)),
        ),
        "b": ArrayEntry((3,), np.dtype("c16"), (Piece(1, ((0, 3),), 240, None),)),
        "s": ArrayEntry((), np.dtype(ml_dtypes.bfloat16), (Piece(0, (), 368, 3),)),
        "none": ArrayEntry((0, 2), np.dtype("i8"), ()),
    },
    {"step": 7, "loss": [{"$float": "nan"}, {"$$tuple": [1.5]}]},
    {"kind": "dict", "keys": ["w", "b"]},
    (("data-0a/00000-000.safetensors", 370), ("data-0a/00001-000.safetensors", 288)),
).text()

HEADER_ENTRIES: list[tuple[str, Any, tuple[int, ...]]] = [
    ("w", np.dtype("f8"), (2, 3)),
    ("w[0:4,0:8]", np.dtype("f4"), (4, 8)),
    ("none", np.dtype("i2"), (0, 7)),
    ("b", np.dtype("u1"), (5,)),
    ("s", np.dtype("?"), ()),
]
HEADER, _ = safetensors_header(HEADER_ENTRIES, {"by": "a test"})
DATA_BYTES = 48 + 128 + 5 + 1


def is_consistent(manifest: Manifest) -> bool:
    """Tell whether a reader that believes a manifest stays in its files and its memory."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for entry in manifest.arrays.values():
        marks = np.zeros(entry.shape, bool)  # so small as the files are
        for piece in entry.pieces:
            view(marks, piece.box)[...] = True
            if entry.nbytes(piece):
                taken.setdefault(piece.file, []).append(
                    (piece.begin, piece.begin + entry.nbytes(piece))
                )
        if not marks.all():
            return False
    return all(
        ranges[-1][1] <= manifest.files[file][1]
        and all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        for file, ranges in ((file, sorted(ranges)) for file, ranges in taken.items())
    )


def mutants(seed: int, make: Callable[[random.Random, int], bytes]) -> Iterator[bytes]:
    """Yield texts; what reading the first 1000 takes of memory is bounded."""
    generator = random.Random(seed)
    tracemalloc.start()
    for number in range(MUTATIONS):
        if number == 1000:
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
            tracemalloc.stop()
        yield make(generator, number)


def test_no_mutated_manifest_is_accepted():
    for text in mutants(17, lambda generator, _: mutated(MANIFEST_TEXT, generator)):
        if text != MANIFEST_TEXT:
            with pytest.raises(OURS):
                Manifest.parse(text, "m")


@pytest.mark.timeout(600)
def test_a_forged_manifest_is_refused_or_consistent():
    accepted = longest = 0
    kinds = mutated, mutated_json
    for text in mutants(
        18, lambda random, number: sealed(kinds[number % 2](MANIFEST_TEXT, random))
    ):
        try:
            manifest = Manifest.parse(text, "m")
        except OURS as error:
            longest = max(longest, len(str(error)))
        else:
            accepted += 1
            assert is_consistent(manifest), text
            assert Manifest.parse(manifest.text(), "m").arrays == manifest.arrays
    assert longest < 700
    assert accepted > MUTATIONS / 100  # else the test would not reach far


def mutated_header(generator: random.Random, number: int) -> bytes:
    """Return a file of safetensors: with another text of its header, or other bytes."""
    if number % 2:
        text = mutated_json(HEADER[8:], generator)
        header = len(text).to_bytes(8, "little") + text
        return header + bytes(DATA_BYTES)
    header = mutated(HEADER, generator)
    return header + bytes(max(0, len(HEADER) + DATA_BYTES - len(header)))


@pytest.mark.timeout(600)
def test_a_mutated_header_is_refused_or_what_safetensors_reads():
    accepted = longest = 0
    for text in mutants(19, mutated_header):
        header = text[: 8 + min(int.from_bytes(text[:8], "little"), len(text))]
        try:
            tensors = parse_safetensors(header, len(text), "f")
        except OURS as error:
            longest = max(longest, len(str(error)))
        else:
            accepted += 1
            text = re.sub(rb"(?<=[\[,])-0(?=[,\]])", b" 0", text)  # which JSON has, but not it
            plain = dict(safetensors.deserialize(text))
            assert plain.keys() == tensors.keys()
            for name, (dtype, shape, begin) in tensors.items():
                assert list(shape) == plain[name]["shape"]
                nbytes = math.prod(shape) * dtype.itemsize
                assert nbytes == len(plain[name]["data"])
                assert len(header) <= begin <= begin + nbytes <= len(text)
    assert longest < 700
    assert accepted > MUTATIONS / 1000


# -- what is refused, and with which words ---------------------------------------------------------


def header_of(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


W = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{" + W, ["JSON"]),
        ("[" + W + "]", ["no header"]),
        ("{" + W + "," + W + "}", ["a name is there twice"]),
        ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"dtype":"F32"}}', ["twice"]),
        ("{" + W.replace("[2]", "[2,true]") + "}", ["the shape of tensor 'w'", "[2, True]"]),
        ("{" + W.replace("[2]", "[-2]") + "}", ["[-2]"]),
        ("{" + W.replace("[2]", "[2.0]") + "}", ["[2.0]"]),
        ("{" + W.replace("[2]", "[3]") + "}", ["shape (3,)", "float32", "has 8 bytes"]),
        ("{" + W.replace("[2]", '"2"') + "}", ["is no list", "'2'"]),
        ("{" + W.replace("[2]", str([1] * 70)) + "}", ["has 70 axes"]),
        ("{" + W.replace("[2]", f"[0,{10**30}]") + "}", ["no array can have"]),
        ("{" + W.replace("[2]", "[" + "9" * 5000 + "]") + "}", ["JSON"]),
        ("{" + W.replace("[0,8]", "[8,0]") + "}", ["has -8 bytes"]),
        ("{" + W.replace("[0,8]", "[8,16]") + "}", ["begins at 8", "end at 0"]),
        ("{" + W.replace("[0,8]", "[0]") + "}", ["2 numbers", "[0]"]),
        ("{" + W.replace("[0,8]", "[NaN,8]") + "}", ["NaN"]),
        ("{" + W + "," + W.replace('"w"', '"v"') + "}", ["begins at 0", "end at 8"]),
        ("{" + W.replace("w", "\\ud800") + "}", ["a name is no text"]),
        ('{"w":3}', ["'w'", "dtype, shape and data_offsets"]),
        ("{" + W + ',"__metadata__":{"a":1}}', ["not texts"]),
        ('{"a":' + "[" * 100_000 + "}", ["JSON"]),
        ("{}", ["its header says 10"]),
    ],
)
def test_a_header_that_breaks_a_rule(text, words):
    header = header_of(text)
    with raises(DamagedError, "some/file", "copy it anew", *words):
        parse_safetensors(header, len(header) + 8, "some/file")


def test_a_dtype_that_is_not_read():
    header = header_of("{" + W.replace("F32", "F4") + "}")
    with raises(DTypeError, "some/file", "'w'", "'F4'", "BF16"):
        parse_safetensors(header, len(header) + 8, "some/file")


def test_a_header_that_claims_more_than_there_is(tmp_path):
    path = tmp_path / "f.safetensors"
    tracemalloc.start()
    for length, size in [(2**63, 100), (93, 100), (100_000_001, 1 << 30), (5, 7)]:
        path.write_bytes(length.to_bytes(8, "little")[:size])
        with path.open("r+b") as file:
            file.truncate(size)  # a gigabyte without any block
        with raises(DamagedError, path, size):
            read_manifest(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def changed(**members: Any) -> bytes:
    """Return the manifest with other members and a checksum that fits."""
    content = {**json.loads(MANIFEST_TEXT), **members}
    content["xxh3_64"] = content.pop("xxh3_64")  # last
    return sealed(json.dumps(content, separators=(",", ":")).encode())


def array(**about: Any) -> dict[str, Any]:
    piece = [0, 64, None, [[0, 4]]]
    return {"arrays": {"w": {"dtype": "uint8", "shape": [4], "pieces": [piece], **about}}}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"files": [["../f", 1]]}, ["../f", "same folder"]),
        ({"files": [["/etc/f", 1]]}, ["/etc/f"]),
        ({"files": [["a/../../f", 1]]}, ["a/../../f"]),
        ({"files": [["", 1]]}, ["''"]),
        ({"files": [["a\0b", 1]]}, ["same folder"]),
        ({"files": [["a", 1], ["a", 1]]}, ["a file is there twice"]),
        ({"files": [["a", -1]]}, ["[-1]"]),
        ({"files": ["a"]}, ["'a'"]),
        ({"more": 1}, ["'more'"]),
        (array(dtype="object"), ["no dtype 'object'"]),
        (array(dtype="float128"), ["no dtype 'float128'"]),
        (array(shape=[5]), ["'w'", "(5,)", "no piece with [4:5]"]),
        (array(shape=[4, 2]), ["(4, 2)", "((0, 4),)"]),
        (array(shape=[2**61] * 3), ["no array can have"]),
        (array(pieces=[[0, 64, None, [[0, 5]]]]), ["((0, 5),)"]),
        (array(pieces=[[0, 64, None, [[3, 0]]]]), ["((3, 0),)"]),
        (array(pieces=[[2, 64, None, [[0, 4]]]]), ["file 2"]),
        (array(pieces=[[0, 367, None, [[0, 4]]]]), ["at 367 of file 0"]),
        (array(pieces=[[0, 64, "12", [[0, 4]]]]), ["digest '12'"]),
        (array(pieces=[[0, 64, None, [[0, 4]]]] * 2), ["'w' and 'w' share bytes of file 0"]),
    ],
)
def test_a_forged_manifest_that_breaks_a_rule(members, words):
    with raises(DamagedError, "some/m", "is damaged", "use another checkpoint", *words):
        Manifest.parse(changed(**members), "some/m")


def test_a_manifest_of_a_newer_format():
    text = MANIFEST_TEXT.replace(b'"version":1', b'"version":12')
    with raises(StoreError, "some/m", "version 12", "reads 1", "newer"):
        Manifest.parse(text, "some/m")


@pytest.mark.parametrize("text", [b"", b"{}", b'{"format":"other",', b"\x93NUMPY"])
def test_what_is_no_manifest(text):
    with raises(DamagedError, "some/m", "not the manifest of a checkpoint"):
        Manifest.parse(text, "some/m")


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [
        ("M8[s]", 'x.view("int64")'),
        ("U3", "x.tolist()"),
        ("O", 'x.view("uint8")'),
        ("g", 'x.astype("float64")'),
        ("i4,f4", "each of its fields"),
        (ml_dtypes.int4, 'x.view("uint8")'),
    ],
)
def test_a_dtype_that_no_file_can_hold(dtype, cure):
    dtype = np.dtype(dtype)
    with raises(DTypeError, dtype, cure):
        safetensors_header([("w", dtype, (2,))])
    with raises(DTypeError, "array 'w'", dtype, cure):
        Manifest({"w": ArrayEntry((2,), dtype, ())}, {}, None, ()).text()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.integers(-9, 9).map(np.int8)
    | st.floats(width=32).map(np.float32),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$float"), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(VALUES)
def test_values_come_back_from_strict_json(value):
    text = json.dumps(to_json(value, "a"), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(value)


@pytest.mark.parametrize(
    ("value", "words"), [(1 << 5000, ["5001 bits"]), ([{1, 2}], ["set"]), (np, ["module"])]
)
def test_a_value_that_is_not_saved(value, words):
    with raises(StoreError, "'a'", *words):
        to_json(value, "'a'")


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"$float": "1e5"}, "1e5"),
        ({"$other": 1}, "not known"),
        ({"$$tuple": 1}, "tuple"),
        (nested(2000), "recursion"),
    ],
)
def test_a_forged_value_is_damage(value, word):
    with raises(DamagedError, word):
        from_json(value)


def test_the_text_of_values_stays_as_it_is():
    """Checkpoints of before are read by it."""
    value = {"a": (1, math.inf), "b": [b"x", 1 + 2j, np.int8(3)], "$c": {4: None}}
    assert to_json(value, "") == {
        "$$dict": [
            ["a", {"$$tuple": [1, {"$float": "inf"}]}],
            ["b", [{"$$bytes": "eA=="}, {"$$complex": [1.0, 2.0]}, {"$$numpy": ["|i1", "Aw=="]}]],
            ["$c", {"$$dict": [[4, None]]}],
        ]
    }


def test_names_that_a_file_cannot_have():
    f4 = np.dtype("f4")
    with raises(StoreError, "'__metadata__'", "another name"):
        safetensors_header([("__metadata__", f4, (1,))])
    with raises(StoreError, "'w' twice"):
        safetensors_header([("w", f4, (1,)), ("w", f4, (1,))])
    with raises(StoreError, "UTF-8"):
        safetensors_header([("\ud800", f4, (1,))])


# -- what is at a path -----------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in two files and an index, as Hugging Face has it."""
    layers = {"m-1.safetensors": ["a", "b"], "m-2.safetensors": ["c"]}
    for number, (name, keys) in enumerate(layers.items()):
        arrays = {key: np.full((2, 3), number, np.float32) for key in keys}
        (tmp_path / name).write_bytes(save(arrays))
    places = {key: name for name, keys in layers.items() for key in keys}
    index = {"metadata": {"total_size": 72}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_model_in_several_files(model):
    for path in (model, model / "model.safetensors.index.json"):
        folder, manifest = read_manifest(path)
        assert folder == model
        assert [name for name, _ in manifest.files] == ["m-1.safetensors", "m-2.safetensors"]
        assert [manifest.arrays[name].pieces[0].file for name in "abc"] == [0, 0, 1]


def test_an_index_that_breaks_a_rule(model):
    path = model / "model.safetensors.index.json"
    cases: list[tuple[Any, type[Exception], list[Any]]] = [
        ({"a": "../m-1.safetensors"}, DamagedError, ["../m-1.safetensors", "same folder"]),
        ({"a": 3}, DamagedError, ["is no str", 3]),
        ({"x": "m-1.safetensors"}, DamagedError, ["'x'", "m-1.safetensors", "none of that name"]),
        ({"a": "m-3.safetensors"}, StoreError, ["No such file"]),
        (None, DamagedError, ["weight_map"]),
    ]
    for places, error, words in cases:
        path.write_text(json.dumps({"weight_map": places}))
        with raises(error, model, *words):
            read_manifest(model)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with raises(StoreError, tmp_path, MANIFEST, "safetensors"):
        read_manifest(tmp_path)
    with raises(StoreError, tmp_path / "none", "No such file"):
        read_manifest(tmp_path / "none")
    (tmp_path / "a.safetensors").write_bytes(save({"w": np.zeros(2)}))
    assert read_manifest(tmp_path)[1].arrays.keys() == {"w"}
    (tmp_path / "b.safetensors").write_bytes(save({"w": np.zeros(2)}))
    with raises(StoreError, tmp_path, "2 files *.safetensors", "give the path of one"):
        read_manifest(tmp_path)


def test_a_checkpoint_of_which_a_file_is_not_whole(tmp_path):
    name = "data-0/00000-000.safetensors"
    manifest = Manifest({}, {}, None, ((name, 10),))
    (tmp_path / MANIFEST).write_bytes(manifest.text())
    with raises(DamagedError, tmp_path / name, "is missing"):
        read_manifest(tmp_path)
    (tmp_path / "data-0").mkdir()
    (tmp_path / name).write_bytes(b"x" * 9)
    with raises(DamagedError, tmp_path / name, "has 9 bytes", "written with 10"):
        read_manifest(tmp_path)
    (tmp_path / name).write_bytes(b"x" * 10)
    assert read_manifest(tmp_path) == (tmp_path, manifest)
