"""Calls of operations, compiled: their records, their comparison over the ranks of a node, their handles."""

cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from mpimesh.core.node cimport NODE_DONE, NODE_MAX_RANKS, Bound, Operation, Window

import sys
from collections import deque
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

cdef extern from "numpy/arrayobject.h":
    object PyArray_Empty(int, cnp.npy_intp *, cnp.dtype, int)

Site = tuple[CodeType, int]
"""A place in a program: the code object and the offset of the instruction in it."""

OWN = ("mpimesh.", "numpy.", "contextlib")
"""Modules whose frames are no place of the program; operators of a split array come by NumPy's mixin."""
cdef tuple _OWN = OWN
cdef object _last_own = None  # the module whose function most calls come by


cdef tuple _site():
    """Return the innermost place outside mpimesh and NumPy: its code, and the offset in it."""
    cdef PyFrameObject *frame = PyEval_GetFrame()
    cdef PyFrameObject *back
    cdef bint owned = False
    global _last_own
    while True:
        module = PyFrame_GetGlobals(frame)
        back = NULL
        if module is _last_own:
            back = PyFrame_GetBack(frame)
        else:
            name = (<dict>module).get("__name__", "")
            if type(name) is str and (<str>name).startswith(_OWN):
                back, _last_own = PyFrame_GetBack(frame), module
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
    cdef int64_t *_words[NODE_MAX_RANKS]
    cdef int _place, _size
    cdef long _last
    cdef uint64_t _total
    cdef public long apart
    cdef public bint open

    def __init__(self, int place, boards, long slots):
        cdef cnp.ndarray board
        cdef int q
        if not 0 < len(boards) <= NODE_MAX_RANKS:
            raise ValueError(f"a board is for at most {NODE_MAX_RANKS} ranks")
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


# -- what every start reads ------------------------------------------------------------------------

cdef int64_t _now_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <int64_t>now.tv_sec * 1000000000 + now.tv_nsec


cdef class Ring:
    """The last operations of a rank in a memory that outlives it: see `runtime/flight.py`.

    A slot has six numbers (order, number, bytes, start and end in nanoseconds since 1970, state), then a text.

    Args:
        memory: The slots.
        slots: How many there are.
    """

    cdef cnp.ndarray _memory
    cdef size_t _slot_bytes
    cdef readonly long slots, started

    def __init__(self, cnp.ndarray memory not None, long slots):
        self._memory, self.slots, self._slot_bytes = memory, slots, cnp.PyArray_NBYTES(memory) // slots
        if self._slot_bytes < 48 or self._slot_bytes % 8:
            raise ValueError("a slot has six numbers")

    cdef int64_t *row(self, long order) noexcept:
        return <int64_t *>(<char *>cnp.PyArray_DATA(self._memory) + <size_t>(order % self.slots) * self._slot_bytes)

    cpdef long write(self, long number, long nbytes, bytes text) except -1:
        """Note that an operation was started; return its order, from 1."""
        cdef int64_t *row
        self.started += 1
        row = self.row(self.started)
        row[0], row[1], row[2], row[3], row[4], row[5] = self.started, number, nbytes, _now_ns(), 0, 0
        memcpy(row + 6, PyBytes_AS_STRING(text), min(<size_t>len(text), self._slot_bytes - 48))
        return self.started

    cpdef end(self, CallRecord call, bint failed):
        """Note that the result of an operation was taken, or that it failed."""
        cdef int64_t *row
        if call.record > self.started - self.slots:
            row = self.row(call.record)
            row[4], row[5] = _now_ns(), 2 if failed else 1

    def text_of(self, group, call):
        """Return what stands in a slot of such a call behind the numbers."""
        raise NotImplementedError



cdef class Counter:
    """A number of starts."""

    cdef public long started


cdef class State:
    """What a rank has under way, as far as every start and every end looks at it.

    Attributes:
        recorder: Writes all that it starts into the flight record; None if there is none.
        calls: What it started last, the latest last.
        tails: The last unfinished operation of each chain that has one.
    """

    cdef public Ring recorder
    cdef public object calls
    cdef public dict tails

    def __cinit__(self):
        self.calls, self.tails = deque(maxlen=8), {}


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
    cdef State _state
    cdef object __weakref__

    __class_getitem__ = classmethod(GenericAlias)

    def _begin(self):
        """Take note that it is started and not resolved."""
        self._work, self._state = self._group.open_work, self._group.progress
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
        if operation.c.state != NODE_DONE:
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
        if self._state.recorder is not None:
            self._state.recorder.end(self._call, failed)
        self._operand = self._request = None
        self._resolved = True  # last: whatever ends this before, it can be done again

    def __del__(self):
        if self._work is None or self._resolved:
            return  # its start has failed, or it has a result
        self._work._dropped.append(self)
        if not sys.is_finalizing() and not self._interrupted:  # nothing can be shown at the end any more
            self._warn()


# -- starts ------------------------------------------------------------------------------------------

