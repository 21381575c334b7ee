"""The flight record: the operations that each rank has started last, for an unplanned end.

Each rank keeps its last 8 calls in memory; whoever ends a job by force writes them to stderr. With
``MPIMESH_RECORD_DIR`` it also writes each operation into a file of that folder, ``rank-N.ring``,
which is mapped into its memory: a rank that is killed, stopped, or ended by its launcher leaves it
as it was. A rank that ends by itself turns its ring into ``rank-N.json`` if it has failed, and
removes it if all went well. `mpimesh flight DIR` reads both.

A ring has a head, in which rank, job and the current wait stand as JSON, and a slot for each of the
last 1,000 operations: a few numbers, and what was called where, as text.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpimesh.arguments import digest_text, ranks_text
from mpimesh.caches import Cache
from mpimesh.comm import Communicator
from mpimesh.comm.signatures import signature_text
from mpimesh.core.call import Ring
from mpimesh.errors import SettingsError
from mpimesh.runtime.call import Call, RecordedGroup, site_text

__all__ = ["KEPT", "FlightEntry", "Record", "Recorder", "read_records"]

KEPT = 1000
_ROW = struct.Struct("<6q")
"""Order, number, bytes, start, end and state of an operation; its text follows."""
_STARTED = 0
_STATES = ("started", "done", "failed")

_MOST_RANKS = 1 << 20
_LONGEST_NAME = 100
"""Most characters of a group's name that are kept."""
_FILE_NAME = re.compile(r"rank-(\d+)\.(json|ring)")
_MAGIC = b"mpimesh flight 2"
_HEAD_AT = 64
_HEAD_BYTES = 1024
_WAIT_AT = _HEAD_AT + _HEAD_BYTES
_WAIT_BYTES = 3008
_SLOTS_AT = 4096
_SLOT_BYTES = 576
_MOST_TEXTS = 2048
"""So many texts are kept to be written again."""
_FILE_BYTES = _SLOTS_AT + KEPT * _SLOT_BYTES
_LENGTH = struct.Struct("<q")
_FIELDS = "\x1f"
_MOST_NEEDED = 256
_LONGEST_ENDING = 400
_LONGEST_RANKS = 160
"""The longest text of a group's ranks, so that the rest of its operation has room."""


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One operation of one rank.

    Attributes:
        group: The group's name.
        mesh: Its mesh, called alike on all ranks.
        ranks: The group's ranks in the job, such as ``"0-3"``.
        number: Which of the collectives of these ranks it is, from 1; 0 for a message.
        signature: What was called.
        digest: Equal on two ranks that called the same, be their blocks of different sizes.
        site: Where.
        bytes: The bytes that the rank put in.
        start_s: When it was started, in seconds since 1970.
        end_s: When its result was taken; 0 if it was not.
        state: ``"started"``, ``"waited for"``, ``"done"`` or ``"failed"``.
    """

    group: str
    mesh: str
    ranks: str
    number: int
    signature: str
    digest: str
    site: str
    bytes: int
    start_s: float
    end_s: float
    state: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Mesh, name and ranks of the group, equal on all its ranks."""
        return (self.mesh, self.group, self.ranks)


@dataclass(frozen=True, slots=True)
class Record:
    """The flight record of one rank.

    Attributes:
        rank: Its number in the job.
        size: How many ranks the job had.
        host: Its machine.
        pid: Its process.
        wait: What it waited for last, for which ranks, and since when; empty if it did not wait.
        entries: Its last operations, the latest last.
        ending: What it said when it ended the job, in one line; empty if it did not.
    """

    rank: int
    size: int
    host: str
    pid: int
    wait: dict[str, Any]
    entries: tuple[FlightEntry, ...]
    ending: str = ""


class _Wait(Protocol):
    """The part of a :class:`~.progress.Wait` that stands in a record."""

    what: object
    communicator: Communicator
    peers: Sequence[int] | None
    mesh: str
    since_s: float


