/* Boxes of C-contiguous arrays: runs of bytes that lie apart, in the order of the elements.
 *
 * In an exchange each rank takes boxes of the blocks of others, which read its own. What a rank gives is *packed*: a
 * table of where that of each rank begins, then the boxes for rank 0, for rank 1, and so on; or it is read where it lies.
 */
#ifndef MPIMESH_BOXES_H
#define MPIMESH_BOXES_H

#include <stdint.h>
#include <string.h>

enum { BOX_DIMS = 64 };

typedef struct {
    uint64_t at, run, bytes; /* where it begins, how much lies together, how much it is */
    const uint64_t *dims;    /* the lengths of `n` axes of such runs, the outermost first, and then their strides */
    uint32_t n;
    uint32_t base;           /* of a target: which array it is in */
} NodeBox;

/* A box that this rank takes of a block: one part of what it copies or reduces. */
typedef struct {
    NodeBox to, from;
    uint64_t packed; /* where it begins in what its owner gives to this rank */
    uint64_t aside;  /* and in the memory where parts of a reduction wait for the others */
    uint32_t owner, count; /* of the first part of a box: how many there are */
    void (*fold)(void *out, const void *const *in, int ranks, long n); /* if there are several */
} NodePart;

/* All that one rank takes and gives. */
typedef struct {
    NodePart *part;
    NodeBox *give;
    uint64_t *give_at;  /* of each rank, and at the end: the first of the boxes for it */
    uint64_t *table;    /* of each rank, and at the end: where what it is given begins, if packed */
    uint64_t *expects;  /* of each rank: how much it gives this one */
    uint64_t *block;    /* of each rank that gives: the bytes and the dtype of its block */
    uint8_t *owner, *reader; /* whether this rank takes of it, whether it takes of this one */
    uint64_t mine;      /* the bytes and the dtype of this rank's block */
    uint64_t head;      /* bytes of the table */
    uint64_t aside;     /* bytes of all parts that are reduced */
    uint64_t step;      /* bytes that are reduced at a time */
    char *room;         /* so many for the result, and for each part */
    const void **in;    /* where the parts are */
    uint32_t parts, item, ranks;
} NodeBoxes;

/* Where the next byte of a box lies. */
typedef struct {
    const NodeBox *box;
    uint64_t at, left; /* and how many lie behind it */
    uint64_t index[BOX_DIMS];
} BoxCursor;

static void box_seek(BoxCursor *c, const NodeBox *box, uint64_t byte) {
    uint64_t row = byte / box->run, in = byte - row * box->run;
    c->box = box, c->at = box->at + in, c->left = box->run - in;
    for (uint32_t d = box->n; d-- > 0; row /= box->dims[d]) {
        c->index[d] = row % box->dims[d];
        c->at += c->index[d] * box->dims[box->n + d];
    }
}

/* Go on by so many bytes, of those that lie together. */
static inline void box_step(BoxCursor *c, uint64_t bytes) {
    const NodeBox *box = c->box;
    c->at += bytes;
    if (c->left -= bytes) return;
    c->at -= box->run, c->left = box->run;
    for (uint32_t d = box->n; d-- > 0;) {
        c->at += box->dims[box->n + d];
        if (++c->index[d] < box->dims[d]) return;
        c->at -= box->dims[box->n + d] * box->dims[d], c->index[d] = 0;
    }
}

#define BOX_ROW(T)                                            \
    for (uint64_t i = 0; i < n; i++, out += to, in += from) { \
        T value;                                              \
        memcpy(&value, in, sizeof value);                     \
        memcpy(out, &value, sizeof value);                    \
    }                                                         \
    return
typedef struct {
    uint64_t low, high;
} box_pair;

static void box_row(char *out, const char *in, uint64_t item, uint64_t n, uint64_t to, uint64_t from) {
    switch (item) {
    case 1: BOX_ROW(uint8_t);
    case 2: BOX_ROW(uint16_t);
    case 4: BOX_ROW(uint32_t);
    case 8: BOX_ROW(uint64_t);
    case 16: BOX_ROW(box_pair);
    default:
        for (uint64_t i = 0; i < n; i++) memcpy(out + i * to, in + i * from, item);
    }
}

/* How many runs of the length `run` come next, at one stride; 1 where they begin within one. */
static inline uint64_t box_runs(const BoxCursor *c, uint64_t run, uint64_t *stride) {
    const NodeBox *box = c->box;
    if (!box->n) return *stride = run, c->left / run; /* all in one */
    *stride = box->dims[2 * box->n - 1];
    return c->left == run && box->run == run ? box->dims[box->n - 1] - c->index[box->n - 1] : 1;
}

static inline void box_skip(BoxCursor *c, uint64_t run, uint64_t runs) {
    if (!c->box->n) {
        box_step(c, run * runs);
        return;
    }
    if (runs > 1) c->index[c->box->n - 1] += runs - 1, c->at += (runs - 1) * c->box->dims[2 * c->box->n - 1];
    box_step(c, run);
}

/* Copy `bytes` from one box to another, both from a byte of theirs on. They do not overlap. */
static void box_copy(char *out, const NodeBox *to, uint64_t to_at, const char *in, const NodeBox *from, uint64_t from_at,
                     uint64_t bytes) {
    BoxCursor a, b;
    box_seek(&a, to, to_at), box_seek(&b, from, from_at);
    while (bytes) {
        uint64_t n = a.left < b.left ? a.left : b.left, runs, more, stride_a, stride_b;
        if (n > bytes) n = bytes;
        runs = box_runs(&a, n, &stride_a), more = box_runs(&b, n, &stride_b);
        if (more < runs) runs = more;
        if (runs > bytes / n) runs = bytes / n;
        if (runs > 1) box_row(out + a.at, in + b.at, n, runs, stride_a, stride_b);
        else runs = 1, memcpy(out + a.at, in + b.at, n);
        box_skip(&a, n, runs), box_skip(&b, n, runs);
        bytes -= n * runs;
    }
}

/* A box of `bytes` that lie together. */
static inline NodeBox box_flat(uint64_t bytes) { return (NodeBox){0, bytes, bytes, 0, 0, 0}; }

/* Where `bytes` of a box lie, if together; else 0. */
static const char *box_at(const char *in, const NodeBox *box, uint64_t byte, uint64_t bytes) {
    BoxCursor c;
    box_seek(&c, box, byte);
    return c.left >= bytes ? in + c.at : 0;
}

/* Pack bytes [lo, hi) of what a rank gives. */
static void boxes_pack(const NodeBoxes *b, const char *in, char *to, uint64_t lo, uint64_t hi) {
    uint64_t at = b->head;
    if (lo < at) memcpy(to, (const char *)b->table + lo, (hi < at ? hi : at) - lo);
    for (uint64_t i = 0; i < b->give_at[b->ranks] && at < hi; at += b->give[i++].bytes) {
        const NodeBox *box = &b->give[i];
        uint64_t first = at < lo ? lo : at, last = at + box->bytes < hi ? at + box->bytes : hi;
        if (first >= last) continue;
        NodeBox flat = box_flat(last - first);
        box_copy(to + (first - lo), &flat, 0, in, box, first - at, last - first);
    }
}

#endif
