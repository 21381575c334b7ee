"""Calls of operations, compiled: their records, their starts, their handles."""

cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from mpimesh.core.node cimport (
    NODE_BOXES, NODE_BROADCAST, NODE_DONE, NODE_GATHER, NODE_REDUCE, NODE_SCATTER, Bound, Boxes, Operation, Window,
    node_state
)

import sys
from types import CodeType, GeneratorType, GenericAlias

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
cdef object _last_outside = None  # the module that most calls come from


cdef object _place(int *offset):
    """Return the code of the innermost place outside mpimesh and NumPy, and the offset in it."""
    cdef PyFrameObject *frame = PyEval_GetFrame()
    cdef PyFrameObject *back
    cdef bint owned = False
    global _last_own, _last_outside
    while True:
        module = PyFrame_GetGlobals(frame)
        back = NULL
        if module is _last_outside:
            break
        if module is _last_own:
            back = PyFrame_GetBack(frame)
        else:
            name = (<dict>module).get("__name__", "")
            if type(name) is str and (<str>name).startswith(_OWN):
                back, _last_own = PyFrame_GetBack(frame), module
            else:
                _last_outside = module
        if back == NULL:
            break
        if owned:
            Py_XDECREF(<PyObject *>frame)
        frame, owned = back, True
    cdef PyCodeObject *code = PyFrame_GetCode(frame)
    offset[0] = PyFrame_GetLasti(frame)
    found = <object><PyObject *>code
    Py_XDECREF(<PyObject *>code)
    if owned:
        Py_XDECREF(<PyObject *>frame)
    return found


def call_site():
    """Return the innermost place outside mpimesh and NumPy: its code, and the offset in it."""
    cdef int offset
    code = _place(&offset)
    return code, offset


cdef class CallRecord:
    """The facts of a call: see :class:`mpimesh.runtime.call.Call`."""

    cdef public object name, group, rule, shape, dtype, label, compared, peers, hint
    cdef object code
    cdef int offset
    cdef public Operation posted
    cdef public long number, record
    cdef public bint ended, planned

    def __cinit__(self):
        self.rule = self.dtype = self.hint = ""

    @property
    def site(self):
        """Where it was called."""
        return self.code, self.offset

    @site.setter
    def site(self, site):
        self.code, self.offset = site


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


cdef class Ledger(Counter):
    """The account of what a rank has started on one communicator, which all groups of its ranks share.

    Args:
        communicator: The communicator.
        mesh: The mesh that it belongs to, called alike on all its ranks.
        name: Its name, alike on all its ranks.
        ranks: The numbers of its ranks in the job; empty if they have none.
        mail: Counts this rank's messages, where the ranks compare what they start; else None.

    Attributes:
        started: Number of collectives that this rank has started.
        unread: Messages that it has sent, less those that it has begun to receive.
        roll_calls: Number of barriers with a limit that it has started.
    """

    cdef public object communicator, mesh, name, ranks, mail
    cdef public long unread, roll_calls

    def __init__(self, communicator, mesh="", name="", ranks=(), mail=None):
        self.communicator, self.mesh, self.name, self.ranks, self.mail = communicator, mesh, name, ranks, mail


cdef class Limits:
    """The limits of what a rank receives, the outermost first."""

    cdef public tuple budgets

    def __cinit__(self):
        self.budgets = ()


cdef enum: LAST_CALLS = 8


cdef class State:
    """What a rank has under way, as far as every start and every end looks at it.

    Attributes:
        recorder: Writes all that it starts into the flight record; None if there is none.
        tails: The last unfinished operation of each chain that has one.
    """

    cdef public Ring recorder
    cdef public dict tails
    cdef list _calls
    cdef Py_ssize_t _at

    def __cinit__(self):
        self._calls, self.tails = [None] * LAST_CALLS, {}

    cpdef note(self, CallRecord call):
        """Note that this was started."""
        self._calls[self._at] = call
        self._at = (self._at + 1) % LAST_CALLS

    @property
    def calls(self):
        """What it started last, the latest last."""
        return [call for call in self._calls[self._at:] + self._calls[:self._at] if call is not None]


# -- handles --------------------------------------------------------------------------------------

