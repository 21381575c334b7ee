"""Declarations of `mail.pyx` for other compiled modules."""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint64_t

from mpimesh.core.node cimport NodeEngine, NodeWindow, Window

cdef extern from "node.h":
    enum: MAIL_SMALL_BYTES, MAIL_CELLS_BYTES, MAIL_TEXT_BYTES
    enum: MAIL_MATCHED, MAIL_TOO_LONG, MAIL_CANCELLED
    ctypedef struct MailRing:
        pass
    ctypedef struct MailSlot:
        pass
    ctypedef struct MailItem:
        uint16_t text_bytes
        const char *text
    ctypedef struct MailNote:
        MailItem item
    ctypedef struct MailOp:
        MailOp *ended
        void *owner
        const char *source_data "in"
        char *out
        const char *text
        uint64_t bytes, place, head, got
        MailNote *note
        int peer
        int32_t tag, state
        uint16_t text_bytes
        uint8_t source, checked, detached
    ctypedef struct MailPeer:
        MailRing *out
    ctypedef struct MailBox:
        NodeWindow *window
        MailSlot **slot
        MailPeer *peer
        MailOp *ended
        int one_process, rendezvous
    enum: MAIL_FULL
    int mail_state(const MailOp *) nogil
    void mail_new_ring(MailBox *, int, MailRing *, uint64_t)
    int mail_reuse_ring(MailBox *, int)
    int mail_send(MailBox *, MailOp *, void *) nogil
    int mail_detach(MailBox *, MailOp *) nogil
    int mail_receive(MailBox *, MailOp *, void *) nogil
    int mail_accept(MailBox *, MailOp *, char *) nogil
    int mail_cancel(MailBox *, MailOp *) nogil
    int mail_probe(MailBox *, int32_t, uint64_t *) nogil
    int mail_idle(MailBox *) nogil
    MailOp *mail_take_ended(MailBox *) nogil
    void mail_close(MailBox *) nogil


cdef class Mail:
    cdef MailBox c
    cdef readonly Window window
    cdef readonly list rings
    cdef object _arena, _keep
    cdef tuple _ranks  # of the communicator, by place in the window
    cdef int32_t *_places  # the other way round; -1 for a rank that shares no memory
    cdef int _size
    cdef size_t short_bytes
    cdef bint _closed

    cdef int check_open(self) except -1
    cdef int place(self, long rank) except -2
    cdef int start(self, Message message) except -3
    cdef open(self, int place)
    cdef void sweep(self)
    cpdef Message send(self, cnp.ndarray buffer, long dest, int tag, uint64_t head=*, bytes text=*)
    cpdef Message receive(self, cnp.ndarray buffer, long source, int tag, uint64_t head=*, receiver=*)


cdef class Message:
    cdef MailOp c
    cdef Mail mail
    cdef readonly object buffer, receiver
    cdef readonly Exception error
    cdef public object value, rest
    cdef bytes _text
    cdef bint sends

    cpdef bint test(self) except -1
    cdef void spend(self, double longest_s)
    cpdef accept(self, cnp.ndarray array)
    cdef bint is_free(self)
    cdef object _error(self)
