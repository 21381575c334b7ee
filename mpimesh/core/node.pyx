"""The ranks that share memory: what each has started, and the waits for it.

:class:`Engine` is a rank's, :class:`Window` a communicator's. What a window starts is an
:class:`Operation`, which the window keeps, with its arrays, until it is over.
"""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from mpimesh.caches import Cache
from mpimesh.errors import ClosedError, MismatchError, TransportError

cnp.import_array()

LANE_BYTES = sizeof(NodeLane)
LANE_HEAD_BYTES = NODE_HEAD_BYTES
DOOR_BYTES = sizeof(NodeDoor)
MOST_RANKS = NODE_MAX_RANKS

# Where arrays begin in shared memory they are read in place from this size on: below, a copy is cheaper than
# to wait for the others to have read it.
cdef enum: IN_PLACE_FROM_BYTES = 2048
# Others are read by calls into their process from this size on, which cost 1.3 us before the first byte.
cdef enum: REMOTE_FROM_BYTES = 1 << 20
# So many may well read the memory of one process at a time: they share a lock of the kernel there.
cdef enum: FEW_READERS = 8
# Of an exchange of boxes more is read where it lies, so that its rank waits for its readers; less is packed.
cdef enum: AT_LEAST_BYTES = 1 << 17
# And in another process where the runs of its boxes have this length.
cdef enum: REMOTE_RUN_BYTES = 512
# Of reductions of boxes.
cdef enum: FOLD_BYTES = 32768, FEW_PARTS = 16
# How long a thread yields before it sleeps: to wake one up takes about as long.
cdef enum: YIELD_NS = 50000

# -- sums by dtype ---------------------------------------------------------------------------------

cdef class _Fold:
    cdef NodeFold function
    cdef uint32_t number

cdef dict _folds = {}

def _read_folds():
    """Fill the table by NumPy's characters: one C type may have two of them."""
    chars = {
        "bool": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "lq", "u8": "B", "u16": "H", "u32": "I", "u64": "LQ",
        "f16": "e", "f32": "f", "f64": "d", "g": "g", "c64": "F", "c128": "D", "c256": "G", "bf16": ["bfloat16"],
    }
    cdef int number = 0
    cdef _Fold fold
    while fold_table[number].operation:
        fold = _Fold.__new__(_Fold)
        fold.function, fold.number = fold_table[number].fold, number + 1
        for char in chars[fold_table[number].dtype.decode()]:
            _folds[fold_table[number].operation.decode(), char] = fold
        number += 1

_read_folds()


def can_reduce(dtype):
    """Tell whether a window reduces arrays of this dtype."""
    return dtype.isnative and ("sum", dtype.char if dtype.num < 256 else dtype.name) in _folds


def fence():
    """Keep what was read and written before apart from what comes after."""
    atomic_thread_fence(memory_order_seq_cst)


def can_read(int pid, size_t address, uint64_t expected):
    """Tell whether this process may read that one's memory, where a word is that is known."""
    return node_can_read(pid, <const void *>address, expected) != 0


# -- a rank ------------------------------------------------------------------------------------------

cdef class Door:
    """Where a process sleeps, and others ring.

    Args:
        memory: `DOOR_BYTES` that all of them see, zero at first.
    """

    def __init__(self, cnp.ndarray memory):
        if cnp.PyArray_NBYTES(memory) < <cnp.npy_intp>sizeof(NodeDoor):
            raise ValueError(f"a door takes {sizeof(NodeDoor)} bytes, and this has {memory.nbytes}")
        self._memory = memory
        self.c = <NodeDoor *>cnp.PyArray_DATA(memory)

    @property
    def asleep(self):
        """How many threads of its process sleep."""
        return self.c.asleep

    def ring(self):
        """Wake the process up, if it is asleep: there is news for it."""
        node_wake(self.c)