class Recorder(Ring):
    """Writes the operations of one rank into its ring.

    Args:
        folder: Where the rings of all ranks lie; made if it is not there.
        rank: This rank in the job.
        size: How many ranks the job has.

    Raises:
        SettingsError: If the file cannot be made.
    """

    def __init__(self, folder: str | Path, rank: int, size: int) -> None:
        folder = Path(folder)
        self._rank = rank
        self._ring = folder / f"rank-{rank}.ring"
        self._json = folder / f"rank-{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("rank-*.*"):  # of an earlier job, which may have been larger
                if (match := _FILE_NAME.fullmatch(path.name)) and int(match[1]) % size == rank:
                    path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(self._ring, flags, 0o644)
            try:
                os.ftruncate(file, _FILE_BYTES)
                self._map = mmap.mmap(file, _FILE_BYTES)
            finally:
                os.close(file)
        except OSError as error:
            raise SettingsError(
                f"MPIMESH_RECORD_DIR={str(folder)!r}: rank {rank} cannot write its record there: "
                f"{error}"
            ) from None
        slots = np.frombuffer(self._map, np.uint8, offset=_SLOTS_AT)
        super().__init__(slots, KEPT)
        self._pid = os.getpid()
        self._texts: Cache[tuple[object, ...], tuple[bytes, object]] = Cache(_MOST_TEXTS)
        self._waited: object = None
        self._map[: len(_MAGIC)] = _MAGIC
        head = {"rank": rank, "size": size, "host": os.uname().nodename, "pid": self._pid}
        self._put(_HEAD_AT, _HEAD_BYTES, json.dumps(head).encode())

    def start(self, group: RecordedGroup, call: Call, nbytes: int) -> None:
        """Note that an operation was started."""
        call.record = self.write(call.number, nbytes, self.text_of(group, call))

    def text_of(self, group: RecordedGroup, call: Call) -> bytes:
        """Return what is written of a call behind the numbers: its length, and where and what."""
        code, offset = call.site
        shape = (call.shape, call.compared)
        key = (id(group), call.name, call.rule, shape, call.dtype, id(code), offset)
        text, _ = self._texts.get(key) or self._learn(key, group, call)
        return text

    def wait(self, wait: _Wait | None) -> None:
        """Note what the rank waits for; None for nothing any more. For waits that take a while."""
        if wait is self._waited:
            return
        self._waited = wait
        text = b""
        if wait is not None:
            what, communicator = wait.what, wait.communicator
            ranks: Sequence[int] = getattr(communicator, "world_ranks", range(communicator.size))
            peers = ranks if wait.peers is None else [ranks[peer] for peer in wait.peers]
            since_s = time.time() - (time.monotonic() - wait.since_s)
            record = what.record if isinstance(what, Call) else 0
            number = what.number if isinstance(what, Call) else 0
            name = what.group if isinstance(what, Call) else ""
            facts = {
                "what": str(what)[:400],
                "record": record,
                "number": number,
                "group": name[:_LONGEST_NAME],
                "mesh": wait.mesh,
                "needs": ranks_text(peers[:_MOST_NEEDED]),
                "since_s": since_s,
            }
            text = json.dumps(facts, ensure_ascii=False).encode(errors="backslashreplace")
        self._put(_WAIT_AT, _WAIT_BYTES, text)

    def finish(self, *, failed: bool, ending: str = "") -> None:
        """Turn the ring into a JSON file if the job has failed, and remove it.

        Args:
            failed: Whether it has.
            ending: Why this rank ended it; empty if it did not.
        """
        if os.getpid() != self._pid:
            return  # a forked child, which has no part in it
        if failed:
            line = ending.split("\n", 1)[0][:_LONGEST_ENDING]
            _write_json(self._json, replace(_read_ring(self._ring), ending=line))
        self._ring.unlink(missing_ok=True)

    def _learn(
        self, key: tuple[object, ...], group: RecordedGroup, call: Call
    ) -> tuple[bytes, object]:
        ledger = group.ledger
        ranks = group.ranks if ledger is None else ledger.ranks or group.ranks
        signature = (call.name, call.rule, call.compared, call.dtype)
        members = ranks_text(ranks)
        if len(members) > _LONGEST_RANKS:
            members = f"{len(ranks)} ranks with digest {digest_text(members.encode())}"
        texts = (
            group.name[:_LONGEST_NAME],
            "" if ledger is None else ledger.mesh,
            members,
            site_text(call.site),
            digest_text(signature_text(signature).encode(errors="backslashreplace")),
            call.text(),
        )
        text = _FIELDS.join(texts).encode(errors="backslashreplace")
        text = text[: _SLOT_BYTES - _ROW.size - _LENGTH.size]
        # The group and the code are kept: another object might get the same id.
        found = self._texts[key] = (_LENGTH.pack(len(text)) + text, (group, call.site[0]))
        return found

    def _put(self, at: int, room: int, text: bytes) -> None:
        """Write a text with its length before it, which is 0 meanwhile."""
        text = text[: room - _LENGTH.size]
        _LENGTH.pack_into(self._map, at, 0)
        self._map[at + 8 : at + 8 + len(text)] = text
        _LENGTH.pack_into(self._map, at, len(text))


