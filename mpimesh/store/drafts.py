"""A checkpoint, or an array, while it is written, and what of one may be removed: what it lists.

Whatever stops a save, a folder tells by its own manifest which files are a checkpoint's. All others
are somebody's, and stay.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from mpimesh.errors import DamagedError, StoreError
from mpimesh.store.array_formats import FORMATS
from mpimesh.store.files import (
    DATA,
    PART,
    TOKEN_DIGITS,
    data_folder,
    is_seen,
    new_token,
    remove,
    sync,
    temporary_beside,
)
from mpimesh.store.format import MANIFEST, Manifest, is_manifest, listed_files

__all__ = ["Draft", "array_draft", "check_target", "clear_left", "drop"]

_DATA_FILE = re.compile(rf"{DATA}[0-9a-f]{{{TOKEN_DIGITS}}}/\d{{5,}}-\d{{3,}}\.safetensors")
"""The names of a checkpoint's files that are ever removed."""
_ARRAYS = {f"array{kind.suffixes[0]}": kind for kind in FORMATS}
"""The names of arrays while they are written."""
_NEXT = re.compile(rf"[0-9a-f]{{{TOKEN_DIGITS}}}\.next")
"""The names of manifests that are being written."""
_BEGUN_S = 60.0
"""A folder without a note that is younger may be one of a save that has just begun."""


def check_target(path: Path) -> tuple[str, ...] | None:
    """Return the files of the checkpoint at a path, by its manifest; None if nothing is there.

    Raises:
        StoreError: If something else is there.
    """
    if not path.is_dir():
        if path.exists() or path.is_symlink():
            raise StoreError(f"{path} is a file; a checkpoint is a folder: give another path")
        return None
    names = sorted(each.name for each in path.iterdir())
    if not names:
        return None
    if MANIFEST not in names:
        raise StoreError(
            f"{path} is a folder with other things in it, such as {names[0]}, and no checkpoint: "
            "give another path, or move it away"
        )
    try:
        return listed_files(path / MANIFEST)
    except DamagedError as error:
        whose = "is damaged" if is_manifest(path / MANIFEST) else "is of another program"
        raise StoreError(
            f"{path} cannot be replaced: its {MANIFEST} {whose}, so nothing says which files are a "
            "checkpoint's: give another path, or rename it"
        ) from error


class Draft:
    """A checkpoint while it is written: a hidden folder beside its path, with a note of its files.

    The note is a manifest without arrays. It lists the files that ranks are about to write, and
    those of the checkpoint that they replace. Whenever the save ends, by an error or a kill too,
    what is listed there and not by the checkpoint at the path is removed, by this save or the next
    one; and nothing else ever is. Local, on the first rank.

    Args:
        path: The checkpoint's folder.
        token: Ends the name of the folder of its data.
        files: The names of the files in that.

    Attributes:
        fresh: The hidden folder.

    Raises:
        StoreError: If there is something else at the path, or another save to it is under way.
    """

    def __init__(self, path: Path, token: str, files: Iterable[str]) -> None:
        self.path, self.fresh = path, temporary_beside(path, token)
        self._data = data_folder(token)
        self._files = [f"{self._data}/{name}" for name in files]
        self._next = self.fresh / f"{token}.next"
        self._note: BinaryIO | None = None
        replaced = check_target(path)
        if not clear_left(path.parent, re.escape(path.name)):
            raise StoreError(
                f"another save to {path} is under way: give each job a path of its own, and "
                "resolve a save with wait=False before the next one"
            )
        self.fresh.mkdir(parents=True)
        try:
            self._list(replaced or ())
            if self._files:
                (self.fresh / self._data).mkdir()
        except BaseException:
            self.close()
            raise

    def _list(self, replaced: Iterable[str]) -> None:
        """Write the note, and lock it: no other save takes this one for what one has left."""
        before, self._note = self._note, _write_note(self._next, [*self._files, *replaced])
        if before is not None:
            before.close()

    def commit(self, manifest: Manifest) -> None:
        """Make visible what all ranks have written, and close; on an error nothing is seen.

        Raises:
            StoreError: If another job has removed it, or something else is at the path by now.
            OSError: If the file system refuses.
        """
        try:
            text = manifest.text()
            _check_seen(self.fresh, manifest)
            replaced = check_target(self.path)
            self._list(replaced or ())  # what is there may have changed since
            new = self._next
            new.write_bytes(text)
            sync(new)
            if replaced is None:
                new.replace(self.fresh / MANIFEST)
                sync(self.fresh)
                self.fresh.rename(self.path)  # fails if more than an empty folder is there by now
            else:
                # One file's name changes hands, so that there is a whole checkpoint at each moment.
                if self._files:
                    (self.fresh / self._data).rename(self.path / self._data)
                    sync(self.path)
                new.replace(self.path / MANIFEST)
                sync(self.path)
            sync(self.path.parent)
        except FileNotFoundError as error:
            raise StoreError(self.lost or str(error)) from error
        finally:
            self.close()

    @property
    def lost(self) -> str:
        """Why the hidden folder is no more; "" if it is there."""
        return "" if self.fresh.is_dir() else _lost(self.fresh)

    def close(self) -> None:
        """Remove what is not, or no longer, the checkpoint's. Again it does nothing."""
        if self._note is not None:
            self._note.close()
            self._note = None
        _clear(self.fresh, self.path)


