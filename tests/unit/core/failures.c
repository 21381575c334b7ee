/* What ranks are told when others of three have left, one rank's moves after the other's. Prints "ok", or what is wrong. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
static int scarce; /* no memory is left */
static void *scarce_malloc(size_t bytes) { return scarce ? 0 : malloc(bytes); }
#define malloc scarce_malloc
#include "node.h"
#include "kernels.h"

enum { RANKS = 3, BYTES = 1000, MANY = 40 };
static NodeEngine e[RANKS];
static NodeWindow w[RANKS];
static NodeDoor doors[RANKS];
static char heap[RANKS][BYTES];

static void make(void) {
    NodeLane *lanes = mmap(0, sizeof(NodeLane) * RANKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int r = 0; r < RANKS; r++) {
        node_engine_init(&e[r]);
        e[r].mine = &doors[r];
        w[r].engine = &e[r], w[r].size = RANKS, w[r].rank = r;
        w[r].lane = malloc(sizeof(void *) * RANKS), w[r].door = malloc(sizeof(void *) * RANKS);
        w[r].segment = malloc(sizeof(void *) * RANKS);
        for (int q = 0; q < RANKS; q++) {
            w[r].lane[q] = &lanes[q], w[r].door[q] = &doors[q];
            w[r].segment[q] = malloc(sizeof(char *)), w[r].segment[q][0] = heap[q];
        }
    }
}

static void start(int r, NodeOp *o, int kind, int root, int bytes, void *in, void *out, int source) {
    memset(o, 0, sizeof *o);
    o->in = in, o->out = out, o->unit = (uint64_t)bytes, o->fold = sum_i64, o->item = 8, o->digest = 7;
    o->kind = (uint8_t)kind, o->root = (int16_t)root, o->source = (uint8_t)source;
    node_start(&w[r], o);
}

static int state(int r, NodeOp *o) {
    for (int i = 0; i < 200 && !o->state; i++) node_pass(&e[r]);
    return o->state;
}

/* More started than there is room for, by a rank that lacks another one for its first as well as for its last. */
static int pending(void) {
    static NodeOp o[MANY];
    static char x[MANY][BYTES];
    make();
    for (int k = 0; k < MANY; k++) start(2, &o[k], NODE_ALL_REDUCE, 0, BYTES, x[k], x[k], 0);
    node_leave(&e[0]);
    for (int k = 0; k < MANY; k++)
        if (state(2, &o[k]) != NODE_LOST || o[k].culprit != 0) return printf("%d: %d by %d\n", k, o[k].state, o[k].culprit);
    return 0;
}

/* Rank 0 needs rank 1, which has left; rank 2 needs only what rank 0 posts no more. */
static int told(void) {
    NodeOp reduce[2], broadcast[2];
    int64_t x[4] = {0};
    make();
    node_leave(&e[1]);
    start(0, &reduce[0], NODE_REDUCE, 0, 8, &x[0], &x[1], 0);
    if (state(0, &reduce[0]) != NODE_LOST) return printf("the root: %d\n", reduce[0].state);
    start(0, &broadcast[0], NODE_BROADCAST, 0, 8, &x[0], &x[1], 0);
    start(2, &reduce[1], NODE_REDUCE, 0, 8, &x[2], &x[3], 0);
    start(2, &broadcast[1], NODE_BROADCAST, 0, 8, &x[2], &x[3], 0);
    if (state(2, &broadcast[1]) != NODE_LOST || broadcast[1].culprit != 1)
        return printf("the other: %d by %d\n", broadcast[1].state, broadcast[1].culprit);
    return 0;
}

/* Rank 1 takes rank 0's array in place, rank 0's own result comes from rank 2. */
static int in_place(void) {
    NodeOp o[2];
    int64_t *x = (int64_t *)heap[0], mine = 5, out[2] = {0};
    make();
    *x = 100;
    start(0, &o[0], NODE_SHIFT, 1, 8, x, &out[0], NODE_SHARED);
    start(1, &o[1], NODE_SHIFT, 1, 8, &mine, &out[1], 0);
    node_leave(&e[2]);
    if (state(0, &o[0])) *x = -1; /* resolved: its own again */
    if (state(1, &o[1]) != NODE_DONE || out[1] != 100) return printf("%d, %ld\n", o[1].state, (long)out[1]);
    if (state(0, &o[0]) != NODE_LOST) return printf("the first: %d\n", o[0].state);
    return 0;
}

/* -- messages, of threads ---------------------------------------------------------------------------- */

static MailBox m[RANKS];

