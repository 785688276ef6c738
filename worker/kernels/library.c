/* What library.py calls: the choice of an instruction set, and the kernels of the one chosen. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

static const struct kernels *chosen = &kernels_generic;

int millrace_version(void)
{
    return MILLRACE_KERNELS_VERSION;
}

/* Return whether this machine has an instruction set: "generic", "avx2", "avx512" or "avx512bf16". */
int millrace_supports(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(name, "avx512bf16") == 0 && !__builtin_cpu_supports("avx512bf16"))
        return 0;
    if (strncmp(name, "avx512", 6) == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return strcmp(name, "generic") == 0;
}

/* Use an instruction set from now on. The machine must support it. */
void millrace_choose(const char *name)
{
    chosen = &kernels_generic;
#if defined(__x86_64__)
    if (strcmp(name, "avx2") == 0)
        chosen = &kernels_avx2;
    if (strcmp(name, "avx512") == 0)
        chosen = &kernels_avx512;
    if (strcmp(name, "avx512bf16") == 0)
        chosen = &kernels_avx512bf16;
#else
    (void)name;
#endif
}

/* A row of one token, and the blocks that it reads. */
struct row_table {
    const int32_t *blocks;
    int32_t num_blocks, row;
};

static int compare_row_tables(const void *a, const void *b)
{
    const struct row_table *x = a, *y = b;
    int32_t shorter = x->num_blocks < y->num_blocks ? x->num_blocks : y->num_blocks;
    int order = memcmp(x->blocks, y->blocks, sizeof(int32_t) * shorter);
    return order != 0 ? order : x->num_blocks - y->num_blocks;
}

static int32_t num_common_blocks(const struct row_table *a, const struct row_table *b)
{
    int32_t count = 0;
    while (count < a->num_blocks && count < b->num_blocks && a->blocks[count] == b->blocks[count])
        count++;
    return count;
}

/* Fill the order of the rows [R], and the positions [R] that neighbours have in common. Return 0, or -1 if there is no
 * memory. */
int millrace_order_rows(struct attention_rows *rows, int64_t block_size, int32_t *order, int32_t *common)
{
    struct row_table *tables = malloc(sizeof(struct row_table) * (rows->num_rows + 1));
    if (tables == NULL)
        return -1;
    int64_t count = 0, last = rows->num_rows;
    for (int64_t row = rows->num_rows - 1; row >= 0; row--)
        if (rows->query_starts[row + 1] - rows->query_starts[row] > 1)
            order[--last] = (int32_t)row;
    for (int64_t row = 0; row < rows->num_rows; row++)
        if (rows->query_starts[row + 1] - rows->query_starts[row] == 1)
            tables[count++] = (struct row_table){rows->block_tables + row * rows->table_width,
                                                 (int32_t)((rows->kv_lens[row] - 1) / block_size), (int32_t)row};
    qsort(tables, count, sizeof(struct row_table), compare_row_tables);
    for (int64_t i = 0; i < count; i++) {
        order[i] = tables[i].row;
        common[i] = i + 1 < count ? num_common_blocks(&tables[i], &tables[i + 1]) * (int32_t)block_size : 0;
    }
    free(tables);
    rows->num_decodes = count;
    rows->order = order;
    rows->common = common;
    return 0;
}

int millrace_attend(const struct attention *call)
{
    return chosen->attend(call);
}

void millrace_argmax(const void *logits, int64_t dtype, int64_t num_rows, int64_t vocab_size, float *peaks,
                     int64_t *token_ids, int64_t num_threads)
{
    chosen->argmax(logits, dtype, num_rows, vocab_size, peaks, token_ids, num_threads);
}

int millrace_draw(const struct draws *call)
{
    return chosen->draw(call);
}

int millrace_linear(const struct linear *call)
{
    return chosen->linear(call);
}

int millrace_linear_argmax(const struct linear *call)
{
    return chosen->linear_argmax(call);
}

void millrace_pack(const struct packing *call)
{
    chosen->pack(call);
}

int millrace_panel_outputs(void)
{
    return chosen->panel_outputs;
}

void millrace_norm(const struct norm *call)
{
    chosen->norm(call);
}

void millrace_gate(const struct gate *call)
{
    chosen->gate(call);
}