@contextmanager
def array_draft(path: Path, suffix: str) -> Iterator[Path]:
    """Yield a name to write an array under, in a hidden folder beside its path. Local.

    It is removed if the block raises, and at the end the folder; and what saves that were killed
    have left for the same path, as their notes list it.
    """
    clear_left(path.parent, re.escape(path.name))
    token, name = new_token(), f"array{suffix}"
    fresh = temporary_beside(path, token)
    fresh.mkdir()
    note = _write_note(fresh / f"{token}.next", [name])
    try:
        yield fresh / name
    except BaseException:
        remove(fresh / name)
        raise
    finally:
        note.close()
        _clear(fresh, path)


def _write_note(new: Path, names: Iterable[str]) -> BinaryIO:
    """Write the note of a hidden folder, and lock it: no other save takes it for what is left."""
    file = new.open("wb")
    try:
        file.write(Manifest({}, {}, None, tuple((name, 0) for name in names)).text())
        file.flush()
        _lock(file)
        new.replace(new.with_name(MANIFEST))
    except BaseException:
        file.close()
        with suppress(OSError):  # without a note nobody else would know whose it is
            new.unlink(missing_ok=True)
            new.parent.rmdir()
        raise
    return file


def drop(path: Path) -> None:
    """Remove a checkpoint: what its manifest lists, and the folder if that is all. Local.

    It is hidden first, in one step, so that nobody sees half of it, whenever this is killed. One
    with other things in it stays in sight with them, without a manifest.

    Raises:
        StoreError: If it is none.
        OSError: If it cannot be changed.
    """
    draft = Draft(path, new_token(), ())
    hidden = temporary_beside(path)
    try:
        names = {MANIFEST, *listed_files(path / MANIFEST)}
        names |= {name.partition("/")[0] for name in names}
        found = {each.relative_to(path).as_posix() for each in path.rglob("*")}
        if found <= names:
            path.rename(hidden)
        else:
            (path / MANIFEST).unlink()
        sync(path.parent)
    finally:
        draft.close()
        _clear(hidden, path)
        with suppress(OSError):
            path.rmdir()


def clear_left(folder: Path, name: str) -> bool:
    """Remove what saves have left that did not end; False if one is still under way. Local.

    Args:
        folder: The folder of the checkpoints.
        name: A regular expression of their names.
    """
    # The token keeps out what is written now for a longer name, as RUN.ema is beside RUN.
    pattern = re.compile(rf"\.({name})\.[0-9a-f]{{{TOKEN_DIGITS}}}{re.escape(PART)}")
    try:
        found = [(each, pattern.fullmatch(each.name)) for each in folder.iterdir()]
    except OSError:
        return True
    cleared = [_clear(each, folder / match[1]) for each, match in found if match]
    return all(cleared)


