#include "boxes.h"
#include "kernels.h"
/* For tests: fold by name; 0 where there is none. */
int fold(const char *operation, const char *dtype, void *out, const void *const *in, int ranks, long n) {
    for (const FoldRow *row = fold_table; row->fold; row++)
        if (!strcmp(row->operation, operation) && !strcmp(row->dtype, dtype)) return row->fold(out, in, ranks, n), 1;
    return 0;
}
void copy_box(char *out, const NodeBox *to, uint64_t to_at, const char *in, const NodeBox *from, uint64_t from_at,
              uint64_t bytes) {
    box_copy(out, to, to_at, in, from, from_at, bytes);
}
/* Where `bytes` of a box lie, from the begin of its array on; -1 where they are not together. */
long find_box(const char *in, const NodeBox *box, uint64_t byte, uint64_t bytes) {
    const char *found = box_at(in, box, byte, bytes);
    return found ? found - in : -1;
}
void pack_boxes(uint32_t ranks, NodeBox *give, uint64_t *give_at, uint64_t *table, const char *in, char *to, uint64_t lo,
                uint64_t hi) {
    NodeBoxes boxes = {.ranks = ranks, .give = give, .give_at = give_at, .table = table, .head = table[0]};
    boxes_pack(&boxes, in, to, lo, hi);
}