cdef class Engine:
    """What a rank has started in all its windows, and its waits.

    Args:
        door: Where it sleeps.
        is_thread: Whether it is one of several ranks of this process.

    Attributes:
        door, is_thread: The same.
    """

    def __cinit__(self, Door door, bint is_thread=False):
        memset(&self.c, 0, sizeof(NodeEngine))
        node_engine_init(&self.c)
        self.door = door
        self.c.mine = door.c
        self._windows, self.is_thread = set(), is_thread
        self.share_cores(False)

    def share_cores(self, bint has_core):
        """Take note whether this rank has a core that no other rank of the node needs."""
        self.c.spin = 300 if has_core else 0
        self.c.yield_ns = 1000000

    def advance(self):
        """Move all that is under way; tell whether anything moved."""
        cdef int moved = 0
        if self.c.active == NULL and self.c.mail == NULL:
            return False
        if self.is_thread and self.c.active == NULL:  # to get Python's lock back may take much longer
            return node_pass(&self.c) != 0
        with nogil:
            moved = node_pass(&self.c)
        return moved != 0

    cdef void spend(self, const int32_t *state, double longest_s, bint large):
        """Wait so long for what has this state, without a look at anything else."""
        self.c.yield_ns = <long>(longest_s * 1e9)
        if not large:
            node_pass(&self.c)  # the others may be there already
            if state[0]:
                return
        with nogil:
            if self.is_thread:
                node_give_turn(&self.c)
            node_wait_briefly(&self.c, state)
            if self.is_thread:
                node_take_turn(&self.c)

    def bell(self):
        """Return how often the door's bell has rung: for :meth:`sleep`, before the last look."""
        return node_bell(&self.c)

    def sleep(self, uint32_t bell, double longest_s):
        """Sleep until something moves or the bell rings; False after the longest time."""
        cdef long nap_ns = <long>(longest_s * 1e9)
        cdef int rung
        with nogil:
            if self.is_thread:
                node_give_turn(&self.c)
                self.c.yield_ns = YIELD_NS
            rung = self.is_thread and node_yield_since(&self.c, bell) or node_sleep_since(&self.c, NULL, nap_ns, bell)
            if self.is_thread:
                node_take_turn(&self.c)
        return rung != 0


# -- a communicator ----------------------------------------------------------------------------------

cdef enum: MOST_KNOWN = 4096  # digests of calls


