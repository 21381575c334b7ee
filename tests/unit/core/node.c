/* Random programs over the node window, against closed formulas: threads or processes, late, stopped, killed ranks. */
#define _GNU_SOURCE
#include "node.h"
#include "kernels.h"
#include "ranks.h"

enum { WINDOWS = 4, MAX_PENDING = 40, HEAP = 48 << 20 };
static int lates;
static NodeLane *lanes[WINDOWS + 1]; /* the last one is of both threads of a rank */
static char *heaps; /* of SHARED arrays: one for each rank */
static int members[WINDOWS + 1][MAX_R], sizes[WINDOWS + 1];

typedef struct { pthread_mutex_t mutex; NodeWindow *w; long count; } Common;
typedef struct { int rank, thread; uint64_t seed; int programs; NodeEngine *e; Common *common; NodeWindow w[WINDOWS + 1]; } Rank;

static int engine(Rank *r) {
    NodeEngine *e = r->e ? r->e : calloc(1, sizeof *e);
    if (!r->e) node_engine_init(e), e->mine = &doors[r->rank];
    r->e = e;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    e->spin = !threads && ranks <= cores ? 2000 : 0, e->yield_ns = 1000000;
    if (getenv("SLEEPY")) e->spin = 0, e->yield_ns = 0;
    for (int i = 0; i <= WINDOWS; i++) {
        NodeWindow *w = &r->w[i];
        w->engine = e, w->size = sizes[i], w->rank = -1;
        w->lane = malloc(sizeof(void *) * (size_t)sizes[i]), w->door = malloc(sizeof(void *) * (size_t)sizes[i]);
        w->segment = malloc(sizeof(void *) * (size_t)sizes[i]);
        w->scratch_bytes = node_scratch_bytes(sizes[i]);
        w->scratch = malloc((size_t)sizes[i] * w->scratch_bytes);
        int32_t *pid = malloc(4 * (size_t)sizes[i]);
        for (int q = 0; q < sizes[i]; q++) {
            int m = members[i][q];
            if (m == r->rank) w->rank = q;
            w->lane[q] = &lanes[i][q], w->door[q] = &doors[m];
            char **one = malloc(sizeof(char *));
            one[0] = heaps + (size_t)m * HEAP, w->segment[q] = one;
            pid[q] = threads ? getpid() : pids[m];
        }
        w->pid = pid;
    }
    return 0;
}

typedef struct { NodeOp op; NodeWindow *w; int window, live, kind, style, root; long n; uint64_t id; char *in, *out; size_t heap, out_bytes; int unequal; uint64_t table[4][MAX_R]; struct Exchange *exchange; } Job;

static int64_t value(uint64_t id, int member, long i) { return (int64_t)(mix(id * 1000003u + (uint64_t)member * 7919u + (uint64_t)i) >> 40); }

/* Of unequal blocks: the elements that `from` has for `to`; of kinds that do not ask, for all or of all the same. */
static long length(const Job *j, int from, int to) {
    uint64_t a = mix(j->id * 31 + (j->kind == NODE_REDUCE_SCATTER || j->kind == NODE_SCATTER ? 0 : (uint64_t)from * 64) + (j->kind == NODE_GATHER || j->kind == NODE_ALL_GATHER ? 0 : (uint64_t)to));
    if (!j->unequal) return j->n;
    return j->unequal == 2 || a % 4 == 0 ? 0 : a % 4 == 1 ? j->n : (long)(a % (uint64_t)(j->n + 1));
}
static int gathers(int kind) { return kind == NODE_ALL_GATHER || kind == NODE_GATHER || kind == NODE_ALL_TO_ALL; }
/* Where block b lies: the last one first, an element apart. */
static long place(const Job *j, int b) { return j->unequal ? (j->w->size - 1 - b) * (j->n + 1) : b * j->n; }
static long in_place(const Job *j, int b) { return place(j, j->unequal && j->kind == NODE_ALL_TO_ALL ? (b + j->w->rank) % j->w->size : b); }
static void set_tables(Job *j) {
    NodeWindow *w = j->w;
    int *m = members[j->window], blocks = node_blocks(w, j->kind);
    for (int b = 0; b < w->size; b++) {
        j->table[0][b] = (uint64_t)in_place(j, b) * 8, j->table[1][b] = (uint64_t)length(j, m[w->rank], m[b]) * 8;
        j->table[2][b] = (uint64_t)place(j, b) * 8, j->table[3][b] = (uint64_t)length(j, m[b], m[w->rank]) * 8;
    }
    j->op.in_at = blocks > 1 ? j->table[0] : 0, j->op.in_bytes = j->table[1];
    if (gathers(j->kind)) j->op.out_at = j->table[2], j->op.out_bytes = j->table[3];
}

