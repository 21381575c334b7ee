# Messages of a group that are alike earlier ones; a part of call.pyx.

from mpimesh.core.mail cimport Mail, Message


cdef enum: MOST_ROUTES = 32


cdef bint _has_come(Message message, bint alone) except -1:
    """Wait a while for a message; tell whether its handle has all that it needs."""
    if not message.c.state and not message.c.detached:
        # A send to a thread of this process need not wait long: it can make a copy.
        message.spend(1e-3 if alone and not (message.sends and message.mail.c.one_process) else 5e-5)
    if message.c.state != NODE_DONE and not message.c.detached:
        return False
    if message.error is not None or message.rest is not None or message.value is not None:
        return False
    if message.mail.c.ended != NULL:
        message.mail.sweep()
    return True


cdef class Route:
    """What messages alike have in common: where they go to or come from, and what they are.

    Args:
        call: A call of them.
        counter: Counts them.
        peer: The other rank.
        tag: Their tag, as the caller gives it.
        wire_tag: The same among all messages of the ranks.
        head: Stands for dtype, shape and group.
        text: The same as text; None for a receive.
        like: An array like those to send, or to receive into; None if it comes with the message.
        nbytes: Bytes that this rank puts in.
        receiver: What a receive makes of a message that is another one.
        guess: Shape and dtype of what comes in all likelihood, where `like` is None.
    """

    cdef CallRecord call
    cdef Counter counter
    cdef long peer, tag, nbytes
    cdef int wire_tag
    cdef unsigned long long head
    cdef bytes text, record_text
    cdef cnp.ndarray like
    cdef tuple guess
    cdef object descr, receiver, code
    cdef int offset
    cdef Route next

    def __init__(
        self,
        CallRecord call not None,
        Counter counter not None,
        long peer,
        long tag,
        int wire_tag,
        unsigned long long head,
        bytes text,
        cnp.ndarray like,
        long nbytes=0,
        receiver=None,
        tuple guess=None,
    ):
        self.guess, self.call, self.counter, self.peer, self.tag, self.wire_tag = guess, call, counter, peer, tag, wire_tag
        self.head, self.text, self.nbytes, self.receiver = head, text, nbytes, receiver
        if like is not None:
            self.descr = <object>cnp.PyArray_DESCR(like)
            self.like = numpy.broadcast_to(numpy.empty((), like.dtype), (<object>like).shape)

    cdef bint fits(self, cnp.ndarray x, long peer, long tag) noexcept:
        """Tell whether a message is like those of it; x is None if it has no array yet."""
        if self.peer != peer or self.tag != tag or (x is None) != (self.like is None):
            return False
        return x is None or self.descr is <object>cnp.PyArray_DESCR(x) and cnp.PyArray_SAMESHAPE(self.like, x)


cdef class ShiftRoute(Route):
    """What shifts alike have in common; the other arguments are those of a :class:`Route` of `offset` as its tag.

    Args:
        wrap: As the caller gives it.
        dest, source: The other ranks; -1 where the row ends.
        plan: How they are compared.
    """

    cdef object wrap
    cdef long dest, source
    cdef PlanRecord plan

    def set_ends(self, wrap, long dest, long source, PlanRecord plan not None):
        """Set what a :class:`Route` has not, and return it."""
        self.wrap, self.dest, self.source, self.plan = wrap, dest, source, plan
        return self


