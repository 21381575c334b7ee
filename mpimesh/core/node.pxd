"""Declarations of `node.pyx` for other compiled modules."""

cimport numpy as cnp
from libc.stdint cimport int16_t, int32_t, uint8_t, uint32_t, uint64_t, uintptr_t

cdef extern from "<stdatomic.h>":
    enum memory_order:
        memory_order_seq_cst
    void atomic_thread_fence(memory_order) nogil

cdef extern from "kernels.h":
    ctypedef void (*NodeFold)(void *, const void *const *, int, long) noexcept nogil
    ctypedef struct FoldRow:
        const char *operation
        const char *dtype
        NodeFold fold
    const FoldRow fold_table[1]

cdef extern from "boxes.h":
    enum: BOX_DIMS
    ctypedef struct NodeBox:
        uint64_t at, run, bytes
        const uint64_t *dims
        uint32_t n, base
    ctypedef struct NodePart:
        NodeBox to "to"
        NodeBox source "from"
        uint64_t packed, aside
        uint32_t owner, count
        NodeFold fold
    ctypedef struct NodeBoxes:
        NodePart *part
        NodeBox *give
        uint64_t *give_at
        uint64_t *table
        uint64_t *expects
        uint64_t *block
        uint8_t *owner
        uint8_t *reader
        uint64_t mine, head, aside, step
        char *room
        const void **source "in"
        uint32_t parts, item, ranks

cdef extern from "node.h":
    enum: NODE_HEAD_BYTES, NODE_SMALL_BYTES, NODE_MAX_RANKS, NODE_ENTRIES, NODE_TEXT_BYTES, NODE_TOLD_BYTES, NODE_PIECE_BYTES
    enum:
        NODE_BARRIER
        NODE_ALL_REDUCE
        NODE_REDUCE
        NODE_REDUCE_SCATTER
        NODE_ALL_GATHER
        NODE_GATHER
        NODE_BROADCAST
        NODE_SCATTER
        NODE_ALL_TO_ALL
        NODE_BOXES
        NODE_OTHER
    enum: NODE_NOTHING, NODE_INLINE, NODE_SMALL, NODE_PIECED, NODE_SHARED, NODE_REMOTE
    enum: NODE_BLOCK, NODE_GIVEN
    enum: NODE_DONE, NODE_MISMATCH, NODE_LOST, NODE_CLOSED
    ctypedef struct NodeLane:
        char tells[1][1024]
    ctypedef struct NodeDoor:
        uint32_t asleep
    ctypedef struct NodeOp:
        const char *source_data "in"
        char *out
        uint64_t unit, in_place, out_place, number
        const uint64_t *in_at
        const uint64_t *in_bytes
        const uint64_t *out_at
        const uint64_t *out_bytes
        NodeFold fold
        uint32_t item, digest, call
        char *text
        uint32_t text_bytes
        uint32_t tells[2]
        NodeBoxes *boxes
        char **beside
        uint64_t seen
        uint8_t kind, source, misfit
        int16_t root
        int32_t state, culprit
    ctypedef struct NodeWindow
    ctypedef struct MailBox
    ctypedef struct NodeEngine:
        NodeWindow *active
        MailBox *mail
        NodeDoor *mine
        int spin
        long yield_ns, nap_ns
    ctypedef struct NodeWindow:
        NodeEngine *engine
        NodeLane **lane
        NodeDoor **door
        char ***segment
        const int32_t *pid
        int rank, size
        NodeOp *unposted
        uint64_t started, over
        int32_t over_state
        uint32_t calls[1]
        char *scratch
        uint64_t scratch_bytes
    void node_engine_init(NodeEngine *)
    int node_start(NodeWindow *, NodeOp *) nogil
    int node_pass(NodeEngine *) nogil
    int32_t node_state(const NodeOp *) nogil
    int node_wait_briefly(NodeEngine *, const int32_t *) nogil
    void node_give_turn(NodeEngine *) nogil
    void node_take_turn(NodeEngine *) nogil
    uint32_t node_bell(NodeEngine *) nogil
    int node_yield_since(NodeEngine *, uint32_t) nogil
    int node_sleep_since(NodeEngine *, const int32_t *, long, uint32_t) nogil
    void node_wake(NodeDoor *) nogil
    void node_close(NodeWindow *) nogil
    int node_can_read(int, const void *, uint64_t) nogil
    uint64_t node_scratch_bytes(int)
    void node_tell(NodeWindow *, uint32_t, const char *, size_t)
    int node_told(NodeWindow *, int, uint32_t, char *, size_t)
    uint32_t node_digest_at(NodeWindow *, int, uint64_t)
    uint64_t node_last_call(NodeWindow *, int)
    int node_agrees(NodeWindow *, uint64_t) nogil
    void node_give(NodeEngine *, NodeOp *, const NodeOp *)
    void node_mark_ready(NodeWindow *)
    int node_all_ready(NodeWindow *)


cdef void *data_of(cnp.ndarray array) except? NULL


cdef class Door:
    cdef NodeDoor *c
    cdef object _memory


cdef class Engine:
    cdef NodeEngine c
    cdef readonly bint is_thread
    cdef readonly Door door
    cdef set _windows  # and what else is to live as long as it may be moved

    cdef void spend(self, const int32_t *state, double longest_s, bint large)


cdef class Window:
    cdef NodeWindow c
    cdef readonly Engine engine
    cdef readonly int rank, size
    cdef readonly object digests, texts
    cdef object _keep
    cdef char *_base
    cdef size_t _length
    cdef int32_t *_pids
    cdef bint _closed
    cdef Operation _first, _last  # what may be under way, each with the next

    cdef inline size_t shared(self, void *data, size_t nbytes) noexcept:
        """Return where an array begins in this rank's memory; the largest number if it does not."""
        cdef size_t at = <size_t>(<char *>data - self._base)
        return at if <char *>data >= self._base and at + nbytes <= self._length else <size_t>-1

    cpdef Operation post(self, uint32_t digest, uint32_t call)
    cdef size_t remote_from(self, const NodeOp *)
    cdef void sweep(self)
    cdef void place(self, NodeOp *o, cnp.ndarray send)
    cdef Bound bind(
        self, uint8_t kind, send, recv, int root, str op, cnp.ndarray like, send_counts=*, recv_counts=*
    )


cdef class Boxes:
    cdef NodeBoxes c
    cdef object explain
    cdef list _memory
    cdef readonly uint64_t run  # the shortest of what this rank gives
    cdef uint64_t takes  # bytes

    cdef void *memory(self, size_t n, size_t each) except NULL


cdef class Bound:
    cdef NodeOp c
    cdef Window window
    cdef Boxes boxes
    cdef public object before
    cdef object send, recv, text, beside
    cdef uint64_t *_tables[2]
    cdef uint64_t _own[2]

    cdef size_t cut(self, counts, size_t itemsize, const uint64_t **at, const uint64_t **nbytes, bint always) except? 0
    cdef size_t total(self, const uint64_t *nbytes)
    cdef size_t sent(self)
    cdef size_t taken(self)
    cpdef Operation start(self)
    cdef Operation operation(self)


cdef class Operation:
    cdef NodeOp c
    cdef Bound bound  # has the tables that `c` points to
    cdef Window window
    cdef Operation after
    cdef object send, recv, _copy
    cdef bint unwanted  # it has been given no place for its block

    cdef int begin(self) except -1
    cdef object _error(self)
    cpdef bint test(self) except -1
    cpdef bint differs(self) except -1
    cdef void spend(self, double longest_s)