/* An exchange of boxes of blocks of so many rows and columns: all of it follows from the number of the job. */
enum { TAKES = 3, NO_MISFIT = 0, OTHER_BLOCK, GIVES_MORE, GIVES_LESS, GIVES_NOTHING };
typedef struct { long row, col, rows, cols, to_row, to_col; int owner[MAX_R], count; } Taken; /* the same box of each owner, reduced */
typedef struct Exchange {
    NodeBoxes b;
    long rows, cols, height; /* of a block, and of the target, which is two columns wider */
    int takes, misfit, bad;  /* which rank has another block than the others think, or gives them something else */
    Taken take[TAKES];
    int boxes;
    uint64_t dims[2 * (3 * TAKES + 1) * MAX_R], give_at[MAX_R + 1], table[MAX_R + 2], expects[MAX_R], block[MAX_R];
    NodePart part[TAKES * MAX_R];
    NodeBox give[(TAKES + 1) * MAX_R];
    uint8_t owner[MAX_R], reader[MAX_R];
    const void *in[MAX_R];
    char *beside[1];
} Exchange;

/* What rank r takes. Often one rank is read by nobody, and some read nobody. */
static int list_takes(const Job *j, const Exchange *x, int r, Taken *take, long *height) {
    int size = j->w->size, takes = 0, unread = (int)(mix(j->id * 17) % (uint64_t)(2 * size));
    uint64_t s = mix(j->id * 131 + (uint64_t)r);
    *height = 1;
    for (int most = (int)(rng(&s) % (TAKES + 1)); most--;) {
        uint64_t a = rng(&s), b = rng(&s), c = rng(&s), d = rng(&s);
        Taken *t = &take[takes];
        t->rows = 1 + (long)(a % (uint64_t)x->rows), t->cols = b % 3 ? 1 + (long)((b >> 8) % (uint64_t)x->cols) : x->cols;
        t->row = (long)((a >> 32) % (uint64_t)(x->rows - t->rows + 1)), t->col = (long)((b >> 32) % (uint64_t)(x->cols - t->cols + 1));
        t->to_row = *height - 1, t->to_col = (long)(c % (uint64_t)(x->cols + 3 - t->cols)), t->count = 0;
        for (int i = d % 2 ? 1 : 1 + (int)((d >> 8) % (uint64_t)size), q = (int)((d >> 16) % (uint64_t)size); i--; q = (q + 1) % size)
            if (q != unread) t->owner[t->count++] = q;
        if (t->count) takes++, *height += t->rows + (long)(c >> 63);
    }
    return takes;
}

/* Which result shows the order of the parts, and that it is asked for. */
static void in_order(void *out, const void *const *in, int ranks, long n) {
    for (long i = 0; i < n; i++) {
        uint64_t total = 0;
        for (int q = 0; q < -ranks; q++) total = total * 31 + ((const uint64_t *)in[q])[i];
        ((uint64_t *)out)[i] = total;
    }
}

static NodeBox box_of(Exchange *x, long row, long col, long rows, long cols, long width) {
    uint64_t *dims = x->dims + 2 * x->boxes++;
    int whole = cols == width;
    dims[0] = (uint64_t)rows, dims[1] = (uint64_t)width * 8;
    return (NodeBox){.at = (uint64_t)(row * width + col) * 8, .run = (uint64_t)(whole ? rows * cols : cols) * 8, .bytes = (uint64_t)(rows * cols) * 8, .dims = dims, .n = !whole};
}

static void set_gives(Job *j, Exchange *x) {
    NodeBoxes *b = &x->b;
    int me = j->w->rank, lesser = (me + 1) % j->w->size; /* who gets nothing of one that gives less */
    uint64_t n = 0;
    b->table[0] = b->head;
    for (int r = 0; r < j->w->size; r++) {
        Taken take[TAKES];
        long height;
        b->give_at[r] = n;
        for (int t = 0, takes = list_takes(j, x, r, take, &height); t < takes && r != me; t++)
            for (int i = 0; i < take[t].count; i++)
                if (take[t].owner[i] == me && !(x->misfit >= GIVES_LESS && x->bad == me && (x->misfit == GIVES_NOTHING || r == lesser)))
                    b->give[n++] = box_of(x, take[t].row, take[t].col, take[t].rows, take[t].cols, x->cols);
        if (r != me && x->misfit == GIVES_MORE && x->bad == me) b->give[n++] = box_of(x, 0, 0, 1, 1, x->cols);
        b->table[r + 1] = b->table[r], b->reader[r] = n > b->give_at[r];
        for (uint64_t i = b->give_at[r]; i < n; i++) b->table[r + 1] += b->give[i].bytes;
    }
    b->give_at[j->w->size] = n;
}

