/* What library.py calls besides the kernels: the choice of an instruction set, and the order of a step's rows. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#if HAS_AMX_COMPILER
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the machine has AMX for bfloat16 and int8, and Linux lets this process use it. */
static int has_amx(void)
{
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 && d & AMX_TILE && d & AMX_INT8 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

int millrace_version(void)
{
    return MILLRACE_KERNELS_VERSION;
}

/* Return the kernels for "generic", "avx2", "avx512", "avx512bf16" or "amx", or NULL if this machine does not have them. */
const struct kernels *millrace_kernels(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int has_vnni = __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2 : NULL;
    if (strcmp(name, "avx512") == 0)
        return has_avx512 ? &kernels_avx512 : NULL;
    int has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") && has_vnni;
    if (strcmp(name, "avx512bf16") == 0)
        return has_bf16 ? &kernels_avx512bf16 : NULL;
#if HAS_AMX_COMPILER
    if (strcmp(name, "amx") == 0)
        return has_bf16 && has_amx() ? &kernels_amx : NULL;
#endif
#endif
    return strcmp(name, "generic") == 0 ? &kernels_generic : NULL;
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

/* Fill the order [R] of the rows, and the positions [R] that neighbours have in common. Return -1 if there is no memory. */
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
