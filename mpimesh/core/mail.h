/* Messages between the ranks of a window; a part of node.h, which includes it.
 *
 * For each ordered pair of ranks the sender has a ring in its own memory, made when the two first need it. A message is
 * a cell of it: the bytes themselves, or where they lie. The receiver takes the cells in order, and acknowledges each
 * by a count in its own memory. Beside the bytes a message has a head, a number that says what they are, and the text of
 * it: a receive that expects another head is given the text. A message whose receive is posted goes straight into
 * place; another one is noted, its bytes copied where they are in the ring, so that messages of one tag never block those
 * of another.
 *
 * A message up to MAIL_SMALL_BYTES is copied when it is sent, and so done. A larger one is read where it lies, in a
 * shared segment or by process_vm_readv, and its sender's memory is its own again when the receiver has answered, by a
 * cell of the ring that goes the other way. Where neither can be, the receiver asks for it by such a cell, and it comes
 * through the ring in pieces.
 *
 * Starting never waits, and a message that is small, or that others can read, needs no further move of its sender: a ring
 * that is full is followed by another one, which its last cell names. Only answers may find no room, in a pass; what they
 * answer is not over before.
 *
 * Every place in shared memory has one writer. What orders the accesses:
 *   - the number of a cell is stored (release) after all that the cell and its bytes hold, and read (acquire) before
 *     any of it is; a cell's number grows by MAIL_CELLS each time, so a cell that was not written again is not taken;
 *   - a cell, and its bytes, are written again only when `taken` of the receiver, stored (release) after its last load
 *     from them, has been read (acquire) to be past it;
 *   - an answer is a cell: what its sender has read before, it has read before the number was stored;
 *   - where a ring lies is stored (release) once, after its cells were made zero: new memory might have the number of
 *     one; a ring is used again when the link out of it is taken, and has only numbers from before;
 *   - after each store node_ring() looks who sleeps, and mail_await() sets its bits before the last look, as for all
 *     that moves in a window.
 * Ranks that are threads share more: `claim` of a send, which its receiver takes before it reads the user's memory, or
 * its sender after it has made a copy of that. One of the two gets it, by one atomic exchange.
 * tests/unit/core/mail_model.py has these functions by their names, tries every interleaving, and fails for each of the
 * rules that is left out.
 */
#ifndef MPIMESH_MAIL_H
#define MPIMESH_MAIL_H

#include <stdlib.h>

enum {
    MAIL_CELLS = 32,
    MAIL_INLINE_BYTES = 80,     /* of a message and its text inside its cell */
    MAIL_TEXT_BYTES = 1 << 12,  /* of the longest text */
    MAIL_SMALL_BYTES = 1 << 13, /* of one that is copied when it is sent */
    MAIL_PIECE_BYTES = 1 << 14,
    MAIL_DATA_BYTES = 1 << 16,  /* of a ring, for what is small or comes in pieces */
};

/* What a cell is, beside a message that is described by a NodeSource. */
enum {
    MAIL_LINK = 16, /* the next one is in another ring */
    MAIL_ANSWER,    /* a message has been read */
    MAIL_ASK,       /* a message is to be sent in pieces */
    MAIL_PIECE,
};

typedef struct {
    node_u64 number; /* from 1 */
    uint64_t head;   /* what it is, as the sender says: two of another dtype or shape have other heads */
    uint64_t bytes;  /* of the message, or of a piece */
    uint64_t place;  /* in the data of the ring, in a segment, or an address; with MAIL_ASK the receiver's MailOp */
    uint64_t handle; /* the sender's MailOp, for answers; with MAIL_PIECE the receiver's */
    int32_t tag;
    uint16_t text_bytes;
    uint8_t kind, pad;
    char data[MAIL_INLINE_BYTES] __attribute__((aligned(16)));
} MailCell;
_Static_assert(sizeof(MailCell) == 128, "a cell is two cache lines");

typedef struct {
    MailCell cell[MAIL_CELLS];
    char data[MAIL_DATA_BYTES];
} __attribute__((aligned(128))) MailRing;
enum { MAIL_CELLS_BYTES = offsetof(MailRing, data) }; /* zero at first */

/* What a rank shows another one; a row of them by rank, zero at first. */
typedef struct {
    node_u64 ring;  /* where its ring to that rank lies in its segment, plus 1; 0 for none yet */
    node_u64 taken; /* cells of that rank's ring to it that it has taken */
} MailSlot;