static Exchange *new_exchange(Job *j) {
    Exchange *x = calloc(1, sizeof *x);
    NodeBoxes *b = &x->b;
    uint64_t a = mix(j->id * 7), size = (uint64_t)j->w->size;
    x->cols = 1 + (long)(a % 40), x->rows = 1 + j->n / x->cols;
    if ((a >> 8) % 6 == 0) x->misfit = 1 + (int)((a >> 16) % 4), x->bad = (int)((a >> 24) % size);
    b->part = x->part, b->give = x->give, b->give_at = x->give_at, b->table = x->table, b->expects = x->expects;
    b->block = x->block, b->owner = x->owner, b->reader = x->reader, b->in = x->in;
    b->ranks = (uint32_t)size, b->item = 8, b->head = (8 * (size + 1) + 15) / 16 * 16;
    for (int q = 0; q < j->w->size; q++) b->block[q] = (uint64_t)(x->rows * x->cols) * 8;
    b->mine = b->block[0] + (x->misfit == OTHER_BLOCK && x->bad == j->w->rank);
    set_gives(j, x);
    x->takes = list_takes(j, x, j->w->rank, x->take, &x->height);
    for (int k = 0; k < x->takes; k++) {
        Taken *t = &x->take[k];
        int beside = k > 0 && k == x->takes - 1; /* the last one goes into an array that begins where the first of it does */
        for (int i = 0; i < t->count; i++) {
            NodePart *p = &b->part[b->parts++];
            p->from = box_of(x, t->row, t->col, t->rows, t->cols, x->cols);
            p->to = box_of(x, beside ? 0 : t->to_row, t->to_col, t->rows, t->cols, x->cols + 2), p->to.base = (uint32_t)beside;
            p->owner = (uint32_t)t->owner[i], p->count = i ? 0 : (uint32_t)t->count, p->packed = b->expects[p->owner];
            b->owner[p->owner] = 1, b->expects[p->owner] += p->to.bytes;
            if (t->count > 1) p->fold = in_order, p->aside = b->aside, b->aside += p->to.bytes;
        }
    }
    b->step = 8 * (1 + (a >> 32) % 5000);
    b->room = malloc((size + 1) * b->step);
    return x;
}

static int check_boxes(Rank *r, Job *j) {
    Exchange *x = j->exchange;
    NodeOp *o = &j->op;
    int *m = members[j->window];
    int64_t *want = malloc(j->out_bytes), *got = (int64_t *)j->out;
    memset(want, 0x77, j->out_bytes);
    int misfit = x->bad != j->w->rank && x->b.owner[x->bad] ? x->misfit : 0;
    if (misfit == GIVES_LESS && j->w->rank != (x->bad + 1) % j->w->size) misfit = 0;
    uint64_t seen = misfit == OTHER_BLOCK ? x->b.block[0] + 1 : misfit == GIVES_MORE ? x->b.expects[x->bad] + 8 : 0;
    int wrong = o->misfit != (misfit == 0 ? 0 : misfit == OTHER_BLOCK ? NODE_BLOCK : NODE_GIVEN) || (misfit && (o->culprit != x->bad || o->seen != seen));
    for (int k = 0; k < x->takes && !misfit; k++) { /* in a misfit nothing is written */
        Taken *t = &x->take[k];
        for (long i = 0; i < t->rows * t->cols; i++) {
            long row = i / t->cols, col = i % t->cols;
            int64_t *to = &want[(t->to_row + row) * (x->cols + 2) + t->to_col + col];
            *to = 0;
            for (int q = 0; q < t->count; q++) *to = (int64_t)((uint64_t)*to * 31 + (uint64_t)value(j->id, m[t->owner[q]], (t->row + row) * x->cols + t->col + col));
        }
    }
    long at = 0, end = (long)j->out_bytes / 8;
    while (at < end && want[at] == got[at]) at++;
    if (wrong || at < end) fprintf(stderr, "rank %d: window %d number %lu boxes style %d source %d n %ld misfit %d of %d, not %d of %d; at %ld of %ld\n", r->rank, j->window, (unsigned long)o->number, j->style, o->source, j->n, o->misfit, o->culprit, misfit, x->bad, at, end);
    free(want), free(x->b.room), free(x);
    return wrong || at < end;
}