# -- reading -------------------------------------------------------------------------------


def read_records(folder: Path) -> tuple[dict[int, Record], list[Path]]:
    """Return the records in a folder by rank, and the files that are damaged.

    Records are JSON files, and rings of ranks that wrote none.
    """
    records: dict[int, Record] = {}
    damaged: list[Path] = []
    for path in sorted(folder.glob("rank-*.*")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or (match[2] == "ring" and int(match[1]) in records):
            continue
        try:
            found = _read_ring(path) if match[2] == "ring" else _read_json(path)
            _check(found, int(match[1]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
            damaged.append(path)
        else:
            records[found.rank] = found
    return records, damaged


def _check(found: Record, rank: int) -> None:
    """Raise ValueError or TypeError for a record that no rank has written."""
    kinds = {"int": int, "str": str, "float": float}
    parts: list[Record | FlightEntry] = [found, *found.entries]
    values = [
        (getattr(part, one.name), kinds[str(one.type)])
        for part in parts
        for one in fields(part)
        if one.type in kinds
    ]
    if found.wait:
        values += [(found.wait[name], str) for name in ("what", "needs", "group")]
        values += [(found.wait[name], int) for name in ("record", "number")]
    if not all(type(value) is kind for value, kind in values):
        raise TypeError
    if found.rank != rank or not rank < found.size <= _MOST_RANKS:
        raise ValueError


def _write_json(path: Path, found: Record) -> None:
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(asdict(found), indent=1))
    new.replace(path)


def _read_json(path: Path) -> Record:
    record = json.loads(path.read_text())
    entries = tuple(FlightEntry(**entry) for entry in record.pop("entries"))
    return Record(**record, entries=entries)


def _read_ring(path: Path) -> Record:
    data = path.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC or len(data) != _FILE_BYTES:
        raise ValueError(f"{path} is no flight record")

    def text_at(at: int) -> str:
        (length,) = _LENGTH.unpack_from(data, at)
        return data[at + 8 : at + 8 + length].decode(errors="replace")

    head = json.loads(text_at(_HEAD_AT))
    wait: dict[str, Any] = {}
    with suppress(ValueError):  # the rank may have been killed while it wrote
        wait = json.loads(text_at(_WAIT_AT) or "{}")
    rows = [
        (*_ROW.unpack_from(data, at), text_at(at + _ROW.size).split(_FIELDS))
        for at in range(_SLOTS_AT, _FILE_BYTES, _SLOT_BYTES)
    ]
    entries = []
    for order, number, nbytes, start_ns, end_ns, state, texts in sorted(rows):
        if not order:
            continue
        group, mesh, ranks, site, digest, signature = (*texts, *[""] * 6)[:6]
        waited = wait.get("record") == order and state == _STARTED
        entries.append(
            FlightEntry(
                group,
                mesh,
                ranks,
                number,
                signature,
                digest,
                site,
                nbytes,
                start_ns / 1e9,
                end_ns / 1e9,
                "waited for" if waited else _STATES[state],
            )
        )
    return Record(**head, wait=wait, entries=tuple(entries))