enum MailState {
    MAIL_MATCHED = 2,    /* a receive has its message, which mail_accept() puts into memory */
    MAIL_TOO_LONG = -10, /* it had `got` bytes, and the receive has room for fewer: they are lost */
    MAIL_CANCELLED = -11,
};

struct MailNote;

/* A send or a receive. */
typedef struct MailOp {
    struct MailOp *next, *before;
    struct MailOp *ended; /* the next one that is over and that its owner is not told of */
    void *owner;          /* to be told, or 0 */
    const char *in;
    char *out;          /* 0: the receive says later where to */
    uint64_t bytes;     /* of a message, or for which there is room */
    uint64_t place;     /* of one that is read where it lies */
    uint64_t head;
    const char *text;
    uint64_t at;        /* how much of it has gone, or come, in pieces */
    uint64_t got;
    uint64_t handle;    /* the receiver's MailOp, for pieces */
    char *sink;         /* where pieces come */
    struct MailNote *note; /* of a receive that is matched */
    char *copy;            /* what is sent from it, where the user's memory is free already */
    _Atomic int claim;     /* of a send whose receiver may read this process: 1 it reads the user's memory, 2 `copy` */
    int peer;
    int32_t tag, state;
    uint16_t text_bytes;
    uint8_t source;
    uint8_t checked;  /* a receive takes only what has its head straight into `out` */
    uint8_t detached; /* a send that is not over, but does not need the user's memory any more */
} MailOp;

/* A message as its receiver sees it. */
typedef struct {
    uint64_t head, bytes, place, handle;
    int32_t tag;
    uint16_t text_bytes;
    uint8_t source; /* NODE_INLINE for all that lies at `data` */
    const char *data, *text;
} MailItem;

/* A message without a receive, or whose receive has no memory yet. */
typedef struct MailNote {
    struct MailNote *next;
    MailItem item;
    MailOp *op;    /* its receive, if it is matched */
    int lost;      /* its sender has died before it could be read */
    int passes;    /* since its receive was matched */
    char *bytes;   /* its copy, or 0 */
    char text[];
} MailNote;

/* A cell that finds no room, and what is over when it has. */
typedef struct MailAnswer {
    struct MailAnswer *next;
    uint64_t handle, place;
    MailOp *op;
    int state, kind;
} MailAnswer;

/* A ring that was followed by another one. */
typedef struct MailOld {
    struct MailOld *next;
    MailRing *ring;
    uint64_t place, until; /* it is free when so many cells are taken */
} MailOld;

/* What this rank has under way with another one. */
typedef struct MailPeer {
    struct MailPeer *next; /* of those with something under way */
    MailRing *out, *in;
    uint64_t out_place;
    uint64_t put, seen, first;     /* cells: put in, known to be taken, and before this ring */
    uint64_t data_put;             /* bytes of the ring's data ever used */
    uint64_t data_end[MAIL_CELLS]; /* the same after each cell */
    uint64_t taken, in_first;      /* cells of the other rank, and before its ring */
    MailOld *old, **old_end;
    MailOp *posted, **posted_end;  /* receives without a message */
    MailOp *unanswered;            /* sends that are to be read, or asked for */
    MailOp *asked, **asked_end;    /* those to be put in pieces */
    MailOp *coming;                /* receives that get pieces */
    MailNote *note, **note_end;    /* messages without a receive */
    MailNote *matched;             /* those of receives that mail_accept() is to be called for */
    int unread;                    /* how many of them are elsewhere */
    MailAnswer *answer, **answer_end;
    int listed, gone;
} MailPeer;

typedef struct MailBox {
    struct MailBox *next; /* of the engine's with something under way */
    NodeWindow *window;
    MailSlot **slot; /* of each rank */
    MailPeer *peer;
    MailPeer *busy;
    MailOp *ended;
    int listed, listening; /* somebody probes */
    int one_process;       /* the ranks are threads */
    int rendezvous;        /* a send is over when its message is read, even a small one */
} MailBox;

static inline int32_t mail_state(const MailOp *o) {
    return __atomic_load_n(&o->state, __ATOMIC_ACQUIRE);
}

static inline int mail_rank_of(const MailBox *m, const MailPeer *p) { return (int)(p - m->peer); }

/* True where this rank and the other one are the same process. */
static inline int mail_is_near(const MailBox *m, int q) { return m->one_process || q == m->window->rank; }

static void mail_over(MailBox *m, MailOp *o, int state) {
    free(o->copy);
    o->copy = 0;
    if (o->owner) o->ended = m->ended, m->ended = o, m->window->engine->rouse = 1;
    __atomic_store_n(&o->state, state, __ATOMIC_RELEASE);
}