cdef class OpenWork:
    """The work of one mesh on one rank that is started and not yet resolved, in order.

    A handle that nobody keeps any more is to warn, so none is held here. One that goes without being
    resolved comes back here to stay, for its buffers are still written.

    Attributes:
        closed: Whether the mesh is closed: nothing may start or be waited for any more.
    """

    cdef public bint closed
    cdef PyObject *_first  # of a row of objects that take themselves out before they go
    cdef PyObject *_last
    cdef Py_ssize_t _size
    cdef list _dropped
    cdef object __weakref__

    def __cinit__(self):
        self._dropped = []

    def __len__(self):
        return self._size

    def all(self):
        """Return it in the order of its start."""
        found = []  # first: it may let garbage be collected, and that resolve what is open
        cdef PyObject *one = self._first
        while one != NULL:
            found.append(<object>one)
            one = (<Handle>one)._next
        return found

    cdef void add(self, Handle handle):
        handle._before, handle._next, handle._is_open = self._last, NULL, True
        if self._last == NULL:
            self._first = <PyObject *>handle
        else:
            (<Handle>self._last)._next = <PyObject *>handle
        self._last = <PyObject *>handle
        self._size += 1

    cdef void remove(self, Handle handle):
        if not handle._is_open:
            return
        if handle._before == NULL:
            self._first = handle._next
        else:
            (<Handle>handle._before)._next = handle._next
        if handle._next == NULL:
            self._last = handle._before
        else:
            (<Handle>handle._next)._before = handle._before
        handle._is_open = False
        self._size -= 1
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

    cdef public object _group, _request, _finish, _unlock, _value, _operand, _scope, _event, _error
    cdef public Prepared _prepared
    cdef public CallRecord _call
    cdef public bint _resolved, _interrupted
    cdef OpenWork _work
    cdef State _state
    cdef PyObject *_before  # of what is open, and not resolved
    cdef PyObject *_next
    cdef bint _is_open
    cdef object __weakref__

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(
        self, group, CallRecord call, request, finish=None, unlock=None, value=None, scope=None, operand=None, nbytes=0
    ):
        """Take note of what has started.

        Args:
            group: Who has started it.
            call: What was called.
            request: What the transport has started.
            finish: Makes the result of what comes; None if that is the result.
            unlock: Makes the caller's array writable again.
            value: What comes; None for the value of the request's steps.
            scope: The stream that it works on, if any.
            operand: The caller's array, to be kept alive.
            nbytes: Bytes that this rank puts in.
        """
        self._group, self._call, self._request, self._finish, self._unlock = group, call, request, finish, unlock
        self._value, self._scope, self._operand = value, scope, operand
        self._work, self._state = group.open_work, group.progress
        self._work.add(self)
        self._state.note(call)
        if self._state.recorder is not None:
            self._state.recorder.start(group, call, nbytes)

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
        if self._finish is not None or self._unlock is not None:
            return self._resolve(None)
        if type(self._request) is Message:
            if not _has_come(<Message>self._request, self._work._size == 1):
                return self._resolve(None)
            if self._call.posted is not None and self._call.posted.differs():
                return self._resolve(None)
            self._end(False)
            return self._value
        if type(self._request) is not Operation:
            return self._resolve(None)
        operation = <Operation>self._request
        # Alone, it may yield for long; else what goes by MPI is to be moved, too.
        if not node_state(&operation.c):
            operation.spend(1e-3 if self._work._size == 1 else 5e-5)
        if node_state(&operation.c) != NODE_DONE:
            return self._resolve(None)
        operation.window.sweep()
        if operation.c.misfit:
            return self._resolve(None)
        if operation.c.kind in (NODE_REDUCE, NODE_GATHER, NODE_BROADCAST, NODE_SCATTER, NODE_BOXES) and operation.differs():
            return self._resolve(None)
        if self._prepared is not None:
            self._prepared.busy = False
            self._prepared = None
        self._end(False)
        return self._value

    def _give(self, value):
        """Let :meth:`resolve` give `value`, which is there when the result is; return this handle."""
        if self._finish is not None:
            return self.map(lambda _: value)
        self._value = value
        return self

    def _compared(self):
        """Return what the ranks of its node compare it by; None if they do not, or it is over."""
        return self._request if type(self._request) is Operation else self._call.posted

    cpdef _end(self, bint failed):
        """Take note that it is over for this rank."""
        self._call.ended = True
        self._work.remove(self)
        if self._state.recorder is not None:
            self._state.recorder.end(self._call, failed)
        self._operand = self._request = self._call.posted = None
        self._resolved = True  # last: whatever ends this before, it can be done again

    def __del__(self):
        if self._work is None or self._resolved:
            return  # its start has failed, or it has a result
        self._work._dropped.append(self)
        if not sys.is_finalizing() and not self._interrupted:  # nothing can be shown at the end any more
            self._warn()


