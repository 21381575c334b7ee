"""Calls of operations, compiled: their records, their comparison over the ranks of a node, their handles."""

cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from mpimesh.core.node cimport NODE_DONE, Bound, Operation, Window

import sys
from types import CodeType, GenericAlias

import numpy

cnp.import_array()

cdef extern from "Python.h":
    ctypedef struct PyFrameObject
    PyFrameObject *PyEval_GetFrame()
    PyFrameObject *PyFrame_GetBack(PyFrameObject *)
    ctypedef struct PyCodeObject
    PyCodeObject *PyFrame_GetCode(PyFrameObject *)
    object PyFrame_GetGlobals(PyFrameObject *)
    int PyFrame_GetLasti(PyFrameObject *)
    void Py_XDECREF(PyObject *)

Site = tuple[CodeType, int]
"""A place in a program: the code object and the offset of the instruction in it."""

OWN = ("mpimesh.", "numpy.", "contextlib")
"""Modules whose frames are no place of the program; operators of a split array come by NumPy's mixin."""
cdef tuple _OWN = OWN


cdef tuple _site():
    """Return the innermost place outside mpimesh and NumPy: its code, and the offset in it."""
    cdef PyFrameObject *frame = PyEval_GetFrame()
    cdef PyFrameObject *back
    cdef bint owned = False
    while True:
        name = (<dict>PyFrame_GetGlobals(frame)).get("__name__", "")
        back = NULL
        if type(name) is str and (<str>name).startswith(_OWN):
            back = PyFrame_GetBack(frame)
        if back == NULL:
            break
        if owned:
            Py_XDECREF(<PyObject *>frame)
        frame, owned = back, True
    cdef PyCodeObject *code = PyFrame_GetCode(frame)
    found = (<object><PyObject *>code, PyFrame_GetLasti(frame))
    Py_XDECREF(<PyObject *>code)
    if owned:
        Py_XDECREF(<PyObject *>frame)
    return found


def call_site():
    """Return the innermost place outside mpimesh and NumPy: its code, and the offset in it."""
    return _site()


cdef class CallRecord:
    """The facts of a call: see :class:`mpimesh.runtime.call.Call`."""

    cdef public object name, group, rule, shape, dtype, label, compared, peers, site, hint, signatures
    cdef public long number, record, word
    cdef public bint ended, planned

    def __cinit__(self):
        self.rule = self.dtype = self.hint = ""


# -- the comparison of what the ranks of a node start -------------------------------------------------

cdef class Board:
    """The words of the ranks of one communicator that share a node: see `comm/signatures.py`.

    Args:
        place: Which of them is this rank.
        boards: The board of each, as bytes.
        slots: Words on each board; a power of two.

    Attributes:
        apart: The first operation in which this rank has found a mismatch; 0 for none.
        open: Whether words are compared.
    """

    cdef list _boards
    cdef int64_t *_words[256]
    cdef int _place, _size
    cdef long _last
    cdef uint64_t _total
    cdef public long apart
    cdef public bint open

    def __init__(self, int place, boards, long slots):
        cdef cnp.ndarray board
        cdef int q
        if not 0 < len(boards) <= 256:
            raise ValueError("a board is for at most 256 ranks")
        self._place, self._size, self._boards = place, len(boards), list(boards)
        self.open, self._last = True, slots - 1
        for q in range(self._size):
            board = boards[q]
            if cnp.PyArray_NBYTES(board) < 8 * slots:
                raise ValueError("a board has a word for each of its slots")
            self._words[q] = <int64_t *>cnp.PyArray_DATA(board)

    cpdef long long post(self, long number, long digest) except? -2:
        """Post what this rank is about to start as operation `number`, by its digest.

        Returns:
            The word, to be compared later; 0 if all others have posted the same already; -1 if
            another rank has started something else: then it must not be started.
        """
        cdef int64_t word, theirs, left = 0
        cdef int q
        if self.apart:
            return -1
        self._total = (3 * self._total + <uint64_t>digest) & 0xFFFFFFF
        word = <int64_t>number << 28 | <int64_t>self._total
        (<volatile int64_t *>self._words[self._place])[number & self._last] = word
        if not self.open:
            return 0
        for q in range(self._size):
            theirs = (<volatile int64_t *>self._words[q])[number & self._last]
            if theirs != word:
                left = word
                if theirs >> 28 == number:
                    self.found(q, number)
                    return -1
        return left

    cpdef bint agrees(self, long number, long long word) except -1:
        """Tell whether no rank is known to have started something else as operation `number`."""
        cdef int64_t theirs
        cdef int q
        for q in range(self._size if self.open else 0):
            theirs = (<volatile int64_t *>self._words[q])[number & self._last]
            if theirs != word and theirs >> 28 == number:
                return False
        return True

    def found(self, int place, long number):
        """Take note that the rank at `place` has started something else up to `number`."""
        raise NotImplementedError


