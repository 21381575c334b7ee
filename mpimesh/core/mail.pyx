"""Messages between ranks that share memory: threads of a process, or processes of a node.

A :class:`Mail` is a communicator's, as one of its ranks has it; a :class:`Message` is a send or a
receive under way. How they go is in `mail.h`.
"""

cimport cython
cimport numpy as cnp
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint16_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from mpimesh.core.node cimport (
    NODE_CLOSED, NODE_DONE, NODE_INLINE, NODE_LOST, NODE_PIECED, NODE_REMOTE, NODE_SHARED, Engine, Window, data_of, node_pass,
)

import numpy

from mpimesh.errors import ClosedError, MpimeshError, TransportError

cnp.import_array()

def slot_bytes(int size):
    """Return the bytes that each of so many ranks shows the others."""
    return size * sizeof(MailSlot)


cdef class Mail:
    """The messages of a communicator's ranks that share memory, as one of them has them.

    Args:
        window: These ranks.
        memories: The memory of each rank's process, as this process has it mapped.
        slots: Where each rank's :func:`slot_bytes` begin in it, which are zero at first.
        ranks: Their numbers in the communicator.
        size: How many ranks that has.
        arena: Gives memory that the others see; None where the ranks are threads.
        rings: Where this rank's rings are kept; the caller keeps them as long as another rank may
            look at them.
        rendezvous: Whether a send is done only when its message is received, even a small one; of ranks
            that are threads.

    Attributes:
        window, rings: The same.
    """

    def __cinit__(self, Window window, memories, slots, ranks, int size, arena, list rings, bint rendezvous=False):
        cdef int q
        cdef cnp.ndarray memory
        if rendezvous and not window.engine.is_thread:
            raise ValueError("only ranks that are threads can send each message by rendezvous")
        self.window, self.rings, self._arena, self._ranks = window, rings, arena, tuple(ranks)
        self._keep, self._size = list(memories), size
        # Up to which size a copy keeps Python's lock: a thread of several may take long to get it back.
        self.short_bytes = MAIL_SMALL_BYTES << 7 * window.engine.is_thread
        self.c.window, self.c.one_process, self.c.rendezvous = &window.c, window.engine.is_thread, rendezvous
        self.c.slot = <MailSlot **>calloc(window.size, sizeof(void *))
        self.c.peer = <MailPeer *>calloc(window.size, sizeof(MailPeer))
        self._places = <int32_t *>calloc(max(size, 1), sizeof(int32_t))
        if not (self.c.slot and self.c.peer and self._places):
            raise MemoryError
        for q in range(size):
            self._places[q] = -1
        for q in range(window.size):
            memory = memories[q]
            if not 0 <= slots[q] <= cnp.PyArray_NBYTES(memory) - <cnp.npy_intp>(window.size * sizeof(MailSlot)):
                raise ValueError("the slots must lie in their memory")
            self.c.slot[q] = <MailSlot *>(<char *>cnp.PyArray_DATA(memory) + <size_t>slots[q])
            self._places[<int?>self._ranks[q]] = q
        window.engine._windows.add(self)

    def __dealloc__(self):
        free(self.c.slot)
        free(self.c.peer)
        free(self._places)

    def reaches(self, long rank):
        """Tell whether messages to and from this rank go by it."""
        return 0 <= rank < self._size and self._places[rank] >= 0

    cpdef Message send(self, cnp.ndarray buffer, long dest, int tag, uint64_t head=0, bytes text=None):
        """Start to send an array; the request is done when it may be written again.

        Args:
            buffer: The array.
            dest: The receiving rank.
            tag: Tells messages of one pair apart.
            head: Stands for what the array is, equal for equal texts.
            text: What it is, for a receiver that does not expect it.
        """
        cdef Message message = Message.__new__(Message)
        cdef MailOp *o = &message.c
        cdef size_t at
        o.peer = self.place(dest)
        o.source_data, o.bytes, o.tag = <const char *>data_of(buffer), cnp.PyArray_NBYTES(buffer), tag
        message.mail, message.buffer, message.sends = self, buffer, True
        if text is not None:
            if len(text) > MAIL_TEXT_BYTES:
                raise TransportError(f"the text of a message has {len(text)} bytes, more than {MAIL_TEXT_BYTES}")
            o.head, o.text, o.text_bytes, message._text = head, PyBytes_AS_STRING(text), <uint16_t>len(text), text
        if self.c.one_process or o.peer == self.window.rank:
            o.source, o.place = NODE_SHARED, <uintptr_t>o.source_data
        elif o.bytes > MAIL_SMALL_BYTES:
            at = self.window.shared(<void *>o.source_data, o.bytes)
            if at != <size_t>-1:
                o.source, o.place = NODE_SHARED, at
            elif self.window.c.pid != NULL:
                o.source, o.place = NODE_REMOTE, <uintptr_t>o.source_data
            else:
                o.source = NODE_PIECED
        self.start(message)
        return message

    cpdef Message receive(self, cnp.ndarray buffer, long source, int tag, uint64_t head=0, receiver=None):
        """Start to receive into an array, which may have more room than comes.

        Args:
            buffer: The array; None if it is made when the message is there.
            source: The sending rank.
            tag: Tells messages of one pair apart.
            head: What must come to be put into the array.
            receiver: Its `take` is called with the message when that is there and is no such one, or
                there is no array. Without it whatever comes is put into the array.
        """
        cdef Message message = Message.__new__(Message)
        cdef MailOp *o = &message.c
        o.peer = self.place(source)
        o.tag, o.head, o.checked = tag, head, receiver is not None
        message.mail, message.buffer, message.receiver = self, buffer, receiver
        if buffer is not None:
            if not cnp.PyArray_ISWRITEABLE(buffer):
                raise TransportError("an array that is received into must be writeable")
            o.out, o.bytes = <char *>data_of(buffer), cnp.PyArray_NBYTES(buffer)
        self.start(message)
        return message

    cdef int start(self, Message message) except -3:
        """Start a send or a receive, in another ring where that is needed."""
        cdef MailOp *o = &message.c
        cdef int going = MAIL_FULL
        Py_INCREF(message)
        try:
            while going == MAIL_FULL:
                if message.sends:
                    going = mail_send(&self.c, o, <void *>message)
                elif o.bytes <= self.short_bytes:
                    going = mail_receive(&self.c, o, <void *>message)
                else:
                    with nogil:
                        going = mail_receive(&self.c, o, <void *>message)
                if going == MAIL_FULL:
                    self.open(o.peer)
            if going < 0:
                raise MemoryError("no memory is left to receive a message")
        finally:
            if going <= 0:
                Py_DECREF(message)
        return 0

    def probe(self, int tag):
        """Return (source, bytes) of a message with `tag` that waits to be received, or None."""
        cdef uint64_t nbytes = 0
        self.check_open()
        cdef int source = mail_probe(&self.c, tag, &nbytes)
        return None if source < 0 else (self._ranks[source], nbytes)

    @property
    def idle(self):
        """Whether nothing is under way that this rank has started."""
        self.sweep()
        return mail_idle(&self.c) != 0

    def close(self):
        """Move nothing any more: what is under way is over, without a result."""
        if not self._closed:
            self._closed = True
            mail_close(&self.c)
            self.sweep()
            self.window.engine._windows.discard(self)

    cdef int place(self, long rank) except -2:
        cdef int place = -1
        self.check_open()
        if 0 <= rank < self._size:
            place = self._places[rank]
        if place < 0:
            raise TransportError(f"rank {rank} is none of those that share memory here: {list(self._ranks)}")
        return place

    cdef int check_open(self) except -1:
        if self._closed:
            raise ClosedError("nothing can start among these ranks any more: their communicator is closed")
        return 0

    cdef open(self, int place):
        """Make a ring to another rank, by which receives from it are answered, too; the next one if one is full."""
        cdef cnp.ndarray ring
        cdef uintptr_t address, offset
        if mail_reuse_ring(&self.c, place):
            return
        if self._arena is None:  # the others have it at the same address
            ring = numpy.zeros(sizeof(MailRing) + 128, numpy.uint8)
            address = offset = (<uintptr_t>cnp.PyArray_DATA(ring) + 127) & ~<uintptr_t>127
        else:
            ring = self._arena.empty(sizeof(MailRing))
            if ring is None:
                raise TransportError("no memory is left that other ranks of the node can read")
            memset(cnp.PyArray_DATA(ring), 0, MAIL_CELLS_BYTES)
            address, offset = <uintptr_t>cnp.PyArray_DATA(ring), self._arena.find(ring)
        self.rings.append(ring)
        mail_new_ring(&self.c, place, <MailRing *>address, offset)

    cdef void sweep(self):
        """Let go of the messages that are over."""
        cdef MailOp *o = mail_take_ended(&self.c)
        cdef MailOp *next
        while o != NULL:
            next = o.ended
            Py_DECREF(<Message>o.owner)
            o = next