static void mail_list(MailBox *m, MailPeer *p) {
    NodeEngine *e = m->window->engine;
    if (!p->listed) p->listed = 1, p->next = m->busy, m->busy = p;
    if (!m->listed) m->listed = 1, m->next = e->mail, e->mail = m;
}

/* -- the sender's end of a ring ------------------------------------------------------------------------ */

/* The next cell, with room for so many bytes of data, and where they are in the ring; 0 where there is none. The last
 * cell is kept for a link. */
static MailCell *mail_room(MailBox *m, MailPeer *p, uint64_t bytes, uint64_t *place) {
    if (!p->out) return 0;
    uint64_t length = (bytes + 63) / 64 * 64, at = p->data_put;
    if (at % MAIL_DATA_BYTES + length > MAIL_DATA_BYTES) at += MAIL_DATA_BYTES - at % MAIL_DATA_BYTES;
    for (int look = 0;; look++) {
        uint64_t begun = p->seen > p->first ? p->seen : p->first, used = p->put - begun;
        uint64_t last = begun > p->first ? p->data_end[(begun - 1 - p->first) % MAIL_CELLS] : 0;
        if (used < MAIL_CELLS - 1 && (!bytes || !used || at + length - last <= MAIL_DATA_BYTES)) break;
        if (look) return 0;
        int q = mail_rank_of(m, p);
        p->seen = atomic_load_explicit(&m->slot[q][m->window->rank].taken, memory_order_acquire);
    }
    if (bytes) *place = at % MAIL_DATA_BYTES, p->data_put = at + length;
    return &p->out->cell[(p->put - p->first) % MAIL_CELLS];
}

static void mail_post(MailBox *m, MailPeer *p, MailCell *c) {
    p->data_end[(p->put - p->first) % MAIL_CELLS] = p->data_put;
    atomic_store_explicit(&c->number, ++p->put, memory_order_release);
    m->window->moved = 1;
}

/* Go on in this ring, whose cells are zero, or from before. */
static void mail_add_ring(MailBox *m, MailPeer *p, MailRing *ring, uint64_t place) {
    if (p->out) {
        MailCell *c = &p->out->cell[(p->put - p->first) % MAIL_CELLS];
        MailOld *old = malloc(sizeof *old);
        c->kind = MAIL_LINK, c->place = place;
        mail_post(m, p, c);
        if (old) { /* else it is not used again */
            *old = (MailOld){0, p->out, p->out_place, p->put};
            *(p->old ? p->old_end : &p->old) = old;
            p->old_end = &old->next;
        }
    } else {
        atomic_store_explicit(&m->slot[m->window->rank][mail_rank_of(m, p)].ring, place + 1, memory_order_release);
    }
    p->out = ring, p->out_place = place, p->first = p->put, p->data_put = 0;
}

/* Put a message into the ring; false where that has no room. */
static int mail_put(MailBox *m, MailPeer *p, MailOp *o) {
    uint64_t place = 0, here = o->source <= NODE_SMALL ? o->bytes : 0, text = o->text_bytes;
    int inside = o->source == NODE_INLINE || (o->source != NODE_SMALL && text <= MAIL_INLINE_BYTES);
    MailCell *c = mail_room(m, p, inside ? 0 : here + text, &place);
    if (!c) return 0;
    c->kind = o->source, c->bytes = o->bytes, c->head = o->head, c->handle = (uint64_t)(uintptr_t)o, c->tag = o->tag;
    c->text_bytes = (uint16_t)text;
    c->place = o->source == NODE_SMALL ? place : o->place;
    if (!inside && o->source != NODE_SMALL) memcpy(c->data, &place, sizeof place);
    char *to = inside ? c->data : p->out->data + place;
    if (here) memcpy(to, o->in, here);
    if (text) memcpy(to + here, o->text, text);
    mail_post(m, p, c);
    if (o->source <= NODE_SMALL) {
        mail_over(m, o, NODE_DONE);
    } else {
        o->before = 0, o->next = p->unanswered;
        if (o->next) o->next->before = o;
        p->unanswered = o;
    }
    return 1;
}

