"""Declarations of `pool.pyx` for other compiled modules."""

cimport numpy as cnp

cdef class Pool:
    cdef object more
    cdef char **free[48]
    cdef int counts[48]
    cdef int rooms[48]
    cdef readonly size_t free_bytes
    cdef unsigned long life
    cdef object take(self, int ndim, cnp.npy_intp *shape, cnp.dtype dtype, size_t nbytes)
    cdef bint _grow(self, int kind) except -1