# -- plans -------------------------------------------------------------------------------------------

cdef class PlanRecord:
    """The facts of a plan that each start reads: see :class:`mpimesh.runtime.plan.Plan`.

    One without a name is that of an operation which has no more: its calls have names of their own.
    """

    cdef public object name, rule, compared, kind, shape_in, receives, also
    cdef public Counter tally
    cdef public tuple shape
    cdef public long nbytes, digest
    cdef public bint in_place, unequal
    # For a window: bound to arrays like those to come, whose tables are used; None if it takes more to start it.
    cdef Bound bound
    cdef size_t sends, takes
    cdef int ndim
    cdef cnp.npy_intp sizes[64]  # the most axes that NumPy has
    # What the flight record says of the call that was recorded last.
    cdef object code
    cdef int offset
    cdef bytes text
    # What the next call must be for this one to be used.
    cdef object make, descr
    cdef tuple options
    cdef cnp.ndarray like
    cdef PlanRecord next

    def __init__(self, long nbytes=0, receives=None, bint unequal=False):
        self.nbytes, self.receives, self.unequal = nbytes, receives, unequal

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
        if type(one) is not type(other) or not _is_value(one) or one != other or not _is_value(other):
            return False
    return True


cdef bint _is_value(option) except -1:
    """Tell whether an argument is a number, a name, a row of numbers, or None, which say all that they are."""
    if type(option) is tuple:
        for number in <tuple>option:
            if type(number) is not int:
                return False
        return True
    return option is None or type(option) is int or isinstance(option, str)


cdef tuple _lasting(tuple options):
    """Return the arguments of a call as they are now: lists may change."""
    for option in options:
        if type(option) is list:
            return tuple([tuple(<list>one) if type(one) is list else one for one in options])
    return options


cdef class Prepared:
    """A plan bound to arrays, to be started.

    Args:
        plan: How it is counted and compared.
        begin: Starts it: gives one request, or several steps.
        value: What comes, which is the result if it needs no more work.
        finish: The work that makes the result of what comes, if any.
        scope: The stream that it works on, if it may be on device memory.
        arguments: Those of the transport's method; empty if it is none.

    Attributes:
        after: Gives the steps that follow what `begin` has started; None for none.
        busy: Whether a start is under way, or has failed, so that it cannot be started again.
    """

    cdef public PlanRecord plan
    cdef public object begin, value, finish, scope, after
    cdef public tuple arguments
    cdef public bint busy

    def __init__(self, PlanRecord plan not None, begin, value=None, finish=None, scope=None, tuple arguments=()):
        self.plan, self.begin, self.value, self.finish = plan, begin, value, finish
        self.scope, self.arguments = scope, arguments


# -- starts ------------------------------------------------------------------------------------------

cdef enum: RECENT = 8
cdef enum: MOST_PLANS = 256
# Results from this size on come from a pool, or lie in shared memory as their operands do.
cdef enum: SMALL_RESULT_BYTES = 32768


cdef tuple _EMPTY = ()


cdef inline bint _is_plain(cnp.ndarray out):
    """Tell whether a result can come straight into this array."""
    return cnp.PyArray_IS_C_CONTIGUOUS(out) and cnp.PyArray_ISALIGNED(out) and cnp.PyArray_ISWRITEABLE(out)


cdef inline _new(object kind):
    """Return a new object without a call of its class."""
    return (<PyTypeObject *>kind).tp_new(<type>kind, <PyObject *>_EMPTY, NULL)