/* Put what finds room of a message in pieces; true when all of it is there. */
static int mail_put_pieces(MailBox *m, MailPeer *p, MailOp *o) {
    while (o->at < o->bytes) {
        uint64_t place, here = o->bytes - o->at < MAIL_PIECE_BYTES ? o->bytes - o->at : MAIL_PIECE_BYTES;
        MailCell *c = mail_room(m, p, here, &place);
        if (!c) return 0;
        c->kind = MAIL_PIECE, c->bytes = here, c->place = place, c->handle = o->handle;
        memcpy(p->out->data + place, o->in + o->at, here);
        mail_post(m, p, c);
        o->at += here;
    }
    return 1;
}

/* Make sure that an answer can be given: by a cell, or else by what `spare` gets; false where there is no memory. */
static int mail_may_answer(MailBox *m, MailPeer *p, MailAnswer **spare) {
    *spare = 0;
    if (!p->answer && mail_room(m, p, 0, 0)) return 1;
    return (*spare = malloc(sizeof **spare)) != 0;
}

static void mail_put_answer(MailBox *m, MailPeer *p, const MailAnswer *a) {
    MailCell *c = mail_room(m, p, 0, 0);
    c->kind = (uint8_t)a->kind, c->handle = a->handle, c->place = a->place;
    mail_post(m, p, c);
    if (a->op) mail_over(m, a->op, a->state);
}

static void mail_put_answers(MailBox *m, MailPeer *p) {
    while (p->answer && mail_room(m, p, 0, 0)) {
        MailAnswer *a = p->answer;
        p->answer = a->next;
        mail_put_answer(m, p, a);
        free(a);
    }
}

/* Answer, and let what is answered be over. */
static void mail_answer(MailBox *m, MailPeer *p, MailAnswer a, MailAnswer *spare) {
    if (!spare) {
        mail_put_answer(m, p, &a);
        return;
    }
    *spare = a;
    *(p->answer ? p->answer_end : &p->answer) = spare;
    p->answer_end = &spare->next;
}

/* -- the receiver's ---------------------------------------------------------------------------------- */

static inline int mail_is_elsewhere(const MailItem *i) { return i->source > NODE_SMALL; }

/* Read the bytes of a message; false where its sender has died. */
static int mail_read(MailBox *m, int q, const MailItem *i, char *to) {
    NodeWindow *w = m->window;
    if (i->source == NODE_REMOTE) {
        struct iovec here = {to, i->bytes}, from = {(void *)(uintptr_t)i->place, i->bytes};
        while (here.iov_len) {
            ssize_t got = process_vm_readv(w->pid[q], &here, 1, &from, 1, 0);
            if (got <= 0) return 0;
            here.iov_base = (char *)here.iov_base + got, from.iov_base = (char *)from.iov_base + got;
            here.iov_len -= (size_t)got, from.iov_len -= (size_t)got;
        }
        return 1;
    }
    const char *from = i->data;
    if (i->source == NODE_SHARED) {
        uintptr_t base = mail_is_near(m, q) ? 0 : (uintptr_t)w->segment[q][0];
        from = (const char *)(base + i->place);
        if (mail_is_near(m, q)) { /* from the sender's copy, where it has made one first */
            MailOp *its = (MailOp *)(uintptr_t)i->handle;
            int nobody = 0;
            if (!atomic_compare_exchange_strong(&its->claim, &nobody, 1)) from = its->copy;
        }
    }
    if (i->bytes) memcpy(to, from, i->bytes);
    return 1;
}

/* Ask for the pieces of a message, which come to `sink`; false where that is to wait. */
static int mail_ask(MailBox *m, MailPeer *p, MailOp *o, const MailItem *i, char *sink) {
    MailAnswer *spare;
    if (!mail_may_answer(m, p, &spare)) return 0;
    o->sink = sink, o->at = 0, o->got = i->bytes, o->head = i->head;
    o->next = p->coming, p->coming = o;
    mail_answer(m, p, (MailAnswer){0, i->handle, (uint64_t)(uintptr_t)o, 0, 0, MAIL_ASK}, spare);
    return 1;
}

/* Put a message into the memory of its receive, or say that it does not fit; false where that is to wait. */
static int mail_deliver(MailBox *m, MailPeer *p, MailOp *o, const MailItem *i) {
    MailAnswer *spare = 0;
    int state = i->bytes > o->bytes ? MAIL_TOO_LONG : NODE_DONE;
    if (i->source == NODE_PIECED && state == NODE_DONE) return mail_ask(m, p, o, i, o->out);
    if (mail_is_elsewhere(i) && !mail_may_answer(m, p, &spare)) return 0;
    o->got = i->bytes, o->head = i->head;
    if (state == NODE_DONE && !mail_read(m, mail_rank_of(m, p), i, o->out)) state = NODE_LOST;
    if (mail_is_elsewhere(i)) mail_answer(m, p, (MailAnswer){0, i->handle, 0, o, state, MAIL_ANSWER}, spare);
    else mail_over(m, o, state);
    return 1;
}