static int check(Rank *r, Job *j) {
    NodeWindow *w = j->w;
    if (j->exchange) return check_boxes(r, j);
    int64_t *out = (int64_t *)j->out;
    int *m = members[j->window];
    if (gathers(j->kind) && (j->kind != NODE_GATHER || w->rank == j->root)) {
        long k = 0, end = (long)j->out_bytes / 8;
        for (long at = 0; at < end; at++) { /* and nothing was written between the blocks */
            int64_t want = (int64_t)0x7777777777777777, got = out[at];
            for (int q = 0; q < w->size; q++) {
                long i = at - place(j, q);
                if (i >= 0 && i < length(j, m[q], m[w->rank])) want = value(j->id, m[q], (j->kind == NODE_ALL_TO_ALL ? w->rank * j->n : 0) + i), k++;
            }
            if (want == got) continue;
            fprintf(stderr, "rank %d: window %d number %lu kind %d style %d n %ld unequal %d at %ld: %lx, not %lx\n", r->rank, j->window, (unsigned long)j->op.number, j->kind, j->style, j->n, j->unequal, at, (long)got, (long)want);
            return 1;
        }
        return 0;
    }
    for (long i = 0; i < length(j, m[w->rank], m[w->rank]); i++) {
        int64_t want = 0, got = out[i];
        switch (j->kind) {
        case NODE_ALL_REDUCE:
        case NODE_REDUCE:
            if (j->kind == NODE_REDUCE && w->rank != j->root) return 0;
            for (int q = 0; q < w->size; q++) want += value(j->id, m[q], i);
            break;
        case NODE_REDUCE_SCATTER:
            for (int q = 0; q < w->size; q++) want += value(j->id, m[q], w->rank * j->n + i);
            break;
        case NODE_BROADCAST: want = value(j->id, m[j->root], i); break;
        case NODE_SCATTER: want = value(j->id, m[j->root], w->rank * j->n + i); break;
        case NODE_SHIFT: want = value(j->id, m[((w->rank - j->root) % w->size + w->size) % w->size], i); break;
       
        default: return 0;
        }
        if (want == got) continue;
        fprintf(stderr, "rank %d: window %d number %lu kind %d style %d n %ld at %ld: %ld, not %ld\n", r->rank, j->window, (unsigned long)j->op.number, j->kind, j->style, j->n, i, (long)got, (long)want);
        return 1;
    }
    return 0;
}

static int finish(Rank *r, Job *j) {
    int calls = 0;
    while (!node_wait(r->e, &j->op.state))
        if (++calls > (killer ? 400 : 300)) {
            fprintf(stderr, "rank %d: window %d number %lu kind %d style %d stage %d stands still: lacks %d %d %d\n", r->rank, j->window, (unsigned long)j->op.number, j->kind, j->style, j->op.stage, j->w->lacks[0], j->w->lacks[1], j->w->lacks[2]);
            return 3;
        }
    j->live = 0;
    if (j->op.state != NODE_DONE) { if (!killer) fprintf(stderr, "rank %d: state %d by %d\n", r->rank, j->op.state, j->op.culprit); return 4; }
    int wrong = check(r, j);
    if (j->style != 1 || !j->heap) free(j->in != j->out ? j->in : 0), free(j->out);
    return wrong;
}

/* Microseconds of an all-reduce in place, the least of 7 blocks: ordinary, shared, read in place; and of 4 pending. */
static void *bench(void *arg) {
    Rank *r = arg;
    engine(r);
    NodeWindow *w = &r->w[0];
    char *mine = heaps + (size_t)r->rank * HEAP;
    double *own = malloc(32 << 20);
    for (long n = 1; n <= 2 << 20; n *= 8) {
        double best[4] = {1e9, 1e9, 1e9, 1e9};
        for (int block = 0; block < 7; block++)
            for (int way = 0; way < 4; way++) {
                if (way == 2 && (threads || n < 1024)) continue;
                if (way == 1 && n < 16) continue;
                int many = way == 3 ? 4 : 1;
                if (way == 3 && n * 8 > NODE_SMALL_BYTES) continue;
                NodeOp o[4];
                memset(o, 0, sizeof o);
                for (int k = 0; k < many; k++) {
                    o[k].source = way == 1 ? NODE_SHARED : way == 2 ? NODE_REMOTE : 0;
                    o[k].in = o[k].out = way == 1 ? mine : (char *)(own + k * n);
                    o[k].in_place = o[k].out_place = way == 2 ? (uint64_t)(uintptr_t)own : 0;
                    o[k].unit = (uint64_t)n * 8, o[k].fold = sum_f64, o[k].item = 8, o[k].digest = 7, o[k].kind = NODE_ALL_REDUCE;
                }
                for (long i = 0; i < n; i++) own[i] = ((double *)mine)[i] = 0;
                long times = n < 4096 ? 3000 : n < 65536 ? 300 : 12;
                uint64_t begin = 0;
                for (long i = -times / 10; i < times; i++) {
                    if (i == 0) begin = node_ns();
                    uint8_t source = o[0].source;
                    for (int k = 0; k < many; k++) o[k].source = source, node_start(w, &o[k]);
                    for (int k = 0; k < many; k++)
                        while (!node_wait(r->e, &o[k].state)) {}
                    o[0].source = source;
                }
                double us = (double)(node_ns() - begin) / 1e3 / (double)times / many;
                if (us < best[way]) best[way] = us;
            }
        if (r->rank == 0)
            printf("%9ld B  ordinary %9.2f  shared %9.2f  in place %9.2f  4 pending, each %9.2f us\n", n * 8, best[0], best[1] < 1e9 ? best[1] : 0, best[2] < 1e9 ? best[2] : 0, best[3] < 1e9 ? best[3] : 0), fflush(stdout);
    }
    node_leave(r->e);
    return 0;
}

