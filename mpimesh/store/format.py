"""The format of checkpoints: a manifest in JSON, and the headers of safetensors files.

Data and checks. A folder has ``manifest.json`` and files of safetensors, in which each tensor is
an array or a box of one. Files of other makers are read into a manifest, too.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeAlias

import numpy as np
import xxhash

from mpimesh.arguments import shown
from mpimesh.arrays import DType
from mpimesh.errors import DamagedError, DTypeError, StoreError
from mpimesh.layout.boxes import Box, fits, uncovered, volume, whole
from mpimesh.store.parts import Value

__all__ = [
    "MANIFEST",
    "ArrayEntry",
    "Manifest",
    "Piece",
    "Tensor",
    "digest_of",
    "file_dtype",
    "is_manifest",
    "listed_files",
    "missing_in",
    "narrow_dtype",
    "parse_safetensors",
    "read_header",
    "read_manifest",
    "safetensors_header",
    "stored_as",
    "tensor_name",
    "wrong_file",
]

MANIFEST = "manifest.json"
"""The manifest's name in the folder of a checkpoint."""

Tensor: TypeAlias = tuple[DType, tuple[int, ...], int]
"""Dtype, shape, and offset in the file of a tensor."""

_VERSION = 1
_BEGIN = re.compile(rb'\{"format":"mpimesh checkpoint",\s*"version":([0-9]{1,9}),')
_BEGIN_BYTES = 128
_FILES = b'"files":', b',\n"arrays":'
"""What stands before and after the list of files; no text of JSON has a line's end."""
_CHECKSUM = b',\n"xxh3_64":"%016x"}\n'
_CHECKSUM_BYTES = len(_CHECKSUM % 0)
_ALIGNMENT = 64
_MOST_HEADER = 100_000_000  # as the library safetensors has it
_MOST_BYTES = (1 << 63) - 1
_MOST_AXES = 64  # of NumPy
_METADATA = "__metadata__"