# -- handles --------------------------------------------------------------------------------------

cdef class OpenWork:
    """The work of one mesh on one rank that is started and not yet resolved, in order.

    A handle that nobody keeps any more is to warn, so none is held here. One that goes without being
    resolved comes back here to stay, for its buffers are still written.
    """

    cdef dict _ids  # of objects that take themselves out before they go
    cdef list _dropped
    cdef object __weakref__

    def __cinit__(self):
        self._ids, self._dropped = {}, []

    def __len__(self):
        return len(self._ids)

    def all(self):
        """Return it in the order of its start."""
        return [<object><PyObject *><size_t>one for one in self._ids]

    cdef void add(self, Handle handle):
        self._ids[<size_t><PyObject *>handle] = None

    cdef void remove(self, Handle handle):
        self._ids.pop(<size_t><PyObject *>handle, None)
        if self._dropped and handle in self._dropped:
            self._dropped.remove(handle)


cdef class Handle:
    """An operation under way, as its user has it: see :class:`mpimesh.CollectiveTensor`.

    Whatever the transport may still read or write is kept here until it is done: the caller's
    array, buffers, the result. On a device, what work is its own stays in the order of the stream
    that it was called on (`_scope`): the input is read there, and the result is divided, converted,
    unpacked. Whoever takes the result works on the stream that is current then, which is made to
    wait for the other one, on the device and not on the host (`_event`).
    """

    cdef public object _group, _request, _finish, _unlock, _value, _prepared, _operand, _scope, _event, _error
    cdef public CallRecord _call
    cdef public bint _resolved, _interrupted
    cdef OpenWork _work
    cdef object __weakref__

    __class_getitem__ = classmethod(GenericAlias)

    def _begin(self):
        """Take note that it is started and not resolved."""
        self._work = self._group.open_work
        self._work.add(self)

    def resolve(self, timeout_s=None):
        """Wait for this operation and return its result; a second call returns the same.

        A CuPy array may be used at once on the stream that is current here, whichever was current
        when the operation was called.

        Args:
            timeout_s: Longest wait; None waits as long as it takes.

        Raises:
            GroupError: If `timeout_s` is no time.
            CollectiveTimeoutError: After `timeout_s`; the operation goes on, and
                `resolve` may be called again.
            MismatchError: If the ranks called different operations: on every rank of the group
                with ``MPIMESH_CHECKS`` on; else on those that know of another one on their node,
                and for each later collective of the group.
            TransportError: If the transport failed.

        An exception from elsewhere, such as Ctrl-C or one of a signal handler, ends the wait and
        not the operation: `resolve` may be called again, but need not be. What goes in several
        steps, as large ordinary arrays through shared memory and all that takes two levels over
        nodes, may end with it on this rank; then so must the program. And one that comes while the
        result is made of what has come, a mean divided or a block unpacked, costs that result:
        later calls raise.
        """
        cdef Operation operation
        if timeout_s is not None or self._scope is not None or self._error is not None:
            return self._resolve(timeout_s)
        if self._resolved:
            return self._value
        if type(self._request) is not Operation or self._finish is not None or self._unlock is not None:
            return self._resolve(None)
        operation = <Operation>self._request
        # Alone, it may yield for long; else what goes by MPI is to be moved, too.
        if not operation.c.state:
            operation.spend(1e-3 if len(self._work._ids) == 1 else 5e-5)
        if operation.c.state != NODE_DONE or self._value is None:
            return self._resolve(None)
        operation.bound.window.sweep()
        if self._call.signatures is not None and not (<Board>self._call.signatures).agrees(self._call.number, self._call.word):
            return self._resolve(None)
        if self._prepared is not None:
            self._prepared.busy = False
            self._prepared = None
        self._end(False)
        return self._value

    cpdef _end(self, bint failed):
        """Take note that it is over for this rank."""
        self._call.ended = True
        self._work.remove(self)
        recorder = self._group.progress.recorder
        if recorder is not None:
            recorder.end(self._call, failed=failed)
        self._operand = self._request = None
        self._resolved = True  # last: whatever ends this before, it can be done again

    def __del__(self):
        if self._work is None or self._resolved:
            return  # its start has failed, or it has a result
        self._work._dropped.append(self)
        if not sys.is_finalizing() and not self._interrupted:  # nothing can be shown at the end any more
            self._warn()


# -- plain calls -------------------------------------------------------------------------------------

cdef class Direct:
    """A planned collective of ordinary form, of which a call binds the arrays and no more."""

    cdef Bound bound
    cdef object plan, tally
    cdef tuple shape
    cdef bint in_place
    cdef long digest
    cdef size_t sends, receives