static inline int mail_goes_straight(const MailOp *o, const MailItem *i) {
    return o->out && (!o->checked || o->head == i->head);
}

static void mail_free_note(MailNote *n) {
    free(n->bytes);
    free(n);
}

/* Give a receive its message, which mail_accept() is to put into memory; false where that is to wait. */
static int mail_match(MailBox *m, MailPeer *p, MailOp *o, MailNote *n) {
    o->note = n, n->op = o;
    if (n->item.source == NODE_PIECED) { /* it is there when all of it is */
        if (!n->bytes && !(n->bytes = malloc(n->item.bytes))) return 0;
        return mail_ask(m, p, o, &n->item, n->bytes);
    }
    o->got = n->item.bytes, o->head = n->item.head;
    n->passes = 0, n->next = p->matched, p->matched = n;
    p->unread += mail_is_elsewhere(&n->item);
    m->window->engine->rouse = 1;
    __atomic_store_n(&o->state, MAIL_MATCHED, __ATOMIC_RELEASE);
    return 1;
}

/* Note a message; 0 where there is no memory. */
static MailNote *mail_note(const MailItem *i) {
    MailNote *n = malloc(sizeof *n + i->text_bytes);
    if (!n) return 0;
    *n = (MailNote){.item = *i};
    n->item.text = n->text;
    if (i->text_bytes) memcpy(n->text, i->text, i->text_bytes);
    if (!mail_is_elsewhere(i)) {
        if (!(n->bytes = malloc(i->bytes ? i->bytes : 1))) {
            free(n);
            return 0;
        }
        if (i->bytes) memcpy(n->bytes, i->data, i->bytes);
        n->item.data = n->bytes, n->item.source = NODE_INLINE;
    }
    return n;
}

/* Take a piece. */
static void mail_open_piece(MailBox *m, MailPeer *p, const MailCell *c) {
    MailOp *o = (MailOp *)(uintptr_t)c->handle;
    memcpy(o->sink + o->at, p->in->data + c->place, c->bytes);
    if ((o->at += c->bytes) < o->got) return;
    MailOp **at = &p->coming;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    if (o->note) o->note->item.source = NODE_INLINE, o->note->item.data = o->note->bytes, mail_match(m, p, o, o->note);
    else mail_over(m, o, NODE_DONE);
}

/* Take the answer to a send. */
static void mail_open_answer(MailBox *m, MailPeer *p, const MailCell *c) {
    MailOp *o = (MailOp *)(uintptr_t)c->handle;
    *(o->before ? &o->before->next : &p->unanswered) = o->next;
    if (o->next) o->next->before = o->before;
    if (c->kind == MAIL_ANSWER) {
        mail_over(m, o, NODE_DONE);
        return;
    }
    o->handle = c->place, o->at = 0, o->next = 0;
    *(p->asked ? p->asked_end : &p->asked) = o;
    p->asked_end = &o->next;
}

/* Take a message; false where that is to wait, for memory. */
static int mail_open(MailBox *m, MailPeer *p, const MailCell *c) {
    MailItem i = {c->head, c->bytes, c->place, c->handle, c->tag, c->text_bytes, c->kind, c->data, c->data};
    if (c->kind == NODE_SMALL) i.source = NODE_INLINE, i.data = p->in->data + c->place;
    uint64_t place;
    if (!mail_is_elsewhere(&i)) i.text = i.data + i.bytes;
    else if (i.text_bytes > MAIL_INLINE_BYTES) memcpy(&place, c->data, sizeof place), i.text = p->in->data + place;
    MailOp **at = &p->posted, *o, *after;
    while (*at && (*at)->tag != i.tag) at = &(*at)->next;
    if ((o = *at)) {
        after = o->next;
        if (mail_goes_straight(o, &i)) {
            if (!mail_deliver(m, p, o, &i)) return 0;
        } else {
            MailNote *n = mail_note(&i);
            if (!n) return 0;
            if (!mail_match(m, p, o, n)) {
                o->note = 0;
                mail_free_note(n);
                return 0;
            }
        }
        /* It may be over, but its owner waits for this thread before it frees it. */
        if (!(*at = after)) p->posted_end = at;
        return 1;
    }
    MailNote *n = mail_note(&i);
    if (!n) return 0;
    if (m->listening) m->window->engine->rouse = 1; /* who has probed before sees it by its bell */
    *(p->note ? p->note_end : &p->note) = n;
    p->note_end = &n->next;
    return 1;
}