cdef class Direct:
    """A collective of a window, worked out but for the arrays, or planned with them.

    Args:
        call: What is called.
        bound: Bound to arrays like those to come, whose tables are used; or to those of the plan.
        digest: Of what the ranks compare.
        counter: Counts its starts.
        nbytes: Bytes that this rank puts in.
        shape: The result's; None if this rank gets none.
        in_place: Whether an array may be its own result.
        value: The result of what is planned.

    Attributes:
        busy: Whether what is planned is under way, or has failed.
    """

    cdef public bint busy
    cdef object value
    cdef CallRecord call
    cdef Bound bound
    cdef Counter counter
    cdef tuple shape
    cdef bint in_place
    cdef long digest, nbytes
    cdef object site  # of the last call that was recorded, and what was written of it
    cdef bytes text
    cdef size_t sends, receives
    cdef int ndim
    cdef cnp.npy_intp sizes[64]  # the most axes that NumPy has
    # What the next call must be for this one to be used.
    cdef object make, descr
    cdef tuple options
    cdef cnp.ndarray like
    cdef Direct next

    def __init__(
        self,
        CallRecord call,
        Bound bound,
        long digest,
        Counter counter,
        long nbytes,
        tuple shape=None,
        bint in_place=False,
        value=None,
    ):
        self.call, self.bound, self.digest, self.counter = call, bound, digest, counter
        self.nbytes, self.shape, self.in_place, self.value = nbytes, shape, in_place, value
        self.sends = 0 if bound.send is None else cnp.PyArray_NBYTES(bound.send)
        self.receives = 0 if bound.recv is None else cnp.PyArray_NBYTES(bound.recv)
        self.ndim = 0 if shape is None else len(shape)
        for axis in range(self.ndim):
            self.sizes[axis] = shape[axis]

    cdef bint fits(self, make, cnp.ndarray x, tuple options) except -1:
        """Tell whether a call is like the one that this was made for."""
        return (
            self.make is make
            and self.descr is <object>cnp.PyArray_DESCR(x)
            and cnp.PyArray_SAMESHAPE(self.like, x)
            and (self.options is options or _same(self.options, options))
        )


cdef bint _same(tuple options, tuple others) except -1:
    """Tell whether the arguments of two calls are the same numbers and names: True is not 1."""
    cdef Py_ssize_t i
    for i in range(len(options)):
        one, other = options[i], others[i]
        if one is other:
            continue
        if type(one) is not type(other) or type(one) is not int and type(one) is not str or one != other:
            return False
    return True


cdef enum: RECENT = 8
# Results from this size on come from a pool, or lie in shared memory as their operands do.
cdef enum: SMALL_RESULT_BYTES = 32768


cdef tuple _EMPTY = ()


cdef inline bint _is_plain(cnp.ndarray out):
    """Tell whether a result can come straight into this array."""
    return cnp.PyArray_IS_C_CONTIGUOUS(out) and cnp.PyArray_ISALIGNED(out) and cnp.PyArray_ISWRITEABLE(out)