cdef class Starter:
    """The compiled half of a group on one rank: the starts of its operations.

    Args:
        name: The group's name.
        ledger: That of its ranks; None on a rank that is not one of them.
        context: The mesh.
        handle: Makes the handle of a call.
        call: Makes the record of a call.
        digest: Gives the digest of a signature.

    Attributes:
        checked: Whether the ranks compare each call by messages before it starts.
        rank: This rank's place in the group; None if it is not a member.
        progress: The unfinished operations of this rank.
        open_work: What is not resolved, of the whole mesh.
    """

    cdef public object context, progress
    cdef readonly object rank
    cdef public str name
    cdef public Ledger ledger
    cdef public OpenWork open_work
    cdef readonly bint checked
    cdef object communicator, digest, _handle, _call
    cdef Limits traffic
    cdef State state
    cdef Window window, node
    cdef dict plans
    cdef PlanRecord recent
    cdef Prepared _barrier

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self, str name, Ledger ledger, context, handle, call, digest):
        self.name, self.ledger, self.context, self.checked = name, ledger, context, bool(context.settings.checks)
        self.progress = self.state = context.progress
        self.traffic, self.open_work = context.traffic, context.open_work
        self.digest, self._handle, self._call, self.plans = digest, handle, call, {}
        if ledger is not None:
            self.communicator, self.window = ledger.communicator, ledger.communicator.window
            self.rank = self.communicator.rank
            self.node = None if self.checked else ledger.communicator.node

    def run(self, make, x, out, label, tuple options):
        """Start the collective that `make` plans, by the plan of the last call alike.

        Args:
            make: Plans it: called with the group, the array as the group moves it, and `options`.
            x: The caller's array.
            out: The caller's array for the result.
            label: The caller's name for the call.
            options: Its arguments. The plan is kept if they are numbers of type int, rows of these, names or None.
        """
        cdef PlanRecord plan
        cdef Handle handle
        cdef tuple lasting = _lasting(options)
        try:
            data = x if type(x) is cnp.ndarray else self.operand(x)
            plan = self.find(make, data, lasting)
            if plan is not None and plan.bound is not None and label is None and x is data:
                handle = self.start(plan, <cnp.ndarray>x, out)
                if handle is not None:
                    return handle
            if self.ledger is None or self.open_work.closed:
                self.refuse(plan.name if plan is not None else make.__name__[5:])
            if plan is None:
                plan = self.plan(make, data, *options)
                self.keep(plan, make, data, lasting)
            prepared = plan.bind(self, x, data, out)
            return self.submit(self.new_call(plan, label), prepared, x)
        except Exception as error:
            self.fail(make.__name__[5:], error)

    def scatter(self, make, x, out, label, tuple options):
        """Start a scatter that `make` plans, as one alike was started; None if that takes more.

        Args:
            make, label, options: As of :meth:`run`; the root comes first.
            x: The caller's array, which only the root reads.
            out: The caller's array for the result.
        """
        cdef PlanRecord plan
        mine = x if options[0] == self.rank else out
        if type(mine) is not cnp.ndarray or label is not None or (mine is not x and "cupy" in sys.modules):
            return None
        try:
            plan = self.find(make, mine, _lasting(options))
            if plan is None or plan.bound is None:
                return None
            return self.start(plan, <cnp.ndarray>mine, out)
        except Exception as error:
            self.fail("scatter", error)

    def exchange(self, PlanRecord plan not None, Boxes boxes not None, source, target, value):
        """Start an exchange of boxes; None if that takes more than a window.

        Args:
            plan: How it is counted and compared.
            boxes: What this rank takes and gives.
            source: This rank's block, or None.
            target: What it takes into, or None.
            value: The result, which is there when the boxes are.
        """
        if self.window is None or not self.ready():
            return None
        try:
            bound = self.window.exchange(source, target, boxes)
            return self.launch(plan, (<Bound>bound).operation(), self.new_call(plan, None), value)
        except Exception as error:
            self.fail(plan.name, error)

    def barrier(self, label):
        """Start a barrier."""
        cdef Prepared prepared = self._barrier
        if self.ledger is None or self.open_work.closed:
            self.refuse("start_barrier")
        try:
            if prepared is None:
                prepared = self._barrier = self.plan_barrier()
            if label is None and type(prepared.begin) is Bound and self.ready():
                return self.launch(
                    prepared.plan, (<Bound>prepared.begin).operation(), self.new_call(prepared.plan, None), None
                )
            return self.submit(self.new_call(prepared.plan, label), prepared)
        except Exception as error:
            self.fail("barrier", error)

    def submit(self, CallRecord call not None, Prepared prepared not None, lock=None):
        """Start one collective of the group in its turn, and give its handle out.

        Args:
            call: What is called, with all that must agree over ranks.
            prepared: The operation; free to be started again when it has ended well.
            lock: The caller's input, which must not change meanwhile: with checks on, a NumPy
                array is read-only until then.

        Raises:
            BudgetError: If it receives more than a budget has left.
        """
        cdef PlanRecord plan = prepared.plan
        cdef Handle handle
        cdef bint asks = False
        unlock = None
        if self.ledger is None or self.open_work.closed:
            self.refuse(call.name)
        if self.traffic.budgets:
            asks = self.asks_for_budget(call, plan)
        if self.checked:
            unlock = self.lock(lock, call)
        call.number = self.ledger.started = self.ledger.started + 1
        if asks or self.checked or plan.also is not None or (self.state.tails and self.progress.busy(self.communicator)):
            request = self.progress.stage(self.communicator, self.in_turn(call, prepared, asks))
        else:
            request = self.begin(call, prepared)
            if type(request) is GeneratorType:
                request = self.progress.stage(self.communicator, request)
        if plan.tally is not None and not asks:
            plan.tally.started += 1
        else:
            self.count(call, plan, not asks)
        handle = self._handle(self, call, request, prepared.finish, unlock, prepared.value, prepared.scope, lock, plan.nbytes)
        handle._prepared = prepared
        return handle

    def begin(self, CallRecord call not None, Prepared prepared not None):
        """Start what was called now, with what the ranks compare: a request, or several steps."""
        cdef Bound bound = None
        if self.node is not None and call.posted is None:
            if type(prepared.begin) is Bound:
                bound = <Bound>prepared.begin
                bound.c.call, bound.c.digest = <unsigned int>call.number, self.digest_of(call, prepared.plan)
            elif self.post(call, prepared.plan):
                return call.posted  # whose test raises
        scope = prepared.scope
        started = prepared.begin() if scope is None else scope.call(prepared.begin)
        if bound is not None and type(started) is Operation:
            call.posted = started  # for the handle, if it is only a step of its request
        if prepared.after is not None:
            started = prepared.after(started)
        if scope is not None and type(started) is GeneratorType:
            started = scope.steps(started)
        return started

    cpdef bint post(self, CallRecord call, PlanRecord plan) except -1:
        """Post what does not go by the window, for the ranks to compare; tell whether they are known to differ."""
        if self.node is None or call.posted is not None:
            return False
        call.posted = self.node.post(self.digest_of(call, plan), <unsigned int>call.number)
        return call.posted.differs()

    cdef unsigned int digest_of(self, CallRecord call, PlanRecord plan) except? 0:
        """Return the digest of a call by a plan."""
        if not plan.digest:
            plan.digest = self.digest(self.node, (call.name, call.rule, call.compared, call.dtype))
        return <unsigned int>plan.digest

    def again(self, CallRecord call not None, Prepared prepared not None):
        """Start what is planned once more; None if that takes more than its window."""
        cdef PlanRecord plan = prepared.plan
        cdef Handle handle
        if prepared.busy or not call.ended or type(prepared.begin) is not Bound or prepared.finish is not None:
            return None
        if plan.also is not None or plan.tally is None or not self.ready():
            return None
        for target in (prepared.value, (<Bound>prepared.begin).recv):
            if type(target) is cnp.ndarray and not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>target):
                return None
        handle = self.launch(plan, (<Bound>prepared.begin).operation(), call, prepared.value)
        prepared.busy, call.ended, handle._prepared = True, False, prepared
        return handle

    cdef PlanRecord find(self, make, x, tuple options):
        """Return the plan of a call alike; None for none."""
        cdef PlanRecord plan = self.recent if type(x) is cnp.ndarray else None
        cdef int looked = 0
        while plan is not None and looked < RECENT:
            if plan.fits(make, <cnp.ndarray>x, options):
                return plan
            plan, looked = plan.next, looked + 1
        key = self.key(make, x, options)
        return None if key is None else <PlanRecord>self.plans.get(key)

    cdef key(self, make, x, tuple options):
        """Return what calls alike have in common; None if that is no value."""
        for option in options:
            if not _is_value(option):
                return None
        # NumPy may have two equal types, long and long long: the result has the type of the input.
        return make, options, type(x), x.dtype, x.dtype.num, x.shape

    cdef keep(self, PlanRecord plan, make, x, tuple options):
        """Keep a plan for the next call alike."""
        key = self.key(make, x, options)
        if key is None:
            return
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
            self.recent = None
        self.plans[key] = plan
        if self.window is None or self.checked or type(x) is not cnp.ndarray or x.dtype.names is not None:
            return  # fields may be renamed in place: the same dtype is another one then
        plan.bound = <Bound>plan.tables(self.window, x.dtype)
        if plan.bound is None:
            return
        plan.make, plan.descr, plan.options = make, x.dtype, options
        plan.like = numpy.broadcast_to(numpy.empty((), x.dtype), x.shape)
        plan.sends = 0 if plan.bound.send is None else cnp.PyArray_NBYTES(plan.bound.send)
        plan.takes = 0 if plan.bound.recv is None else cnp.PyArray_NBYTES(plan.bound.recv)
        plan.ndim = 0 if plan.shape is None else len(plan.shape)
        for axis in range(plan.ndim):
            plan.sizes[axis] = plan.shape[axis]
        plan.bound.send = plan.bound.recv = None  # its tables are what is kept
        plan.next, self.recent = self.recent, plan

    cdef bint ready(self) except -1:
        """Tell whether a start needs nothing else: no budget, no turn, no checks."""
        return not (
            self.ledger is None
            or self.checked
            or self.open_work.closed
            or self.traffic.budgets
            or (self.state.tails and self.progress.busy(self.communicator))
        )

    cdef Handle start(self, PlanRecord plan, cnp.ndarray x, out):
        """Start a plan on these arrays; None if they need more work."""
        cdef cnp.ndarray target = None
        cdef Operation operation
        cdef char *source = <char *>cnp.PyArray_DATA(x)
        cdef char *result
        if not self.ready() or not cnp.PyArray_IS_C_CONTIGUOUS(x) or not cnp.PyArray_ISALIGNED(x):
            return None
        if plan.shape is None:  # what `out` of another rank must be, this one must be, too
            if out is not None and (type(out) is not cnp.ndarray or not _is_plain(<cnp.ndarray>out)):
                return None
        elif out is None:
            if plan.takes < SMALL_RESULT_BYTES:
                Py_INCREF(x.descr)  # which the next call takes
                target = <cnp.ndarray>PyArray_Empty(plan.ndim, plan.sizes, x.descr, 0)
            else:
                target = self.empty(plan.shape, x.descr, numpy, x)
        elif out is x:
            if not plan.in_place or not cnp.PyArray_ISWRITEABLE(x):
                return None
            target = x
        elif type(out) is cnp.ndarray:
            target = <cnp.ndarray>out
            if target.descr is not x.descr or (<object>target).shape != plan.shape:
                return None
            if not _is_plain(target):
                return None
            result = <char *>cnp.PyArray_DATA(target)
            if source < result + plan.takes and result < source + plan.sends:
                return None
        else:
            return None
        operation = Operation.__new__(Operation)
        operation.c, operation.bound, operation.window = plan.bound.c, plan.bound, self.window
        operation.send, operation.recv = x, target
        operation.c.source_data = source
        operation.c.out = NULL if target is None else <char *>cnp.PyArray_DATA(target)
        self.window.place(&operation.c, x)
        return self.launch(plan, operation, self.new_call(plan, None), target)

    cdef CallRecord new_call(self, PlanRecord plan, label):
        """Return the record of a call of a plan made here."""
        cdef CallRecord call
        if label is not None:
            return self._call(plan.name, self.name, plan.rule, plan.shape_in, plan.kind, label, plan.compared)
        call = <CallRecord>_new(self._call)
        call.name, call.group, call.rule, call.shape = plan.name, self.name, plan.rule, plan.shape_in
        call.dtype, call.compared, call.code = plan.kind, plan.compared, _place(&call.offset)
        return call

    cdef Handle launch(self, PlanRecord plan, Operation operation, CallRecord call, value):
        """Start what is bound, and give its handle out."""
        call.number = self.ledger.started = self.ledger.started + 1
        self.record(plan, call)
        operation.c.call = <unsigned int>call.number
        if plan.digest:
            operation.c.digest = <unsigned int>plan.digest
        operation.begin()
        plan.tally.started += 1
        return self.hand_out(call, value, operation)

    cdef record(self, PlanRecord plan, CallRecord call):
        """Write a start of a plan into the flight record, if there is one."""
        if self.state.recorder is None:
            return
        if plan.code is not call.code or plan.offset != call.offset:
            plan.code, plan.offset = call.code, call.offset
            plan.text = self.state.recorder.text_of(self, call)
        call.record = self.state.recorder.write(call.number, plan.nbytes, plan.text)

    cdef Handle hand_out(self, CallRecord call, value, request):
        """Return the handle of what has started."""
        cdef Handle handle = <Handle>_new(self._handle)
        handle._group, handle._call, handle._value, handle._request = self, call, value, request
        handle._work, handle._state = self.open_work, self.state
        self.open_work.add(handle)
        self.state.note(call)
        return handle


include "messages.pxi"