/* The last rank calls something else at number 30, past what can be posted: all that is before is done, the rest refused, on every rank. */
static void *mismatch(void *arg) {
    Rank *r = arg;
    engine(r);
    int64_t x[40];
    NodeOp o[40];
    memset(o, 0, sizeof o);
    intptr_t wrong = 0;
    for (int k = 0; k < 40; k++) {
        x[k] = r->rank;
        o[k].in = o[k].out = (char *)&x[k], o[k].unit = 8, o[k].fold = sum_i64, o[k].item = 8, o[k].kind = NODE_ALL_REDUCE;
        o[k].digest = 1 + (k == 29 && r->rank == ranks - 1);
        node_tell(&r->w[0], o[k].digest, o[k].digest == 1 ? "this" : "that", 4);
        node_start(&r->w[0], &o[k]);
    }
    for (int k = 39; k >= 0; k--) {
        while (!node_wait(r->e, &o[k].state)) {}
        wrong |= o[k].state != (k < 29 ? NODE_DONE : NODE_MISMATCH) || (k < 29 && x[k] != ranks * (ranks - 1) / 2);
    }
    /* Each knows of two ranks, at least, that called different things, and which. */
    int seen = 0;
    for (int q = 0; q < ranks; q++) {
        char text[10] = "";
        uint32_t digest = node_digest_at(&r->w[0], q, 30), of_it = q == ranks - 1 ? 2 : 1;
        if (digest && (digest != of_it || !node_told(&r->w[0], q, digest, text, 10) || strcmp(text, of_it == 1 ? "this" : "that"))) wrong = 1;
        wrong |= node_digest_at(&r->w[0], q, 41) || node_digest_at(&r->w[0], q, 29 - NODE_ENTRIES), seen |= (int)digest;
    }
    wrong |= seen != 3;
    node_leave(r->e);
    return (void *)wrong;
}

/* The first rank writes one text over the other; what others read is whole, and of the digest that they asked for. */
static void *texts(void *arg) {
    Rank *r = arg;
    engine(r);
    node_u32 *last = (node_u32 *)heaps, *whole = last + 32; /* how many texts each has read */
    char text[NODE_TEXT_BYTES + 9], want[NODE_TEXT_BYTES + 9];
    intptr_t wrong = 0;
    uint32_t k = 1, least = 0;
    for (; r->rank == 0 && (k < 300000 || least < 2000); k++) {
        uint32_t digest = 1 + 32 * (k % 31); /* of two places */
        size_t n = digest % 300;
        memset(text, 'a' + (int)(digest % 26), n < sizeof text ? n : sizeof text);
        node_tell(&r->w[0], digest, text, n < sizeof text ? n : sizeof text);
        atomic_store(last, digest + 1);
        least = 2000;
        for (int q = 1; q < ranks; q++) least = whole[32 * q] < least ? whole[32 * q] : least;
    }
    if (r->rank == 0) atomic_store(last, 1);
    while (r->rank && atomic_load(last) != 1) {
        uint32_t digest = atomic_load(last) - 1;
        if (!digest || !node_told(&r->w[0], 0, digest, text, sizeof text)) continue;
        size_t n = digest % 300 < NODE_TEXT_BYTES ? digest % 300 : NODE_TEXT_BYTES - 1;
        memset(want, 'a' + (int)(digest % 26), n), want[n] = 0;
        if (strcmp(text, want)) fprintf(stderr, "rank %d: %s, not %s\n", r->rank, text, want), wrong = 1;
        atomic_fetch_add(&whole[32 * r->rank], 1);
    }
    return (void *)wrong;
}

static uint64_t secret;

