"""Small arrays in the memory that the ranks of a node share: taking one is a step, and so is giving it back."""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdlib cimport free, realloc

import os

import numpy

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(
        type, cnp.dtype, int, cnp.npy_intp *, cnp.npy_intp *, void *, int, PyObject *
    )

cdef enum: LINE_BYTES = 64
cdef enum: WHOLE_LINES = 16  # up to so many lines there is a size for each number of them, and then four for each doubling
cdef enum: CHUNK_BYTES = 65536
MOST_BYTES = 32768
"""Larger parts are no small ones."""

cdef unsigned long _life = 0  # of this process: another one in a forked child


def _forked():
    global _life
    _life += 1


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


cdef inline size_t _lines_of(int kind) noexcept:
    """Return how many lines the parts of a size have."""
    if kind <= WHOLE_LINES:
        return kind
    kind -= WHOLE_LINES + 1
    return <size_t>(5 + kind % 4) << (2 + kind // 4)


cdef inline int _kind_of(size_t nbytes) noexcept:
    """Return the number of the smallest size that has room for so many bytes."""
    cdef size_t lines = (nbytes + LINE_BYTES - 1) // LINE_BYTES
    cdef int kind = WHOLE_LINES + 1
    if lines <= WHOLE_LINES:
        return <int>lines if lines else 1
    while _lines_of(kind) < lines:
        kind += 1
    return kind


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class _Part:
    """What an array of a pool refers to; its memory is free again when this ends."""

    cdef Pool pool
    cdef char *place
    cdef int kind

    def __dealloc__(self):
        cdef Pool pool = self.pool
        # There is room: `_grow` made it for all parts of this size.
        pool.free[self.kind][pool.counts[self.kind]] = self.place
        pool.counts[self.kind] += 1
        pool.free_bytes += _lines_of(self.kind) * LINE_BYTES


cdef class Pool:
    """Free parts of some sizes, which start on cache lines. What was taken for it stays its own.

    A forked child takes nothing from it: its parent would hand the same out.

    Args:
        more: Returns the address of so many fresh bytes, on a line, or 0 if there are none left.

    Attributes:
        free_bytes: Bytes that are its own and that no array has.
    """

    def __init__(self, more):
        self.more, self.life = more, _life

    def __dealloc__(self):
        cdef int kind
        for kind in range(48):
            free(self.free[kind])

    cdef bint _grow(self, int kind) except -1:
        """Take memory for more parts of a size; return whether there was any."""
        cdef size_t nbytes = _lines_of(kind) * LINE_BYTES
        cdef int number, count = <int>(CHUNK_BYTES // nbytes)
        cdef char *place = <char *><size_t>self.more(count * nbytes)
        cdef char **room
        if place == NULL:
            return False
        room = <char **>realloc(self.free[kind], (self.rooms[kind] + count) * sizeof(char *))
        if room == NULL:
            raise MemoryError()
        self.free[kind] = room
        self.rooms[kind] += count
        for number in range(count):  # the first part comes to lie on top
            room[self.counts[kind] + number] = place + (count - 1 - number) * nbytes
        self.counts[kind] += count
        self.free_bytes += count * nbytes
        return True

    cdef object take(self, int ndim, cnp.npy_intp *shape, cnp.dtype dtype, size_t nbytes):
        """Return an uninitialised array of at most `MOST_BYTES`; None if there is no memory left, or in a forked child."""
        cdef int kind = _kind_of(nbytes)
        cdef _Part part
        cdef cnp.ndarray made
        if self.life != _life:
            return None
        if not self.counts[kind] and not self._grow(kind):
            return None
        part = _Part.__new__(_Part)
        self.counts[kind] -= 1
        self.free_bytes -= _lines_of(kind) * LINE_BYTES
        part.pool, part.place, part.kind = self, self.free[kind][self.counts[kind]], kind
        Py_INCREF(dtype)
        made = PyArray_NewFromDescr(_array, dtype, ndim, shape, NULL, part.place, cnp.NPY_ARRAY_CARRAY, NULL)
        cnp.set_array_base(made, part)
        return made

    def empty(self, size_t nbytes):
        """Return so many uninitialised bytes, at most `MOST_BYTES`; None as `take`."""
        cdef cnp.npy_intp shape = nbytes
        return self.take(1, &shape, _bytes, nbytes)


cdef type _array = numpy.ndarray
cdef cnp.dtype _bytes = numpy.dtype(numpy.uint8)