# fmt: off
_CODES = {
    "bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}
# fmt: on
"""Codes of safetensors by NumPy's and ml_dtypes' names."""
_NAMES = {code: name for name, code in _CODES.items()}
_AS_PAIRS = "complex128"  # safetensors has no code: the parts are F64 in an axis of length 2


# -- a checkpoint's contents -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array in a file, in C order and little endian.

    Attributes:
        file: The number of the file.
        box: (start, stop) along each axis of the whole array.
        begin: The offset of its bytes in the file.
        digest: :func:`digest_of` its bytes; None where nobody has written one, as in files of
            other makers.
    """

    file: int
    box: Box
    begin: int
    digest: int | None


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array of a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        pieces: The boxes that make it up.
    """

    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[Piece, ...]

    def nbytes(self, piece: Piece) -> int:
        """Return the size of a piece."""
        return volume(piece.box) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        arrays: The arrays by name.
        values: JSON values by name, of :func:`to_json`.
        tree: How the saved tree was built, in JSON.
        files: Names, relative to the folder, and sizes in bytes.
    """

    arrays: Mapping[str, ArrayEntry]
    values: Mapping[str, Value]
    tree: Value
    files: tuple[tuple[str, int], ...]

    def text(self) -> bytes:
        """Return the manifest as JSON, which ends with a checksum of all before it.

        Raises:
            DTypeError: If an array has a dtype that no file of safetensors can hold.
        """
        members = {
            "format": '"mpimesh checkpoint"',
            "version": str(_VERSION),
            "files": _dumps([[name, size] for name, size in self.files]),
            "arrays": _lines(
                (name, _dumps(_entry_to_json(name, entry))) for name, entry in self.arrays.items()
            ),
            "values": _lines((name, _dumps(value)) for name, value in self.values.items()),
            "tree": _dumps(self.tree),
        }
        body = ",\n".join(f'"{name}":{text}' for name, text in members.items())
        text = f"{{{body}".encode("ascii")
        return text + _CHECKSUM % digest_of(text)

    @classmethod
    def parse(cls, text: bytes, name: str) -> Manifest:
        """Return the manifest that `text` is, after checking all that it says.

        Each array is whole, each piece lies in its array and its file, no two share bytes.

        Args:
            text: What :meth:`text` has returned.
            name: What errors call it: its path.

        Raises:
            DamagedError: If it is none, or was cut off or changed since it was written.
            StoreError: If a newer mpimesh has written it.
            DTypeError: If an array has a dtype of ml_dtypes, which is not installed.
        """
        _check_text(text, name)
        try:
            return _manifest_from_json(_loads(text))
        except _WrongError as problem:
            raise DamagedError(f"{name} is damaged: {problem}; use another checkpoint") from None


def _check_text(text: bytes, name: str) -> None:
    """Refuse what is no manifest, or is not as it was written; see :meth:`Manifest.parse`."""
    begin = _BEGIN.match(text)
    if begin is None:
        raise DamagedError(
            f"{name} is not the manifest of a checkpoint, or its beginning was lost; use another "
            "checkpoint"
        )
    version = int(begin[1])
    if version != _VERSION:
        raise StoreError(
            f"{name} has version {version} of the format, and this mpimesh reads {_VERSION}: load "
            "it with the mpimesh that has written it, or a newer one"
        )
    if text[-_CHECKSUM_BYTES:] != _CHECKSUM % digest_of(text[:-_CHECKSUM_BYTES]):
        raise DamagedError(
            f"{name} was cut off or changed since it was written: its checksum is not that of its "
            "text; use another checkpoint"
        )


def is_manifest(path: Path) -> bool:
    """Tell whether a file begins as the manifest of a checkpoint, damaged or not. Local."""
    try:
        with path.open("rb") as file:
            return _BEGIN.match(file.read(_BEGIN_BYTES)) is not None
    except OSError:
        return False


def listed_files(path: Path) -> tuple[str, ...]:
    """Return the names of the files that a manifest lists, without reading all of it. Local.

    Raises:
        OSError: If it cannot be read.
        StoreError: If it is no manifest, or not as it was written.
    """
    text = path.read_bytes()
    _check_text(text, str(path))
    begin, end = text.find(_FILES[0]), text.find(_FILES[1])
    try:
        return tuple(name for name, _ in _loads(b"{%b}" % text[begin:end])["files"])
    except (_WrongError, KeyError, TypeError, ValueError):
        raise DamagedError(f"{path} is damaged: its list of files cannot be read") from None


def digest_of(data: bytes | memoryview) -> int:
    """Return the checksum of bytes: XXH3 with 64 bits. It finds accidents, not forgeries."""
    return xxhash.xxh3_64_intdigest(data)


def tensor_name(name: str, shape: Sequence[int], box: Box) -> str:
    """Return the name that a box of an array has in a file of safetensors.

    Example:
        >>> tensor_name("w", (4, 8), ((0, 4), (0, 8))), tensor_name("w", (4, 8), ((0, 4), (4, 8)))
        ('w', 'w[0:4,4:8]')
    """
    if box == whole(shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def missing_in(entry: ArrayEntry) -> Box | None:
    """Return a box of an array that is in none of its pieces; None if they cover it.

    Example:
        >>> missing_in(ArrayEntry((4, 6), np.dtype("f4"), (Piece(0, ((0, 4), (2, 6)), 64, None),)))
        ((0, 4), (0, 2))
    """
    if not math.prod(entry.shape):
        return None
    return uncovered([one.box for one in entry.pieces if volume(one.box)], whole(entry.shape))


# -- files of safetensors --------------------------------------------------------------------------


def file_dtype(dtype: DType) -> DType:
    """Return the dtype that values have in a file: the same in little endian.

    Raises:
        DTypeError: If no file of safetensors can hold it.
    """
    if dtype.name not in _CODES and dtype.name != _AS_PAIRS:
        if dtype.kind in "mM":
            cure = 'save x.view("int64"), and view it again after loading'
        elif dtype.kind in "SU":
            cure = "save x.tolist(), a list of texts"
        elif dtype.kind in "fc":
            cure = f'save x.astype("{"float64" if dtype.kind == "f" else "complex128"}")'
        elif dtype.names:
            cure = "save each of its fields as an array of its own"
        else:
            cure = 'save it as numbers, such as x.view("uint8")'
        raise DTypeError(f"no checkpoint can hold an array of dtype {dtype}: {cure}")
    return dtype.newbyteorder("<")


def stored_as(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return dtype and shape of an array's tensor: complex128 is float64 with one more axis."""
    return (np.dtype("float64"), (*shape, 2)) if dtype.name == _AS_PAIRS else (dtype, shape)


def _dtype_named(name: str) -> DType:
    """Return the dtype that a manifest calls `name`."""
    if name not in _CODES and name != _AS_PAIRS:
        _wrong(f"there is no dtype {shown(name)}")
    return np.dtype(name) if hasattr(np, name) else narrow_dtype(name)


def narrow_dtype(name: str) -> DType:
    """Return a dtype that NumPy has from ml_dtypes.

    Raises:
        DTypeError: If there is none of the name, or the package is not installed.
    """
    try:
        import ml_dtypes

        small: DType = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        raise DTypeError(
            f"arrays of dtype {name} need a newer ml_dtypes: pip install -U ml_dtypes"
        ) from None
    return small


def safetensors_header(
    entries: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return how a file of safetensors begins, and where each of its tensors begins.

    The tensors follow each other without gaps, as the format has it; the first begins at a multiple
    of 64. Order them by the size of their elements, falling, so that all are aligned to theirs.

    Args:
        entries: (name, dtype, shape) of each tensor, in the file's order.
        metadata: Texts for other programs.

    Returns:
        The header, and offsets from the beginning of the file.

    Raises:
        StoreError: If two tensors have one name, a name cannot be written, or the header is longer
            than readers take.
        DTypeError: If a tensor has a dtype that the format has not.
    """
    header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    begins = []
    end = 0
    for name, dtype, shape in entries:
        if name in header or name == _METADATA:
            raise StoreError(
                f"a file of safetensors cannot have a tensor {shown(name)}"
                f"{'' if name == _METADATA else ' twice'}: save the array under another name"
            )
        begins.append(end)
        end += math.prod(shape) * file_dtype(dtype).itemsize
        kind, shape = stored_as(dtype, shape)
        header[name] = {
            "dtype": _CODES[kind.name],
            "shape": shape,
            "data_offsets": [begins[-1], end],
        }
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"a name cannot be written as UTF-8: {error}") from None
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MOST_HEADER:
        raise StoreError(
            f"{len(begins)} tensors are too many for one file of safetensors, whose header has at "
            f"most {_MOST_HEADER} bytes, got {len(text)}: save into more files"
        )
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + begin for begin in begins]


def parse_safetensors(header: bytes, file_bytes: int, name: str) -> dict[str, Tensor]:
    """Return dtype, shape and offset in the file of each tensor, after checking them.

    Args:
        header: The file's first bytes: 8 with the length of the JSON text, and the text.
        file_bytes: The size of the file.
        name: What errors call it: its path.

    Raises:
        DamagedError: If it is no such file, or was cut off or changed.
        DTypeError: If a tensor has a dtype that is not read here.
    """
    try:
        return _tensors(header, file_bytes)
    except _WrongError as problem:
        raise DamagedError(
            f"{name} is damaged or no file of safetensors: {problem}; copy it anew, or use another"
        ) from None
    except DTypeError as error:
        raise DTypeError(f"{name}: {error}") from None


def _tensors(header: bytes, file_bytes: int) -> dict[str, Tensor]:
    length = _header_bytes(header, file_bytes)
    if len(header) != 8 + length or header[8:9] != b"{":
        _wrong(f"no header of {length} bytes follows its length")
    start = 8 + length
    tensors: dict[str, Tensor] = {}
    ranges = []
    content = _loads(header[8:])
    metadata = _of(content.pop(_METADATA, {}), dict, "the metadata")
    if not all(isinstance(value, str) for value in metadata.values()):
        _wrong("the metadata are not texts by name")
    try:
        "".join([*content, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:
        _wrong(f"a name is no text ({error})")
    for key, about in content.items():
        if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
            _wrong(f"tensor {shown(key)} has not dtype, shape and data_offsets")
        code = _of(about["dtype"], str, f"the dtype of tensor {shown(key)}")
        if code not in _NAMES:
            raise DTypeError(
                f"tensor {shown(key)} has dtype {shown(code)}, which is not read here: only "
                f"{', '.join(_NAMES)}"
            )
        dtype = _dtype_named(_NAMES[code])
        shape = _shape(about["shape"], dtype, f"tensor {shown(key)}")
        begin, end = _integers(about["data_offsets"], f"the offsets of tensor {shown(key)}", 2)
        if math.prod(shape) * dtype.itemsize != end - begin:
            _wrong(
                f"tensor {shown(key)} of shape {shape} and dtype {dtype} has {end - begin} bytes"
            )
        ranges.append((begin, end, key))
        tensors[key] = (dtype, shape, start + begin)
    position = 0
    for begin, end, key in sorted(ranges):
        if begin != position:
            _wrong(
                f"tensor {shown(key)} begins at {begin}, and the tensors before it end at "
                f"{position}"
            )
        position = end
    if start + position != file_bytes:
        _wrong(f"it has {file_bytes} bytes, and its header says {start + position}")
    return tensors


def _header_bytes(beginning: bytes, file_bytes: int) -> int:
    """Return the length of the header of a file that begins with these bytes, 8 at least."""
    if file_bytes < 8 or len(beginning) < 8:
        _wrong(f"it has {file_bytes} bytes")
    length = int.from_bytes(beginning[:8], "little")
    if length > min(_MOST_HEADER, file_bytes - 8):
        _wrong(
            f"its header would have {length} bytes, in a file of {file_bytes}; at most "
            f"{_MOST_HEADER} are read"
        )
    return length


def read_manifest(path: Path) -> tuple[Path, Manifest]:
    """Return the folder that files are in, and the manifest of what they hold. Local.

    `path` is the folder of a checkpoint; a file of safetensors; or the index or the folder of a
    model of Hugging Face, whose arrays have the names of its files.

    Raises:
        StoreError: If there is nothing of this at `path`, or it cannot be read.
        DamagedError: If it is damaged.
        DTypeError: If an array has a dtype that is not read here.

    Cost:
        Reads the manifest, or the headers of the files, and asks for the size of each file: what
        arrays take of memory is not more than what is on the disk.
    """
    try:
        if not path.is_dir():
            return path.parent, _foreign(path)
        own = path / MANIFEST
        if own.exists():
            manifest = Manifest.parse(own.read_bytes(), str(own))
            _check_sizes(path, manifest.files)
            return path, manifest
        for pattern in ("*.safetensors.index.json", "*.safetensors"):
            files = sorted(path.glob(pattern))
            if len(files) > 1:
                raise StoreError(
                    f"{path} has {len(files)} files {pattern}, such as {files[0].name} and "
                    f"{files[1].name}: give the path of one of them"
                )
            if files:
                return path, _foreign(files[0])
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    raise StoreError(
        f"{path} is no checkpoint: it has neither a {MANIFEST} nor files of safetensors"
    )


def _check_sizes(folder: Path, files: Sequence[tuple[str, int]]) -> None:
    """Refuse a checkpoint of which a file is missing or has another size."""
    for name, nbytes in files:
        try:
            actual = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise wrong_file(folder / name, nbytes, None) from None
        if actual != nbytes:
            raise wrong_file(folder / name, nbytes, actual)


def wrong_file(path: Path, nbytes: int, actual: int | None) -> DamagedError:
    """Return the error for a file that is missing, None, or has another size than was written."""
    found = "is missing" if actual is None else f"has {actual} bytes, and was written with {nbytes}"
    return DamagedError(f"{path} {found}; use another checkpoint")


def _foreign(path: Path) -> Manifest:
    """Return the manifest of a file of safetensors, or of the files that an index names."""
    places: dict[str, str] | None = None
    if path.name.endswith(".index.json"):
        try:
            places = _of(_loads(path.read_bytes()).get("weight_map"), dict, "its weight_map")
            for name in places.values():
                _check_file_name(name)
        except _WrongError as problem:
            raise DamagedError(
                f"{path} is damaged, or no index of files of safetensors: {problem}; copy it anew"
            ) from None
    files = [path.name] if places is None else dict.fromkeys(places.values())
    read = {file: read_header(path.parent / file) for file in files}
    if places is None:
        places = dict.fromkeys(read[path.name][1], path.name)
    numbers = {file: number for number, file in enumerate(read)}
    arrays = {}
    for name, file in places.items():
        if name not in read[file][1]:
            raise DamagedError(
                f"{path} says that array {shown(name)} is in {file}, which has none of that name; "
                "copy both anew"
            )
        dtype, shape, begin = read[file][1][name]
        arrays[name] = ArrayEntry(shape, dtype, (Piece(numbers[file], whole(shape), begin, None),))
    return Manifest(arrays, {}, None, tuple((file, size) for file, (size, _) in read.items()))


def read_header(path: Path) -> tuple[int, dict[str, Tensor]]:
    """Return the size of a file of safetensors, and its tensors; see `parse_safetensors`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        beginning = file.read(8)
        try:
            header = beginning + file.read(_header_bytes(beginning, size))
        except _WrongError as problem:
            raise DamagedError(f"{path} is no file of safetensors: {problem}") from None
    return size, parse_safetensors(header, size, str(path))


# -- JSON ------------------------------------------------------------------------------------------


class _WrongError(Exception):
    """Something in a text is not as it should be; the caller says in which file, and the cure."""


def _wrong(what: str) -> NoReturn:
    raise _WrongError(what)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _lines(members: Iterable[tuple[str, str]]) -> str:
    """Return a JSON object with a line for each member."""
    return "{" + ",".join(f"\n{json.dumps(name)}:{text}" for name, text in members) + "}"


def _loads(text: bytes) -> dict[str, Any]:
    """Return a JSON object as Python has it; nothing is in it twice."""
    try:
        content = json.loads(
            text.decode(), object_pairs_hook=_without_doubles, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        _wrong(f"it cannot be read as JSON ({error})")
    return dict(_of(content, dict, "it"))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name is there twice")
    return content


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"JSON has no {text}")


def _of(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        _wrong(f"{what} is no {kind.__name__}: {shown(value)}")
    return value


def _integers(value: Any, what: str, count: int) -> list[int]:
    """Return `count` whole numbers from 0 on."""
    numbers = _of(value, list, what)
    if len(numbers) != count or not all(type(one) is int and one >= 0 for one in numbers):
        _wrong(f"{what} must be {count} numbers from 0 on, got {shown(value)}")
    return list(numbers)


def _shape(value: Any, dtype: DType, what: str) -> tuple[int, ...]:
    """Return a shape that NumPy can have, though perhaps not the memory."""
    sizes = _of(value, list, f"the shape of {what}")
    if len(sizes) > _MOST_AXES:
        _wrong(f"{what} has {len(sizes)} axes")
    shape = tuple(_integers(sizes, f"the shape of {what}", len(sizes)))
    if math.prod(size or 1 for size in shape) * dtype.itemsize > _MOST_BYTES:
        _wrong(f"{what} has shape {shown(shape)}, which no array can have")
    return shape


def _check_file_name(name: Any) -> None:
    """Refuse a name that is none of a file in the folder or its folders."""
    path = PurePosixPath(_of(name, str, "the name of a file"))
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        _wrong(f"{shown(name)} is not the name of a file in the same folder")


def _entry_to_json(name: str, entry: ArrayEntry) -> dict[str, Any]:
    try:
        file_dtype(entry.dtype)
    except DTypeError as error:
        raise DTypeError(f"array {shown(name)}: {error}") from None
    return {
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "pieces": [
            [one.file, one.begin, None if one.digest is None else f"{one.digest:016x}", one.box]
            for one in entry.pieces
        ],
    }


def _manifest_from_json(content: dict[str, Any]) -> Manifest:
    expected = {"format", "version", "files", "arrays", "values", "tree", "xxh3_64"}
    if content.keys() != expected:
        _wrong(f"its members are {sorted(content)}")
    files = []
    for row in _of(content["files"], list, "the list of files"):
        if len(_of(row, list, "a file")) != 2:
            _wrong(f"a file is its name and its size, got {shown(row)}")
        _check_file_name(row[0])
        files.append((row[0], *_integers(row[1:], "the size of a file", 1)))
    if len({name for name, _ in files}) != len(files):
        _wrong("a file is there twice")
    arrays = {
        name: _entry_from_json(about, f"array {shown(name)}", files)
        for name, about in _of(content["arrays"], dict, "the table of arrays").items()
    }
    _check_apart(arrays)
    values = _of(content["values"], dict, "the table of values")
    return Manifest(arrays, values, content["tree"], tuple(files))


def _entry_from_json(about: Any, what: str, files: Sequence[tuple[str, int]]) -> ArrayEntry:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "pieces"}:
        _wrong(f"{what} has not dtype, shape and pieces")
    dtype = _dtype_named(_of(about["dtype"], str, f"the dtype of {what}"))
    shape = _shape(about["shape"], dtype, what)
    pieces = []
    for row in _of(about["pieces"], list, f"the pieces of {what}"):
        if len(_of(row, list, f"a piece of {what}")) != 4:
            _wrong(f"a piece of {what} is {shown(row)}")
        file, begin = _integers(row[:2], f"file and offset of a piece of {what}", 2)
        edges = [_integers(pair, f"a box of {what}", 2) for pair in _of(row[3], list, "a box")]
        box = tuple([(start, stop) for start, stop in edges])
        if not fits(box, shape) or any(start > stop for start, stop in box):
            _wrong(f"{what} of shape {shape} has a piece {shown(box)}")
        if file >= len(files) or begin + volume(box) * dtype.itemsize > files[file][1]:
            _wrong(f"{what} has a piece at {begin} of file {file}, which is not there")
        digest = row[2]
        if digest is not None and not re.fullmatch("[0-9a-f]{16}", _of(digest, str, "a digest")):
            _wrong(f"{what} has a piece with the digest {shown(digest)}")
        pieces.append(Piece(file, box, begin, None if digest is None else int(digest, 16)))
    entry = ArrayEntry(shape, dtype, tuple(pieces))
    gap = missing_in(entry)
    if gap is not None:
        _wrong(f"{what} of shape {shape} has no piece with {tensor_name('', shape, gap) or 'it'}")
    return entry


def _check_apart(arrays: Mapping[str, ArrayEntry]) -> None:
    """Refuse pieces that share bytes: arrays have no more bytes then than their files."""
    ranges = [
        (piece.file, piece.begin, piece.begin + nbytes, name)
        for name, entry in arrays.items()
        for piece in entry.pieces
        if (nbytes := entry.nbytes(piece))
    ]
    ranges.sort()
    for (file, _, end, name), (next_file, begin, _, other) in pairwise(ranges):
        if file == next_file and begin < end:
            _wrong(f"arrays {shown(name)} and {shown(other)} share bytes of file {file}")
