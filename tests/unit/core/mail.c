/* Random messages between threads or processes: tags, sizes, ways, orders; against what the sender's number says. */
#define _GNU_SOURCE
#include <stdlib.h>
static void *scarce_malloc(size_t bytes);
#define malloc scarce_malloc
#include "node.h"
#undef malloc
#include "ranks.h"

enum { MOST = 400, HEAP = 128 << 20, TAGS = 3 };
static int rendezvous, pieces, pairing, scarce;
static NodeLane *lanes;
static MailSlot *slots;
static char *heaps;

/* With `scarce` one of four finds no memory. */
static void *scarce_malloc(size_t bytes) {
    static _Thread_local uint64_t s;
    return scarce && rng(&s) % 4 == 0 ? 0 : malloc(bytes);
}

/* A message of a program, alike on all ranks. */
typedef struct { int from, to, tag, style; uint64_t bytes, id; } Letter;
typedef struct { MailOp op; const Letter *l; char *memory; uint64_t room; int sends, unknown, live; } Job;
typedef struct { int rank; uint64_t seed; int programs; NodeEngine e; NodeWindow w; MailBox m; pthread_mutex_t lock; char *heap; } Rank;
/* One of a rank's threads: of its memory, half is for rings, the other half for the arrays of its threads. */
typedef struct { Rank *r; int number; char *arrays, *arrays_begin, *arrays_end; Letter letters[MOST]; Job jobs[2 * MOST]; } Thread;

static void make(Rank *r) {
    NodeWindow *w = &r->w;
    node_engine_init(&r->e);
    r->e.mine = &doors[r->rank], r->e.yield_ns = getenv("SLEEPY") ? 0 : 1000000;
    w->engine = &r->e, w->rank = r->rank, w->size = ranks;
    w->lane = calloc((size_t)ranks, sizeof(void *)), w->door = calloc((size_t)ranks, sizeof(void *));
    w->segment = calloc((size_t)ranks, sizeof(void *));
    int32_t *pid = calloc((size_t)ranks, 4);
    r->m.window = w, r->m.one_process = threads, r->m.rendezvous = rendezvous;
    r->m.slot = calloc((size_t)ranks, sizeof(void *)), r->m.peer = calloc((size_t)ranks, sizeof(MailPeer));
    for (int q = 0; q < ranks; q++) {
        w->lane[q] = &lanes[q], w->door[q] = &doors[q], pid[q] = pids[q];
        w->segment[q] = malloc(sizeof(char *)), w->segment[q][0] = threads ? 0 : heaps + (size_t)q * HEAP;
        r->m.slot[q] = &slots[q * ranks];
    }
    w->pid = pid;
    r->heap = heaps + (size_t)r->rank * HEAP;
    pthread_mutex_init(&r->lock, 0);
}

static void open_ring(Rank *r, int q) {
    if (mail_reuse_ring(&r->m, q)) return;
    pthread_mutex_lock(&r->lock);
    MailRing *ring = (MailRing *)r->heap;
    r->heap += (sizeof(MailRing) + 4095) / 4096 * 4096;
    pthread_mutex_unlock(&r->lock);
    if ((char *)(ring + 1) > heaps + (size_t)r->rank * HEAP + HEAP / 2) fprintf(stderr, "the heap is too small\n"), exit(3);
    mail_new_ring(&r->m, q, ring, threads ? (uint64_t)(uintptr_t)ring : (uint64_t)((char *)ring - heaps - (size_t)r->rank * HEAP));
}

static void receive(Rank *r, MailOp *o) {
    for (int going; (going = mail_receive(&r->m, o, 0)) < 0;) if (going == MAIL_FULL) open_ring(r, o->peer);
}