cdef class Window:
    """The ranks of a communicator that share memory, as one of them starts operations among them.

    Args:
        engine: This rank's.
        rank: Its place.
        memories: The memory of each rank's process, as this process has it mapped.
        lanes: Where each rank's `LANE_BYTES` begin in its memory; the first `LANE_HEAD_BYTES` of them
            are zero at first.
        doors: The door of each.
        pids: The process of each, if all may read each other's memory; empty if not.
        keep: What holds this rank's lane, kept until the window is closed.
        is_threads: Whether the ranks are threads of this process, which may read all of its arrays.

    Attributes:
        digests: What `comm/signatures.py` knows of its calls: the digest of each.
        texts: The text of each digest.
    """

    def __cinit__(
        self, Engine engine, int rank, memories, lanes, doors, pids=(), keep=None, bint is_threads=False
    ):
        cdef int size = len(memories), q
        cdef cnp.ndarray memory
        if not 0 < size <= NODE_MAX_RANKS:
            raise TransportError(f"at most {NODE_MAX_RANKS} ranks of a node can share memory, not {size}")
        self.engine, self.rank, self.size = engine, rank, size
        self.digests, self.texts = Cache(MOST_KNOWN), Cache(MOST_KNOWN)
        # A communicator that is dropped with something under way gives its memory back, but the window goes on in it.
        self._keep = list(memories), list(doors), keep
        self.c.engine, self.c.rank, self.c.size = &engine.c, rank, size
        self.c.lane = <NodeLane **>calloc(size, sizeof(void *))
        self.c.door = <NodeDoor **>calloc(size, sizeof(void *))
        self.c.segment = <char ***>calloc(size, sizeof(void *))
        cdef char **bases = <char **>calloc(size, sizeof(void *))
        if not (self.c.lane and self.c.door and self.c.segment and bases):
            raise MemoryError
        for q in range(size):
            memory = memories[q]
            if not 0 <= lanes[q] <= cnp.PyArray_NBYTES(memory) - <cnp.npy_intp>sizeof(NodeLane):
                raise ValueError("a lane must lie in its memory")
            bases[q] = NULL if is_threads else <char *>cnp.PyArray_DATA(memory)
            self.c.segment[q] = &bases[q]
            self.c.lane[q] = <NodeLane *>(<char *>cnp.PyArray_DATA(memory) + <size_t>lanes[q])
            self.c.door[q] = (<Door?>doors[q]).c
        if len(pids):
            self._pids = <int32_t *>calloc(size, sizeof(int32_t))
            self.c.scratch_bytes = node_scratch_bytes(size)
            self.c.scratch = <char *>calloc(size, self.c.scratch_bytes)
            if not (self._pids and self.c.scratch):
                raise MemoryError
            for q in range(size):
                self._pids[q] = pids[q]
            self.c.pid = self._pids
        self._base = bases[rank]
        self._length = <size_t>-1 if is_threads else <size_t>cnp.PyArray_NBYTES(memories[rank])
        engine._windows.add(self)

    def __dealloc__(self):
        if self.c.segment:
            free(<void *>self.c.segment[0])
        free(self.c.segment)
        free(self.c.scratch)
        free(self._pids)
        free(self.c.lane)
        free(self.c.door)

    @property
    def idle(self):
        """Whether nothing is under way that this rank has started."""
        node_pass(&self.engine.c)
        self.sweep()
        return self._first is None

    def close(self):
        """Move and start nothing any more: what is under way is over, without a result."""
        if not self._closed:
            self._closed = True
            node_close(&self.c)
            self.sweep()
            self.engine._windows.discard(self)
            self._keep = None

    cdef size_t remote_from(self, const NodeOp *o):
        """Return from how many bytes on others read a contribution by calls into this process."""
        cdef int ranks = self.size
        if o.fold != NULL:
            return REMOTE_FROM_BYTES << 4 * (o.kind == NODE_ALL_REDUCE and ranks > 2)
        if ranks > 2 and o.kind == NODE_ALL_GATHER:
            return <size_t>-1  # a piece is in a cache when the others read it
        if ranks > 2 and o.kind == NODE_BROADCAST:
            return REMOTE_FROM_BYTES // 2 * min(ranks - 2, 2) + 1
        if ranks > 2 and o.kind == NODE_GATHER:
            return REMOTE_FROM_BYTES // 32
        if ranks <= FEW_READERS:  # it is copied once by them, and twice by way of pieces
            return NODE_SMALL_BYTES + 1
        return REMOTE_FROM_BYTES

    cdef void sweep(self):
        cdef Operation first
        while self._first is not None and node_state(&self._first.c):
            first = self._first
            self._first, first.after = first.after, None
        if self._first is None:
            self._last = None

    # -- what the ranks compare

    cpdef Operation post(self, uint32_t digest, uint32_t call):
        """Start what moves nothing, for the ranks to compare a call that goes by other ways.

        Args:
            digest: Of the call, equal on two ranks if they call the same; not 0.
            call: Its number among the calls.
        """
        cdef Operation op = Operation.__new__(Operation)
        op.window, op.c.kind, op.c.item, op.c.digest, op.c.call = self, NODE_OTHER, 1, digest, call
        op.begin()
        return op

    def tell(self, uint32_t digest, bytes text not None):
        """Leave the text of a digest for the others' messages."""
        if not self.c.over:  # what was found to differ keeps its text
            node_tell(&self.c, digest, text, len(text))

    def told(self, int q, uint32_t digest):
        """Return what rank `q` has told of a digest; None if it is not there any more."""
        cdef char text[NODE_TEXT_BYTES]
        return bytes(text) if node_told(&self.c, q, digest, text, NODE_TEXT_BYTES) else None

    def last_call(self, int q):
        """Return the number and the digest of the last call that rank `q` has posted; 0 for none."""
        cdef uint64_t last = node_last_call(&self.c, q)
        return last >> 32, last & 0xFFFFFFFFu

    @property
    def difference(self):
        """Where the ranks have started different things: the call's number, if known, and the digest of each rank.

        None if that is not known of any. A digest is 0 where a rank has not come there, or gone far beyond.
        """
        cdef uint64_t number = self.c.over
        cdef int q
        if not number or self.c.over_state != NODE_MISMATCH:
            return None
        digests = tuple([node_digest_at(&self.c, q, number) for q in range(self.size)])
        return self.c.calls[number % NODE_ENTRIES] if digests[self.rank] else 0, digests

    def mark_ready(self):
        """Tell that this rank takes memory of a device from the next operation on."""
        node_mark_ready(&self.c)

    @property
    def all_ready(self):
        """Whether all ranks are known to do so in the next operation."""
        return node_all_ready(&self.c) != 0

    # -- collectives: the arguments are those of a Communicator's methods

    def all_reduce(self, send, cnp.ndarray recv not None, str op):
        """Bind an all-reduce into `recv`; of `recv` itself, if `send` is None."""
        return self.bind(NODE_ALL_REDUCE, recv if send is None else send, recv, 0, op, recv)

    def reduce(self, cnp.ndarray send not None, recv, str op, int root):
        """Bind a reduction into `recv` of `root`."""
        return self.bind(NODE_REDUCE, send, recv, root, op, send)

    def reduce_scatter(self, cnp.ndarray send not None, cnp.ndarray recv not None, counts, str op):
        """Bind a reduction of which each rank gets a block."""
        return self.bind(NODE_REDUCE_SCATTER, send, recv, 0, op, send, counts, None)

    def all_gather(self, cnp.ndarray send not None, cnp.ndarray recv not None, counts):
        """Bind the gathering of all ranks' blocks on all."""
        return self.bind(NODE_ALL_GATHER, send, recv, 0, None, recv, None, counts)

    def gather(self, cnp.ndarray send not None, recv, counts, int root):
        """Bind the gathering of all ranks' blocks on `root`."""
        return self.bind(NODE_GATHER, send, recv, root, None, send, None, counts)

    def scatter(self, send, cnp.ndarray recv not None, counts, int root):
        """Bind the scattering of root's blocks."""
        return self.bind(NODE_SCATTER, send, recv, root, None, recv, counts, None)

    def all_to_all(self, cnp.ndarray send not None, cnp.ndarray recv not None, send_counts, recv_counts):
        """Bind an exchange of blocks, of which each rank knows its own."""
        return self.bind(NODE_ALL_TO_ALL, send, recv, 0, None, send, send_counts, recv_counts)

    def broadcast(self, cnp.ndarray buffer not None, int root):
        """Bind the broadcast of root's `buffer` into that of all."""
        return self.bind(NODE_BROADCAST, buffer, buffer, root, None, buffer)

    def barrier(self):
        """Bind a barrier."""
        return self.bind(NODE_BARRIER, None, None, 0, None, None)

    def await_scatter(self, int root):
        """Bind a scatter for a rank that does not know its block yet: see :meth:`Operation.give`."""
        cdef Bound bound = Bound.__new__(Bound)
        bound.window, bound.c.kind, bound.c.root, bound.c.item, bound.c.tells[0] = self, NODE_SCATTER, root, 1, 1
        return bound

    def exchange(self, source, target, Boxes boxes not None, tuple beside=()):
        """Bind an exchange of boxes.

        Args:
            source: This rank's block, which must stay as it is until the exchange is over; None if it gives nothing.
            target: What it takes into; None if it takes nothing.
            boxes: What it gives and takes.
            beside: More arrays that it takes into, as the boxes say.
        """
        cdef Bound bound = Bound.__new__(Bound)
        cdef NodeOp *o = &bound.c
        cdef NodeBoxes *b = &boxes.c
        cdef uint64_t given = b.table[b.ranks] if b.give_at[b.ranks] else 0
        cdef size_t at
        bound.window, bound.send, bound.recv, bound.boxes, bound.beside = self, source, target, boxes, beside
        o.kind, o.item, o.boxes, o.source, o.unit = NODE_BOXES, 1, b, NODE_INLINE, max(given, boxes.takes)
        o.digest = 0x9E3779B1u * (1 + NODE_BOXES)
        if source is not None:
            o.source_data = <const char *>data_of(source)
            if given > AT_LEAST_BYTES:
                at = self.shared(<void *>o.source_data, cnp.PyArray_NBYTES(source))
                if at != <size_t>-1:
                    o.source, o.in_place = NODE_SHARED, at
                elif self.c.pid != NULL and boxes.run >= REMOTE_RUN_BYTES:
                    o.source, o.in_place = NODE_REMOTE, <uint64_t>o.source_data
        if target is not None:
            o.out = <char *>data_of(target)
        if beside:
            bound._tables[0] = <uint64_t *>calloc(len(beside), sizeof(void *))
            if bound._tables[0] == NULL:
                raise MemoryError
            o.beside = <char **>bound._tables[0]
            for place, array in enumerate(beside):
                (<char **>bound._tables[0])[<int>place] = <char *>data_of(array)
        return bound

    cdef Bound bind(
        self, uint8_t kind, send, recv, int root, str op, cnp.ndarray like, send_counts=None, recv_counts=None
    ):
        cdef Bound bound = Bound.__new__(Bound)
        cdef NodeOp *o = &bound.c
        cdef _Fold fold
        cdef uint32_t number = 0
        cdef size_t most
        bound.window, bound.send, bound.recv = self, send, recv
        o.kind, o.root, o.item = kind, root, 1
        if not 0 <= root < self.size:
            raise TransportError(f"root must be one of the ranks 0 to {self.size - 1}, got {root}")
        if op is not None:
            fold = <_Fold>_folds.get((op, like.dtype.char))
            if fold is None:
                raise TransportError(f"arrays of dtype {like.dtype} cannot be reduced by {op!r}")
            o.fold, o.item, number = fold.function, cnp.PyArray_ITEMSIZE(like), fold.number
        if send is not None:
            o.source_data = <const char *>data_of(send)
        if recv is not None:
            o.out = <char *>data_of(recv)
        if send_counts is not None:
            o.unit = bound.cut(send_counts, cnp.PyArray_ITEMSIZE(like), &o.in_at, &o.in_bytes, kind == NODE_ALL_TO_ALL)
        elif recv_counts is None and like is not None:
            o.unit = cnp.PyArray_NBYTES(like)
        if recv_counts is not None:
            most = bound.cut(recv_counts, cnp.PyArray_ITEMSIZE(like), &o.out_at, &o.out_bytes, kind == NODE_ALL_TO_ALL)
            o.unit = max(o.unit, most)
            if o.out_at != NULL and send_counts is None:
                bound._own[1] = cnp.PyArray_NBYTES(send)
                o.in_at, o.in_bytes = &bound._own[0], &bound._own[1]
        o.digest = 0x9E3779B1u * (1 + kind) ^ 0x85EBCA6Bu * number ^ 0xC2B2AE35u * <uint32_t>(root + 1)
        if kind != NODE_ALL_TO_ALL:  # of which each rank knows its own sizes
            o.digest ^= 0x27D4EB2Fu * <uint32_t>(o.unit ^ o.unit >> 32)
        # What would be read or written beyond an array is refused before it starts.
        sends = self.rank == root if kind in (NODE_BROADCAST, NODE_SCATTER) else kind != NODE_BARRIER
        takes = self.rank == root if kind in (NODE_REDUCE, NODE_GATHER) else kind != NODE_BARRIER
        if sends or kind == NODE_BROADCAST:
            _check(send, like, bound.sent(), "sends")
        if takes:
            _check(recv, like, bound.taken(), "receives into")
        self.place(o, send)
        return bound

    cdef void place(self, NodeOp *o, cnp.ndarray send):
        """Tell where the input lies, if others can read it there."""
        cdef size_t nbytes, at, target = 0
        o.source = NODE_INLINE  # or what its size takes
        if send is None:
            return
        nbytes = cnp.PyArray_NBYTES(send)
        at = self.shared(<void *>o.source_data, nbytes)
        if o.kind == NODE_ALL_REDUCE:
            target = self.shared(o.out, nbytes)
        if nbytes >= IN_PLACE_FROM_BYTES and at != <size_t>-1 and target != <size_t>-1:
            o.source, o.in_place, o.out_place = NODE_SHARED, at, target
        elif self.c.pid != NULL and nbytes >= self.remote_from(o):
            o.source, o.in_place, o.out_place = NODE_REMOTE, <uint64_t>o.source_data, <uint64_t>o.out


