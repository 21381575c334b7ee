/* The window of the ranks that share memory: threads of one process, or processes of one machine.
 *
 * Each rank writes what it has started into its lane, in order, and reads the lanes of the others. node_start() never
 * waits: it queues an operation and posts what finds room. node_wait() moves everything that this rank has started, in
 * every window, until one operation is over, and every message (mail.h). Nothing here calls Python, allocates, but for
 * messages that nobody receives yet and boxes that come in many pieces, or takes a lock between processes; threads of
 * one rank take turns by a lock of their own: who finds it taken leaves the moving to the other.
 *
 * Every place in shared memory has one writer, but for `bell` and `waiters`. What orders the accesses:
 *   - a word is stored (release) after everything that it speaks of, and read (acquire) before any of it is;
 *   - an entry, or a slot, is written again only when all ranks have read past the operation that used it (`read`);
 *   - after a store that others may wait for comes a fence, then a look at `waiters`; who sleeps sets its bit, fences,
 *     and looks again before it sleeps: one of the two sees the other. Release alone would lose a wake-up.
 * So each rank's stores are seen in their order, and its loads are made in theirs; only a load may overtake a store, on
 * x86 as on aarch64, and only between a store and the look at `waiters` does that matter. tests/unit/core/node_model.py has
 * these functions by their names, tries every interleaving, and fails for each of the rules that is left out.
 */
#ifndef MPIMESH_NODE_H
#define MPIMESH_NODE_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "boxes.h"

#if defined(__x86_64__)
#define NODE_PAUSE() __builtin_ia32_pause()
#else
#define NODE_PAUSE() __asm__ volatile("yield")
#endif

enum {
    NODE_ENTRIES = 16,         /* operations of a rank that not all others have read */
    NODE_INLINE_BYTES = 80,    /* a contribution inside its entry */
    NODE_TOLD_BLOCKS = NODE_INLINE_BYTES / 8, /* ranks for which an entry has room to say where their blocks lie, or how much it is */
    NODE_SMALL_BYTES = 8192,   /* a contribution copied when it is posted */
    NODE_SMALLS = 4,
    NODE_PIECE_BYTES = 1 << 17,
    NODE_PIECES = 4,
    NODE_MAX_RANKS = 1024,
    NODE_TURN_YIELDS = 200,
    NODE_CHUNK_BYTES = 1 << 15, /* what is read, summed and written while it stays in the cache */
    NODE_TEXTS = 64,
    NODE_TEXT_BYTES = 256,
    NODE_TOLD_BYTES = 1024, /* of what the root of a scatter tells */
    NODE_RUNS = 64, /* of a box that are read by one call into another process */
    NODE_NAP_NS = 1000000,
    NODE_LONGEST_NAP_NS = 20000000,
};

typedef _Atomic uint64_t node_u64;
typedef _Atomic uint32_t node_u32;

/* A position in the order of a window: an operation's number and a piece of it, of which one has fewer than 2^20. */
#define NODE_AT(number, piece) ((uint64_t)(number) << 20 | (uint64_t)(piece))

enum NodeKind {
    NODE_BARRIER,
    NODE_ALL_REDUCE,
    NODE_REDUCE,
    NODE_REDUCE_SCATTER,
    NODE_ALL_GATHER,
    NODE_GATHER,
    NODE_BROADCAST,
    NODE_SCATTER,
    NODE_ALL_TO_ALL,
    NODE_SHIFT,
    NODE_BOXES, /* each rank takes boxes of the blocks of some */
    NODE_OTHER, /* goes by other ways than the window: here the ranks only compare it */
};

/* Where the contribution of a rank lies. */
enum NodeSource {
    NODE_NOTHING,
    NODE_INLINE, /* in the entry */
    NODE_SMALL,  /* in a small slot */
    NODE_PIECED, /* comes through the ring of pieces */
    NODE_SHARED, /* in a segment that all ranks see */
    NODE_REMOTE, /* in memory of its process, to be read by process_vm_readv */
};

/* What is another one than this rank takes it for. */
enum NodeMisfit { NODE_BLOCK = 2, NODE_GIVEN };

enum NodeState {
    NODE_UNDER_WAY = 0,
    NODE_DONE = 1,
    NODE_MISMATCH = -1, /* `culprit` has started another operation at this number */
    NODE_LOST = -2,     /* `culprit` has left, or died */
    NODE_CLOSED = -3,   /* its window was closed before */
};

typedef struct {
    node_u64 word;   /* number and rolling total of the signatures so far: equal on all ranks, or they differ */
    uint64_t in;     /* offset in a segment, address, slot, or first piece */
    uint64_t out;
    uint32_t in_segment, out_segment;
    node_u32 digest; /* of this operation alone */
    node_u32 tells;  /* digest of what the root of a scatter tells, or 0 */
    uint8_t source;
    uint8_t pad[7];
    char data[NODE_INLINE_BYTES] __attribute__((aligned(16))); /* as complex long doubles must be; near the word */
} __attribute__((aligned(128))) NodeEntry;
_Static_assert(sizeof(NodeEntry) == 128, "an entry is two cache lines");

/* What one rank shows the others in one window. */
typedef struct {
    NodeEntry entry[NODE_ENTRIES];
    struct {
        node_u64 put;    /* up to where its pieces lie in slots */
        node_u64 summed; /* up to where its part is summed */
        node_u64 read;   /* up to where it has read and written all that it ever will */
        node_u64 refused; /* from which number on, and why: NODE_AT(number, 2 * culprit + is lost) */
        node_u64 ready; /* from which number on it takes memory of a device; 0 for never */
        node_u64 call; /* the last call: its number among those of the callers, and its digest */
    } __attribute__((aligned(128))) at;
    node_u64 waiters[NODE_MAX_RANKS / 64] __attribute__((aligned(128))); /* who sleeps until it moves: any sets its bit */
    node_u64 told[NODE_TEXTS]; /* the digests whose texts are below, 0 while one is written; above it how many were */
    char small[NODE_SMALLS][NODE_SMALL_BYTES] __attribute__((aligned(128)));
    char tells[NODE_ENTRIES][NODE_TOLD_BYTES]; /* beside the entries */
    char piece[NODE_PIECES][NODE_PIECE_BYTES];
    node_u64 text[NODE_TEXTS][NODE_TEXT_BYTES / 8];
} __attribute__((aligned(4096))) NodeLane;

enum { NODE_HEAD_BYTES = offsetof(NodeLane, small) }; /* zero at first */

/* What one process shows all others of the node, whatever the window. */
typedef struct {
    node_u32 bell;  /* any adds */
    node_u32 left;  /* it has gone; what it has posted stays valid */
    node_u32 asleep; /* its threads that sleep, or are about to */
} __attribute__((aligned(128))) NodeDoor;

/* out = the sum (or what else) of `n` elements of all `ranks` arrays, in the order of the ranks. */
typedef void (*NodeFold)(void *out, const void *const *in, int ranks, long n);

struct NodeWindow;
struct MailBox;
typedef struct NodeOp {
    struct NodeOp *next;
    const char *in;
    char *out;
    uint64_t unit;       /* bytes of one block: a contribution is one of them, or one for each rank */
    uint64_t in_place, out_place;  /* what an entry says of a SHARED or REMOTE one */
    /* Blocks of unequal size, or 0: `unit` is then the largest of all ranks. Where block b of the input lies and how
     * long it is, alike on all ranks but for all-to-all (a gather's is one block, at 0); and the same of what rank q
     * contributes to the output. */
    const uint64_t *in_at, *in_bytes, *out_at, *out_bytes;
    uint32_t in_segment, out_segment;
    NodeFold fold;
    uint32_t item;       /* bytes of an element */
    uint32_t digest;
    uint32_t call;       /* its number among those of the caller; 0 if it has none */
    /* Of a scatter of which the root alone knows what it is, or zeros: what the root tells, NODE_TOLD_BYTES at most with
     * a 0 behind, and its digest, which is not compared. On the others the digests of what fits their blocks, and where
     * what does not is copied to. */
    char *text;
    uint32_t text_bytes, tells[2];
    NodeBoxes *boxes;    /* of an exchange of boxes */
    char *const *beside; /* the targets after `out` */
    uint64_t *begins;    /* where in the pieces of each rank this one's begin, if any gives many, else 0; ... */
    char *aside;         /* ... and the parts of reductions that wait for others */
    uint64_t seen;       /* in a misfit, what `culprit` has instead */
    uint8_t kind, source;
    int16_t root;        /* or the steps of a shift */
    int32_t state, culprit;
    uint64_t number;
    /* while it is under way */
    uint64_t piece_bytes, pieces, put, summed, read, first;
    uint64_t own_unit, own_pieces; /* before it was known of an all-to-all what the others give */
    uint8_t stage, written;
    uint8_t told;        /* the root has told, and this rank has no place for its block yet */
    uint8_t misfit;      /* the root has told of something else, of which nothing was read; or NODE_BLOCK, NODE_GIVEN */
} NodeOp;