static char texts[MAIL_TEXT_BYTES]; /* of the heads */
static int text_length(const Letter *l) { return l->style % 4 == 3 ? (int)(l->id % MAIL_TEXT_BYTES) : (int)(l->id % 90); }
static char byte(const Letter *l, uint64_t i) { return (char)(mix(l->id + i / 8) >> (i % 8 * 8)); }
static void fill(const Letter *l, char *to) { for (uint64_t i = 0; i < l->bytes; i++) to[i] = byte(l, i); }
static int differs(const Letter *l, const char *got) {
    for (uint64_t i = 0; i < l->bytes; i++) if (got[i] != byte(l, i)) return 1;
    return 0;
}

static void start_send(Thread *t, Job *j) {
    Rank *r = t->r;
    const Letter *l = j->l;
    int shared = l->style % 3 == 1 && !threads;
    j->memory = shared ? (t->arrays -= (l->bytes + 63) / 64 * 64) : malloc(l->bytes + 1);
    if (t->arrays < t->arrays_begin) fprintf(stderr, "no room for arrays\n"), exit(3);
    fill(l, j->memory);
    j->op = (MailOp){.in = j->memory, .bytes = l->bytes, .head = l->id % 5, .peer = l->to, .tag = l->tag};
    j->op.source = NODE_PIECED;
    j->op.text = texts, j->op.text_bytes = (uint16_t)text_length(l);
    if (mail_is_near(&r->m, l->to)) { if (!pieces || rendezvous) j->op.source = NODE_SHARED, j->op.place = (uint64_t)(uintptr_t)j->memory; }
    else if (shared) j->op.source = NODE_SHARED, j->op.place = (uint64_t)(j->memory - heaps - (size_t)r->rank * HEAP);
    else if (!pieces) j->op.source = NODE_REMOTE, j->op.place = (uint64_t)(uintptr_t)j->memory;
    j->sends = 1, j->live = 1;
    while (mail_send(&r->m, &j->op, 0) == MAIL_FULL) open_ring(r, l->to);
}

static void start_receive(Rank *r, Job *j) {
    const Letter *l = j->l;
    j->room = l->style / 3 % 8 == 0 && l->bytes ? l->bytes / 2 : l->bytes + (uint64_t)(l->style % 2);
    j->unknown = l->style / 24 % 3 == 0;
    j->memory = malloc(l->bytes + 2);
    memset(j->memory, 0x55, l->bytes + 2);
    j->op = (MailOp){.out = j->unknown ? 0 : j->memory, .bytes = j->room, .head = l->id % 4, .checked = l->style / 72 % 2, .peer = l->from, .tag = l->tag};
    j->sends = 0, j->live = 1;
    receive(r, &j->op);
}

static int finish(Rank *r, Job *j) {
    const Letter *l = j->l;
    int free_already = j->sends && (j->op.detached || (l->style % 5 == 0 && mail_detach(&r->m, &j->op)));
    if (free_already) memset(j->memory, 0x33, l->bytes); /* its own again: others read the copy */
    while (!node_wait(&r->e, &j->op.state)) {}
    int state = mail_state(&j->op), bad = 0;
    if (state == MAIL_MATCHED) {
        const MailItem *i = &j->op.note->item;
        if (i->text_bytes != text_length(l) || memcmp(i->text, texts, i->text_bytes)) bad = 8;
        if (j->op.out && j->op.head == l->id % 4) bad = 1;
        int drop = l->style % 7 == 0;
        while (mail_accept(&r->m, &j->op, drop ? 0 : j->memory) == MAIL_FULL) open_ring(r, l->from);
        j->room = l->bytes;
        state = mail_state(&j->op);
        if (drop && !bad && state == NODE_DONE) return free(j->memory), j->live = 0;
    }
    if (killer && state == NODE_LOST) return 4;
    if (!j->sends && j->room < l->bytes) { /* and nothing of it was written */
        if (state != MAIL_TOO_LONG) bad = 3;
        for (uint64_t i = 0; i < l->bytes; i++) if (j->memory[i] != 0x55) bad = 4;
    } else if (state != NODE_DONE) bad = 5;
    else if (!j->sends && (j->op.got != l->bytes || j->op.head != l->id % 5 || differs(l, j->memory))) bad = 6;
    else if (!j->sends && (j->memory[l->bytes] != 0x55 || j->memory[l->bytes + 1] != 0x55)) bad = 7;
    if (bad) return fprintf(stderr, "rank %d: %s %d of %lu bytes from %d to %d tag %d style %d: %d, state %d, got %lu head %lu\n", r->rank, j->sends ? "send" : "receive", (int)(l->id >> 40), (unsigned long)l->bytes, l->from, l->to, l->tag, l->style, bad, state, (unsigned long)j->op.got, (unsigned long)j->op.head), 1;
    j->live = 0;
    if (!j->sends || l->style % 3 != 1 || threads) free(j->memory);
    return 0;
}