/* Two ranks wait for words that are in no window: no bell is lost, though each would sleep for long. */
static void *bells(void *arg) {
    Rank *r = arg;
    engine(r);
    node_u64 *words = (node_u64 *)heaps, *mine = &words[r->rank * 16], *its = &words[(1 - r->rank) * 16];
    uint64_t s = r->seed + (uint64_t)r->rank, lost = 0;
    if (!threads) secret = 7 + (uint64_t)r->rank;
    for (uint64_t k = 1; k <= 20000; k++) {
        for (uint64_t i = rng(&s) % 64; i--;) NODE_PAUSE();
        atomic_store(mine, k);
        node_wake(&doors[1 - r->rank]);
        for (;;) {
            uint32_t bell = node_bell(r->e);
            if (atomic_load(its) >= k) break;
            for (uint64_t i = rng(&s) % 256; i--;) NODE_PAUSE();
            /* Once it may be a rank that stood still between its word and its bell. */
            if (!node_sleep_since(r->e, 0, 2000000000, bell) && atomic_load(its) >= k && lost++) return fprintf(stderr, "rank %d: a lost bell at %lu\n", r->rank, (unsigned long)k), (void *)1;
        }
    }
    if (!threads) { /* each has a word of its own at this address, written before the first bell */
        int pid = pids[1 - r->rank];
        if (!node_can_read(pid, &secret, 8 - (uint64_t)r->rank) || node_can_read(pid, &secret, 7 + (uint64_t)r->rank) || node_can_read(pid, (void *)8, 0))
            return fprintf(stderr, "rank %d: does not tell whether it can read\n", r->rank), (void *)1;
        /* The other one may end now: not before it has been read. */
        atomic_store(mine, 20001), node_wake(&doors[1 - r->rank]);
        while (atomic_load(its) < 20001) sched_yield();
    }
    /* Nobody rings: the nap is as long as was asked for. */
    uint64_t begin = node_ns();
    while (node_sleep(r->e, 0, 20000000)) begin = node_ns();
    return (void *)(intptr_t)(node_ns() - begin < 20000000 || doors[r->rank].asleep);
}

/* The next sum of the window that both threads of a rank use; its number says what is in it. */
static int start_common(Rank *r) {
    NodeOp o;
    int64_t x[3], sum;
    memset(&o, 0, sizeof o);
    pthread_mutex_lock(&r->common->mutex);
    uint64_t id = 1000000 + (uint64_t)r->common->count++;
    for (int i = 0; i < 3; i++) x[i] = value(id, r->rank, i);
    o.in = o.out = (char *)x, o.unit = sizeof x, o.fold = sum_i64, o.item = 8, o.digest = (uint32_t)id, o.kind = NODE_ALL_REDUCE;
    node_start(r->common->w, &o);
    pthread_mutex_unlock(&r->common->mutex);
    for (int calls = 0; !node_wait(r->e, &o.state);)
        if (++calls > 300) return fprintf(stderr, "rank %d: number %lu of both threads stands still\n", r->rank, (unsigned long)o.number), 3;
    for (int i = 0; i < 3; i++) {
        sum = 0;
        for (int q = 0; q < ranks; q++) sum += value(id, q, i);
        if (o.state != NODE_DONE || x[i] != sum) return fprintf(stderr, "rank %d: number %lu of both threads is wrong\n", r->rank, (unsigned long)o.number), 1;
    }
    return 0;
}

/* Rank 0 sums a box of rank 1, who gives it in one piece, and of rank 2, who gives many: the last one not before rank 1
 * has written over its own. */
static void *fewer(void *arg) {
    enum { A = 2000, B = 6 * NODE_PIECE_BYTES / 8 };
    static const struct { int number, owner, count; long begin, n; } taken[] = {{1, 1, 2, 0, A}, {1, 2, 0, 0, A}, {1, 2, 1, A, B}, {2, 1, 1, A, B}};
    Rank *r = arg;
    engine(r);
    int64_t *in = malloc((A + B) * 8), *out = calloc(A + B, 8);
    NodeOp o[2];
    intptr_t wrong = 0;
    memset(o, 0, sizeof o);
    for (long i = 0; i < A + B; i++) in[i] = value(1, r->rank, i);
    for (int k = 0; k < 2; k++) {
        Exchange *x = calloc(1, sizeof *x);
        x->b = (NodeBoxes){.part = x->part, .give = x->give, .give_at = x->give_at, .table = x->table, .expects = x->expects, .block = x->block, .owner = x->owner, .reader = x->reader, .in = x->in, .ranks = 3, .item = 8, .head = 32, .mine = 1, .step = 4096, .room = malloc(3 * 4096)};
        for (int q = 0; q < 3; q++) x->block[q] = 1;
        uint64_t n = 0, bytes = 32;
        for (size_t t = 0; t < sizeof taken / sizeof *taken; t++) {
            int q = taken[t].owner;
            if (taken[t].number != k + 1 || (r->rank && r->rank != q)) continue;
            NodeBox box = box_of(x, 0, taken[t].begin, 1, taken[t].n, A + B);
            if (r->rank) { x->give[n++] = box, bytes += box.bytes, x->reader[0] = 1; continue; }
            x->part[x->b.parts++] = (NodePart){.to = box, .from = box, .packed = x->expects[q], .aside = x->b.aside, .owner = (uint32_t)q, .count = (uint32_t)taken[t].count, .fold = taken[t].n == A ? sum_i64 : 0};
            x->expects[q] += box.bytes, x->owner[q] = 1, x->b.aside += taken[t].n == A ? box.bytes : 0;
        }
        x->table[0] = 32;
        for (int q = 1; q <= 3; q++) x->give_at[q] = n, x->table[q] = bytes;
        o[k].kind = NODE_BOXES, o[k].item = 8, o[k].digest = 9, o[k].in = (char *)in, o[k].out = (char *)out, o[k].boxes = &x->b;
        node_start(&r->w[0], &o[k]);
    }
    if (r->rank == 2) {
        node_pass(r->e); /* the four pieces that find room */
        while (atomic_load(&r->w[0].lane[1]->at.put) < NODE_AT(2, 4)) sched_yield();
    }
    for (int k = 0; k < 2; k++) {
        while (!node_wait(r->e, &o[k].state)) {}
        wrong |= o[k].state != NODE_DONE || o[k].misfit;
    }
    for (long i = 0; i < A + B && r->rank == 0; i++) wrong |= out[i] != value(1, 1, i) + (i < A ? value(1, 2, i) : 0);
    node_leave(r->e);
    return (void *)wrong;
}