/* Take all cells that are there; false where one is to wait, for memory. */
static int mail_take(MailBox *m, MailPeer *p) {
    int q = mail_rank_of(m, p);
    uintptr_t base = (uintptr_t)m->window->segment[q][0];
    if (!p->in) {
        uint64_t at = atomic_load_explicit(&m->slot[q][m->window->rank].ring, memory_order_acquire);
        if (!at) return 1;
        p->in = (MailRing *)(base + (at - 1));
    }
    for (;;) {
        MailCell *c = &p->in->cell[(p->taken - p->in_first) % MAIL_CELLS];
        if (atomic_load_explicit(&c->number, memory_order_acquire) != p->taken + 1) return 1;
        if (c->kind == MAIL_PIECE) mail_open_piece(m, p, c);
        else if (c->kind == MAIL_LINK) p->in = (MailRing *)(base + c->place), p->in_first = p->taken + 1;
        else if (c->kind > MAIL_LINK) mail_open_answer(m, p, c);
        else if (!mail_open(m, p, c)) return 0;
        atomic_store_explicit(&m->slot[m->window->rank][q].taken, ++p->taken, memory_order_release);
        m->window->moved = 1;
    }
}

/* Read what a matched receive has no memory for yet: its sender may wait for it, and this rank for something else. */
static void mail_take_in(MailBox *m, MailPeer *p) {
    for (MailNote *n = p->matched; n; n = n->next) {
        MailAnswer *spare;
        char *bytes = 0;
        if (!mail_is_elsewhere(&n->item) || !n->passes++) continue;
        if (!(bytes = malloc(n->item.bytes ? n->item.bytes : 1)) || !mail_may_answer(m, p, &spare)) {
            free(bytes);
            continue;
        }
        n->lost = !mail_read(m, mail_rank_of(m, p), &n->item, bytes);
        mail_answer(m, p, (MailAnswer){0, n->item.handle, 0, 0, 0, MAIL_ANSWER}, spare);
        n->item.source = NODE_INLINE, n->item.data = n->bytes = bytes;
        p->unread--, m->window->moved = 1;
    }
}

static int mail_is_busy(const MailBox *m, const MailPeer *p) {
    return m->listening || p->posted || p->unanswered || p->asked || p->coming || p->unread || p->answer;
}

static void mail_end_all(MailBox *m, MailOp **list, int state) {
    for (MailOp *o; (o = *list);) {
        *list = o->next;
        if (o->note) mail_free_note(o->note), o->note = 0;
        mail_over(m, o, state);
    }
}

/* All of this peer is over: it has left, or the box is closed. */
static void mail_end(MailBox *m, MailPeer *p, int state) {
    mail_end_all(m, &p->posted, state);
    mail_end_all(m, &p->unanswered, state);
    mail_end_all(m, &p->asked, state);
    mail_end_all(m, &p->coming, state);
    for (MailAnswer *a; (a = p->answer);) {
        p->answer = a->next;
        if (a->op) mail_over(m, a->op, a->state);
        free(a);
    }
}

static void mail_pass_peer(MailBox *m, MailPeer *p) {
    NodeWindow *w = m->window;
    int all = 1;
    if (m->listening || p->posted || p->unanswered || p->coming) all = mail_take(m, p);
    mail_put_answers(m, p);
    while (!p->answer && p->asked) {
        MailOp *o = p->asked, *after = o->next;
        if (!mail_put_pieces(m, p, o)) break;
        p->asked = after;
        mail_over(m, o, NODE_DONE);
    }
    if (p->unread) mail_take_in(m, p);
    /* As of node_lacks(): after one more look, which has taken all that it ever sent. */
    if (p->gone && all) mail_end(m, p, NODE_LOST);
    else if (!p->gone && !w->moved && atomic_load_explicit(&w->door[mail_rank_of(m, p)]->left, memory_order_acquire))
        p->gone = w->moved = 1;
}

static int mail_pass(NodeEngine *e) {
    int moved = 0;
    for (MailBox **at = &e->mail; *at;) {
        MailBox *m = *at;
        m->window->moved = 0;
        for (MailPeer **its = &m->busy; *its;) {
            MailPeer *p = *its;
            mail_pass_peer(m, p);
            if (mail_is_busy(m, p)) its = &p->next;
            else *its = p->next, p->listed = 0;
        }
        if (m->window->moved) node_ring(m->window), moved = 1;
        if (m->busy) at = &m->next;
        else *at = m->next, m->listed = 0;
    }
    return moved;
}