static void make_mail(void) {
    static MailSlot slots[RANKS][RANKS];
    static MailPeer peers[RANKS][RANKS];
    static MailSlot *rows[RANKS];
    static MailRing rings[RANKS][RANKS];
    make();
    for (int r = 0; r < RANKS; r++) {
        rows[r] = slots[r];
        for (int q = 0; q < RANKS; q++) w[r].segment[q][0] = 0;
        m[r] = (MailBox){.window = &w[r], .slot = rows, .peer = peers[r], .one_process = 1};
        for (int q = 0; q < RANKS; q++) mail_new_ring(&m[r], q, &rings[r][q], (uint64_t)(uintptr_t)&rings[r][q]);
    }
}

static int mail_ends(int r, MailOp *o) {
    for (int i = 0; i < 200 && !o->state; i++) node_pass(&e[r]);
    return o->state;
}

/* Two ranks have left, and somebody probes for a message of anyone. */
static int both(void) {
    MailOp o[RANKS] = {{0}};
    char x[RANKS];
    uint64_t bytes;
    make_mail();
    mail_probe(&m[0], 7, &bytes);
    for (int q = 1; q < RANKS; q++) o[q] = (MailOp){.out = &x[q], .bytes = 1, .peer = q}, mail_receive(&m[0], &o[q], 0);
    for (int q = 1; q < RANKS; q++) node_leave(&e[q]);
    for (int q = 1; q < RANKS; q++)
        if (mail_ends(0, &o[q]) != NODE_LOST) return printf("from %d: %d\n", q, o[q].state);
    if (node_pass(&e[0])) return printf("who has left moves something\n");
    return 0;
}

/* What was probed for comes before the sleep, when something else is looked at. */
static int probed(void) {
    MailOp o = {.in = "", .bytes = 1, .tag = 7};
    uint64_t bytes;
    make_mail();
    uint32_t bell = node_bell(&e[0]);
    if (mail_probe(&m[0], 7, &bytes) >= 0) return printf("found too early\n");
    mail_send(&m[1], &o, 0);
    node_pass(&e[0]);
    if (node_bell(&e[0]) == bell) return printf("it would sleep\n");
    return mail_probe(&m[0], 7, &bytes) == 1 && bytes == 1 ? 0 : printf("not found\n");
}

/* There is no memory for a message, and its sender has left. */
static int no_memory(void) {
    char x[100] = "all of it", y[100];
    MailOp send = {.in = x, .bytes = sizeof x}, receive = {.peer = 1};
    make_mail();
    mail_receive(&m[0], &receive, 0);
    mail_send(&m[1], &send, 0);
    node_leave(&e[1]);
    scarce = 1;
    if (mail_ends(0, &receive)) return printf("without memory: %d\n", receive.state);
    scarce = 0;
    if (mail_ends(0, &receive) != MAIL_MATCHED) return printf("with memory: %d\n", receive.state);
    if (mail_accept(&m[0], &receive, y) || memcmp(x, y, sizeof x)) return printf("wrong\n");
    return 0;
}

/* A pass reads a message, but its answer finds no room: it is given before the receive is over. */
static int answered(void) {
    static char x[MAIL_SMALL_BYTES + 1] = "all of it", y[sizeof x];
    static MailOp small[MAIL_CELLS - 1];
    static MailRing more;
    MailOp send = {.in = x, .bytes = sizeof x, .source = NODE_SHARED, .place = (uint64_t)(uintptr_t)x}, receive = {.peer = 1};
    make_mail();
    mail_receive(&m[0], &receive, 0);
    for (int i = 0; i < MAIL_CELLS - 1; i++) small[i] = (MailOp){.in = x, .bytes = 1, .peer = 1}, mail_send(&m[0], &small[i], 0);
    mail_send(&m[1], &send, 0);
    for (int i = 0; i < 3; i++) node_pass(&e[0]);
    while (mail_accept(&m[0], &receive, y) == MAIL_FULL) mail_new_ring(&m[0], 1, &more, (uint64_t)(uintptr_t)&more);
    if (receive.state != NODE_DONE || memcmp(x, y, sizeof x)) return printf("the receive: %d\n", receive.state);
    return mail_ends(1, &send) == NODE_DONE ? 0 : printf("the send: %d\n", send.state);
}

static const struct { const char *name; int (*run)(void); } cases[] = {
    {"pending", pending}, {"told", told}, {"in_place", in_place}, {"both", both}, {"probed", probed}, {"no_memory", no_memory}, {"answered", answered},
};

int main(int argc, char **argv) {
    int bad = 1;
    for (size_t i = 0; argc > 1 && i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name)) bad = cases[i].run();
    if (!bad) printf("ok\n");
    return bad != 0;
}