typedef struct NodeEngine {
    struct NodeWindow *active; /* with something under way */
    struct MailBox *mail;      /* the same of messages */
    NodeDoor *mine;
    int spin;                  /* passes before it yields; 0 for threads */
    long yield_ns;             /* how long it yields before it sleeps */
    _Atomic long nap_ns;       /* of the next sleep of node_wait(); they grow */
    node_u32 busy;             /* the lock: a thread of this rank starts or moves something */
    int rouse;                 /* something is over or was started that a thread of this rank may not know of when it goes to sleep */
} NodeEngine;

typedef struct NodeWindow {
    NodeEngine *engine;
    struct NodeWindow *next;
    NodeLane **lane;
    char ***segment;           /* segment[q][s]: where this rank sees segment s of rank q */
    const int32_t *pid;        /* of each rank, for process_vm_readv */
    NodeDoor **door;           /* of each rank's process */
    int rank, size;
    uint32_t total;
    uint64_t started, seen_read;
    NodeOp *head, *tail, *unposted;
    uint64_t small_used[NODE_SMALLS], piece_used[NODE_PIECES]; /* by whom, as NODE_AT one past it */
    uint64_t smalls, pieces;
    uint64_t over, shown;      /* the number from which on everything is refused; what the others see of it */
    int32_t over_state, culprit;
    int lacks[3];              /* ranks without which nothing moved: to post, to put a piece, to go on */
    int awaited[3];            /* those that are to ring when they move */
    int moved, listed;
    uint32_t calls[NODE_ENTRIES]; /* of what is in the entries */
    uint32_t texts;            /* how many it has told */
    uint64_t gone[NODE_MAX_RANKS / 64]; /* who was seen to have left: a later look finds all that it ever posts */
    char *scratch;             /* `scratch_bytes` for each rank, for REMOTE ones */
    uint64_t scratch_bytes;    /* node_scratch_bytes(), or 0: NODE_CHUNK_BYTES */
} NodeWindow;

/* -- bells ------------------------------------------------------------------------------------ */

/* Who is about to sleep counts itself as asleep, then the kernel compares the bell: one of the two sees the other. By
 * itself for what is in no window, and waited for by node_sleep_since(). */