cdef _check(cnp.ndarray array, cnp.ndarray like, size_t nbytes, str what):
    """Refuse an array of another size, or another type where values are reduced."""
    if array is None:
        raise TransportError(f"a rank that {what} an array of {nbytes} bytes has none")
    if cnp.PyArray_NBYTES(array) != <cnp.npy_intp>nbytes or array.dtype != like.dtype:
        raise TransportError(
            f"a rank {what} {nbytes} bytes of dtype {like.dtype}, and its array has {array.nbytes} of {array.dtype}"
        )


cdef void *data_of(cnp.ndarray array) except? NULL:
    if not cnp.PyArray_IS_C_CONTIGUOUS(array):
        raise TransportError("arrays between ranks must be contiguous")
    return cnp.PyArray_DATA(array)


cdef class Boxes:
    """What one rank takes and gives in an exchange of boxes, of arrays of one kind.

    Args:
        size: How many ranks there are.
        dtype: That of all blocks; the boxes are in elements.
        takes: For each box that this rank takes: the box, the shape of the array it goes into and its
            number, the parts (a rank, the shape of its block, the box in it), and how several are reduced.
        gives: For each rank the boxes that it takes of this one's block, in the order in which it takes them.
        shape: That of this rank's block; None if it has none.
        blocks: For each rank what its block must be: a number for its bytes and dtype.
        mine: That of this rank.
        explain: Makes the error of a rank whose block, or what it gives, is another one: called with the rank,
            whether it is the block, and what it has instead.
    """

    def __init__(self, int size, dtype, takes, gives, shape, blocks, uint64_t mine, explain):
        cdef NodeBoxes *b = &self.c
        cdef NodePart *part
        cdef _Fold fold
        cdef uint64_t item = dtype.itemsize, aside = 0, most = 1, at
        cdef int q
        cdef size_t n = 0
        self.explain, self._memory = explain, []
        b.ranks, b.mine, b.item, self.run = size, mine, item, <uint64_t>-1
        b.parts = sum([len(parts) for _, _, _, parts, _ in takes])
        b.part = <NodePart *>self.memory(b.parts, sizeof(NodePart))
        b.give = <NodeBox *>self.memory(sum(map(len, gives)), sizeof(NodeBox))
        b.give_at = <uint64_t *>self.memory(size + 1, sizeof(uint64_t))
        b.table = <uint64_t *>self.memory(size + 2, sizeof(uint64_t))
        b.expects = <uint64_t *>self.memory(size, sizeof(uint64_t))
        b.block = <uint64_t *>self.memory(size, sizeof(uint64_t))
        b.owner = <uint8_t *>self.memory(size, 1)
        b.reader = <uint8_t *>self.memory(size, 1)
        b.head = (8 * (size + 1) + 15) // 16 * 16
        b.table[0] = b.head
        for q in range(size):
            b.block[q] = blocks[q]
            b.table[q + 1] = b.table[q]
            for box in gives[q]:
                _cut(self, &b.give[n], shape, box, item)
                b.table[q + 1] += b.give[n].bytes
                self.run = min(self.run, b.give[n].run)
                n += 1
            b.give_at[q + 1], b.reader[q] = n, b.give_at[q] != n
        n = 0
        for into, target_shape, base, parts, op in takes:
            fold = None
            if len(parts) > 1:
                fold = <_Fold>_folds.get((op, dtype.char if dtype.num < 256 else dtype.name))
                if fold is None:
                    raise TransportError(f"boxes of dtype {dtype} cannot be reduced by {op!r}")
                most = max(most, <uint64_t>len(parts))
            for place, (owner, block_shape, box) in enumerate(parts):
                part = &b.part[n]
                n += 1
                _cut(self, &part.to, target_shape, into, item)
                part.to.base = base
                _cut(self, &part.source, block_shape, box, item)
                part.owner, part.count, part.packed = owner, 0 if place else len(parts), b.expects[owner]
                b.owner[part.owner] = 1
                self.takes += part.to.bytes
                b.expects[part.owner] += part.to.bytes
                if fold is not None:
                    part.fold, part.aside, aside = fold.function, aside, aside + part.to.bytes
        b.aside = aside
        if aside:
            b.step = FOLD_BYTES if most <= FEW_PARTS else FOLD_BYTES // 4
            b.room = <char *>self.memory((most + 1), b.step)
            b.source = <const void **>self.memory(most, sizeof(void *))

    def __dealloc__(self):
        for address in self._memory or ():
            free(<void *><size_t>address)

    cdef void *memory(self, size_t n, size_t each) except NULL:
        cdef void *found = calloc(n or 1, each)
        if found == NULL:
            raise MemoryError
        self._memory.append(<size_t>found)
        return found