static const long LENGTHS[] = {0, 1, 1, 1, 2, 9, 10, 100, 1000, 1024, 1025, 3000, 20000, 50000, 200001};

static void *program(void *arg) {
    Rank *r = arg;
    if (!r->e) engine(r);
    uint64_t same = r->seed + (uint64_t)r->thread * 977, own = mix(r->seed * 31 + (uint64_t)(r->rank + 100 * r->thread) + 1);
    Job *jobs = calloc(MAX_PENDING, sizeof *jobs);
    int pending = 0, rc = 0;
    size_t heap_begin = r->common ? (size_t)r->thread * HEAP / 2 : 0, heap_end = r->common ? heap_begin + HEAP / 2 : HEAP, heap = heap_begin;
    char *mine = heaps + (size_t)r->rank * HEAP;
    for (uint64_t step = 0; step < (uint64_t)r->programs * 40; step++) {
        /* alike on all ranks */
        uint64_t a = rng(&same), b = rng(&same), c = rng(&same), d = rng(&same);
        int wi = r->common ? 2 * r->thread + (int)(a % 2) : (int)(a % WINDOWS), style = (int)((b >> 8) % 6), kind = (int)(b % 14) < NODE_BOXES ? (int)(b % 14) : NODE_BOXES;
        long n = LENGTHS[c % (sizeof LENGTHS / sizeof *LENGTHS)];
        if (d % 4) n = n > 3000 ? n % 3001 : n;
        NodeWindow *w = &r->w[wi];
        int inplace = (d >> 8) % 2 && kind == NODE_ALL_REDUCE, flush = (d >> 16) % 9 == 0;
        if (lates && rng(&own) % 50 == 0) usleep((useconds_t)(rng(&own) % 3000));
        if (w->rank >= 0) {
            while (pending == MAX_PENDING || (pending && rng(&own) % 3 == 0)) {
                int k = (int)(rng(&own) % MAX_PENDING);
                while (!jobs[k].live) k = (k + 1) % MAX_PENDING;
                if ((rc = finish(r, &jobs[k]))) goto end;
                pending--;
            }
            Job *j = jobs;
            while (j->live) j++;
            memset(j, 0, sizeof *j);
            int blocks = node_blocks(w, kind), outs = gathers(kind) ? w->size : 1;
            j->w = w, j->window = wi, j->live = 1, j->kind = kind, j->style = style, j->n = kind == NODE_BARRIER ? 0 : n, j->id = step;
            j->root = kind == NODE_SHIFT ? (int)((d >> 24) % 5) - 2 : (int)((d >> 24) % (uint64_t)w->size);
            if (blocks > 1 || gathers(kind)) j->unequal = (d >> 32) % 8 == 0 ? 2 : (int)((d >> 32) % 2);
            Exchange *x = j->exchange = kind == NODE_BOXES ? new_exchange(j) : 0;
            long own_n = x ? x->rows * x->cols : n;
            size_t in_bytes = (size_t)(own_n * blocks + j->unequal * blocks) * 8;
            size_t out_bytes = j->out_bytes = (size_t)(x ? x->height * (x->cols + 2) : (n + !!j->unequal) * outs) * 8;
            /* 1: shared on all; 2: remote on all; 3: shared on some; 4: remote on some */
            int s = style == 1 || (style == 3 && rng(&own) % 2) ? NODE_SHARED : (style == 2 || (style == 4 && rng(&own) % 2)) && !threads ? NODE_REMOTE : 0;
            if (n * blocks * 8 <= 1024) s = 0; /* the plan's rule: alike on all */
            if (s == NODE_SHARED && heap + in_bytes + out_bytes + 256 > heap_end) s = NODE_NOTHING;
            if (s == NODE_SHARED) {
                j->in = mine + heap, heap += (in_bytes + 127) & ~(size_t)127;
                j->out = inplace ? j->in : mine + heap, heap += inplace ? 0 : (out_bytes + 127) & ~(size_t)127;
                j->heap = 1, j->style = 1;
            } else {
                j->style = style == 1 ? 0 : style;
                j->in = malloc(in_bytes + 8), j->out = inplace ? j->in : malloc(out_bytes + 8);
            }
            if (j->out != j->in) memset(j->out, 0x77, out_bytes);
            for (int b = 0; b < blocks; b++)
                for (long i = 0; i < own_n; i++) ((int64_t *)j->in)[(blocks > 1 ? in_place(j, b) : 0) + i] = value(step, r->rank, b * n + i);
            NodeOp *o = &j->op;
            o->in = j->in, o->out = j->out, o->unit = (uint64_t)j->n * 8, o->fold = sum_i64, o->item = 8;
            o->digest = (uint32_t)mix((uint64_t)kind * 100000u + (uint64_t)n), o->kind = (uint8_t)kind, o->root = (int16_t)j->root, o->source = (uint8_t)s;
            if (j->unequal) set_tables(j);
            if (x) o->boxes = &x->b, o->beside = x->beside, x->beside[0] = j->out + (x->takes ? x->take[x->takes - 1].to_row * (x->cols + 2) * 8 : 0);
            if (s == NODE_SHARED) o->in_place = (uint64_t)(j->in - mine), o->out_place = (uint64_t)(j->out - mine);
            if (s == NODE_REMOTE) o->in_place = (uint64_t)(uintptr_t)j->in, o->out_place = (uint64_t)(uintptr_t)j->out;
            pending++;
            /* A small one that is posted has been copied: the caller may write x. Boxes of its own are read later. */
            if (node_start(w, o) && s == 0 && !x && in_bytes <= NODE_SMALL_BYTES && j->in != j->out) memset(j->in, 0x55, in_bytes);
        }
        if (flush || heap > heap_end - (16 << 20)) {
            for (int k = 0; k < MAX_PENDING; k++)
                if (jobs[k].live) { if ((rc = finish(r, &jobs[k]))) goto end; pending--; }
            /* others may still read what lies in the heap: not, by the promise of resolve() */
            heap = heap_begin;
        }
        if (r->common && d % 3 == 0 && (rc = start_common(r))) goto end;
    }
    for (int k = 0; k < MAX_PENDING; k++)
        if (jobs[k].live && (rc = finish(r, &jobs[k]))) goto end;
end:
    if (!r->common) node_leave(r->e);
    return (void *)(intptr_t)rc;
}