def _clear(fresh: Path, path: Path) -> bool:
    """Remove what the note of a hidden folder lists; False if its save is still under way.

    What has no note is left as it is: nobody knows whose it is. But a folder goes that has nothing
    in it, or a note without its name yet, as a save leaves it that was killed when it began.
    """
    note = fresh / MANIFEST
    try:
        if fresh.is_symlink() or note.is_symlink():
            return True
        names = listed_files(note)
        files = [name for name in names if _DATA_FILE.fullmatch(name)]
        with note.open("rb+") as file:
            if not _lock(file):
                return False
            # Whoever writes there nevertheless, without locks, finds it gone, and raises.
            taken = temporary_beside(path)
            fresh.rename(taken)
    except FileNotFoundError:
        _clear_begun(fresh)
        return True
    except OSError:
        return True
    _remove_files(taken, files)
    for name in _ARRAYS.keys() & set(names):
        array = taken / name
        if not array.is_symlink() and array.is_file() == (name != "array.zarr"):
            _ARRAYS[name].remove(array)
    try:
        kept = {*listed_files(path / MANIFEST)}
    except (FileNotFoundError, NotADirectoryError):
        kept = set()
    except OSError:  # nobody knows what is the checkpoint's
        kept = {*files}
    emptied = _remove_files(path, [name for name in files if name not in kept])
    with suppress(OSError):
        if emptied and not kept:
            path.rmdir()
    with suppress(OSError):
        for new in _unnamed(taken):
            new.unlink()
        (taken / MANIFEST).unlink()
    try:
        taken.rmdir()
    except OSError:  # others have put something there
        with suppress(OSError):
            taken.rename(fresh)
    return True


def _clear_begun(fresh: Path) -> None:
    """Remove a hidden folder with nothing in it, or but a note without its name; others stay."""
    with suppress(OSError):
        if time.time() - fresh.stat().st_mtime < _BEGUN_S:
            return
        for new in _unnamed(fresh):
            new.unlink()
        fresh.rmdir()


def _unnamed(folder: Path) -> list[Path]:
    """Return the files of manifests that have not got their name."""
    found = [one for one in folder.iterdir() if _NEXT.fullmatch(one.name) and not one.is_symlink()]
    return [one for one in found if one.is_file() and (not one.stat().st_size or is_manifest(one))]


def _remove_files(folder: Path, files: Iterable[str]) -> bool:
    """Remove files, but nothing behind links; tell whether a folder of data has gone."""
    gone = False
    for data, names in groupby(sorted(files), lambda name: name.partition("/")[0]):
        inner = folder / data
        with suppress(OSError):
            if inner.is_symlink():
                continue
            for name in names:
                if not (folder / name).is_symlink():
                    (folder / name).unlink(missing_ok=True)
            inner.rmdir()
            gone = True
    return gone


def _lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed; False if it is locked. Where there are no locks, True."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _lost(folder: Path) -> str:
    return (
        f"{folder.name} was removed while it was written, as by another job that saves to the same "
        "path: give each job a path of its own"
    )


def _check_seen(folder: Path, manifest: Manifest) -> None:
    """Return once all files that the ranks have written are seen here.

    Raises:
        StoreError: If some are not after a while, as where nodes have folders of their own.
    """

    def is_whole(path: Path, nbytes: int) -> bool:
        if not folder.is_dir():
            raise StoreError(_lost(folder))
        return path.is_file() and path.stat().st_size == nbytes

    for name, nbytes in manifest.files:
        if not is_seen(partial(is_whole, folder / name, nbytes)):
            raise StoreError(
                f"{name}, which another rank has written, is not seen by the first one: save to a "
                "folder that all nodes share"
            )