cdef int _cut(Boxes boxes, NodeBox *to, shape, box, uint64_t item) except -1:
    """Note the runs of a box of a C-contiguous array."""
    cdef uint64_t *dims
    cdef uint64_t stride = item, length, begin, end, size
    cdef list lengths = [], strides = []
    to.at, to.run, to.bytes = 0, item, item
    for (begin, end), size in zip(reversed(box), reversed(shape)):
        length = end - begin
        to.at += begin * stride
        to.bytes *= length
        if length != 1:
            if not lengths and to.run == stride:
                to.run *= length
            elif lengths and strides[-1] * lengths[-1] == stride:
                lengths[-1] *= length
            else:
                lengths.append(length)
                strides.append(stride)
        stride *= size
    if len(lengths) > BOX_DIMS:
        raise TransportError(f"boxes have {BOX_DIMS} axes at most, not {len(lengths)}")
    if not to.bytes:
        raise TransportError(f"a box has an element at least, not {box}")
    to.n = len(lengths)
    dims = <uint64_t *>boxes.memory(2 * to.n, sizeof(uint64_t))
    for place in range(to.n):
        dims[place], dims[to.n + place] = lengths[to.n - 1 - place], strides[to.n - 1 - place]
    to.dims = dims
    return 0


cdef class Bound:
    """A collective bound to its arrays, to be started as often as wanted, each time with what they hold then.

    Attributes:
        before: Called before each start; None for nothing.
    """

    def __dealloc__(self):
        free(self._tables[0])
        free(self._tables[1])

    cdef size_t cut(self, counts, size_t itemsize, const uint64_t **at, const uint64_t **nbytes, bint always) except? 0:
        """Note where each rank's block begins, unless all are alike; return the largest one's bytes."""
        cdef int q, size = self.window.size
        cdef size_t most = 0, total = 0, n
        cdef bint alike = not always
        cdef uint64_t *table
        if len(counts) != size:
            raise TransportError(f"there must be a count for each of {size} ranks, got {len(counts)}")
        table = <uint64_t *>calloc(2 * size, sizeof(uint64_t))
        if table == NULL:
            raise MemoryError
        self._tables[self._tables[0] != NULL] = table
        for q in range(size):
            n = counts[q] * itemsize
            table[q], table[size + q] = total, n
            alike = alike and n == table[size]
            total += n
            most = max(most, n)
        if not alike:
            at[0], nbytes[0] = table, table + size
        return most

    cdef size_t total(self, const uint64_t *nbytes):
        """Return the bytes of the blocks of all ranks."""
        cdef int q
        cdef size_t found = 0
        for q in range(self.window.size):
            found += self.c.unit if nbytes == NULL else nbytes[q]
        return found

    cdef size_t sent(self):
        """Return the bytes that this rank's input must have."""
        if self.c.kind in (NODE_REDUCE_SCATTER, NODE_SCATTER, NODE_ALL_TO_ALL):
            return self.total(self.c.in_bytes)
        if self.c.kind in (NODE_ALL_GATHER, NODE_GATHER) and self.c.out_bytes != NULL:
            return self.c.out_bytes[self.window.rank]
        return self.c.unit

    cdef size_t taken(self):
        """Return the bytes that its result must have."""
        if self.c.kind in (NODE_ALL_GATHER, NODE_GATHER, NODE_ALL_TO_ALL):
            return self.total(self.c.out_bytes)
        if self.c.kind in (NODE_REDUCE_SCATTER, NODE_SCATTER) and self.c.in_bytes != NULL:
            return self.c.in_bytes[self.window.rank]
        return self.c.unit

    def tell(self, uint32_t digest, uint32_t other=0, bytes text=None):
        """Let the root alone know what a scatter is.

        Args:
            digest: On the root, of what it tells, not 0; elsewhere of what fits the block.
            other: Elsewhere, of what fits, too.
            text: On the root, what it tells, `TOLD_BYTES` at most.
        """
        self.c.tells[0], self.c.tells[1], self.text = digest, other, text
        if text is not None:
            if len(text) >= NODE_TOLD_BYTES:
                raise TransportError(f"the root of a scatter tells less than {NODE_TOLD_BYTES} bytes, not {len(text)}")
            self.c.text, self.c.text_bytes = PyBytes_AS_STRING(text), len(text) + 1

    def __call__(self):
        """Start it; return what is under way."""
        return self.start()

    cpdef Operation start(self):
        """Start it; return what is under way."""
        cdef Operation op = self.operation()
        op.begin()
        return op

    cdef Operation operation(self):
        """Return an operation of these arrays, to be started."""
        cdef Operation op = Operation.__new__(Operation)
        op.c, op.bound, op.window, op.send, op.recv = self.c, self, self.window, self.send, self.recv
        return op