/* One program: all ranks draw the same messages, and each an order of its own, in which those of one tag keep theirs. */
static int one(Thread *t, uint64_t seed) {
    Rank *r = t->r;
    Letter *letters = t->letters;
    Job *jobs = t->jobs;
    uint64_t s = mix(seed), own = mix(seed * 31 + (uint64_t)r->rank + 1);
    int n = 1 + (int)(rng(&s) % MOST), most = 1 + (int)(rng(&s) % 3), left = 0, waits = (int)(rng(&s) % 4);
    for (int i = 0; i < n; i++) {
        uint64_t a = rng(&s), size = rng(&s);
        int kind = (int)(a % 10);
        size = kind < 5 ? size % 100 : kind < 8 ? size % 10000 : most == 3 && i < 40 ? size % 900000 : size % 40000;
        letters[i] = (Letter){(int)((a >> 8) % (uint64_t)ranks), (int)((a >> 24) % (uint64_t)ranks), (int)((a >> 40) % TAGS) + TAGS * t->number, (int)((a >> 48) % 144), size, mix(seed) + ((uint64_t)i << 40)};
    }
    Job *mine[2 * MOST];
    for (int i = 0; i < n; i++) {
        if (letters[i].from == r->rank) jobs[left].l = &letters[i], jobs[left].sends = 1, left++;
        if (letters[i].to == r->rank) jobs[left].l = &letters[i], jobs[left].sends = 0, left++;
    }
    for (int i = 0; i < left; i++) mine[i] = &jobs[i];
    for (int i = left - 1; i > 0; i--) { /* shuffle, then put those of one pair and tag in order again */
        int k = (int)(rng(&own) % (uint64_t)(i + 1));
        Job *x = mine[i];
        mine[i] = mine[k], mine[k] = x;
    }
    for (int i = 0; i < left; i++)
        for (int k = i + 1; k < left; k++) {
            Job *x = mine[i], *y = mine[k];
            if (x->sends == y->sends && x->l->from == y->l->from && x->l->to == y->l->to && x->l->tag == y->l->tag && x > y) mine[i] = y, mine[k] = x;
        }
    for (int i = 0; i < left; i++) {
        Job *j = mine[i];
        if (j->sends) start_send(t, j);
        else start_receive(r, j);
        if (waits && rng(&own) % 8 == 0) node_pass(&r->e);
        if (waits == 2 && rng(&own) % 16 == 0) usleep((useconds_t)(rng(&own) % 200));
        if (waits == 3 && rng(&own) % 64 == 0) { MailOp o = {.out = (char *)&o, .bytes = 8, .peer = (int)(rng(&own) % (uint64_t)ranks), .tag = 99}; receive(r, &o); if (!mail_cancel(&r->m, &o)) return fprintf(stderr, "not cancelled\n"), 1; }
    }
    for (int i = left - 1; i > 0; i--) {
        int k = (int)(rng(&own) % (uint64_t)(i + 1));
        Job *x = mine[i];
        mine[i] = mine[k], mine[k] = x;
    }
    for (int i = 0; i < left; i++) { int rc = finish(r, mine[i]); if (rc) return rc; }
    return 0;
}