/* Ask all ranks that may move something to ring then, before the last look. */
static void mail_await(NodeEngine *e) {
    for (MailBox *m = e->mail; m; m = m->next)
        for (MailPeer *p = m->busy; p; p = p->next) {
            NodeWindow *w = m->window;
            atomic_fetch_or(&w->lane[mail_rank_of(m, p)]->waiters[w->rank / 64], 1ull << w->rank % 64);
        }
}

/* -- what callers use ---------------------------------------------------------------------------------- */

static inline void mail_lock(MailBox *m) {
    node_lock(m->window->engine);
    m->window->moved = 0;
}

static inline void mail_unlock(MailBox *m) {
    if (m->window->moved) node_ring(m->window);
    node_unlock(m->window->engine);
}

/* Go on in a ring that is free again; false where there is none. */
static int mail_reuse_ring(MailBox *m, int q) {
    MailPeer *p = &m->peer[q];
    mail_lock(m);
    MailOld *old = p->old;
    if (old) p->seen = atomic_load_explicit(&m->slot[q][m->window->rank].taken, memory_order_acquire);
    int can = old && p->seen >= old->until;
    if (can) {
        p->old = old->next;
        mail_add_ring(m, p, old->ring, old->place);
        mail_put_answers(m, p);
        free(old);
    }
    mail_unlock(m);
    return can;
}

/* Go on in a new ring, whose cells are zero. */
static void mail_new_ring(MailBox *m, int q, MailRing *ring, uint64_t place) {
    mail_lock(m);
    mail_add_ring(m, &m->peer[q], ring, place);
    mail_put_answers(m, &m->peer[q]);
    mail_unlock(m);
}

/* Start a send. `source` says how it goes if it is not small: NODE_PIECED, or by `place`. Returns whether it is under
 * way; then `owner` is to be told when it is over. MAIL_FULL asks for another ring, MAIL_NO_MEMORY is for good: nothing
 * was started. */
enum { MAIL_FULL = -1, MAIL_NO_MEMORY = -2 };
static int mail_send(MailBox *m, MailOp *o, void *owner) {
    MailPeer *p = &m->peer[o->peer];
    if (!m->rendezvous && o->bytes <= MAIL_SMALL_BYTES)
        o->source = o->bytes + o->text_bytes <= MAIL_INLINE_BYTES ? NODE_INLINE : NODE_SMALL;
    mail_lock(m);
    int going = MAIL_FULL;
    if (mail_put(m, p, o)) {
        going = !o->state;
        if (going) o->owner = owner, mail_list(m, p);
    }
    mail_unlock(m);
    return going;
}

/* Where this process is its receiver's too, a send need not wait for it: true where the user's memory is free. */
static int mail_detach(MailBox *m, MailOp *o) {
    if (mail_state(o) || o->detached) return 1;
    if (m->rendezvous || !mail_is_near(m, o->peer)) return 0;
    char *copy = malloc(o->bytes);
    if (!copy) return 0;
    memcpy(copy, o->in, o->bytes);
    mail_lock(m); /* it might end meanwhile */
    int nobody = 0, done = mail_state(o) != 0;
    if (!done) {
        o->copy = copy;
        if (atomic_compare_exchange_strong(&o->claim, &nobody, 2)) o->in = copy, done = o->detached = 1, copy = 0;
        else o->copy = 0;
    }
    mail_unlock(m);
    free(copy);
    return done;
}

/* Start a receive; returns what mail_send() does. */
static int mail_receive(MailBox *m, MailOp *o, void *owner) {
    MailPeer *p = &m->peer[o->peer];
    mail_lock(m);
    if (p->answer || !mail_room(m, p, 0, 0)) { /* as it may have to be answered */
        mail_unlock(m);
        return MAIL_FULL;
    }
    MailNote **at = &p->note, *n, *after;
    while ((n = *at) && n->item.tag != o->tag) at = &n->next;
    int matched = 0;
    if (n) {
        after = n->next;
        if (mail_goes_straight(o, &n->item)) {
            if ((matched = mail_deliver(m, p, o, &n->item))) mail_free_note(n);
        } else if (!(matched = mail_match(m, p, o, n))) {
            o->note = 0, n->op = 0;
        }
        if (matched && !(*at = after)) p->note_end = at;
    }
    if (n && !matched) {
        mail_unlock(m);
        return MAIL_NO_MEMORY;
    }
    if (!n) {
        o->next = 0;
        *(p->posted ? p->posted_end : &p->posted) = o;
        p->posted_end = &o->next;
        /* It may be there. A large one is not copied at once: the others may wait for what this rank sends next. */
        if (o->bytes <= MAIL_SMALL_BYTES) mail_take(m, p);
    }
    int going = !o->state || o->state == MAIL_MATCHED;
    if (going) o->owner = owner;
    if (mail_is_busy(m, p)) mail_list(m, p);
    mail_unlock(m);
    return going;
}