cdef inline _new(object kind):
    """Return a new object without a call of its class."""
    return (<PyTypeObject *>kind).tp_new(<type>kind, <PyObject *>_EMPTY, NULL)


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
    cdef object core, context, traffic, progress, note, _handle, _call
    cdef Counter communicator
    cdef State state
    cdef str name
    cdef Window window
    cdef OpenWork open_work
    cdef Board board
    cdef dict _known
    cdef Direct _recent, _barrier

    def __init__(self, core, communicator, handle, call):
        self.core, self.communicator, self.window = core, communicator, communicator.window
        self.context, self.progress = core.context, core.progress
        self.state, self.note = core.progress, core.progress.calls.append
        self.traffic, self.open_work = core.context.traffic, core.open_work
        self.name, self.board = core.name, communicator.signatures
        self._handle, self._call, self._known = handle, call, {}

    def run(self, make, x, out, label, tuple options):
        """Start a collective, as `run` of the group does."""
        cdef Direct direct = None
        if type(x) is not cnp.ndarray or label is not None:
            return self.core.run(make, x, out, label, options)
        direct = self.find(make, <cnp.ndarray>x, options)
        if direct is not None:
            try:
                found = self.start(direct, <cnp.ndarray>x, out)
            except Exception as error:
                self.core.fail(direct.call.name, error)
            if found is not None:
                return found
        found = self.core.run(make, x, out, label, options)
        if direct is None:
            self.learn(make, <cnp.ndarray>x, options)
        return found

    def barrier(self):
        """Start a barrier, as `start_barrier` of the group does; None if that must do it."""
        if self._barrier is None:
            self._barrier = self.core.direct_barrier(self.window)
        if not self.ready():
            return None
        return self.launch(self._barrier, self._barrier.bound, self.new_call(self._barrier.call), None)

    def again(self, Direct planned not None):
        """Start what is planned once more; None if that takes more than to start it."""
        cdef Handle handle
        if planned.busy or not planned.call.ended or not self.ready():
            return None
        if planned.value is not None and not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>planned.value):
            return None
        handle = self.launch(planned, planned.bound, planned.call, planned.value)
        if handle is not None:
            planned.busy, planned.call.ended, handle._prepared = True, False, planned
        return handle

    cdef Direct find(self, make, cnp.ndarray x, tuple options):
        """Return what a call alike has left; None for none."""
        cdef Direct direct = self._recent
        cdef int looked = 0
        while direct is not None and looked < RECENT:
            if direct.fits(make, x, options):
                return direct
            direct, looked = direct.next, looked + 1
        if looked < RECENT:
            return None
        key = self.key(make, x, options)
        return None if key is None else <Direct>self._known.get(key)

    cdef key(self, make, cnp.ndarray x, tuple options):
        """Return what calls alike have in common; None if that is no value."""
        for option in options:
            if not (option is None or type(option) is int or isinstance(option, str)):
                return None
        # NumPy may have two equal types, long and long long: the result has the type of the input.
        return make, options, <object>cnp.PyArray_DESCR(x), cnp.PyArray_TYPE(x), (<object>x).shape

    cdef learn(self, make, cnp.ndarray x, tuple options):
        """Keep what the next call alike needs, if it can go directly, or that it cannot."""
        cdef Direct direct
        if not cnp.PyArray_IS_C_CONTIGUOUS(x) or not cnp.PyArray_ISALIGNED(x):
            return
        key = self.key(make, x, options)
        if key is None or key in self._known or len(self._known) >= 256:
            return
        self._known[key] = direct = <Direct>self.core.directly(make, x, options)
        if direct is None:
            return
        direct.make, direct.descr, direct.options = make, <object>cnp.PyArray_DESCR(x), options
        direct.like = numpy.broadcast_to(numpy.empty((), x.dtype), (<object>x).shape)
        direct.bound.send = direct.bound.recv = None  # its tables are what is kept
        direct.next, self._recent = self._recent, direct

    cdef bint ready(self) except -1:
        """Tell whether a start needs nothing else: no budget, no turn."""
        return not (
            self.closed
            or self.context.closed
            or self.traffic.budgets
            or (self.state.tails and self.progress.busy(self.communicator))
        )

    cdef Handle start(self, Direct direct, cnp.ndarray x, out):
        """Start it on these arrays; None if they need more work."""
        cdef cnp.ndarray target = None
        cdef Bound bound
        cdef char *source = <char *>cnp.PyArray_DATA(x)
        cdef char *result
        if not self.ready() or not cnp.PyArray_IS_C_CONTIGUOUS(x) or not cnp.PyArray_ISALIGNED(x):
            return None
        if direct.shape is None:  # what `out` of another rank must be, this one must be, too
            if out is not None and (type(out) is not cnp.ndarray or not _is_plain(<cnp.ndarray>out)):
                return None
        elif out is None:
            if direct.receives < SMALL_RESULT_BYTES:
                Py_INCREF(x.descr)  # which the next call takes
                target = <cnp.ndarray>PyArray_Empty(direct.ndim, direct.sizes, x.descr, 0)
            else:
                target = self.core.empty(direct.shape, x.descr, numpy, x)
        elif out is x:
            if not direct.in_place or not cnp.PyArray_ISWRITEABLE(x):
                return None
            target = x
        elif type(out) is cnp.ndarray:
            target = <cnp.ndarray>out
            if target.descr is not x.descr or (<object>target).shape != direct.shape:
                return None
            if not _is_plain(target):
                return None
            result = <char *>cnp.PyArray_DATA(target)
            if source < result + direct.receives and result < source + direct.sends:
                return None
        else:
            return None
        bound = Bound.__new__(Bound)
        bound.c, bound.window, bound.send, bound.recv = direct.bound.c, self.window, x, target
        bound.tables = direct.bound
        bound.c.source_data = source
        bound.c.out = NULL if target is None else <char *>cnp.PyArray_DATA(target)
        bound.place()
        return self.launch(direct, bound, self.new_call(direct.call), target)

    cdef CallRecord new_call(self, CallRecord like):
        """Return the record of a call made here."""
        cdef CallRecord call = <CallRecord>_new(self._call)
        call.name, call.group, call.rule, call.shape = like.name, self.name, like.rule, like.shape
        call.dtype, call.compared, call.site = like.dtype, like.compared, _site()
        return call

    cdef Handle launch(self, Direct direct, Bound bound, CallRecord call, value):
        """Start what is bound, and give its handle out; None if the ranks are known to differ."""
        cdef Handle handle
        cdef long long word = 0
        cdef long number = self.communicator.started + 1
        if self.board is not None:
            word = self.board.post(number, direct.digest)
            if word < 0:
                return None  # as `submit` does then: it gets a handle whose request raises
            call.word, call.signatures = word, self.board if word else None
        call.number = self.communicator.started = number
        handle = <Handle>_new(self._handle)
        handle._group, handle._call, handle._value = self.core, call, value
        if self.state.recorder is not None:
            if direct.site is None or <tuple>call.site != <tuple>direct.site:
                direct.site, direct.text = call.site, self.state.recorder.text_of(self.core, call)
            call.record = self.state.recorder.write(number, direct.nbytes, direct.text)
        handle._request = bound.start()
        direct.counter.started += 1
        handle._work, handle._state = self.open_work, self.state
        self.open_work.add(handle)
        self.note(call)
        return handle