cdef class Caller:
    """The calls of one group that are alike earlier ones: no plan, no copy, no queue.

    Args:
        core: The group, whose `run` takes all others.
        communicator: Its transport, which has a window.
        handle: Makes the handle of a call.
        call: Makes the record of a call.

    Attributes:
        closed: Whether the group is closed.
    """

    cdef public bint closed
    cdef object core, communicator, context, traffic, progress, _handle, _call
    cdef str name
    cdef Window window
    cdef OpenWork open_work
    cdef Board board
    cdef dict _direct

    def __init__(self, core, communicator, handle, call):
        self.core, self.communicator, self.window = core, communicator, communicator.window
        self.context, self.progress = core.context, core.progress
        self.traffic, self.open_work = core.context.traffic, core.open_work
        self.name, self.board = core.name, communicator.signatures
        self._handle, self._call, self._direct = handle, call, {}

    def run(self, make, x, out, label, tuple options):
        """Start a collective, as `run` of the group does."""
        cdef Direct direct = None
        cdef cnp.ndarray array
        cdef bint alike = type(x) is cnp.ndarray and label is None
        for option in options:
            alike = alike and (option is None or type(option) is int or isinstance(option, str))
        if alike:
            array = <cnp.ndarray>x
            # NumPy may have two equal types, long and long long: the result has the type of the input.
            key = (make, options, <object>array.descr, cnp.PyArray_TYPE(array), (<object>array).shape)
            direct = <Direct>self._direct.get(key)
            if direct is not None and direct.bound is not None:
                try:
                    found = self.start(direct, array, out)
                except Exception as error:
                    self.core.fail(direct.plan.name, error)
                if found is not None:
                    return found
        found = self.core.run(make, x, out, label, options)
        if alike and direct is None and len(self._direct) < 256:
            self._direct[key] = self.learn(make, array, options)
        return found

    cdef learn(self, make, cnp.ndarray x, tuple options):
        """Return what the next call alike needs; an empty one if it cannot go directly."""
        cdef Direct direct = Direct.__new__(Direct)
        facts = self.core.directly(make, x, options)
        if facts is not None:
            direct.plan, bound = facts
            direct.bound, direct.tally = bound, direct.plan.tally
            direct.shape = direct.plan.shape
            direct.in_place, direct.digest = direct.plan.in_place, direct.plan.digest
            direct.sends = cnp.PyArray_NBYTES(direct.bound.send)
            direct.receives = cnp.PyArray_NBYTES(direct.bound.recv)
            direct.bound.send = direct.bound.recv = None  # its tables are what is kept
        return direct

    cdef start(self, Direct direct, cnp.ndarray x, out):
        """Start it on these arrays; None if they need more work."""
        cdef cnp.ndarray target
        cdef Bound bound
        cdef Operation operation
        cdef Handle handle
        cdef CallRecord call
        cdef long number
        cdef long long word = 0
        cdef char *source
        cdef char *result
        if self.closed or self.context.closed or self.traffic.budgets or self.progress.recorder is not None:
            return None
        if not cnp.PyArray_IS_C_CONTIGUOUS(x) or not cnp.PyArray_ISALIGNED(x):
            return None
        if self.progress.tails and self.progress.busy(self.communicator):
            return None
        source = <char *>cnp.PyArray_DATA(x)
        if out is None:
            target = self.core.empty(direct.shape, x.descr, numpy, x)
        elif out is x:
            if not direct.in_place or not cnp.PyArray_ISWRITEABLE(x):
                return None
            target = x
        elif type(out) is cnp.ndarray:
            target = <cnp.ndarray>out
            if target.descr is not x.descr or (<object>target).shape != direct.shape:
                return None
            if not (
                cnp.PyArray_IS_C_CONTIGUOUS(target) and cnp.PyArray_ISALIGNED(target) and cnp.PyArray_ISWRITEABLE(target)
            ):
                return None
            result = <char *>cnp.PyArray_DATA(target)
            if source < result + direct.receives and result < source + direct.sends:
                return None
        else:
            return None
        number = self.communicator.started + 1
        self.communicator.started = number
        call = <CallRecord>self._call.__new__(self._call)
        plan = direct.plan
        call.name, call.group, call.rule, call.shape = plan.name, self.name, plan.rule, plan.shape_in
        call.dtype, call.compared, call.number, call.site = plan.kind, plan.compared, number, _site()
        if self.board is not None:
            word = self.board.post(number, direct.digest)
            if word < 0:
                # As `submit` does: it gets a handle whose request raises.
                self.communicator.started = number - 1
                return None
            if word > 0:
                call.word, call.signatures = word, self.board
        bound = Bound.__new__(Bound)
        bound.c, bound.window, bound.send, bound.recv = direct.bound.c, self.window, x, target
        bound.tables = direct.bound
        bound.c.source_data, bound.c.out = source, <char *>cnp.PyArray_DATA(target)
        bound.place()
        operation = bound.start()
        direct.tally.starts += 1
        handle = <Handle>self._handle.__new__(self._handle)
        handle._group, handle._call, handle._request, handle._value = self.core, call, operation, target
        handle._work = self.open_work
        self.open_work.add(handle)
        self.progress.calls.append(call)
        return handle

