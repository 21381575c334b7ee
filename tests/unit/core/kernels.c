#include "kernels.h"
/* For tests: fold by name; 0 where there is none. */
int fold(const char *operation, const char *dtype, void *out, const void *const *in, int ranks, long n) {
    for (const FoldRow *row = fold_table; row->fold; row++)
        if (!strcmp(row->operation, operation) && !strcmp(row->dtype, dtype)) return row->fold(out, in, ranks, n), 1;
    return 0;
}
void copy_box(char *out, const char *in, const NodeBox *box) { node_copy_box(out, in, box); }