/* Two threads of each rank share an engine: each has windows of its own, and one is of both. */
static void *pair(void *arg) {
    Rank *r = arg, both[2] = {*r, *r};
    engine(r);
    Common common = {PTHREAD_MUTEX_INITIALIZER, &r->w[WINDOWS], 0};
    pthread_t t[2];
    intptr_t bad = 0;
    for (int i = 0; i < 2; i++) both[i].e = r->e, both[i].common = &common, both[i].thread = i, engine(&both[i]);
    for (int i = 0; i < 2; i++) pthread_create(&t[i], 0, program, &both[i]);
    for (int i = 0; i < 2; i++) { void *rc; pthread_join(t[i], &rc); bad |= (intptr_t)rc; }
    node_leave(r->e);
    return (void *)bad;
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    uint64_t seed = strtoull(argv[3], 0, 10);
    int pairing = has_word(argc, argv, "pairs");
    lates = has_word(argc, argv, "late");
    static const struct { const char *word; void *(*work)(void *); } others[] = {{"bench", bench}, {"mismatch", mismatch}, {"bells", bells}, {"texts", texts}, {"fewer", fewer}, {"pairs", pair}};
    void *(*work)(void *) = program;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) if (has_word(argc, argv, others[i].word)) work = others[i].work;
    heaps = shared_memory((size_t)HEAP * (size_t)ranks);
    for (int i = 0; i <= WINDOWS; i++) {
        lanes[i] = shared_memory(sizeof(NodeLane) * (size_t)ranks);
        uint64_t s = mix(seed + (uint64_t)i);
        for (int q = 0; q < ranks; q++)
            if (i == 0 || i == WINDOWS || pairing || (i == 1 && q % 2 == 0) || (i > 1 && (rng(&s) % 2 || (!sizes[i] && q == ranks - 1)))) members[i][sizes[i]++] = q;
    }
    static Rank r[MAX_R];
    void *state[MAX_R];
    for (int q = 0; q < ranks; q++) r[q] = (Rank){.rank = q, .seed = seed, .programs = atoi(argv[4])}, state[q] = &r[q];
    return run_ranks(work, state, seed, 60000);
}