/* Put the message of a matched receive into `out`, which has room for it, or drop it. MAIL_FULL asks for another ring. */
static int mail_accept(MailBox *m, MailOp *o, char *out) {
    MailPeer *p = &m->peer[o->peer];
    mail_lock(m);
    MailNote *n = o->note;
    int answers = mail_is_elsewhere(&n->item), result = MAIL_FULL;
    /* Where a pass has read it, its answer may still wait for a cell: this rank may make no other pass for it. */
    if (!p->answer && (!answers || mail_room(m, p, 0, 0))) {
        MailNote **at = &p->matched;
        while (*at != n) at = &(*at)->next;
        *at = n->next;
        p->unread -= answers;
        int state = n->lost || (out && !mail_read(m, o->peer, &n->item, out)) ? NODE_LOST : NODE_DONE;
        if (answers) mail_answer(m, p, (MailAnswer){0, n->item.handle, 0, 0, 0, MAIL_ANSWER}, 0);
        o->note = 0;
        mail_free_note(n);
        mail_over(m, o, state);
        result = 0;
    }
    mail_unlock(m);
    return result;
}

/* Take a receive back; false if it has a message. */
static int mail_cancel(MailBox *m, MailOp *o) {
    MailPeer *p = &m->peer[o->peer];
    mail_lock(m);
    MailOp **at = &p->posted;
    while (*at && *at != o) at = &(*at)->next;
    int is_posted = *at != 0;
    if (is_posted) {
        if (!(*at = o->next)) p->posted_end = at;
        mail_over(m, o, MAIL_CANCELLED);
    }
    mail_unlock(m);
    return is_posted;
}

/* The rank whose message of this tag waits to be received, and its bytes; -1 for none. A wait for one is rung. */
static int mail_probe(MailBox *m, int32_t tag, uint64_t *bytes) {
    int source = -1;
    mail_lock(m);
    for (int q = 0; q < m->window->size && source < 0; q++) {
        MailPeer *p = &m->peer[q];
        mail_take(m, p);
        for (MailNote *n = p->note; n && source < 0; n = n->next)
            if (n->item.tag == tag) source = q, *bytes = n->item.bytes;
    }
    m->listening = source < 0;
    for (int q = 0; m->listening && q < m->window->size; q++) mail_list(m, &m->peer[q]);
    mail_unlock(m);
    return source;
}

/* True where nothing is under way. */
static int mail_idle(MailBox *m) {
    int idle = 1;
    mail_lock(m);
    for (int q = 0; q < m->window->size; q++) {
        MailPeer *p = &m->peer[q];
        if (p->posted || p->unanswered || p->asked || p->coming || p->matched || p->answer) idle = 0;
    }
    mail_unlock(m);
    return idle;
}

/* The messages that are over and have owners, by `ended`. */
static MailOp *mail_take_ended(MailBox *m) {
    mail_lock(m); /* who has ended them is through with them */
    MailOp *o = m->ended;
    m->ended = 0;
    mail_unlock(m);
    return o;
}

/* Move nothing any more. */
static void mail_close(MailBox *m) {
    mail_lock(m);
    for (MailBox **at = &m->window->engine->mail; *at; at = &(*at)->next)
        if (*at == m) {
            *at = m->next;
            break;
        }
    for (int q = 0; q < m->window->size; q++) {
        MailPeer *p = &m->peer[q];
        mail_end(m, p, NODE_CLOSED);
        for (MailNote *n; (n = p->matched);) {
            p->matched = n->next, n->op->note = 0;
            mail_over(m, n->op, NODE_CLOSED);
            mail_free_note(n);
        }
        for (MailNote *n; (n = p->note);) p->note = n->next, mail_free_note(n);
        for (MailOld *old; (old = p->old);) p->old = old->next, free(old);
    }
    m->busy = 0, m->listed = 0;
    mail_unlock(m);
}

#endif