cdef class Courier:
    """The messages of one group between ranks that share memory, where they are alike earlier ones.

    Args:
        core: The group, whose communicator has `node_mail`.
        handle: Makes the handle of a call.
        call: Makes the record of a call.
    """

    cdef Starter core
    cdef Ledger ledger
    cdef object communicator, _handle, _call, modules
    cdef Limits traffic
    cdef State state
    cdef str name
    cdef Mail mail
    cdef OpenWork open_work
    cdef Route sends, receives
    cdef ShiftRoute shifts
    cdef int num_routes

    def __init__(self, Starter core not None, handle, call):
        self.core, self.ledger, self.communicator = core, core.ledger, core.communicator
        self.mail, self.traffic, self.state = self.communicator.node_mail, core.traffic, core.state
        self.open_work, self.name = core.open_work, core.name
        self._handle, self._call, self.modules = handle, call, sys.modules

    def learn(self, Route route not None, bint sends):
        """Let further messages alike go by this route."""
        self.make_room()
        if sends:
            route.next, self.sends = self.sends, route
        else:
            route.next, self.receives = self.receives, route

    def learn_shift(self, ShiftRoute route not None):
        """Let further shifts alike go by this route."""
        self.make_room()
        route.next, self.shifts = self.shifts, route

    cdef make_room(self):
        """Count one more route, and forget all others where they are many."""
        if self.num_routes == MOST_ROUTES:
            self.sends = self.receives = None
            self.shifts = None
            self.num_routes = 0
        self.num_routes += 1

    def send(self, x, dest, tag):
        """Start to send an array as one like it was sent before; None if that takes more."""
        cdef Route route
        if type(x) is not cnp.ndarray or type(dest) is not int or type(tag) is not int:
            return None
        route = self.find(self.sends, <cnp.ndarray>x, dest, tag)
        if route is None or not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>x) or not self.ready():
            return None
        message = self.mail.send(<cnp.ndarray>x, route.peer, route.wire_tag, route.head, route.text)
        self.count(1)
        return self.launch(route, self.new_call(route.call), message, None)

    def receive(self, source, out, tag):
        """Start to receive, into `out` or what comes, as was done before; None if that takes more."""
        cdef Route route
        cdef cnp.ndarray array = None
        if type(source) is not int or type(tag) is not int:
            return None
        if out is not None:
            if type(out) is not cnp.ndarray or not _is_plain(<cnp.ndarray>out):
                return None
            array = <cnp.ndarray>out
        route = self.find(self.receives, array, source, tag)
        if route is None or not self.ready() or "cupy" in self.modules:
            return None
        if route.guess is not None:
            array = self.core.empty(*route.guess)
        message = self.mail.receive(array, route.peer, route.wire_tag, route.head, route.receiver)
        self.count(-1)
        return self.launch(route, self.new_call(route.call), message, array)

    def shift(self, x, offset, wrap):
        """Start a shift as one like it was started before; None if that takes more."""
        cdef ShiftRoute route = self.shifts
        cdef Message sent = None, message
        cdef CallRecord call
        if type(x) is not cnp.ndarray or type(offset) is not int or type(wrap) is not bool:
            return None
        while route is not None and not (route.wrap is wrap and route.fits(<cnp.ndarray>x, 0, offset)):
            route = <ShiftRoute>route.next
        if route is None or not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>x) or not self.ready():
            return None
        if "cupy" in self.modules or (self.state.tails and self.core.progress.busy(self.communicator)):
            return None
        call = self.new_call(route.call)
        array = None
        if route.source >= 0:  # first: where memory is lacking, nothing is sent
            array = self.core.empty((<object>x).shape, (<cnp.ndarray>x).descr, numpy, x)
        call.number = self.ledger.started = self.ledger.started + 1
        if self.core.post(call, route.plan):
            return None
        # Both under way at once: a ring of ranks that all send first must not wait.
        if route.dest >= 0:
            sent = self.mail.send(<cnp.ndarray>x, route.dest, route.wire_tag, route.head, route.text)
        if route.source < 0:
            return self.launch(route, call, sent, None)
        message = self.mail.receive(array, route.source, route.wire_tag, route.head, route.receiver)
        if sent is not None and not sent.c.state:
            message.rest = sent
        return self.launch(route, call, message, array)

    cdef Route find(self, Route route, cnp.ndarray x, long peer, long tag):
        while route is not None and not route.fits(x, peer, tag):
            route = route.next
        return route

    cdef bint ready(self) except -1:
        """Tell whether a start needs nothing else."""
        return not (self.core.ledger is None or self.open_work.closed or self.traffic.budgets)

    cdef count(self, int change):
        """Count a message that is sent, or begun to be received."""
        self.ledger.unread += change

    cdef CallRecord new_call(self, CallRecord like):
        """Return the record of a call made here."""
        cdef CallRecord call = <CallRecord>_new(self._call)
        call.name, call.group, call.rule, call.shape = like.name, self.name, like.rule, like.shape
        call.dtype, call.peers, call.code = like.dtype, like.peers, _place(&call.offset)
        return call

    cdef Handle launch(self, Route route, CallRecord call, Message message, value):
        """Give the handle of a message out."""
        cdef Handle handle = <Handle>_new(self._handle)
        handle._group, handle._call, handle._value, handle._request = self.core, call, value, message
        if self.state.recorder is not None:
            if route.code is not call.code or route.offset != call.offset:
                route.code, route.offset = call.code, call.offset
                route.record_text = self.state.recorder.text_of(self.core, call)
            call.record = self.state.recorder.write(call.number, route.nbytes, route.record_text)
        route.counter.started += 1
        handle._work, handle._state = self.open_work, self.state
        self.open_work.add(handle)
        self.state.note(call)
        return handle