@cython.freelist(64)
cdef class Message:
    """A send or a receive under way, or over.

    Attributes:
        buffer: The array that is sent, or received into; None if that was not known.
        receiver: See :meth:`Mail.receive`.
        value: What the receiver has made of the message.
        rest: Another request, which is to be done, too; the receiver may have started it.
        error: What it has raised.
    """

    cpdef bint test(self) except -1:
        """Move it along, with all else of this rank; tell whether it is over.

        Raises:
            TransportError: If it is larger than its room, or its sender or receiver has left.
            ClosedError: If the communicator was closed.
        """
        cdef Engine engine = self.mail.window.engine
        if self.error is not None:
            raise self.error
        if not mail_state(&self.c) and not self.c.detached:
            if self.c.bytes > self.mail.short_bytes:
                with nogil:
                    node_pass(&engine.c)
            else:
                node_pass(&engine.c)
            if not mail_state(&self.c) and not (self.sends and self.is_free()):
                return False
        if self.mail.c.ended != NULL:
            self.mail.sweep()
        if mail_state(&self.c) == MAIL_MATCHED:
            if self.receiver is not None:
                try:
                    self.receiver.take(self)
                except MpimeshError as error:
                    self.error = error
                    raise
                except BaseException as error:  # such as Ctrl-C; before the message is taken, it can be taken again
                    if self.c.state != MAIL_MATCHED:
                        self.error = TransportError(
                            f"rank {self.mail._ranks[self.mail.window.rank]}: {type(error).__name__} came while the "
                            f"result was made of a message from rank {self.mail._ranks[self.c.peer]} with tag "
                            f"{self.c.tag}; it is lost, send it again"
                        )
                    raise
            elif self.buffer is not None:
                self.accept(self.buffer)
        if self.c.state < 0 and self.c.state != MAIL_CANCELLED:
            raise self._error()
        return self.rest is None or self.rest.test()

    @property
    def text(self):
        """What the sender says of a message that is there, and not yet accepted."""
        if mail_state(&self.c) != MAIL_MATCHED:
            raise TransportError("only a message that waits to be accepted has a text")
        return PyBytes_FromStringAndSize(self.c.note.item.text, self.c.note.item.text_bytes)

    cpdef accept(self, cnp.ndarray array):
        """Put a message that is there into an array, which has its size; None drops it."""
        cdef char *out = NULL
        cdef int result = MAIL_FULL
        if mail_state(&self.c) != MAIL_MATCHED:
            raise TransportError("only a message that is there can be accepted, and once")
        if array is not None:
            out = <char *>data_of(array)
            if cnp.PyArray_NBYTES(array) != <cnp.npy_intp>self.c.got:
                raise TransportError(f"a message of {self.c.got} bytes cannot be put into {array.nbytes}")
        while result == MAIL_FULL:
            if self.c.got <= self.mail.short_bytes:
                result = mail_accept(&self.mail.c, &self.c, out)
            else:
                with nogil:
                    result = mail_accept(&self.mail.c, &self.c, out)
            if result == MAIL_FULL:
                self.mail.open(self.c.peer)
        if self.mail.c.ended != NULL:
            self.mail.sweep()
        if self.c.state < 0:
            raise self._error()

    def comes_before(self, Message other not None):
        """Tell whether it is a receive of the same sender and tag, that is not taken yet."""
        if self is other or self.sends or mail_state(&self.c) not in (0, MAIL_MATCHED):
            return False
        return self.mail is other.mail and self.c.peer == other.c.peer and self.c.tag == other.c.tag

    @property
    def head(self):
        """The head that came, or is expected."""
        return self.c.head

    def received_bytes(self):
        """Return the message's size, once :meth:`test` is True."""
        return self.c.got

    def cancel(self):
        """Take the receive back; False if a message had already matched it."""
        return mail_cancel(&self.mail.c, &self.c) != 0

    cdef bint is_free(self):
        """Tell whether a send, which is not over, needs its array no more."""
        cdef bint is_free
        if self.c.bytes <= self.mail.short_bytes:
            return mail_detach(&self.mail.c, &self.c)
        with nogil:
            is_free = mail_detach(&self.mail.c, &self.c)
        return is_free

    cdef void spend(self, double longest_s):
        """Wait for it so long, without a look at anything else."""
        self.mail.window.engine.spend(&self.c.state, longest_s, self.c.bytes > MAIL_SMALL_BYTES)

    cdef _error(self):
        ranks = self.mail._ranks
        peer, rank = ranks[self.c.peer], ranks[self.mail.window.rank]
        if self.c.state == MAIL_TOO_LONG:
            return TransportError(
                f"rank {rank} receives {self.c.bytes} bytes from rank {peer} with tag {self.c.tag}, but "
                f"{self.c.got} bytes were sent"
            )
        if self.c.state == NODE_CLOSED:
            return ClosedError("a message was given up: its communicator was closed while it was under way")
        return TransportError(f"rank {peer} has left, and a message with tag {self.c.tag} needs it")