static inline void node_wake(NodeDoor *door) {
    atomic_fetch_add(&door->bell, 1);
    if (atomic_load(&door->asleep)) syscall(SYS_futex, &door->bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

/* After a store that others may wait for. The fence keeps the load of `waiters` behind it; the exchange is atomic for a
 * bit that is set meanwhile, whose rank has not looked again yet, and will see the store. */
static inline void node_ring(NodeWindow *w) {
    node_u64 *waiters = w->lane[w->rank]->waiters;
    atomic_thread_fence(memory_order_seq_cst);
    for (int i = 0; i * 64 < w->size; i++) {
        if (!atomic_load_explicit(&waiters[i], memory_order_relaxed)) continue;
        for (uint64_t m = atomic_exchange(&waiters[i], 0); m; m &= m - 1)
            node_wake(w->door[i * 64 + __builtin_ctzll(m)]);
    }
}

static inline int node_try_lock(NodeEngine *e) {
    return !atomic_load_explicit(&e->busy, memory_order_relaxed) &&
           !atomic_exchange_explicit(&e->busy, 1, memory_order_acquire);
}

/* Its holder runs a pass, and nothing of Python: at most a large copy. */
static inline void node_lock(NodeEngine *e) {
    struct timespec nap = {0, 50000};
    for (int i = 0; !node_try_lock(e); i++) {
        if (i < 100) sched_yield();
        else nanosleep(&nap, 0);
    }
}

/* A sleeper counts itself before it takes the lock to look again: it has seen what was done before, or is woken. */
static inline void node_unlock(NodeEngine *e) {
    int rouse = e->rouse;
    e->rouse = 0;
    atomic_store_explicit(&e->busy, 0, memory_order_release);
    if (rouse) node_wake(e->mine); /* also for who has not looked yet whether it may sleep */
}

static inline uint64_t node_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#include "mail.h"

/* -- what the ranks have posted ---------------------------------------------------------------- */

/* What is read of each rank by one call into another process: 1.3 us and more, so as much as the caches hold. */
static inline uint64_t node_scratch_bytes(int size) {
    uint64_t bytes = 1 << 20;
    while (bytes > NODE_CHUNK_BYTES && bytes * (uint64_t)(size - 1) > 1 << 21) bytes /= 2;
    return bytes;
}

static inline NodeEntry *node_entry(NodeWindow *w, int q, uint64_t number) {
    return &w->lane[q]->entry[number % NODE_ENTRIES];
}

static int node_refuse(NodeWindow *w, uint64_t number, int state, int q) {
    if (!w->over || number < w->over) {
        w->over = number;
        w->over_state = state;
        w->culprit = q;
        w->moved = 1;
    }
    return 0;
}

/* Show it, between two moves only: others take it that this rank touches nothing of what it refuses any more. */
static void node_show_refused(NodeWindow *w) {
    if (w->shown == w->over) return;
    w->shown = w->over;
    uint64_t why = (uint64_t)w->culprit * 2 + (w->over_state == NODE_LOST);
    atomic_store_explicit(&w->lane[w->rank]->at.refused, NODE_AT(w->over, why), memory_order_release);
    w->moved = 1;
}

/* Rank q is missing: note it for the sleep, and look whether it will ever come. */
static int node_lacks(NodeWindow *w, int what, int q, uint64_t number) {
    w->lacks[what] = q;
    uint64_t refused = atomic_load_explicit(&w->lane[q]->at.refused, memory_order_acquire);
    if (refused && refused >> 20 <= number) { /* for its reason; its culprit may be this rank, for which it is q */
        int culprit = (int)(refused >> 1 & 0x7FFFF), state = refused & 1 ? NODE_LOST : NODE_MISMATCH;
        return node_refuse(w, refused >> 20, state, culprit == w->rank ? q : culprit);
    }
    if (atomic_load_explicit(&w->door[q]->left, memory_order_acquire)) {
        /* It may have posted between the look at its word and the look at its door: look again. After this acquire
         * all that it ever stored is seen, whatever is looked for. */
        if (w->gone[q / 64] >> q % 64 & 1) return node_refuse(w, number, NODE_LOST, q);
        w->gone[q / 64] |= 1ull << q % 64;
        w->moved = 1;
    }
    return 0;
}

/* True where rank q has posted the operation of this number, and the same one. The acquire is for its entry and what
 * that speaks of; the word stays until this rank has read past it. */
static inline int node_posted(NodeWindow *w, int q, uint64_t number) {
    uint64_t word = atomic_load_explicit(&node_entry(w, q, number)->word, memory_order_acquire);
    uint64_t own = atomic_load_explicit(&node_entry(w, w->rank, number)->word, memory_order_relaxed);
    if (word == own) return 1;
    if (word >> 32 == own >> 32) return node_refuse(w, number, NODE_MISMATCH, q);
    return node_lacks(w, 2, q, number);
}

/* True where all ranks, or those `among` them, have come to `at` of what `counter` (an offset in the lane) counts. */
static int node_all_at(NodeWindow *w, size_t counter, const uint8_t *among, uint64_t at, int what, uint64_t number) {
    for (int i = 1; i < w->size; i++) {
        int q = w->rank + i < w->size ? w->rank + i : w->rank + i - w->size;
        if (among && !among[q]) continue;
        node_u64 *its = (node_u64 *)((char *)w->lane[q] + counter);
        if (atomic_load_explicit(its, memory_order_acquire) < at) return node_lacks(w, what, q, number);
    }
    return 1;
}

/* True where every rank has read what was before `at`, so that its place may be written again: their release of `read`
 * keeps their last loads from it, the acquire here keeps the stores to it, on their sides. */
static int node_room(NodeWindow *w, uint64_t at, int what, uint64_t number) {
    if (w->seen_read >= at) return 1;
    uint64_t least = UINT64_MAX;
    int last = w->rank;
    for (int q = 0; q < w->size; q++) {
        uint64_t v = atomic_load_explicit(&w->lane[q]->at.read, memory_order_acquire);
        if (v < least) least = v, last = q;
    }
    w->seen_read = least;
    if (least >= at) return 1;
    /* Its own reading comes with its own work, which waits for others by itself. */
    return last == w->rank ? 0 : node_lacks(w, what, last, number);
}

static inline int node_contributes(const NodeOp *o, int q) {
    if (o->kind == NODE_BARRIER || o->kind == NODE_OTHER) return 0;
    return o->kind == NODE_BROADCAST || o->kind == NODE_SCATTER ? q == o->root : 1;
}

static inline int node_takes(const NodeOp *o, int q) {
    return o->kind == NODE_REDUCE || o->kind == NODE_GATHER ? q == o->root : 1;
}

static inline int node_blocks(const NodeWindow *w, int kind) {
    return kind == NODE_REDUCE_SCATTER || kind == NODE_SCATTER || kind == NODE_ALL_TO_ALL ? w->size : 1;
}

static inline uint64_t node_in_at(const NodeOp *o, int block) {
    return o->in_at ? o->in_at[block] : (uint64_t)block * o->unit;
}

static inline uint64_t node_in_bytes(const NodeOp *o, int block) {
    return o->in_bytes ? o->in_bytes[block] : o->unit;
}

/* Where bytes [lo, hi) of each own block end up in `to`, one block after the other in steps of hi - lo. */
static void node_pack(const NodeOp *o, char *to, int blocks, uint64_t lo, uint64_t hi) {
    for (int b = 0; b < blocks; b++, to += hi - lo) {
        uint64_t bytes = node_in_bytes(o, b), end = hi < bytes ? hi : bytes;
        if (lo < end) memcpy(to, o->in + node_in_at(o, b) + lo, end - lo);
    }
}

/* True where rank r waits for the word of rank q. */
static inline int node_needs(const NodeWindow *w, const NodeOp *o, int q) {
    if (q == w->rank || !node_takes(o, w->rank)) return 0;
    if (o->boxes) return o->boxes->owner[q];
    if (o->kind == NODE_BARRIER || o->kind == NODE_OTHER) return 1;
    if (o->kind == NODE_SHIFT) return q == ((w->rank - o->root) % w->size + w->size) % w->size;
    return node_contributes(o, q);
}

/* True of an all-to-all of which each rank knows its own sizes alone: an entry tells its largest block. */
static inline int node_is_uneven(const NodeOp *o) { return o->kind == NODE_ALL_TO_ALL && o->in_bytes; }

static inline uint64_t node_unit(const NodeOp *o, const NodeEntry *e) { return node_is_uneven(o) ? e->out : o->unit; }

static int node_is_even(const NodeWindow *w, const NodeOp *o) {
    for (int q = 0; q < w->size; q++)
        if (o->in_bytes[q] != o->in_bytes[0] || o->in_at[q] != (uint64_t)q * o->in_bytes[0]) return 0;
    return 1;
}

/* Where its blocks lie, or of many the length of each. */
static void node_tell_blocks(const NodeWindow *w, const NodeOp *o, NodeEntry *e) {
    uint64_t *told = (uint64_t *)e->data;
    if (w->size > NODE_TOLD_BLOCKS) told[0] = o->in_bytes[0];
    else
        for (int q = 0; q < w->size; q++) told[q] = node_in_at(o, q);
}

/* Where a block begins in a contribution that is read where it lies. */
static inline uint64_t node_block_at(const NodeWindow *w, const NodeOp *o, const NodeEntry *e, int block) {
    if (!node_is_uneven(o)) return node_in_at(o, block);
    const uint64_t *told = (const uint64_t *)e->data;
    return w->size > NODE_TOLD_BLOCKS ? (uint64_t)block * told[0] : told[block];
}

/* How much each rank is given of boxes that are read where they lie; of many ranks it is not told. */
static void node_tell_boxes(const NodeWindow *w, const NodeBoxes *b, NodeEntry *e) {
    uint64_t *told = (uint64_t *)e->data;
    for (int q = 0; w->size <= NODE_TOLD_BLOCKS && q < w->size; q++) told[q] = b->table[q + 1] - b->table[q];
}

/* Put the entries of started operations where there is room, in order. */
static void node_post(NodeWindow *w) {
    NodeLane *mine = w->lane[w->rank];
    int posted = 0;
    /* What is before a mismatch goes on, and others wait for it. */
    while (w->unposted && (!w->over || w->unposted->number < w->over)) {
        NodeOp *o = w->unposted;
        uint64_t n = o->number, need = n > NODE_ENTRIES ? NODE_AT(n - NODE_ENTRIES + 1, 0) : 0;
        uint64_t slot = w->smalls % NODE_SMALLS;
        if (o->source == NODE_SMALL && w->small_used[slot] > need) need = w->small_used[slot];
        if (!node_room(w, need, 0, n)) break;
        NodeEntry *e = &mine->entry[n % NODE_ENTRIES];
        int blocks = node_blocks(w, o->kind);
        e->source = o->source;
        atomic_store_explicit(&e->digest, o->digest, memory_order_relaxed);
        atomic_store_explicit(&e->tells, w->rank == o->root ? o->tells[0] : 0, memory_order_relaxed);
        if (o->text && w->rank == o->root) memcpy(mine->tells[n % NODE_ENTRIES], o->text, o->text_bytes);
        if (o->source == NODE_INLINE || o->source == NODE_SMALL) {
            char *to = o->source == NODE_INLINE ? e->data : mine->small[slot];
            if (o->boxes) boxes_pack(o->boxes, o->in, to, 0, o->boxes->table[w->size]);
            else if (o->in_bytes) node_pack(o, to, blocks, 0, o->unit);
            else memcpy(to, o->in, o->unit * (uint64_t)blocks);
        }
        if (o->source == NODE_SMALL) {
            e->in = slot;
            w->small_used[slot] = NODE_AT(n + 1, 0);
            w->smalls++;
        } else if (o->source == NODE_PIECED) {
            e->in = o->first, e->in_segment = (uint32_t)o->own_pieces;
        } else if (o->source != NODE_NOTHING) {
            e->in = o->in_place, e->in_segment = o->in_segment;
            e->out = o->out_place, e->out_segment = o->out_segment;
        }
        if (o->boxes) e->out = o->boxes->mine;
        else if (o->source <= NODE_PIECED || node_is_uneven(o)) e->out = o->own_unit;
        if (node_is_uneven(o) && o->source > NODE_PIECED) node_tell_blocks(w, o, e);
        if (o->boxes && o->source > NODE_PIECED) node_tell_boxes(w, o->boxes, e);
        w->calls[n % NODE_ENTRIES] = o->call;
        if (o->call) atomic_store_explicit(&mine->at.call, (uint64_t)o->call << 32 | o->digest, memory_order_relaxed);
        w->total = (w->total ^ o->digest) * 0x9E3779B1u + (w->total >> 15);
        atomic_store_explicit(&e->word, (n & 0xFFFFFFFFu) << 32 | w->total, memory_order_release);
        w->unposted = o->next;
        posted = 1;
    }
    w->moved |= posted;
}

/* -- reading and writing ------------------------------------------------------------------------ */

/* Where bytes [lo, hi) of block `block` of rank q's contribution can be read; `result` asks for what q has summed. */
static const char *node_read(NodeWindow *w, NodeOp *o, int q, int block, uint64_t lo, uint64_t hi, int result) {
    NodeEntry *e = node_entry(w, q, o->number);
    /* A small one of its own is read where it was copied to: the user may have written x since. */
    if (q == w->rank && !result && e->source >= NODE_PIECED) return o->in + node_in_at(o, block) + lo;
    uint64_t at = node_block_at(w, o, e, block) + lo;
    switch (e->source) {
    case NODE_NOTHING: /* the ranks' tables of blocks differ */
        node_refuse(w, o->number, NODE_MISMATCH, q);
        return 0;
    case NODE_INLINE:
        return e->data + (uint64_t)block * node_unit(o, e) + lo;
    case NODE_SMALL:
        return w->lane[q]->small[e->in] + (uint64_t)block * node_unit(o, e) + lo;
    case NODE_PIECED: {
        uint64_t k = lo / o->piece_bytes, begin = k * o->piece_bytes, unit = node_unit(o, e);
        uint64_t end = begin + o->piece_bytes < unit ? begin + o->piece_bytes : unit;
        return w->lane[q]->piece[(e->in + k) % NODE_PIECES] + (uint64_t)block * (end - begin) + (lo - begin);
    }
    case NODE_SHARED:
        return w->segment[q][result ? e->out_segment : e->in_segment] + (result ? e->out : e->in) + at;
    default: { /* NODE_REMOTE; the caller asks for what the scratch holds at most */
        char *here = w->scratch + (size_t)q * (w->scratch_bytes ? w->scratch_bytes : NODE_CHUNK_BYTES);
        struct iovec to = {here, hi - lo}, from = {(void *)(uintptr_t)((result ? e->out : e->in) + at), hi - lo};
        if (process_vm_readv(w->pid[q], &to, 1, &from, 1, 0) != (ssize_t)(hi - lo)) {
            node_refuse(w, o->number, NODE_LOST, q);
            return 0;
        }
        return here;
    }
    }
}

/* Where this rank's own part of a sum is left for the others. */
static char *node_result(NodeWindow *w, NodeOp *o, uint64_t lo) {
    if (o->source == NODE_SHARED || o->source == NODE_REMOTE) return o->out + lo;
    NodeEntry *e = node_entry(w, w->rank, o->number);
    if (o->source == NODE_SMALL) return w->lane[w->rank]->small[e->in] + lo;
    if (o->source == NODE_INLINE) return e->data + lo;
    uint64_t k = lo / o->piece_bytes;
    return w->lane[w->rank]->piece[(e->in + k) % NODE_PIECES] + (lo - k * o->piece_bytes);
}

static int node_copy(NodeWindow *w, NodeOp *o, char *out, int q, int block, uint64_t lo, uint64_t hi, int result) {
    if (lo >= hi) return 1;
    NodeEntry *e = node_entry(w, q, o->number);
    if (e->source == NODE_REMOTE && q != w->rank) { /* straight to where it belongs */
        struct iovec to = {out, hi - lo};
        struct iovec from = {(void *)(uintptr_t)((result ? e->out : e->in) + node_block_at(w, o, e, block) + lo), hi - lo};
        while (to.iov_len) {
            ssize_t got = process_vm_readv(w->pid[q], &to, 1, &from, 1, 0);
            if (got <= 0) return node_refuse(w, o->number, NODE_LOST, q);
            to.iov_base = (char *)to.iov_base + got, from.iov_base = (char *)from.iov_base + got;
            to.iov_len -= (size_t)got, from.iov_len -= (size_t)got;
        }
        return 1;
    }
    const char *from = node_read(w, o, q, block, lo, hi, result);
    if (from && from != out) memmove(out, from, hi - lo);
    return from != 0;
}

/* Sum bytes [lo, hi) of block `block` of all ranks into `out`, and into each of `targets` if there are any. */
static int node_sum(NodeWindow *w, NodeOp *o, int block, uint64_t lo, uint64_t hi, char *out, char *const *targets) {
    const void *in[NODE_MAX_RANKS];
    uint64_t step = NODE_CHUNK_BYTES;
    for (int q = 0; w->scratch_bytes && q < w->size; q++)
        if (q != w->rank && node_entry(w, q, o->number)->source == NODE_REMOTE) step = w->scratch_bytes;
    for (uint64_t c = lo; c < hi; c += step) {
        uint64_t z = c + step < hi ? c + step : hi;
        for (int q = 0; q < w->size; q++)
            if (!(in[q] = node_read(w, o, q, block, c, z, 0))) return 0;
        o->fold(out + (c - lo), in, w->size, (long)((z - c) / o->item));
        for (int q = 0; targets && q < w->size; q++)
            if (targets[q] != out) memcpy(targets[q] + (c - lo), out + (c - lo), z - c);
    }
    return 1;
}

/* The part of [lo, hi) that rank q sums. */
static inline uint64_t node_part(const NodeWindow *w, const NodeOp *o, uint64_t lo, uint64_t hi, int q) {
    uint64_t items = (hi - lo) / o->item;
    return lo + items * (uint64_t)q / (uint64_t)w->size * o->item;
}

/* Take [lo, hi) of each block: all that is not a large all-reduce. */
static int node_take(NodeWindow *w, NodeOp *o, uint64_t lo, uint64_t hi) {
    if (o->in_bytes && (o->kind == NODE_REDUCE_SCATTER || o->kind == NODE_SCATTER) && hi > o->in_bytes[w->rank])
        hi = o->in_bytes[w->rank];
    switch (o->kind) {
    case NODE_ALL_REDUCE:
    case NODE_REDUCE:
        return node_sum(w, o, 0, lo, hi, o->out + lo, 0);
    case NODE_REDUCE_SCATTER:
        return node_sum(w, o, w->rank, lo, hi, o->out + lo, 0);
    case NODE_BROADCAST:
        return node_copy(w, o, o->out + lo, o->root, 0, lo, hi, 0);
    case NODE_SCATTER:
        return node_copy(w, o, o->out + lo, o->root, w->rank, lo, hi, 0);
    case NODE_SHIFT:
        return node_copy(w, o, o->out + lo, ((w->rank - o->root) % w->size + w->size) % w->size, 0, lo, hi, 0);
    case NODE_BARRIER:
    case NODE_OTHER:
        return 1;
    default: /* NODE_ALL_GATHER, NODE_GATHER, NODE_ALL_TO_ALL */
        for (int i = 0; i < w->size; i++) { /* from different ranks at a time */
            int q = w->rank + i < w->size ? w->rank + i : w->rank + i - w->size;
            int block = o->kind == NODE_ALL_TO_ALL ? w->rank : 0;
            uint64_t at = o->out_at ? o->out_at[q] : (uint64_t)q * o->unit;
            uint64_t end = o->out_bytes && o->out_bytes[q] < hi ? o->out_bytes[q] : hi;
            if (!node_copy(w, o, o->out + at + lo, q, block, lo, end, 0)) return 0;
        }
        return 1;
    }
}

/* -- boxes -------------------------------------------------------------------------------------- */

/* Read bytes from `at` on of a box in the memory of rank q's process into a box of this one's. */
static int node_pull(NodeWindow *w, NodeOp *o, int q, const char *in, const NodeBox *from, uint64_t at, char *out,
                     const NodeBox *to, uint64_t to_at, uint64_t bytes) {
    while (bytes) {
        struct iovec here[NODE_RUNS], there[NODE_RUNS];
        BoxCursor a, b;
        uint64_t left = bytes;
        unsigned long n = 0;
        box_seek(&a, to, to_at), box_seek(&b, from, at);
        for (; n < NODE_RUNS && left; n++) {
            uint64_t run = a.left < b.left ? a.left : b.left;
            if (run > left) run = left;
            here[n] = (struct iovec){out + a.at, run}, there[n] = (struct iovec){(char *)(uintptr_t)(in + b.at), run};
            box_step(&a, run), box_step(&b, run);
            left -= run;
        }
        ssize_t got = process_vm_readv(w->pid[q], here, n, there, n, 0);
        if (got <= 0) return node_refuse(w, o->number, NODE_LOST, q);
        at += (uint64_t)got, to_at += (uint64_t)got, bytes -= (uint64_t)got;
    }
    return 1;
}

/* Byte `at` of what rank q has packed; of pieces, the one there must be in its slot. */
static const char *node_packed(NodeWindow *w, const NodeEntry *e, int q, uint64_t at) {
    if (e->source == NODE_INLINE) return e->data + at;
    if (e->source == NODE_SMALL) return w->lane[q]->small[e->in] + at;
    return w->lane[q]->piece[(e->in + at / NODE_PIECE_BYTES) % NODE_PIECES] + at % NODE_PIECE_BYTES;
}

/* True of what is taken as its pieces come, also a single one beside many of another rank: when the last of those has
 * come, its owner may have written over its own, which all have read past. */
static inline int node_in_pieces(const NodeOp *o, const NodeEntry *e) { return e->source == NODE_PIECED && o->begins; }

static inline char *node_target(const NodeOp *o, const NodeBox *to) { return to->base ? o->beside[to->base - 1] : o->out; }

/* Copy bytes from `at` on of a part to where they belong, a box of `out`: all but what is taken by pieces. */
static int node_copy_part(NodeWindow *w, NodeOp *o, const NodePart *p, uint64_t at, char *out, const NodeBox *to,
                          uint64_t to_at, uint64_t bytes) {
    int q = (int)p->owner;
    const NodeEntry *e = node_entry(w, q, o->number);
    if (q == w->rank) box_copy(out, to, to_at, o->in, &p->from, at, bytes);
    else if (e->source == NODE_SHARED) box_copy(out, to, to_at, w->segment[q][e->in_segment] + e->in, &p->from, at, bytes);
    else if (e->source == NODE_REMOTE)
        return node_pull(w, o, q, (const char *)(uintptr_t)e->in, &p->from, at, out, to, to_at, bytes);
    else {
        NodeBox flat = box_flat(p->from.bytes);
        const uint64_t *table = (const uint64_t *)node_packed(w, e, q, 0);
        box_copy(out, to, to_at, node_packed(w, e, q, table[w->rank] + p->packed), &flat, at, bytes);
    }
    return 1;
}

/* Where bytes [at, at + bytes) of a part can be reduced from, if they lie together in memory of this process; else 0. */
static const char *node_part_at(NodeWindow *w, const NodeOp *o, const NodePart *p, uint64_t at, uint64_t bytes) {
    int q = (int)p->owner;
    const NodeEntry *e = node_entry(w, q, o->number);
    if (q == w->rank) return box_at(o->in, &p->from, at, bytes);
    if (node_in_pieces(o, e)) return o->aside + p->aside + at;
    if (e->source == NODE_SHARED) return box_at(w->segment[q][e->in_segment] + e->in, &p->from, at, bytes);
    if (e->source == NODE_REMOTE) return 0;
    return node_packed(w, e, q, ((const uint64_t *)node_packed(w, e, q, 0))[w->rank] + p->packed + at);
}

/* Reduce the parts of a box in their order. */
static int node_fold_parts(NodeWindow *w, NodeOp *o, const NodePart *p) {
    const NodeBoxes *b = o->boxes;
    const void **in = b->in;
    char *out = node_target(o, &p->to), *room = b->room;
    for (uint64_t at = 0; at < p->to.bytes; at += b->step) {
        uint64_t bytes = p->to.bytes - at < b->step ? p->to.bytes - at : b->step;
        NodeBox flat = box_flat(bytes);
        for (uint32_t i = 0; i < p->count; i++) {
            char *copy = room + (i + 1) * b->step;
            if ((in[i] = node_part_at(w, o, p + i, at, bytes))) continue;
            if (!node_copy_part(w, o, p + i, at, copy, &flat, 0, bytes)) return 0;
            in[i] = copy;
        }
        char *into = (char *)(uintptr_t)box_at(out, &p->to, at, bytes);
        p->fold(into ? into : room, in, -(int)p->count, (long)(bytes / b->item));
        if (!into) box_copy(out, &p->to, at, room, &flat, 0, bytes);
    }
    return 1;
}

/* Of a part that is taken by pieces, take what is in this one. */
static void node_take_piece(NodeWindow *w, NodeOp *o, const NodePart *p, uint64_t piece, uint64_t begin) {
    const NodeEntry *e = node_entry(w, (int)p->owner, o->number);
    uint64_t lo = piece * NODE_PIECE_BYTES, hi = lo + NODE_PIECE_BYTES, end = begin + p->from.bytes;
    uint64_t first = begin < lo ? lo : begin, last = end < hi ? end : hi;
    if (first >= last) return;
    NodeBox flat = box_flat(last - first);
    const char *from = node_packed(w, e, (int)p->owner, first);
    if (p->fold) memcpy(o->aside + p->aside + (first - begin), from, last - first);
    else box_copy(node_target(o, &p->to), &p->to, first - begin, from, &flat, 0, last - first);
}

/* It reads nothing more. */
static int node_misfit(NodeOp *o, uint8_t what, int q, uint64_t seen) {
    o->misfit = what, o->culprit = q, o->seen = seen, o->pieces = o->read;
    return 1;
}

/* Take what is there when piece number `o->read` of all has come. */
static int node_take_boxes(NodeWindow *w, NodeOp *o) {
    const NodeBoxes *b = o->boxes;
    for (int q = 0; !o->read && q < w->size; q++) { /* where in the pieces of each its own part begins */
        const NodeEntry *e = node_entry(w, q, o->number);
        if (!b->owner[q] || q == w->rank || e->source < NODE_INLINE || e->source > NODE_PIECED) continue;
        const uint64_t *table = (const uint64_t *)node_packed(w, e, q, 0);
        if (table[w->rank + 1] - table[w->rank] != b->expects[q])
            return node_misfit(o, NODE_GIVEN, q, table[w->rank + 1] - table[w->rank]);
        if (node_in_pieces(o, e)) o->begins[q] = table[w->rank];
    }
    for (uint32_t i = 0; i < b->parts; i++) {
        const NodePart *p = &b->part[i];
        const NodeEntry *e = node_entry(w, (int)p->owner, o->number);
        if ((int)p->owner != w->rank && node_in_pieces(o, e)) node_take_piece(w, o, p, o->read, o->begins[p->owner] + p->packed);
        else if (!p->fold && !o->read && !node_copy_part(w, o, p, 0, node_target(o, &p->to), &p->to, 0, p->to.bytes)) return 0;
    }
    for (uint32_t i = 0; o->read + 1 == o->pieces && i < b->parts; i++)
        if (b->part[i].count > 1 && !node_fold_parts(w, o, &b->part[i])) return 0;
    return 1;
}

/* What the words of the owners say: how many pieces come, or that a block is another one. */
static int node_decide_boxes(NodeWindow *w, NodeOp *o) {
    NodeBoxes *b = o->boxes;
    int is_long = 0;
    o->pieces = b->parts > 0;
    for (int q = 0; q < w->size; q++) {
        const NodeEntry *e = node_entry(w, q, o->number);
        if (!b->owner[q] || q == w->rank) continue;
        if (e->out != b->block[q]) return node_misfit(o, NODE_BLOCK, q, e->out);
        if (e->source == NODE_NOTHING) return node_misfit(o, NODE_GIVEN, q, 0);
        /* Who gives this rank nothing would not wait until it has read. */
        uint64_t told = e->source > NODE_PIECED && w->size <= NODE_TOLD_BLOCKS ? ((const uint64_t *)e->data)[w->rank] : b->expects[q];
        if (told != b->expects[q]) return node_misfit(o, NODE_GIVEN, q, told);
        if (e->source == NODE_PIECED && e->in_segment > o->pieces) o->pieces = e->in_segment;
        is_long |= e->source == NODE_PIECED && e->in_segment > 1;
    }
    if (is_long) {
        uint64_t at = ((uint64_t)w->size * 8 + 15) / 16 * 16;
        o->begins = malloc(at + b->aside);
        if (!o->begins) return 0; /* there may be memory later */
        o->aside = (char *)o->begins + at;
    }
    return 1;
}

/* -- one operation ------------------------------------------------------------------------------ */

enum { NODE_STAGE_NEW, NODE_STAGE_MOVE, NODE_STAGE_AFTER };

static void node_divide(NodeWindow *w, NodeOp *o, int pieced) {
    uint64_t bytes = o->unit ? o->unit : 1;
    if (pieced) {
        bytes = NODE_PIECE_BYTES / (uint64_t)node_blocks(w, o->kind);
        bytes -= bytes % ((uint64_t)o->item * 64 <= bytes ? (uint64_t)o->item * 64 : o->item);
    }
    o->piece_bytes = bytes;
    o->pieces = (o->unit + bytes - 1) / bytes;
}

/* Of a scatter of which the root alone knows what it is: false before this rank has a place for its block. */
static int node_fits(NodeWindow *w, NodeOp *o) {
    uint32_t digest = atomic_load_explicit(&node_entry(w, o->root, o->number)->tells, memory_order_relaxed);
    if (!o->out) { /* wake this rank up: the pass that sees it may be that of a wait for something else */
        if (!o->told) o->told = 1, w->moved = 1, w->engine->rouse = 1;
        return 0;
    }
    if (digest == o->tells[0] || digest == o->tells[1]) return 1;
    o->misfit = 1, o->unit = 0, o->in_at = o->in_bytes = 0;
    if (o->text) memcpy(o->text, w->lane[o->root]->tells[o->number % NODE_ENTRIES], NODE_TOLD_BYTES);
    return 1;
}

/* What is known when the words are there: through how many pieces it goes, and who sums what. */
static int node_decide(NodeWindow *w, NodeOp *o) {
    if (o->boxes) return node_decide_boxes(w, o);
    if (o->tells[0] && w->rank != o->root && !node_fits(w, o)) return 0;
    int pieced = o->source == NODE_PIECED, direct = 0, shared = 1;
    for (int q = 0; q < w->size; q++) {
        if (q != w->rank && !node_needs(w, o, q)) continue;
        NodeEntry *e = node_entry(w, q, o->number);
        int source = q == w->rank ? o->source : e->source;
        pieced |= source == NODE_PIECED;
        direct |= source == NODE_SHARED || source == NODE_REMOTE;
        shared &= source == NODE_SHARED;
        if (!node_is_uneven(o)) continue;
        uint64_t unit = source == NODE_NOTHING ? 0 : e->out;
        if (o->out_bytes[q] > unit) return node_refuse(w, o->number, NODE_MISMATCH, q);
        if (unit > o->unit) o->unit = unit;
    }
    node_divide(w, o, pieced);
    o->written = 0;
    if (o->kind == NODE_ALL_REDUCE) o->written = shared ? 2 : pieced || direct; /* else each sums all */
    return 1;
}

static int node_pieces_there(NodeWindow *w, NodeOp *o, uint64_t k) {
    for (int q = 0; q < w->size; q++) {
        if (q == w->rank || !node_needs(w, o, q)) continue;
        NodeEntry *e = node_entry(w, q, o->number);
        if (e->source != NODE_PIECED) continue;
        if (o->boxes ? k >= e->in_segment : k * o->piece_bytes >= node_unit(o, e)) continue;
        if (atomic_load_explicit(&w->lane[q]->at.put, memory_order_acquire) < NODE_AT(o->number, k + 1))
            return node_lacks(w, 2, q, o->number);
    }
    return 1;
}

static void node_put_pieces(NodeWindow *w, NodeOp *o) {
    NodeLane *mine = w->lane[w->rank];
    int blocks = node_blocks(w, o->kind);
    for (; o->put < o->own_pieces; o->put++) {
        uint64_t slot = (o->first + o->put) % NODE_PIECES;
        if (!node_room(w, w->piece_used[slot], 1, o->number)) break;
        uint64_t lo = o->put * o->piece_bytes, unit = o->own_unit;
        uint64_t hi = lo + o->piece_bytes < unit ? lo + o->piece_bytes : unit;
        if (o->boxes) boxes_pack(o->boxes, o->in, mine->piece[slot], lo, hi);
        else node_pack(o, mine->piece[slot], blocks, lo, hi);
        w->piece_used[slot] = NODE_AT(o->number, o->put + 1);
        atomic_store_explicit(&mine->at.put, NODE_AT(o->number, o->put + 1), memory_order_release);
        w->moved = 1;
    }
}

/* Each rank sums its part of a piece, then reads the others' parts. */
static int node_sum_parts(NodeWindow *w, NodeOp *o) {
    NodeLane *mine = w->lane[w->rank];
    int again = 0;
    /* Its part is left in its own slot, so that must hold its own piece by then. */
    int slot_is_its = o->source != NODE_PIECED || o->summed < o->put;
    if (o->summed < o->pieces && slot_is_its && node_pieces_there(w, o, o->summed)) {
        uint64_t k = o->summed, lo = k * o->piece_bytes;
        uint64_t hi = lo + o->piece_bytes < o->unit ? lo + o->piece_bytes : o->unit;
        uint64_t a = node_part(w, o, lo, hi, w->rank), z = node_part(w, o, lo, hi, w->rank + 1);
        char *targets[NODE_MAX_RANKS], *result = node_result(w, o, a);
        for (int q = 0; o->written == 2 && q < w->size; q++) {
            NodeEntry *e = node_entry(w, q, o->number);
            targets[q] = q == w->rank ? result : w->segment[q][e->out_segment] + e->out + a;
        }
        if (!node_sum(w, o, 0, a, z, result, o->written == 2 ? targets : 0)) return 0;
        if (result != o->out + a) memcpy(o->out + a, result, z - a);
        atomic_store_explicit(&mine->at.summed, NODE_AT(o->number, ++o->summed), memory_order_release);
        w->moved = again = 1;
    }
    if (o->read < o->summed &&
        node_all_at(w, offsetof(NodeLane, at.summed), 0, NODE_AT(o->number, o->read + 1), 2, o->number)) {
        uint64_t lo = o->read * o->piece_bytes, hi = lo + o->piece_bytes < o->unit ? lo + o->piece_bytes : o->unit;
        for (int i = 1; o->written == 1 && i < w->size; i++) {
            int q = w->rank + i < w->size ? w->rank + i : w->rank + i - w->size;
            uint64_t a = node_part(w, o, lo, hi, q), z = node_part(w, o, lo, hi, q + 1);
            if (!node_copy(w, o, o->out + a, q, 0, a, z, 1)) return 0;
        }
        atomic_store_explicit(&mine->at.read, NODE_AT(o->number, ++o->read), memory_order_release);
        w->moved = again = 1;
    }
    return again;
}

/* Move the first operation of a window; true when it is over. */
static int node_advance(NodeWindow *w, NodeOp *o) {
    NodeLane *mine = w->lane[w->rank];
    int takes = node_takes(o, w->rank);
    if (o->stage == NODE_STAGE_NEW) {
        if (w->unposted && w->unposted->number <= o->number) return 0;
        for (int i = 1; i < w->size; i++) {
            int q = w->rank + i < w->size ? w->rank + i : w->rank + i - w->size;
            if (node_needs(w, o, q) && !node_posted(w, q, o->number)) return 0;
        }
        if (!node_decide(w, o)) return 0;
        o->stage = NODE_STAGE_MOVE;
        if (!takes) { /* the others' pieces need not wait for this rank to read any */
            atomic_store_explicit(&mine->at.read, NODE_AT(o->number + 1, 0), memory_order_release);
            w->moved = 1;
        }
    }
    if (o->stage == NODE_STAGE_MOVE) {
        if (o->source == NODE_PIECED) {
            node_put_pieces(w, o);
            if (!takes && o->put < o->own_pieces) return 0;
        }
        if (o->boxes) {
            while (o->read < o->pieces) {
                if (o->source == NODE_PIECED) node_put_pieces(w, o);
                if (!node_pieces_there(w, o, o->read) || !node_take_boxes(w, o)) return 0;
                if (o->misfit) break;
                atomic_store_explicit(&mine->at.read, NODE_AT(o->number, ++o->read), memory_order_release);
                w->moved = 1;
            }
        } else if (takes && o->written) {
            while (o->read < o->pieces) {
                if (o->source == NODE_PIECED) node_put_pieces(w, o);
                if (!node_sum_parts(w, o)) return 0;
            }
        } else if (takes) {
            for (; o->read < o->pieces; o->read++) {
                if (o->source == NODE_PIECED) node_put_pieces(w, o);
                uint64_t lo = o->read * o->piece_bytes;
                if (!node_pieces_there(w, o, o->read)) return 0;
                if (!node_take(w, o, lo, lo + o->piece_bytes < o->unit ? lo + o->piece_bytes : o->unit)) return 0;
                if (o->read + 1 < o->pieces) {
                    atomic_store_explicit(&mine->at.read, NODE_AT(o->number, o->read + 1), memory_order_release);
                    w->moved = 1;
                }
            }
            if (o->put < o->own_pieces && o->source == NODE_PIECED) return 0;
        }
        o->stage = NODE_STAGE_AFTER;
        atomic_store_explicit(&mine->at.read, NODE_AT(o->number + 1, 0), memory_order_release);
        w->moved = 1;
    }
    if (o->boxes && o->source == NODE_PIECED) { /* which others may wait for that this one need not wait for */
        node_put_pieces(w, o);
        if (o->put < o->own_pieces) return 0;
    }
    /* Memory of this rank's that others read (or write) in place is its own again when they are through. */
    if ((o->source == NODE_SHARED || o->source == NODE_REMOTE) && o->written != 2)
        return node_all_at(w, offsetof(NodeLane, at.read), o->boxes ? o->boxes->reader : 0, NODE_AT(o->number + 1, 0),
                           2, o->number);
    return 1;
}

/* True where nobody touches this rank's memory for a refused operation any more: who is not through may still read it. */
static int node_out(NodeWindow *w, NodeOp *o) {
    if (o->source != NODE_SHARED && o->source != NODE_REMOTE) return 1;
    if (w->unposted && w->unposted->number <= o->number) return 1;
    for (int i = 1; i < w->size; i++) {
        int q = w->rank + i < w->size ? w->rank + i : w->rank + i - w->size;
        NodeLane *its = w->lane[q];
        if (o->boxes && !o->boxes->reader[q]) continue;
        if (atomic_load_explicit(&its->at.read, memory_order_acquire) >= NODE_AT(o->number + 1, 0)) continue;
        uint64_t refused = atomic_load_explicit(&its->at.refused, memory_order_acquire);
        if (refused && refused >> 20 <= o->number) continue;
        if (atomic_load_explicit(&w->door[q]->left, memory_order_acquire)) continue;
        w->lacks[2] = q;
        return 0;
    }
    return 1;
}

static void node_over(NodeWindow *w, NodeOp *o, int state) {
    if (!o->boxes || state != NODE_DONE) o->culprit = w->culprit;
    free(o->begins);
    w->engine->rouse = 1;
    w->head = o->next;
    if (!w->head) w->tail = 0;
    /* The last store: its owner may free it now. */
    __atomic_store_n(&o->state, state, __ATOMIC_RELEASE);
}

static void node_pass_window(NodeWindow *w) {
    w->lacks[0] = w->lacks[1] = w->lacks[2] = -1;
    if (w->unposted) node_post(w);
    while (w->head && (!w->over || w->head->number < w->over) && node_advance(w, w->head)) {
        w->moved = 1;
        node_over(w, w->head, NODE_DONE);
        if (w->unposted) node_post(w);
    }
    node_show_refused(w);
    if (w->over && w->head && w->head->number >= w->over) {
        while (w->head && node_out(w, w->head)) node_over(w, w->head, w->over_state), w->moved = 1;
        if (!w->head) w->unposted = 0;
    }
}

static int node_pass_locked(NodeEngine *e) {
    int moved = 0;
    for (NodeWindow **p = &e->active; *p;) {
        NodeWindow *w = *p;
        w->moved = 0;
        node_pass_window(w);
        if (w->moved) node_ring(w), moved = 1;
        if (w->head) p = &w->next;
        else *p = w->next, w->listed = 0;
    }
    if (e->mail && mail_pass(e)) moved = 1;
    return moved;
}

/* Move everything that this rank has started and that can move; true where something did. */
static int node_pass(NodeEngine *e) {
    if (!node_try_lock(e)) return 0;
    int moved = node_pass_locked(e);
    node_unlock(e);
    return moved;
}

/* -- what callers use ----------------------------------------------------------------------------- */

static inline void node_engine_init(NodeEngine *e) {
    e->nap_ns = NODE_NAP_NS;
    atomic_init(&e->busy, 0);
}

/* The acquire is for what another thread of this rank has moved. */
static inline int32_t node_state(const NodeOp *o) {
    return __atomic_load_n(&o->state, __ATOMIC_ACQUIRE);
}

static void node_number(NodeWindow *w, NodeOp *o) {
    o->next = 0, o->state = NODE_UNDER_WAY, o->stage = NODE_STAGE_NEW;
    o->told = o->misfit = 0, o->put = o->summed = o->read = 0, o->own_unit = o->unit, o->own_pieces = 0, o->number = ++w->started;
    int blocks = node_blocks(w, o->kind);
    uint64_t bytes = o->unit * (uint64_t)blocks, packed;
    o->begins = 0;
    if (!node_contributes(o, w->rank)) {
        bytes = 0;
    } else if (o->boxes) {
        o->own_unit = bytes = o->boxes->give_at[w->size] ? o->boxes->table[w->size] : 0;
    } else if (o->in_bytes) {
        bytes = 0;
        for (int b = 0; b < blocks; b++) bytes += o->in_bytes[b];
        /* Others do not know where its blocks lie: an entry can tell of a few, or that all are alike. */
        if (o->kind == NODE_ALL_TO_ALL && w->size > NODE_TOLD_BLOCKS && !node_is_even(w, o)) o->source = 0;
    }
    packed = blocks == 1 ? bytes : o->unit * (uint64_t)blocks;
    if (!bytes) o->source = NODE_NOTHING;
    else if (o->source != NODE_SHARED && o->source != NODE_REMOTE)
        o->source = packed <= NODE_INLINE_BYTES ? NODE_INLINE : packed <= NODE_SMALL_BYTES ? NODE_SMALL : NODE_PIECED;
    if (o->source == NODE_PIECED) {
        if (o->boxes) o->piece_bytes = NODE_PIECE_BYTES, o->pieces = (bytes + NODE_PIECE_BYTES - 1) / NODE_PIECE_BYTES;
        else node_divide(w, o, 1);
        o->first = w->pieces, w->pieces += o->own_pieces = o->pieces;
    }
    if (w->tail) w->tail->next = o;
    else w->head = o;
    w->tail = o;
    if (!w->unposted) w->unposted = o;
}

/* Start operations of one window: number them, and post those that find room. Never waits for others. Returns how many
 * of them are posted, so that a small one's input has been copied. */
static int node_start_many(NodeWindow *w, NodeOp *const *o, int n) {
    NodeEngine *e = w->engine;
    node_lock(e);
    for (int i = 0; i < n; i++) node_number(w, o[i]);
    if (n && !w->listed) w->listed = 1, w->next = e->active, e->active = w;
    w->moved = 0;
    node_post(w);
    node_show_refused(w);
    if (w->moved) node_ring(w);
    e->rouse = 1;
    /* Another thread may have seen one through by then, and its owner may have freed it: not after the lock. */
    uint64_t posted = w->unposted ? w->unposted->number - 1 : w->started, first = w->started - (uint64_t)n;
    node_unlock(e);
    return posted > first ? (int)(posted - first) : 0;
}

static int node_start(NodeWindow *w, NodeOp *o) {
    return node_start_many(w, &o, 1);
}

/* From the next operation on, to be started after this, this rank takes memory of a device. */
static inline void node_mark_ready(NodeWindow *w) {
    node_u64 *ready = &w->lane[w->rank]->at.ready;
    if (!atomic_load_explicit(ready, memory_order_relaxed)) atomic_store_explicit(ready, w->started + 1, memory_order_release);
}

/* True where all ranks are known to do so in the next operation. */
static inline int node_all_ready(NodeWindow *w) {
    for (int q = 0; q < w->size; q++) {
        uint64_t from = atomic_load_explicit(&w->lane[q]->at.ready, memory_order_acquire);
        if (!from || from > w->started + 1) return 0;
    }
    return 1;
}

/* Give a scatter under way, of which the root has told what it is, the place of this rank's block; `like` has the rest. */
static inline void node_give(NodeEngine *e, NodeOp *o, const NodeOp *like) {
    node_lock(e);
    o->unit = like->unit, o->in_at = like->in_at, o->in_bytes = like->in_bytes, o->out = like->out;
    memcpy(o->tells, like->tells, sizeof o->tells);
    e->rouse = 1;
    node_unlock(e);
}

/* Ask the ranks that are lacking to ring when they move. The fence keeps the second look behind the bits: on x86 the
 * atomic OR would do. */
static void node_await(NodeEngine *e) {
    for (NodeWindow *w = e->active; w; w = w->next)
        for (int i = 0; i < 3; i++) {
            int q = w->awaited[i] = w->lacks[i];
            if (q >= 0) atomic_fetch_or(&w->lane[q]->waiters[w->rank / 64], 1ull << w->rank % 64);
        }
    mail_await(e);
    atomic_thread_fence(memory_order_seq_cst);
}

static int node_lacks_others(const NodeEngine *e) {
    for (NodeWindow *w = e->active; w; w = w->next)
        for (int i = 0; i < 3; i++)
            if (w->lacks[i] != w->awaited[i]) return 1;
    return 0;
}

/* True where an operation, or a message, is over; of none it is not. */
static inline int node_is_over(const int32_t *state) { return state && __atomic_load_n(state, __ATOMIC_ACQUIRE); }

/* Spin, then yield: true where it is over. */
static int node_wait_briefly(NodeEngine *e, const int32_t *state) {
    for (int i = 0; i < e->spin; i++) {
        node_pass(e);
        if (node_is_over(state)) return 1;
        NODE_PAUSE();
    }
    for (uint64_t end = node_ns() + (uint64_t)e->yield_ns;;) {
        for (int i = 0; i < 8; i++) {
            if (node_pass(e), node_is_over(state)) return 1;
            sched_yield();
        }
        if (node_ns() >= end) return 0;
    }
}

static inline uint32_t node_bell(NodeEngine *e) {
    return atomic_load(&e->mine->bell);
}

/* Sleep until something moves, what has this state (or 0) is over or the bell is not `bell` any more; false after a full nap. Who waits for
 * what is in no window takes the bell before it looks at that. */
static int node_sleep_since(NodeEngine *e, const int32_t *state, long nap_ns, uint32_t bell) {
    NodeDoor *mine = e->mine;
    int rung = 1;
    atomic_fetch_add(&mine->asleep, 1);
    node_lock(e);
    node_await(e);
    int moved = node_pass_locked(e) || node_lacks_others(e); /* the second look */
    node_unlock(e);
    if (!moved && !node_is_over(state)) {
        struct timespec nap = {nap_ns / 1000000000, nap_ns % 1000000000};
        rung = !syscall(SYS_futex, &mine->bell, FUTEX_WAIT, bell, &nap, 0, 0) || errno != ETIMEDOUT;
    }
    atomic_fetch_sub(&mine->asleep, 1);
    return node_pass(e) || rung || node_is_over(state);
}

/* Yield for a while, until something moves or the bell is not `bell` any more; false if it still is. */
static inline int node_yield_since(NodeEngine *e, uint32_t bell) {
    for (uint64_t end = node_ns() + (uint64_t)e->yield_ns; node_ns() < end;)
        for (int i = 0; i < 8; i++) {
            if (node_bell(e) != bell || node_pass(e)) return 1;
            sched_yield();
        }
    return 0;
}

static int node_sleep(NodeEngine *e, const int32_t *state, long nap_ns) {
    return node_sleep_since(e, state, nap_ns, node_bell(e));
}

/* Ranks that are threads of one interpreter: who has its lock, or is about to take it. Who waits for its turn here takes
 * the lock free; the lock's own wait sleeps, and takes ten times as long to wake up. It is a hint: after a while a thread
 * takes the turn of one that keeps the lock, or has let go of it elsewhere. */
static _Atomic(NodeEngine *) node_turn __attribute__((unused));

static inline void node_give_turn(NodeEngine *e) {
    NodeEngine *mine = e;
    atomic_compare_exchange_strong(&node_turn, &mine, 0);
}

static inline void node_take_turn(NodeEngine *e) {
    for (int i = 0; i < NODE_TURN_YIELDS; i++) {
        NodeEngine *nobody = 0;
        if (atomic_compare_exchange_strong(&node_turn, &nobody, e)) return;
        sched_yield();
    }
    atomic_store(&node_turn, e);
}

/* Wait for one operation or message; false after a nap, or a bell: for signals, failures, the watchdog, then call it again. */
static int node_wait(NodeEngine *e, const int32_t *state) {
    if (node_wait_briefly(e, state)) return 1;
    long nap_ns = e->nap_ns, longer = nap_ns * 2 < NODE_LONGEST_NAP_NS ? nap_ns * 2 : NODE_LONGEST_NAP_NS;
    e->nap_ns = node_sleep(e, state, nap_ns) ? NODE_NAP_NS : longer;
    return node_is_over(state);
}

/* True where this process may read memory of another one, and finds there what it should. */
static inline int node_can_read(int pid, const void *its_word, uint64_t expected) {
    uint64_t word = ~expected;
    struct iovec to = {&word, sizeof word}, from = {(void *)(uintptr_t)its_word, sizeof word};
    return process_vm_readv(pid, &to, 1, &from, 1, 0) == sizeof word && word == expected;
}

/* Leave the text of a digest (not 0) for a mismatch's message, in place of the oldest, or of its own before. By one
 * thread at a time. */
static inline void node_tell(NodeWindow *w, uint32_t digest, const char *text, size_t n) {
    NodeLane *mine = w->lane[w->rank];
    uint64_t words[NODE_TEXT_BYTES / 8] = {0};
    uint32_t slot = 0;
    while (slot < NODE_TEXTS && (uint32_t)atomic_load_explicit(&mine->told[slot], memory_order_relaxed) != digest) slot++;
    if (slot == NODE_TEXTS) slot = w->texts++ % NODE_TEXTS;
    uint64_t count = (atomic_load_explicit(&mine->told[slot], memory_order_relaxed) >> 32) + 1;
    memcpy(words, text, n < NODE_TEXT_BYTES ? n : NODE_TEXT_BYTES - 1);
    atomic_store_explicit(&mine->told[slot], count << 32, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < NODE_TEXT_BYTES / 8; i++)
        atomic_store_explicit(&mine->text[slot][i], words[i], memory_order_relaxed);
    atomic_store_explicit(&mine->told[slot], count << 32 | digest, memory_order_release);
}

/* Copy what rank q has told of a digest, and a 0, to `buffer`; false where it is not there, or not any more. */
static inline int node_told(NodeWindow *w, int q, uint32_t digest, char *buffer, size_t n) {
    NodeLane *its = w->lane[q];
    for (int slot = 0; digest && n && slot < NODE_TEXTS; slot++) {
        uint64_t words[NODE_TEXT_BYTES / 8], before = atomic_load_explicit(&its->told[slot], memory_order_acquire);
        if ((uint32_t)before != digest) continue;
        for (int i = 0; i < NODE_TEXT_BYTES / 8; i++)
            words[i] = atomic_load_explicit(&its->text[slot][i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        /* Others may have been written since, and this one once more: the count tells it. */
        if (atomic_load_explicit(&its->told[slot], memory_order_relaxed) != before) continue;
        n = n < NODE_TEXT_BYTES ? n : NODE_TEXT_BYTES;
        memcpy(buffer, words, n - 1);
        buffer[n - 1] = 0;
        return 1;
    }
    return 0;
}

/* The word that rank q has posted at a number; 0 where it is not there yet, or not any more. */
static inline uint64_t node_word_at(NodeWindow *w, int q, uint64_t number) {
    uint64_t word = atomic_load_explicit(&node_entry(w, q, number)->word, memory_order_acquire);
    return word >> 32 == (number & 0xFFFFFFFFu) ? word : 0;
}

/* The digest that rank q has posted at a number; 0 where it has not yet, or has written over it. */
static inline uint32_t node_digest_at(NodeWindow *w, int q, uint64_t number) {
    NodeEntry *e = node_entry(w, q, number);
    uint64_t word = node_word_at(w, q, number);
    uint32_t digest = atomic_load_explicit(&e->digest, memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    return word && word == atomic_load_explicit(&e->word, memory_order_relaxed) ? digest : 0;
}

/* The last call that rank q has posted, as `call` in its lane; 0 for none. */
static inline uint64_t node_last_call(NodeWindow *w, int q) {
    return atomic_load_explicit(&w->lane[q]->at.call, memory_order_relaxed);
}

/* True unless a rank, also one that nobody waited for, is known to have posted something else up to `number`. What
 * differs there may have done so before: it is refused from where it first did. */
static inline int node_agrees(NodeWindow *w, uint64_t number) {
    node_lock(w->engine);
    w->moved = 0;
    for (int q = 0; q < w->size; q++) {
        uint64_t n = number, first = 0;
        for (; n; n--) {
            uint64_t own = node_word_at(w, w->rank, n), word = node_word_at(w, q, n);
            if (!own || !word || word == own) break;
            first = n;
        }
        if (first) node_refuse(w, first, NODE_MISMATCH, q);
    }
    node_show_refused(w);
    if (w->moved) node_ring(w);
    int agrees = !w->over || w->over_state != NODE_MISMATCH || w->over > number;
    node_unlock(w->engine);
    return agrees;
}

/* Move nothing of this window any more: what is under way is over, without a result. */
static void node_close(NodeWindow *w) {
    node_lock(w->engine);
    for (NodeWindow **p = &w->engine->active; *p; p = &(*p)->next)
        if (*p == w) {
            *p = w->next;
            break;
        }
    while (w->head) node_over(w, w->head, NODE_CLOSED);
    w->unposted = 0, w->listed = 0;
    node_unlock(w->engine);
}

/* This rank leaves: what it has posted stays valid, who needs more learns it when its nap ends. */
static inline void node_leave(NodeEngine *e) {
    atomic_store(&e->mine->left, 1);
}

#endif
