/* Memory that UCX alone can read and write, as device memory is for a UCX with CUDA under an MPI
 * without. To be preloaded: the same bytes are mapped twice, and whoever touches the hidden mapping
 * crashes; UCX's calls by which both MPIs send and receive are given the other one instead.
 *
 * Hidden stays what UCX would not take for device memory either: what is not contiguous, which the
 * MPI packs in calls that UCX makes, and what the MPI calls memory of the host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#define SIZE ((size_t)1 << 30) /* far more than the trials take; no page is there before its use */

static char *hidden, *readable;
static size_t used;

/* Returns the readable place of new memory. */
void *only_ucx_new(size_t bytes) {
    if (!hidden) {
        int file = memfd_create("only_ucx", 0);
        if (file < 0 || ftruncate(file, SIZE)) abort();
        hidden = mmap(NULL, SIZE, PROT_NONE, MAP_SHARED, file, 0);
        readable = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (hidden == MAP_FAILED || readable == MAP_FAILED) abort();
    }
    if (bytes > SIZE - used) abort();
    void *place = readable + used;
    used += (bytes + 63) / 64 * 64;
    return place;
}

/* Returns the hidden place of a readable one. */
void *only_ucx_hidden(void *place) { return hidden + ((char *)place - readable); }

static void *shown(const void *place, ucp_datatype_t type) {
    const char *at = place;
    int inside = hidden && at >= hidden && at < hidden + SIZE;
    int whole = (type & UCP_DATATYPE_CLASS_MASK) == UCP_DATATYPE_CONTIG;
    return inside && whole ? readable + (at - hidden) : (void *)place;
}

static void *shown_by(const void *place, const ucp_request_param_t *p) {
    int told = !!(p->op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE);
    if (told && p->memory_type == UCS_MEMORY_TYPE_HOST) return (void *)place;
    int typed = !!(p->op_attr_mask & UCP_OP_ATTR_FIELD_DATATYPE);
    return shown(place, typed ? p->datatype : ucp_dt_make_contig(1));
}

static void *ucx(const char *name) {
    void *library = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) abort();
    return function;
}

/* NAME, its ARGUMENTS, and how they are handed on. */
#define STAND_IN(NAME, ARGUMENTS, HANDED_ON)                          \
    ucs_status_ptr_t NAME ARGUMENTS {                                 \
        static __typeof__(&NAME) real;                                \
        if (!real) real = (__typeof__(&NAME))ucx(#NAME);              \
        return real HANDED_ON;                                        \
    }
#define PARAMETERS const ucp_request_param_t *p

STAND_IN(ucp_tag_send_nbx, (ucp_ep_h e, const void *b, size_t n, ucp_tag_t t, PARAMETERS),
         (e, shown_by(b, p), n, t, p))
STAND_IN(ucp_tag_send_sync_nbx, (ucp_ep_h e, const void *b, size_t n, ucp_tag_t t, PARAMETERS),
         (e, shown_by(b, p), n, t, p))
STAND_IN(ucp_tag_recv_nbx,
         (ucp_worker_h w, void *b, size_t n, ucp_tag_t t, ucp_tag_t mask, PARAMETERS),
         (w, shown_by(b, p), n, t, mask, p))
STAND_IN(ucp_tag_msg_recv_nbx,
         (ucp_worker_h w, void *b, size_t n, ucp_tag_message_h m, PARAMETERS),
         (w, shown_by(b, p), n, m, p))
STAND_IN(ucp_tag_send_nb,
         (ucp_ep_h e, const void *b, size_t n, ucp_datatype_t d, ucp_tag_t t,
          ucp_send_callback_t done),
         (e, shown(b, d), n, d, t, done))
STAND_IN(ucp_tag_send_sync_nb,
         (ucp_ep_h e, const void *b, size_t n, ucp_datatype_t d, ucp_tag_t t,
          ucp_send_callback_t done),
         (e, shown(b, d), n, d, t, done))
STAND_IN(ucp_tag_recv_nb,
         (ucp_worker_h w, void *b, size_t n, ucp_datatype_t d, ucp_tag_t t, ucp_tag_t mask,
          ucp_tag_recv_callback_t done),
         (w, shown(b, d), n, d, t, mask, done))
STAND_IN(ucp_tag_msg_recv_nb,
         (ucp_worker_h w, void *b, size_t n, ucp_datatype_t d, ucp_tag_message_h m,
          ucp_tag_recv_callback_t done),
         (w, shown(b, d), n, d, m, done))
