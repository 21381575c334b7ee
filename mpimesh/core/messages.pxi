# Messages of a group between ranks that share memory; a part of call.pyx.

from mpimesh.core.mail cimport Mail, Message, mail_state


cdef enum: MOST_ROUTES = 32


cdef bint _has_come(Message message, bint alone) except -1:
    """Wait a while for a message; tell whether its handle has all that it needs."""
    if not mail_state(&message.c) and not message.c.detached:
        # A send to a thread of this process need not wait long: it can make a copy.
        message.spend(1e-3 if alone and not (message.sends and message.mail.c.one_process) else 5e-5)
    if mail_state(&message.c) != NODE_DONE and not message.c.detached:
        return False
    if message.error is not None or message.rest is not None or message.value is not None:
        return False
    if message.mail.c.ended != NULL:
        message.mail.sweep()
    return True


cdef class Route(PlanRecord):
    """The plan of a send, of a receive, or of a shift, which is both.

    Args:
        call: What is called.
        wire_tag: Its tag among all messages of the ranks.
        dest, source: The ranks that it sends to and receives from; -1 for none.

    Attributes:
        source, wire_tag: The same.
        description, head: What is sent, as text and as the text's digest.
        expected_head: The digest of what is received straight into its array; 0 for none.
        guess: Shape and dtype of what comes in all likelihood, where no array is given to receive into.
    """

    cdef public bytes description
    cdef public unsigned long long head, expected_head
    cdef public tuple guess
    cdef readonly long dest, source
    cdef readonly int wire_tag
    cdef object peers
    cdef int unread  # how a start changes the messages that are sent and not received

    def __init__(self, CallRecord call not None, int wire_tag, long dest=-1, long source=-1):
        self.name, self.rule, self.kind, self.shape_in, self.peers = call.name, call.rule, call.dtype, call.shape, call.peers
        self.wire_tag, self.dest, self.source = wire_tag, dest, source
        self.unread = {"send": 1, "recv": -1}.get(call.name, 0)

    def take(self, Message message not None):
        """Make the result of a message that is not the expected one, or of any."""
        raise NotImplementedError


_ANY_ARRAY = numpy.empty(0)  # in the place of an array to receive into, where none is given


cdef class Courier:
    """The messages of one group between ranks that share memory.

    Args:
        starter: The group's starts; its communicator has `node_mail`.
    """

    cdef Starter starter
    cdef Mail mail
    cdef object modules
    cdef PlanRecord routes
    cdef int num_routes

    def __init__(self, Starter starter not None):
        self.starter, self.mail, self.modules = starter, starter.communicator.node_mail, sys.modules

    def keep(self, Route route not None, cnp.ndarray like, tuple options):
        """Let calls alike go by this route; forget all others where they are many.

        Args:
            route: That of a call which has started.
            like: An array like those to send, or to receive into; None if none is given.
            options: The other arguments.
        """
        route.make = route.name
        if like is None:
            route.make, like = "recv any", _ANY_ARRAY
        if self.find(route.make, like, options) is not None:  # which is for plain arguments, unlike this call's
            return
        if self.num_routes == MOST_ROUTES:
            self.routes, self.num_routes = None, 0
        route.options, route.descr = options, like.dtype
        route.like = numpy.broadcast_to(numpy.empty((), like.dtype), (<object>like).shape)
        route.next, self.routes, self.num_routes = self.routes, route, self.num_routes + 1

    def send(self, x, dest, tag):
        """Start to send an array as one like it was sent before; None if that takes more."""
        return None if type(x) is not cnp.ndarray else self.again("send", <cnp.ndarray>x, None, (dest, tag))

    def receive(self, source, out, tag):
        """Start to receive, into `out` or what comes, as was done before; None if that takes more."""
        if out is None:
            return self.again("recv any", _ANY_ARRAY, None, (source, tag))
        if type(out) is not cnp.ndarray or not _is_plain(<cnp.ndarray>out):
            return None
        return self.again("recv", <cnp.ndarray>out, <cnp.ndarray>out, (source, tag))

    def shift(self, x, offset, wrap):
        """Start a shift as one like it was started before; None if that takes more."""
        return None if type(x) is not cnp.ndarray else self.again("shift", <cnp.ndarray>x, None, (offset, wrap))

    cdef Route find(self, str name, cnp.ndarray x, tuple options):
        cdef PlanRecord route = self.routes
        while route is not None and not route.fits(name, x, options):
            route = route.next
        return <Route>route

    cdef again(self, str name, cnp.ndarray x, cnp.ndarray room, tuple options):
        cdef Route route = self.find(name, x, options)
        if route is None or not cnp.PyArray_IS_C_CONTIGUOUS(x):
            return None
        if self.starter.ledger is None or self.starter.open_work.closed or self.starter.traffic.budgets:
            return None
        if route.source >= 0 and "cupy" in self.modules:  # what comes may lie on a device
            return None
        return self.start(route, self.starter.new_call(route, None), None if route.dest < 0 else x, room)

    cpdef start(self, Route route, CallRecord call, cnp.ndarray x, cnp.ndarray room):
        """Start a message, and give its handle out; None for a shift that has to wait for its turn.

        Args:
            route: How it goes.
            call: What was called.
            x: The array to send.
            room: The array to receive into.
        """
        cdef Starter starter = self.starter
        cdef Message sent = None, received
        request = None
        if not route.unread and not starter.ready():
            return None
        if room is None and route.guess is not None:  # first: where memory is lacking, nothing is sent
            room = starter.empty(route.guess[0], route.guess[1], numpy, x)
        if not route.unread:
            call.number = starter.ledger.started = starter.ledger.started + 1
            if starter.post(call, route):
                request = call.posted  # whose test raises
        if request is None:
            # Both under way at once: a ring of ranks that all send first must not wait.
            if route.dest >= 0:
                request = sent = self.mail.send(x, route.dest, route.wire_tag, route.head, route.description)
            if route.source >= 0:
                request = received = self.mail.receive(
                    room, route.source, route.wire_tag, route.expected_head, route
                )
                if sent is not None and not mail_state(&sent.c):
                    received.rest = sent
        if route.tally is None:
            starter.count_start(call, route)
        else:
            route.tally.started += 1
            starter.ledger.unread += route.unread
        call.peers = route.peers
        starter.record(route, call)
        return starter.hand_out(call, room, request)