@cython.freelist(64)
cdef class Operation:
    """What is under way in a window, or over."""

    cdef int begin(self) except -1:
        """Start it."""
        cdef Window w = self.window
        cdef bint posted
        if w._closed:
            raise ClosedError("nothing can start among these ranks any more: their communicator is closed")
        if self.bound is not None and self.bound.before is not None:
            self.bound.before()
        if w._first is not None:
            w.sweep()
        if self.c.tells[0] and w.rank != self.c.root:
            self._copy = PyBytes_FromStringAndSize(NULL, NODE_TOLD_BYTES)
            self.c.text = PyBytes_AS_STRING(self._copy)
        posted = node_start(&w.c, &self.c)
        if w._first is None:
            w._first = self
        else:
            w._last.after = self
        w._last = self
        if not posted and self.c.boxes == NULL and self.c.source in (NODE_INLINE, NODE_SMALL):
            # It found no room yet, and the caller may write its array.
            self._copy = PyBytes_FromStringAndSize(self.c.source_data, cnp.PyArray_NBYTES(self.send))
            self.c.source_data = PyBytes_AS_STRING(self._copy)
        return 0

    cpdef bint test(self) except -1:
        """Move it along, with all else of this rank; tell whether it is over.

        Raises:
            MismatchError: If the ranks have started different operations.
            TransportError: If a rank that it takes has left.
        """
        cdef Engine engine = self.window.engine
        if not node_state(&self.c):
            if self.c.unit > NODE_SMALL_BYTES:
                with nogil:
                    node_pass(&engine.c)
            else:
                node_pass(&engine.c)
            if not node_state(&self.c):
                return False
        self.window.sweep()
        if self.c.state != NODE_DONE or (self.c.misfit and self.c.boxes != NULL):
            raise self._error()
        self.send = self.recv = self.bound = None  # the engine, or a program, may keep it for a while
        return True

    @property
    def told(self):
        """What the root of a scatter has told of it; None as long as it has not.

        For a rank that has not been given its place yet, or whose block does not fit.
        """
        cdef char *text = self.c.text
        if not self.c.misfit:
            if node_digest_at(&self.window.c, self.c.root, self.c.number) != self.c.digest:
                return None  # or it has started something else, which tells nothing
            text = self.window.c.lane[self.c.root].tells[self.c.number % NODE_ENTRIES]
        return None if text == NULL else <bytes>text

    @property
    def root(self):
        """The root of a collective that has one."""
        return self.c.root

    @property
    def misfit(self):
        """Whether what the root of a scatter has told does not fit this rank's block."""
        return self.c.misfit != 0 and self.c.boxes == NULL and not self.unwanted

    def give(self, Bound like):
        """Give a scatter under way the place of this rank's block, of which the root has told; None for none.

        Args:
            like: The scatter, bound with what the root has told.
        """
        cdef NodeOp none
        if like is None:
            self.unwanted = True
            memset(&none, 0, sizeof(NodeOp))
            none.out, none.tells[0] = <char *>&self.window.c, 1  # which nobody tells
            node_give(&self.window.engine.c, &self.c, &none)
        else:
            self.bound, self.recv = like, like.recv  # first: it has the tables, and the memory
            node_give(&self.window.engine.c, &self.c, &like.c)

    cpdef bint differs(self) except -1:
        """Tell whether a rank is known to have started something else, be it before. Never waits."""
        cdef Window window = self.window
        if not node_state(&self.c):
            node_pass(&window.engine.c)
        # One under way may wait for one rank, and another one has posted something else; and some end without all.
        if node_state(&self.c) in (0, NODE_DONE):
            return not node_agrees(&window.c, self.c.number)
        return self.c.state == NODE_MISMATCH

    cdef void spend(self, double longest_s):
        """Wait for it so long, without a look at anything else."""
        self.window.engine.spend(&self.c.state, longest_s, self.c.unit > NODE_SMALL_BYTES)

    cdef _error(self):
        if self.c.state == NODE_MISMATCH:
            return MismatchError(
                f"the ranks of a group started different collectives, or with different arrays: rank "
                f"{self.c.culprit} of those on this node has another one than rank {self.window.rank}"
            )
        if self.c.state == NODE_DONE:
            return self.bound.boxes.explain(self.c.culprit, self.c.misfit == NODE_BLOCK, self.c.seen)
        if self.c.state == NODE_CLOSED:
            return ClosedError("an operation was given up: its communicator was closed while it was under way")
        return TransportError(f"rank {self.c.culprit} of those on this node has left, and is needed")