static void *thread(void *arg) {
    Thread *t = arg;
    int rc = 0;
    for (int k = 0; k < t->r->programs && !rc; k++) {
        t->arrays = t->arrays_end; /* all sends are over */
        rc = one(t, t->r->seed * 1000 + (uint64_t)(k + 500 * t->number));
    }
    return (void *)(intptr_t)rc;
}

static void *program(void *arg) {
    Rank *r = arg;
    int rc = 0, many = pairing ? 2 : 1;
    make(r);
    pthread_t threads_of_it[2];
    for (int i = 0; i < many; i++) {
        Thread *t = calloc(1, sizeof *t);
        t->r = r, t->number = i, t->arrays_begin = heaps + (size_t)r->rank * HEAP + HEAP / 4 * (2 + i), t->arrays_end = t->arrays_begin + HEAP / 4;
        pthread_create(&threads_of_it[i], 0, thread, t);
    }
    for (int i = 0; i < many; i++) { void *its; pthread_join(threads_of_it[i], &its); rc = rc ? rc : (int)(intptr_t)its; }
    uint64_t bytes;
    /* What was sent last to others must be on its way. */
    for (uint64_t end = node_ns() + 20000000000u; !rc && !mail_idle(&r->m) && node_ns() < end;) node_sleep(&r->e, 0, 1000000);
    if (!rc && (!mail_idle(&r->m) || mail_probe(&r->m, 7, &bytes) >= 0)) rc = 5;
    node_leave(&r->e);
    return (void *)(intptr_t)rc;
}

/* Messages that fill the ring many times over, one way and the other; the figures are nanoseconds a message. */
static void *bench(void *arg) {
    Rank *r = arg;
    char *x = calloc(1, 1 << 20), *y = calloc(1, 1 << 20);
    make(r);
    r->e.spin = threads ? 0 : 2000;
    for (uint64_t bytes = 8; bytes <= 1 << 20; bytes = bytes < 8192 ? bytes * 8 : bytes * 2) {
        int n = bytes > 8192 ? 500 : 20000;
        uint64_t begin = node_ns();
        for (int i = 0; i < n; i++) {
            MailOp s = {.in = x, .bytes = bytes, .peer = (r->rank + 1) % ranks, .source = pieces ? NODE_PIECED : threads ? NODE_SHARED : NODE_REMOTE, .place = (uint64_t)(uintptr_t)x};
            MailOp o = {.out = y, .bytes = bytes, .peer = (r->rank + ranks - 1) % ranks};
            while (mail_send(&r->m, &s, 0) == MAIL_FULL) open_ring(r, s.peer);
            receive(r, &o);
            while (!node_wait(&r->e, &o.state)) {}
            while (!node_wait(&r->e, &s.state)) {}
        }
        if (!r->rank) fprintf(stderr, "%7lu bytes: %.2f us an exchange\n", (unsigned long)bytes, (double)(node_ns() - begin) / n / 1000);
    }
    return 0;
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    uint64_t seed = strtoull(argv[3], 0, 10);
    rendezvous = has_word(argc, argv, "rendezvous"), pieces = has_word(argc, argv, "pieces");
    pairing = has_word(argc, argv, "pairs"), scarce = has_word(argc, argv, "scarce");
    for (int i = 0; i < MAIL_TEXT_BYTES; i++) texts[i] = (char)(i * 7 + i / 256);
    lanes = shared_memory(sizeof(NodeLane) * MAX_R), slots = shared_memory(sizeof(MailSlot) * MAX_R * MAX_R);
    heaps = shared_memory((size_t)HEAP * (size_t)ranks);
    static Rank r[MAX_R];
    void *state[MAX_R];
    for (int q = 0; q < ranks; q++) r[q] = (Rank){.rank = q, .seed = seed, .programs = atoi(argv[4])}, state[q] = &r[q];
    return run_ranks(has_word(argc, argv, "bench") ? bench : program, state, seed, 30000);
}
